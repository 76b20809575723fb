"""A truth is its run again, in float64: the same tokens, the same sites, free and anchored."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from divergence import Run, capture
from divergence import truth as make_truth
from divergence.errors import DivergenceError, ModelError, UsageError
from divergence.recording import passes
from divergence.run.site import module_of
from tests.digests import without_digests

PROMPTS = ["A bridge is built twice: once on paper.", "def mean"]
UNIT = {"float32": 2**-24, "bfloat16": 2**-8}


@pytest.fixture(scope="session")
def truth_of(tmp_path_factory):
    """``truth_of(run)`` → its truth; the same run, the same truth."""
    truths: dict[str, Run] = {}

    def make(run: Run) -> Run:
        if run.manifest.id not in truths:
            out = tmp_path_factory.mktemp("truth-") / "truth"
            truths[run.manifest.id] = make_truth(
                run, out=out, trust_remote_code=run.manifest.model.trust_remote_code
            )
        return truths[run.manifest.id]

    return make


def read(run: Run, site: str, *, pass_: str = "free", sample: int = 0, step: int = 0):
    return run.read(run.find((pass_, sample, step, site))).double()


def rel_l2(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one.double() - two.double()).norm() / two.double().norm())


def blocks_of(run: Run) -> list[str]:
    return [path for path, note in run.manifest.plan.modules.items() if note.role == "block"]


# --- what is in a truth --------------------------------------------------------------------------

RUNS = [
    ("llama", "bfloat16", {"attn_implementation": "sdpa"}),
    ("gemma3", "float32", {}),
    ("qwen3-moe", "bfloat16", {}),
    ("mamba", "float32", {"sites": ["modules"]}),
    ("t5", "bfloat16", {}),
    ("bert", "float32", {}),
    ("remote-code", "float32", {}),
]


@pytest.mark.parametrize(("architecture", "dtype", "options"), RUNS)
def test_a_truth_holds_its_run_again_in_float64(architecture, dtype, options, captured, truth_of):
    """Each site of each step is there twice, free and anchored, in float64, and near the run's."""
    run = captured(architecture, dtype=dtype, capture_options=options)
    truth = truth_of(run)
    manifest = truth.manifest
    assert manifest.complete
    assert manifest.settings.compute_dtype == "float64"
    assert manifest.model.dtype == dtype
    assert manifest.model.digest == run.manifest.model.digest
    assert manifest.plan.passes == ["free", "anchored"]
    assert manifest.like == manifest.plan.anchored_to == run.manifest.id
    assert manifest.environment.label == "float64 truth"
    free = {r.coordinates[1:]: r for r in truth.records if r.pass_ == "free"}
    anchored = {r.coordinates[1:]: r for r in truth.records if r.pass_ == "anchored"}
    asked = {r.coordinates[1:]: r for r in run.records}
    assert set(free) == set(asked)
    # what a pass puts in place itself is no news of it
    left_out = set(asked) - set(anchored)
    assert set(anchored) < set(asked)
    assert {module_of(site) for _, _, site in left_out} >= set(blocks_of(run))
    assert all(":in" in site for _, _, site in left_out)
    for coordinates, record in (free | anchored).items():
        assert record.shape == asked[coordinates].shape
        kept = asked[coordinates].dtype
        assert record.dtype == ("float64" if kept in (*UNIT, "float16") else kept)
        assert record.positions == asked[coordinates].positions
    logits = manifest.plan.logits_site or f"{blocks_of(run)[-1]}:out"
    for step in {step for _, step, _ in asked}:
        error = rel_l2(read(run, logits, step=step), read(truth, logits, step=step))
        assert 0 < error < 40 * UNIT[dtype], step


@pytest.mark.slow
def test_tokens_are_the_runs(captured, replay, truth_of):
    """The recorded tokens are forced, whatever the truth would have chosen."""
    run = captured("llama")
    odd = replay(run, plants=["lm_head:out=scale:-1"])
    samples = truth_of(run).manifest.tokens
    assert samples.forced_by == run.manifest.id
    assert samples.samples[0].generated_ids == run.manifest.tokens.samples[0].generated_ids
    assert odd.manifest.tokens.samples[0].chosen_ids != samples.samples[0].chosen_ids


def gpt2(folder) -> torch.nn.Module:
    """In float64 throughout: this model has no cast inside, so the naive way is right for it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager")
    return model.double().eval()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_free_pass_is_the_float64_model(dtype, captured, truth_of, tiny_model):
    """Where a float64 model can be had another way, it agrees in every block and every step."""
    run = captured("gpt2", dtype=dtype)
    truth, sample = truth_of(run), run.manifest.tokens.samples[0]
    ids = torch.tensor([sample.prompt_ids + sample.generated_ids])
    model, length = gpt2(tiny_model("gpt2", dtype=dtype)), len(sample.prompt_ids)
    with torch.no_grad():
        right = model(ids, output_hidden_states=True)
    for step in range(4):
        rows = slice(0, length) if step == 0 else slice(length + step - 1, length + step)
        for block in range(2):  # the last hidden state has the final norm in it
            found = read(truth, f"transformer.h.{block}:out", step=step)
            assert rel_l2(found, right.hidden_states[block + 1][:, rows]) < 1e-13
        logits = read(truth, run.manifest.plan.logits_site, step=step)
        assert rel_l2(logits, right.logits[:, rows][:, -1:]) < 1e-13


@pytest.mark.slow
def test_the_anchored_pass_starts_from_the_runs_inputs(captured, truth_of, tiny_model):
    """Each block's output is the float64 block's of the input that the run recorded."""
    run = captured("gpt2", dtype="bfloat16")
    truth, model = truth_of(run), gpt2(tiny_model("gpt2", dtype="bfloat16"))
    for number, block in enumerate(model.transformer.h):
        path = f"transformer.h.{number}"
        entered = read(run, f"{path}:in")
        causal = torch.zeros(1, 1, entered.shape[1], entered.shape[1], dtype=torch.float64)
        causal = causal.masked_fill(causal.new_ones(causal.shape).triu(1).bool(), -torch.inf)
        with torch.no_grad():
            right = block(entered, attention_mask=causal)
        right = right[0] if isinstance(right, tuple) else right
        assert rel_l2(read(truth, f"{path}:out", pass_="anchored"), right) < 1e-13
        if number:
            assert rel_l2(read(truth, f"{path}:out"), right) > 1e-4


@pytest.mark.slow
def test_a_padded_batch_has_the_truth_of_its_prompts(captured, truth_of):
    """Pads travel with the truth, and the tokens' own numbers are those of each prompt alone."""
    options = {"prompts": PROMPTS, "max_new_tokens": 3}
    single = truth_of(captured("llama", dtype="bfloat16", capture_options=options))
    batch = truth_of(captured("llama", dtype="bfloat16", capture_options=options | {"batch": True}))
    assert batch.manifest.tokens.groups == [[0, 1]]
    num_pads = [sample.num_left_pad for sample in batch.manifest.tokens.samples]
    assert num_pads[0] == 0 < num_pads[1]
    for sample, pads in enumerate(num_pads):
        for block in blocks_of(single):
            one = read(single, f"{block}:out", sample=sample)
            row = read(batch, f"{block}:out")[sample : sample + 1, pads:]
            assert rel_l2(row, one) < 1e-13


@pytest.mark.slow
def test_kept_weights_make_no_difference(captured, truth_of, tmp_path, monkeypatch):
    """With and without room to keep widened weights the truth is the same, bit for bit."""
    run = captured("qwen3-moe", dtype="bfloat16")
    monkeypatch.setattr(passes, "free_bytes", lambda device: 0)
    without = make_truth(run, out=tmp_path / "truth")
    assert [r.xxh3 for r in without.records] == [r.xxh3 for r in truth_of(run).records]


# --- while it is made ----------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "num_forwards"), [("llama", 4), ("bert", 1), ("t5", 4)])
def test_progress_goes_by_blocks(architecture, num_forwards, captured, tmp_path):
    """One step for each block of each forward in both passes, up to the total; where forwards
    pass different blocks it goes by forwards."""
    told: dict[str, list] = {"free": [], "anchored": []}

    def progress(event, done, total, detail):
        if event in told and total is not None:
            told[event].append((done, total, detail))

    run = captured(architecture)
    make_truth(run, out=tmp_path / "truth", progress=progress)
    passed = [f"step {step}" for step in range(4)]
    if architecture != "t5":
        passed = num_forwards * blocks_of(run)
    total = len(passed)
    for steps in told.values():
        assert [done for done, _, _ in steps] == list(range(1, total + 1))
        assert {of for _, of, _ in steps} == {total}
        assert [detail for _, _, detail in steps] == passed


@pytest.mark.slow
def test_a_stopped_truth_leaves_a_readable_run(captured, truth_of, tmp_path):
    """Ctrl-C in the anchored pass keeps all that was seen before, marked incomplete; and torch's
    default dtype is the old one."""

    def stop(event, done, total, detail):
        if (event, done) == ("anchored", 4):
            raise KeyboardInterrupt

    run = captured("llama")
    with pytest.raises(KeyboardInterrupt):
        make_truth(run, out=tmp_path / "part", progress=stop)
    assert torch.get_default_dtype() == torch.float32
    part = Run.open(tmp_path / "part")
    assert not part.manifest.complete
    assert "interrupted" in part.manifest.stopped_by
    assert part.manifest.settings.compute_dtype == "float64"
    assert part.verify() == []
    whole = {r.coordinates: r.xxh3 for r in truth_of(run).records}
    found = {r.coordinates: r.xxh3 for r in part.records}
    assert found.items() < whole.items()
    assert sum(c[0] == "free" for c in found) == len(run.records)
    assert {c[2] for c in found if c[0] == "anchored"} == {0, 1}


# --- what is refused, and what is done instead ---------------------------------------------------


def test_a_truth_has_no_truth(captured, truth_of, tmp_path):
    """It is refused before a model is loaded, with the run that was meant."""
    with pytest.raises(UsageError, match="is a truth itself") as caught:
        make_truth(truth_of(captured("llama")), out=tmp_path / "again")
    assert "the model's own dtype" in caught.value.hint
    assert not (tmp_path / "again").exists()


def test_a_fused_kernel_is_repeated_by_eager(captured, tmp_path):
    """Fused attention has no float64: the truth takes eager, and says what it took instead."""
    path = tmp_path / "run"
    shutil.copytree(captured("llama").path, path)
    without_digests(path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["model"]["attn_implementation"] = "flash_attention_2"
    manifest["settings"]["attn_implementation"] = "flash_attention_2"
    (path / "manifest.json").write_text(json.dumps(manifest))
    truth = make_truth(path, out=tmp_path / "truth")
    assert truth.manifest.model.attn_implementation == "eager"
    assert [(o.name, o.reference, o.used) for o in truth.manifest.overrides] == [
        ("attn_implementation", "flash_attention_2", "eager")
    ]


@pytest.mark.slow
def test_sdpa_is_kept(captured, truth_of):
    """What has a float64 form is repeated as it was."""
    run = captured("llama", dtype="bfloat16", capture_options={"attn_implementation": "sdpa"})
    truth = truth_of(run)
    assert truth.manifest.model.attn_implementation == "sdpa"
    assert truth.manifest.overrides == []


def test_a_model_that_is_not_here_is_asked_for(tiny_model, tmp_path):
    """Where the recorded folder is gone the error names --model, and with it the truth is made."""
    folder = tmp_path / "there"
    shutil.copytree(tiny_model("llama"), folder)
    run = capture(str(folder), out=tmp_path / "run", prompts=PROMPTS[1:], max_new_tokens=1)
    shutil.rmtree(folder)
    with pytest.raises(DivergenceError) as caught:
        make_truth(run, out=tmp_path / "truth")
    assert isinstance(caught.value, ModelError)
    assert "--model" in f"{caught.value.message} {caught.value.hint}"
    assert not (tmp_path / "truth").exists()
    truth = make_truth(run, out=tmp_path / "truth", model=str(tiny_model("llama")))
    assert truth.manifest.complete


def test_the_run_itself_is_not_overwritten(captured):
    """A truth goes to a directory of its own, even with force."""
    run = captured("llama")
    with pytest.raises(DivergenceError, match="to be repeated"):
        make_truth(run, out=run.path, force=True)
