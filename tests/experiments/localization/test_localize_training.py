"""The descent into the backward of a training step: which operator, whose, and that it is."""

import json
import shlex
import subprocess
import sys

import pytest

import divergence
from divergence import RecordOptions
from divergence.run.site import BACKWARD
from tests.models.wrong_kernels import wrong_kernels

pytestmark = pytest.mark.whole
IDS = [
    [(7 * place + 13 * number) % 90 + 5 for place in range(length)]
    for number, length in enumerate((17, 9, 12))
]
ATTENTION = {
    "llama": "model.layers.1.self_attn",
    "gpt2": "transformer.h.1.attn",
    "qwen3-moe": "model.layers.1.self_attn",
}
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "qwen3-moe")]


@pytest.fixture(scope="module")
def wrong():
    with wrong_kernels() as kernels:
        yield kernels


@pytest.fixture(scope="module")
def pair(wrong, tiny_model, tmp_path_factory):
    """``pair("llama", dtype, fault, module, **options)`` → (a, b, truth): b has the fault."""
    made = {}

    def make(architecture, dtype, fault=None, module="", **options):
        key = architecture, dtype
        if key not in made:
            folder = tmp_path_factory.mktemp("step")
            model = tiny_model(architecture, dtype=dtype, num_blocks=3)
            a = divergence.capture(
                str(model),
                out=folder / "a",
                training=divergence.TrainOptions(train=True),
                prompts=IDS,
                probe=False,
                prepare=wrong.into(None),
            )
            made[key] = a, divergence.truth(a, out=folder / "truth")
        a, right = made[key]
        b = divergence.capture(
            like=a,
            out=tmp_path_factory.mktemp("b") / "b",
            probe=False,
            prepare=wrong.into(fault, module),
            **options,
        )
        return a, b, right

    return make


def descend(wrong, runs, out, fault=None, module="", **options):
    a, b, right = runs
    return divergence.localize(
        a,
        b,
        truth=right,
        out=out,
        prepare_reference=wrong.into(None),
        prepare_candidate=wrong.into(fault, module),
        **options,
    )


@pytest.mark.parametrize("architecture", ["llama", *OTHERS])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_wrong_sign_in_the_backward_of_softmax(
    architecture, dtype, wrong, pair, tmp_path, lines_of
):
    """Block, module, operator; proven; shown by itself; and the line of the forward's softmax."""
    fault = "softmax", ATTENTION[architecture]
    runs = pair(architecture, dtype, *fault)
    block = fault[1].rpartition(".")[0]
    verdict = divergence.compare(*runs[:2], truth=runs[2]).verdict
    assert (verdict.onset.site, verdict.side) == (f"{block}{BACKWARD}:out", "candidate")
    assert verdict.next[0].startswith("divergence localize ")
    result = descend(wrong, runs, tmp_path / "work", *fault)
    site = f"{fault[1]}{BACKWARD}/aten._softmax_backward_data"
    assert (result.operator.site, result.side) == (site, "candidate")
    assert (result.operator.phase, result.operator.backward_of) == ("backward", "aten._softmax")
    assert [level.site for level in result.levels][::2] == [f"{block}{BACKWARD}:out", f"{site}:out"]
    assert result.causal.holds
    times = {own.side: own.times for own in result.alone}
    assert times["candidate"] > 30 > 3 > times["reference"]
    lines = "\n".join(lines_of(result))
    assert "backward of aten._softmax, modeling_" in lines
    assert "aten._softmax_backward_data.default" in (tmp_path / "work/repro/report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_weights_gradient_that_is_summed_in_16_bits(architecture, wrong, pair, tmp_path):
    """Nothing that the block hands on is off, one product is."""
    module = {"llama": "model.layers.1.mlp.down_proj", "gpt2": "transformer.h.1.mlp.c_proj"}
    fault = "mm", module[architecture]
    runs = pair(architecture, "float32", *fault)
    verdict = divergence.compare(*runs[:2], truth=runs[2]).verdict
    assert verdict.onset.site == f"{fault[1]}{BACKWARD}:out.weight"
    assert verdict.next[0].startswith("divergence localize ")
    result = descend(wrong, runs, tmp_path / "work", *fault)
    assert result.operator.site.startswith(f"{fault[1]}{BACKWARD}/aten.mm")
    assert result.operator.shape == wrong.weight
    assert result.side == "candidate"
    assert result.causal.holds


@pytest.mark.slow
def test_the_reference_may_be_wrong(wrong, pair, tmp_path):
    """The operator is named on A's side, where the truth blames it."""
    fault = "softmax", ATTENTION["llama"]
    _, faulty, _ = pair("llama", "float32", *fault)
    right = divergence.truth(faulty, out=tmp_path / "truth")
    again = divergence.capture(
        like=faulty, out=tmp_path / "again", probe=False, prepare=wrong.into(None)
    )
    result = divergence.localize(
        faulty,
        again,
        truth=right,
        out=tmp_path / "work",
        prepare_reference=wrong.into(*fault),
        prepare_candidate=wrong.into(None),
    )
    assert result.operator.site == f"{fault[1]}{BACKWARD}/aten._softmax_backward_data"
    assert result.side == "reference"


@pytest.mark.slow
def test_a_hook_of_one_side_alone_is_what_feeds_it(wrong, pair, tmp_path):
    """The gradient by queries is scaled by code of B's, which no operator of A's is."""

    def prepare(model):
        wrong.into(None)(model)
        query = model.get_submodule("model.layers.1.self_attn.q_proj")
        query.register_forward_hook(lambda _m, _a, out: out.register_hook(scaled) and None)

    def scaled(gradient):
        return gradient * 4.0

    a, _, right = pair("llama", "float32")
    b = divergence.capture(like=a, out=tmp_path / "b", probe=False, prepare=prepare)
    result = divergence.localize(
        a, b, truth=right, out=tmp_path / "work", prepare_candidate=prepare
    )
    assert result.operator.fed_by == [f"model.layers.1.self_attn.q_proj{BACKWARD}/aten.mul"]
    assert (result.operator.fed_by_side, result.side) == ("candidate", "candidate")
    assert result.causal.holds


@pytest.mark.parametrize("architecture", ["llama", *OTHERS])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "change",
    [
        {"attn_implementation": "sdpa"},
        {"gradient_checkpointing": True},
        pytest.param({"batch": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_healthy_pair_has_no_wrong_operator(architecture, dtype, change, wrong, pair, tmp_path):
    """Another attention kernel is another backward, of which each part is within rounding."""
    runs = pair(architecture, dtype, **change)
    block = ATTENTION[architecture].rpartition(".")[0]
    result = descend(wrong, runs, tmp_path / "work", block=block)
    assert result.operator is None, result.operator.site
    assert "beyond its limit" in result.stopped or "equal" in result.stopped or change.get("batch")
    report = result.report
    assert report.verdict.kind in ("within_floor", "identical", "drift"), report.verdict.summary
    if "batch" not in change:
        backward = [one for one in report.operators.results if one.phase == "backward"]
        assert len(backward) > 25
        assert max(one.limit_usage for one in backward) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"autocast": "bfloat16"}, {"dtype": "bfloat16"}], ids=str)
def test_of_two_dtypes_no_operator_is_named(options, wrong, pair, tmp_path, answer):
    """What differs by dtype alone is no operator's fault."""
    a, *_ = pair("llama", "float32")
    sites = ["blocks", "ops@model.layers.1"]
    one = divergence.capture(
        like=a,
        out=tmp_path / "one",
        probe=False,
        recording=RecordOptions(anchor=False),
        sites=sites,
    )
    report = answer(one, truth=divergence.truth(one, out=tmp_path / "truth"), **options)
    assert report.operators.onset is None
    assert report.verdict.onset is None or "/" not in report.verdict.onset.site


@pytest.mark.slow
def test_the_optimizers_step_is_behind_all_operators(wrong, pair, tmp_path):
    """It is said where there is none to go into."""
    a, _, _ = pair("llama", "float32")
    one, two = (
        divergence.capture(
            like=a,
            out=tmp_path / name,
            probe=False,
            training=divergence.TrainOptions(optimizer="sgd", learning_rate=rate),
        )
        for name, rate in (("one", 0.1), ("two", 0.2))
    )
    result = divergence.localize(
        one, two, out=tmp_path / "work", truth=divergence.truth(one, out=tmp_path / "truth")
    )
    assert "by the optimizer's step" in result.stopped
    assert result.levels[0].site.partition(":")[0].endswith("#optimizer")


@pytest.mark.slow
def test_each_side_keeps_its_own_settings(wrong, pair, tmp_path):
    """A side with gradient checkpointing is repeated with it; what adds up gradients is behind all
    operators."""
    plant = "model.layers.1.mlp.down_proj#backward:out.weight=scale:1.01"
    runs = pair("llama", "float32", gradient_checkpointing=True, plants=[plant])
    result = descend(wrong, runs, tmp_path / "work")
    assert result.operator is None
    assert "comes after them" in result.stopped
    again = divergence.Run.open(tmp_path / "work/candidate-operators")
    assert again.manifest.training.gradient_checkpointing
    commands = divergence.compare(*runs[:2], truth=runs[2]).verdict.next
    assert any("--gradient-checkpointing" in command for command in commands)


@pytest.mark.slow
def test_the_commands_that_compare_prints_work(tiny_model, tmp_path):
    """Copied into a shell, one after the other."""

    def run(*words):
        done = subprocess.run(
            [sys.executable, "-m", "divergence", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    model = tiny_model("llama", dtype="float32", num_blocks=3)
    (tmp_path / "prompts.txt").write_text("one two three four five six\nthree one two\n")
    run("capture", str(model), "-o", "a", "--train", "--prompts", "prompts.txt", "--no-probe")
    plant = "model.layers.1.self_attn.q_proj#backward:in=scale:1.01"
    run("capture", "--like", "a", "-o", "b", "--no-probe", "--plant", plant)
    run("truth", "a", "-o", "truth")
    told = json.loads(run("compare", "a", "b", "--truth", "truth", "--json"))
    for command in told["verdict"]["next"]:
        words = shlex.split(command, comments=True)
        printed = run(*words[1:])
        if words[1] in ("localize", "compare"):
            assert "self_attn.q_proj#backward/aten.m" in printed
