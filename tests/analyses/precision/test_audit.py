"""The precision audit of tiny models: healthy ones accuse nobody, planted changes are named."""

import re
import types

import pytest
import torch
from torch.nn import functional as F

from divergence import LoadOptions, Run, capture, compare
from divergence import truth as make_truth
from divergence.analyses.precision.audit import audit_runs
from divergence.run.manifest import ArithmeticFact

BLOCKS = {
    "llama": "model.layers.1",
    "gpt2": "transformer.h.1",
    "gemma3": "model.layers.1",
    "qwen3-moe": "model.layers.1",
    "mixtral": "model.layers.1",
    "mamba": "backbone.layers.1",
    "mamba2": "backbone.layers.1",
    "bert": "bert.encoder.layer.1",
    "t5": "decoder.block.1",
    "remote-code": "bricks.1",
}
WITHOUT_SDPA = ("mamba", "mamba2", "remote-code")


@pytest.fixture
def run_of(shared_run):
    """``run_of("llama")`` → a run with block 1's operators."""

    def make(architecture, dtype="bfloat16", attention="eager", **options) -> Run:
        return shared_run(
            architecture,
            prompts=["A bridge is built twice."],
            max_new_tokens=2,
            dtype=dtype,
            device="cpu",
            attn_implementation=attention,
            sites=["blocks", f"ops@{BLOCKS[architecture]}"],
            loading=LoadOptions(trust_remote_code=architecture == "remote-code"),
            **options,
        )

    return make


def rows(run: Run, other: Run | None = None):
    return {row.part: row for row in audit_runs(run, other).rows}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", [name for name in BLOCKS if name != "remote-code"])
def test_healthy_models_accuse_nobody(run_of, architecture, dtype):
    """In no family, dtype or kind of attention, alone or beside one another."""
    kinds = ["eager"] if architecture in WITHOUT_SDPA else ["eager", "sdpa"]
    runs = [run_of(architecture, dtype, kind) for kind in kinds]
    for pair in [(runs[0],), (runs[0], runs[-1])]:
        audit = audit_runs(*pair)
        assert audit.findings == []
        assert not any(row.differs or (row.below and row.own) for row in audit.rows)


@pytest.mark.parametrize(
    ("architecture", "part", "computed", "num_places"),
    [
        ("llama", "norm statistics", ["float32"], 4),
        ("llama", "norm weight", ["bfloat16"], 4),
        ("llama", "softmax", ["float32"], 2),
        ("llama", "attention scores", ["bfloat16"], 2),
        ("llama", "rotary", ["bfloat16"], 4),
        ("llama", "residual add", ["bfloat16"], 4),
        ("llama", "matrix product", ["bfloat16"], 16),
        ("llama", "activation", ["bfloat16"], 2),
        ("llama", "kv cache", ["bfloat16"], 4),
        ("llama", "logits", ["bfloat16"], 2),
        ("gpt2", "norm statistics", ["inside aten.native_layer_norm"], 4),
        ("gpt2", "softmax", ["bfloat16"], 2),
        ("gpt2", "residual add", ["bfloat16"], 4),
        ("gemma3", "norm statistics", ["float32"], 12),
        ("gemma3", "norm weight", ["float32"], 12),
        ("gemma3", "residual add", ["bfloat16"], 4),
        ("qwen3-moe", "norm statistics", ["float32"], 8),
        ("qwen3-moe", "router", ["float32"], 2),
        ("qwen3-moe", "router product", ["bfloat16"], 2),
        ("mixtral", "router", ["float32"], 2),
        ("mamba", "norm statistics", ["float32"], 2),
        ("mamba", "residual add", ["float32"], 2),
        ("mamba", "logits", ["float32"], 2),
        ("bert", "residual add", ["bfloat16"], 2),
        ("bert", "softmax", ["bfloat16"], 1),
        ("t5", "norm statistics", ["float32"], 6),
        ("t5", "residual add", ["bfloat16"], 6),
        ("t5", "softmax", ["bfloat16"], 4),
    ],
)
def test_every_part_is_found_where_it_is(run_of, architecture, part, computed, num_places):
    """As many norms, adds and so on as the model's code has, in prefill and decode."""
    row = rows(run_of(architecture))[part]
    assert (row.reference, row.num_places) == (computed, num_places)


def test_a_part_that_a_model_lacks_is_not_told(run_of):
    """Llama routes nothing, GPT-2 turns nothing, Mamba attends to nothing."""
    assert "router" not in rows(run_of("llama"))
    assert "rotary" not in rows(run_of("gpt2"))
    assert not {"softmax", "attention scores", "rotary"} & rows(run_of("mamba")).keys()


def test_fused_attention_is_named_and_not_judged(run_of):
    """What it does inside is not claimed."""
    row = rows(run_of("llama", attention="sdpa"))["softmax"]
    (name,) = row.reference
    assert re.fullmatch(r"inside aten\._scaled_dot_product\w+", name)
    assert (row.expected, row.below) == (["float32"], None)


def without_upcast(patch, num_axes):
    """softmax in bfloat16 whatever was asked for: attention's has 4 axes, a router's 2."""
    softmax = F.softmax

    def narrow(x, dim=-1, dtype=None, **rest):
        if x.ndim != num_axes:
            return softmax(x, dim=dim, dtype=dtype, **rest)
        return softmax(x.bfloat16(), dim=dim, **rest)

    patch.setattr(F, "softmax", narrow)


def narrow_norms(model):
    """Every RMS norm's statistics in the dtype of its input."""

    def forward(self, x):
        eps = getattr(self, "variance_epsilon", getattr(self, "eps", 1e-6))
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        weight = 1 + self.weight if "Gemma" in type(self).__name__ else self.weight
        return weight * (x * scale)

    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")):
            module.forward = types.MethodType(forward, module)


def wide_residual(block, branch):
    """The branch's result in float32, and so the add; the block's result as it was."""

    def prepare(model):
        def widen(module, args, output):
            return output.float()

        def narrow(module, args, output):
            return output.bfloat16()

        model.get_submodule(f"{block}.{branch}").register_forward_hook(widen)
        model.get_submodule(block).register_forward_hook(narrow)

    return prepare


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3-moe", "mixtral"])
def test_a_softmax_without_its_upcast_is_named(run_of, monkeypatch, architecture):
    """Whichever side it is on, with what was expected and by whom; a router's is left alone."""
    healthy = run_of(architecture)
    with monkeypatch.context() as patch:
        without_upcast(patch, 4)
        other = run_of(architecture, prepare=lambda model: None)
    row = rows(healthy, other)["softmax"]
    assert (row.reference, row.candidate) == (["float32"], ["bfloat16"])
    assert (row.differs, row.below) == (True, "candidate")
    (found,) = audit_runs(healthy, other).findings
    assert found.text.startswith("B computes softmax in bfloat16 (test_audit.py:")
    assert found.text.endswith("A in float32; expected float32 (common practice)")
    (swapped,) = audit_runs(other, healthy).findings
    assert swapped.text.startswith("A computes softmax in bfloat16")


@pytest.mark.parametrize("architecture", ["qwen3-moe", "mixtral"])
def test_a_router_in_bfloat16_is_named(run_of, monkeypatch, architecture):
    """The router, and not attention's softmax."""
    healthy = run_of(architecture)
    with monkeypatch.context() as patch:
        without_upcast(patch, 2)
        other = run_of(architecture, prepare=lambda model: None)
    audit = audit_runs(healthy, other)
    assert [item.part for item in audit.findings] == ["router"]
    assert "B computes router in bfloat16" in audit.findings[0].text


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3-moe", "mamba", "t5"])
def test_norm_statistics_in_bfloat16_are_named(run_of, architecture):
    """On one side; on both, or in one run alone, it is shown, as a model may be meant so."""
    healthy, other = run_of(architecture), run_of(architecture, prepare=narrow_norms)
    audit = audit_runs(healthy, other)
    assert audit.findings[0].part == "norm statistics"
    assert audit.findings[0].text.startswith("B computes norm statistics in bfloat16")
    assert {item.part for item in audit.findings} <= {"norm statistics", "norm weight"}
    for pair, below in (((other, other), "both"), ((other,), "reference")):
        audit = audit_runs(*pair)
        (row,) = [row for row in audit.rows if row.part == "norm statistics"]
        assert (row.below, row.own, audit.findings) == (below, False, [])


def test_products_below_the_runs_dtype_are_named(run_of, invoke):
    """In two runs, on both sides, and in one alone: its own dtype promises them."""

    def prepare(model):
        def forward(self, x):
            return F.linear(x.half(), self.weight.half()).bfloat16()

        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.forward = types.MethodType(forward, module)

    healthy, other = run_of("llama"), run_of("llama", prepare=prepare)
    (found,) = audit_runs(healthy, other).findings
    assert found.text.startswith("B computes matrix product in float16")
    (both,) = audit_runs(other, other).findings
    assert both.text.startswith("both sides compute matrix product in float16")
    (alone,) = audit_runs(other).findings
    assert alone.text.startswith("the run computes matrix product in float16")
    assert alone.text.endswith("expected bfloat16 (the model's dtype)")
    page = invoke("inspect", other.path)[1].splitlines()  # one column, and the findings
    assert "    part              computed in        expected" in page
    assert any(line.startswith("    !: the run computes matrix product") for line in page)


def test_autocast_is_a_promise_too(run_of):
    """Products in bfloat16 are what was asked for, in a model of float32."""
    run = Run.open(run_of("llama").path)
    run.manifest.model.dtype, run.manifest.training.autocast = "float32", "bfloat16"
    audit = audit_runs(run)
    assert audit.findings == []
    (row,) = [row for row in audit.rows if row.part == "matrix product"]
    assert (row.expected, row.expected_by, row.own) == (["bfloat16"], "autocast", True)


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_a_residual_add_in_another_dtype_is_named(run_of, architecture):
    """Wider than the model's is no fault, but a difference."""
    prepare = wide_residual(BLOCKS[architecture], "mlp")
    healthy, other = run_of(architecture), run_of(architecture, prepare=prepare)
    row = rows(healthy, other)["residual add"]
    assert (row.differs, row.below) == (True, None)
    assert set(row.candidate) == {"bfloat16", "float32"}
    texts = [f.text for f in audit_runs(healthy, other).findings]
    assert any(text.startswith("B computes residual add in float32") for text in texts)


def test_mambas_stream_in_bfloat16_is_a_difference(run_of):
    """Its default is float32; a configuration may have it so: no fault, but named."""

    def prepare(model):
        for block in model.backbone.layers:
            block.residual_in_fp32 = False

    healthy, other = run_of("mamba"), run_of("mamba", prepare=prepare)
    row = rows(healthy, other)["residual add"]
    assert (row.candidate, row.below, row.differs) == (["bfloat16"], None, True)
    assert audit_runs(other).findings == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3-moe"])
def test_the_audit_explains_the_onset(run_of, tmp_path, architecture, answer):
    """compare's first reason is the dtype, where the onset is the part that ran in another."""
    source = run_of(architecture)
    report = answer(
        source, narrow_norms, truth=make_truth(source, out=tmp_path / "t"), device="cpu"
    )
    verdict = report.verdict
    assert verdict.onset is not None and "norm/" in verdict.onset.site
    assert verdict.side == "candidate"
    assert verdict.evidence[0].text.startswith(
        "B computes norm statistics in bfloat16 (test_audit.py:"
    )
    assert '"audit":{"rows"' in report.to_json()


@pytest.mark.slow
def test_a_finding_stands_also_where_no_number_is_wrong(run_of, tmp_path, monkeypatch):
    """A kernel that adds up in float32 makes softmax in bfloat16 harmless: named all the same."""
    source = run_of("llama")
    with monkeypatch.context() as patch:
        without_upcast(patch, 4)
        other = capture(like=source, out=tmp_path / "b", device="cpu")
    report = compare(source, other, truth=make_truth(source, out=tmp_path / "t"))
    texts = [item.text for item in report.verdict.evidence]
    assert texts[-1].startswith("B computes softmax in bfloat16")


def test_a_truth_is_not_audited(run_of, tmp_path):
    """Everything there is float64 by intent."""
    source = run_of("llama")
    truth = make_truth(source, out=tmp_path / "t")
    assert audit_runs(truth) is None
    assert audit_runs(truth, source).reference is None


def test_a_run_without_operators_has_no_audit(tiny_model, tmp_path):
    """Nor has a comparison of such runs."""
    run = capture(
        str(tiny_model("llama")), out=tmp_path / "a", prompts=["A bridge."], max_new_tokens=1
    )
    assert audit_runs(run) is None
    assert compare(run, run).audit is None


def test_runs_of_different_dtypes_are_not_held_against_each_other(run_of):
    """bfloat16 beside float32 is what was asked for."""
    audit = audit_runs(run_of("llama", "float32"), run_of("llama"))
    assert audit.findings == []
    assert audit.notes[0].startswith("the runs have different dtypes")


def test_a_probes_accumulator_is_told(run_of):
    """What the manifest holds as verified, of the dtypes that were stored, beside the table."""
    one, two = (Run.open(run_of("llama").path) for _ in range(2))
    for run in (one, two):
        run.manifest.arithmetic = [
            ArithmeticFact(name=f"accumulator: {subject}", value=value, verified=verified)
            for subject, value, verified in [
                ("linear M=16 K=64 N=64 bfloat16", "24 bits (float32)", True),
                ("attention P@V heads=2 n=64 bfloat16", "24 bits (float32)", True),
                ("sum n=8 bfloat16", "8 bits (bfloat16)", False),
                ("sum n=8 float16", "24 bits (float32)", True),
            ]
        ]
    text = "bfloat16 is accumulated in 24 bits (float32) (probed: linear, attention P@V)"
    assert audit_runs(one).notes == [f"the run: {text}"]
    assert audit_runs(one, two).notes == [f"A and B: {text}"]


def test_parts_of_code_from_elsewhere_are_found(run_of):
    """By what operators compute: names are nothing to go by."""
    run = run_of("remote-code")
    audit = audit_runs(run)
    assert audit.findings == []
    assert {"softmax", "residual add", "matrix product", "norm statistics"} <= rows(run).keys()
