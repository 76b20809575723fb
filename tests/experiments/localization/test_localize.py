"""The descent in one command: block, module, operator, cause, reproducer."""

import functools
import json
import shlex

import pytest
import torch

from divergence import BatchOptions, RecordOptions, Run, capture, localize
from divergence import truth as make_truth
from divergence.errors import RunExistsError, UsageError
from divergence.report.localization import localization_lines

BLOCK = "model.layers.1"


def truncated_down_proj(model):
    """A product that keeps 7 bits of its inputs: a wrong kernel in place of the right one."""
    linear = model.get_submodule(f"{BLOCK}.mlp.down_proj")
    healthy = linear.forward

    def forward(x):
        bits = x.view(torch.int32) & ~0xFFFF
        return healthy(bits.view(torch.float32))

    linear.forward = forward


@pytest.fixture(scope="module")
def runs(llama, tmp_path_factory):
    """a, its healthy repeat, a repeat with a planted fault, a repeat with a wrong kernel, truth."""
    folder = tmp_path_factory.mktemp("localize")
    a = capture(
        llama, out=folder / "a", prompts=["one two three four"], dtype="float32", max_new_tokens=2
    )
    capture(like=a, out=folder / "healthy")
    capture(like=a, out=folder / "planted", plants=[f"{BLOCK}.mlp.act_fn:out=scale:1.02"])
    capture(like=a, out=folder / "kernel", prepare=truncated_down_proj)
    make_truth(a, out=folder / "truth")
    return folder


@pytest.fixture(scope="module")
def planted(runs):
    """What is found of the planted fault, in the folder ``found``."""
    return localize(runs / "a", runs / "planted", truth=runs / "truth", out=runs / "found")


def test_a_planted_fault_is_followed_to_the_operators_that_only_one_side_calls(runs, planted):
    """Block, module and operator in one call, proven by substitution, with a reproducer."""
    result = planted
    assert [level.level for level in result.levels] == ["block", "module", "operator"]
    assert [level.site for level in result.levels] == [
        f"{BLOCK}:out",
        f"{BLOCK}.mlp.act_fn:out",
        f"{BLOCK}.mlp/aten.mul:out",
    ]
    because = result.levels[1].because[0]  # err of A, of B
    assert 0 < because["reference"] < 1e-5 < 1e-2 < because["candidate"]
    assert result.side == "candidate"
    assert f"{BLOCK}.mlp.act_fn/aten.mul" in result.operator.fed_by
    assert result.causal.holds
    assert result.causal.before > 1 > result.causal.largest_limit_usage
    assert max(own.times for own in result.alone) < 3  # the product itself is right on both sides
    report = (runs / "found/repro/report.md").read_text()
    assert f"{BLOCK}.mlp.act_fn/aten.mul" in report  # what that side alone calls
    assert result.commands == []


def low_bits_lost(model):
    """The block's second product, in the kernel: below everything that a capture sees."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Lossy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.silu.default and self.inside:
                out = (out.view(torch.int32) & ~0xFFFF).view(torch.float32)
            return out

    lossy = Lossy()
    lossy.inside = False
    block = model.get_submodule(BLOCK)
    block.register_forward_pre_hook(lambda *_: setattr(lossy, "inside", True))
    block.register_forward_hook(lambda *_: setattr(lossy, "inside", False))
    healthy = model.forward

    @functools.wraps(healthy)
    def forward(*args, **kwargs):
        with lossy:
            return healthy(*args, **kwargs)

    model.forward = forward


@pytest.fixture(scope="module")
def lossy(runs, tmp_path_factory):
    """What is found of a kernel that loses low bits, and its reproducer's report."""
    folder = tmp_path_factory.mktemp("lossy")
    b = capture(like=runs / "a", out=folder / "b", prepare=low_bits_lost)
    result = localize(
        runs / "a", b, truth=runs / "truth", out=folder / "work", prepare_candidate=low_bits_lost
    )
    return result, (folder / "work/repro/report.md").read_text()


def test_a_kernel_that_is_wrong_by_itself_is_shown_as_a_reproducer(lossy):
    """Far from float64 on its own inputs, on one side alone."""
    result, report = lossy
    assert result.operator.site == f"{BLOCK}.mlp.act_fn/aten.silu"
    assert result.causal.holds
    times = {own.side: own.times for own in result.alone}
    assert times["candidate"] > 1000 > 3 > times["reference"]
    assert "aten.silu.default" in report


@pytest.mark.whole
def test_a_reproducer_says_what_the_probe_knows_of_its_operation(lossy):
    """And of no other."""
    _, report = lossy
    assert "silu n=2048 float32" in report
    assert "linear" not in report.partition("## Arithmetic")[2]


@pytest.mark.slow
def test_what_several_operators_read_is_replaced_for_all_of_them(runs, tmp_path):
    """A norm reads its input twice, for the mean and for the product: proven all the same."""
    plant = f"{BLOCK}.post_attention_layernorm:in=noise:0.05"
    b = capture(like=runs / "a", out=tmp_path / "b", plants=[plant])
    result = localize(runs / "a", b, truth=runs / "truth", out=tmp_path / "work")
    assert result.side == "candidate"
    assert result.operator.fed_by_side == "candidate"
    assert result.causal.holds


@pytest.mark.slow
def test_a_wrong_side_may_be_the_reference(runs, tmp_path):
    """The healthy side's result is then put in the reference's place."""
    planted = Run.open(runs / "planted")
    again = capture(like=planted, out=tmp_path / "again", plants=[])
    assert again.manifest.plan.plants == []
    result = localize(planted, again, out=tmp_path / "work")
    assert result.side == "reference"
    assert result.operator.site == f"{BLOCK}.mlp/aten.mul"
    assert result.causal.holds


@pytest.mark.slow
def test_a_wrong_kernel_is_named_by_what_it_is_given(runs, tmp_path):
    """What was prepared for the capture is prepared again for the descent."""
    result = localize(
        runs / "a",
        runs / "kernel",
        truth=runs / "truth",
        out=tmp_path / "work",
        prepare_candidate=truncated_down_proj,
    )
    assert result.side == "candidate"
    assert result.operator.site == f"{BLOCK}.mlp.down_proj/aten.mm"
    assert result.causal.holds


def test_a_healthy_pair_is_not_gone_into(runs, tmp_path):
    """Nothing is captured, and it says why."""
    result = localize(runs / "a", runs / "healthy", truth=runs / "truth", out=tmp_path / "work")
    assert (result.operator, result.commands) == (None, [])
    assert "nothing" in result.stopped
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_a_block_can_be_asked_for(runs, tmp_path):
    """And a healthy one is found healthy."""
    result = localize(
        runs / "a", runs / "healthy", truth=runs / "truth", out=tmp_path / "w", block=BLOCK
    )
    assert result.stopped == f"no operator of {BLOCK} is beyond its limit"
    with pytest.raises(UsageError, match=r"no block 'model\.layers\.9'"):
        localize(
            runs / "a",
            runs / "healthy",
            truth=runs / "truth",
            out=tmp_path / "w",
            block="model.layers.9",
        )


@pytest.mark.slow
def test_what_another_machine_must_make_is_a_command(runs, tmp_path):
    """And what lies there already is not made again."""
    work = tmp_path / "work"
    first = localize(runs / "a", runs / "planted", truth=runs / "truth", out=work, here="reference")
    assert first.operator is None
    assert first.stopped.startswith("B cannot be captured")
    (command,) = first.commands
    assert command.startswith("divergence capture --like")
    assert "--plant" in command
    made = (work / "reference-operators/manifest.json").stat().st_mtime_ns
    second = localize(
        runs / "a", runs / "planted", truth=runs / "truth", out=work, here="candidate"
    )
    assert second.operator.site == f"{BLOCK}.mlp/aten.mul"
    assert (work / "reference-operators/manifest.json").stat().st_mtime_ns == made


def test_the_page_and_the_json_say_the_same(planted, lines_of):
    """The operator first; the answer alone is its first lines; JSON holds the same facts."""
    lines = lines_of(planted)
    assert [line.text for line in localization_lines(planted)] == lines
    assert lines[0].startswith("LOCALIZED: the error comes into")
    assert len(lines) < 60
    assert lines_of(planted, "-q") == lines[:4]
    answer = json.loads(planted.to_json())
    assert (answer["schema_version"], answer["side"]) == (1, "candidate")
    assert answer["causal"]["holds"] is True


@pytest.mark.slow
def test_equal_runs_and_other_experiments_need_no_truth(runs, tmp_path, lines_of):
    """It would take the model and minutes, to say what the runs alone say."""
    for other, kind in (("a", "undetermined"), ("other", "incomparable")):
        b = runs / "a"
        if other == "other":
            source = Run.open(runs / "a").manifest.model.source
            b = capture(source, out=tmp_path / "b", prompts=["five six"], max_new_tokens=1)
        result = localize(runs / "a", b, out=tmp_path / "work", model=tmp_path / "no such model")
        assert (result.levels[0].verdict, result.truth) == (kind, None)
        assert result.stopped
        assert not any(line.startswith("truth") for line in lines_of(result))


@pytest.mark.slow
def test_a_directory_that_is_not_its_own_is_refused(runs, tmp_path):
    """A file, a run, and the runs of another pair: those are not the candidate's."""
    options = {"truth": runs / "truth", "block": BLOCK, "here": "reference"}
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunExistsError, match="is not a directory"):
        localize(runs / "a", runs / "planted", out=tmp_path / "file", **options)
    with pytest.raises(RunExistsError, match="is a run itself"):
        localize(runs / "a", runs / "planted", out=runs / "a", **options)
    localize(runs / "a", runs / "planted", out=tmp_path / "work", **options)
    with pytest.raises(RunExistsError, match="made for another pair"):
        localize(runs / "a", runs / "healthy", out=tmp_path / "work", **options)
    localize(runs / "a", runs / "healthy", out=tmp_path / "work", force=True, **options)
    ours = (tmp_path / "work" / "pair.json").read_text()
    (tmp_path / "work" / "notes.txt").write_text("mine")
    with pytest.raises(RunExistsError, match=r"other files \(notes.txt\)"):
        localize(runs / "a", runs / "planted", out=tmp_path / "work", force=True, **options)
    assert (tmp_path / "work" / "pair.json").read_text() == ours


@pytest.mark.slow
def test_what_was_made_for_fewer_tokens_or_of_other_weights_is_made_anew(runs, tmp_path, llama):
    """A run in the directory is taken only where it is what would be made."""
    a, work = Run.open(runs / "a"), tmp_path / "work"
    make_truth(a, out=work / "truth", max_new_tokens=1)
    localize(a, runs / "planted", out=work, here="reference")
    assert Run.open(work / "truth").manifest.settings.max_new_tokens == 2
    made = (work / "truth/manifest.json").stat().st_mtime_ns
    localize(a, runs / "planted", out=work, here="none")
    assert (work / "truth/manifest.json").stat().st_mtime_ns == made


def test_commands_run_as_they_are_printed(runs, tmp_path, lines_of):
    """Paths with spaces are quoted, and what was asked for is asked for again."""
    work = tmp_path / "a b"
    result = localize(
        runs / "a", runs / "planted", truth=runs / "truth", out=work, here="none", block=BLOCK
    )
    words = shlex.split(result.again)
    assert words[:2] == ["divergence", "localize"]
    assert words[words.index("-o") + 1] == str(work)
    assert words[words.index("--block") + 1] == BLOCK
    assert any(line.strip().startswith(result.again) for line in lines_of(result))


@pytest.mark.slow
def test_operators_of_one_side_alone_are_named_where_no_other_is_wrong(runs, tmp_path):
    """A head whose result is scaled: its product is right, and the candidate goes on with it."""
    scaled = capture(like=runs / "a", out=tmp_path / "b", plants=["lm_head:out=scale:1.1"])
    result = localize(runs / "a", scaled, truth=runs / "truth", out=tmp_path / "work")
    assert result.operator is None
    assert "only B calls lm_head/aten.mul" in result.stopped


@pytest.mark.slow
def test_a_module_whose_output_is_equal_is_not_where_the_runs_part(tiny_model, tmp_path):
    """In BERT, a healthy dropout before the planted fault, flagged against the truth on both."""
    model, dense = str(tiny_model("bert")), "bert.encoder.layer.1.intermediate.dense:out"
    a = capture(
        model,
        out=tmp_path / "a",
        prompts=["hello there", "a b c"],
        batching=BatchOptions(batch=True),
        dtype="float32",
    )
    b = capture(like=a, out=tmp_path / "b", plants=[f"{dense}=scale:1.1"])
    result = localize(a, b, out=tmp_path / "work")
    assert [level.site for level in result.levels][1] == dense


@pytest.mark.parametrize("site", ["model.norm:in", ".:out"])
def test_what_is_made_between_modules_has_no_block(runs, tmp_path, site):
    """It is said, and nothing is captured: there is no block to go into."""

    def larger(module, args, out):
        out.logits = out.logits * 1.1
        return out

    def prepare(model):
        if site == ".:out":
            model.register_forward_hook(larger)
        else:
            model.model.norm.register_forward_pre_hook(lambda _, args: (args[0] * 1.1,))

    recording = RecordOptions(anchor=site != ".:out")
    b = capture(like=runs / "a", out=tmp_path / "b", prepare=prepare, recording=recording)
    options = {"truth": runs / "truth", "prepare_candidate": prepare}
    result = localize(runs / "a", b, out=tmp_path / "work", **options)
    assert f"{site} is made wrong outside blocks and modules" in result.stopped
    assert not list((tmp_path / "work").glob("*-operators"))


@pytest.mark.slow
def test_what_one_side_calls_in_one_prompt_alone_is_named(llama, tmp_path):
    """A cast of long inputs alone, in which they overflow: the operator is shown as in the prompt
    where it is wrong, and what only that side calls there is named."""

    def cast(model):
        linear = model.get_submodule(f"{BLOCK}.mlp.down_proj")
        healthy = linear.forward
        linear.forward = lambda x: healthy(
            (1e9 * x).half().to(x.dtype) / 1e9 if x.shape[-2] > 4 else x
        )

    capture(
        llama, out=tmp_path / "a", prompts=["one two", "one two three four five"], dtype="float32"
    )
    capture(like=tmp_path / "a", out=tmp_path / "b", prepare=cast)
    make_truth(tmp_path / "a", out=tmp_path / "truth")
    found = localize(
        tmp_path / "a",
        tmp_path / "b",
        truth=tmp_path / "truth",
        out=tmp_path / "found",
        prepare_candidate=cast,
    )
    assert found.operator.site == f"{BLOCK}.mlp.down_proj/aten.mm"
    assert found.operator.sample == 1 and found.side == "candidate"
    assert f"{BLOCK}.mlp.down_proj/aten._to_copy" in found.operator.fed_by
