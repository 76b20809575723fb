"""Runs with layers beside log-probabilities: the block, or the expert, that explains Δ log p."""

import json

import pytest
import torch

from divergence import RecordOptions, Run, capture, compare
from divergence.errors import UsageError
from tests.models.tiny import build

PROMPTS = [[5 + n, 6, 7 * n + 8, 9, 10 + 3 * n] for n in range(12)]
OPTIONS = {"device": "cpu", "probe": False, "dtype": "float32", "max_new_tokens": 6}


def as_scores(run: Run, path) -> Run:
    """What a server of the same would have said: the log-probabilities of its tokens alone."""
    import_dump = pytest.importorskip("divergence.domains.importing.importing").import_dump
    lines = []
    for number, sample in enumerate(run.manifest.tokens.samples):
        answer = [*sample.generated_ids, *sample.chosen_ids[len(sample.generated_ids) :]]
        values = []
        for step, token in enumerate(answer):
            logits = run.read(run.find(("free", number, step, run.manifest.plan.logits_site)))
            values.append(float(torch.log_softmax(logits[0, -1].double(), -1)[token]))
        lines.append(
            {"prompt_ids": sample.prompt_ids, "completion_ids": answer, "logprobs": values}
        )
    file = path.with_suffix(".jsonl")
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return import_dump(file, out=path)


@pytest.fixture(scope="module")
def runs(llama, tmp_path_factory):
    """A trainer with layers; a faulty engine with layers, and what it says without them."""
    folder = tmp_path_factory.mktemp("layers")
    trainer = capture(llama, out=folder / "trainer", prompts=PROMPTS, **OPTIONS)
    engine = capture(
        like=trainer,
        model=llama,
        out=folder / "engine",
        plants=["model.layers.1.mlp.down_proj:out=scale:3"],
        device="cpu",
    )
    return trainer, engine, as_scores(engine, folder / "rollout")


@pytest.mark.slow
def test_the_block_that_explains_the_difference(runs):
    """The stand-in shows the same Δ log p, and its comparison names the block."""
    trainer, engine, rollout = runs
    alone = compare(trainer, rollout)
    assert alone.verdict.onset is None or alone.verdict.onset.block is None
    report = compare(trainer, rollout, layers=engine)
    assert report.logprobs.layers.share == pytest.approx(1, abs=1e-3)
    assert report.logprobs.layers.block == "model.layers.1"
    assert "100% of Δ log p" in report.verdict.evidence[0].text


@pytest.mark.slow
def test_a_stand_in_that_shows_something_else(runs, llama, tmp_path):
    """A healthy build of what the server is said to run: the difference is not in it."""
    trainer, _, rollout = runs
    other = capture(
        like=trainer,
        model=llama,
        out=tmp_path / "healthy",
        device="cpu",
        plants=["lm_head:out=noise:1e-6"],
    )
    report = compare(trainer, rollout, layers=other)
    assert report.logprobs.layers.share < 0.1
    assert "not in what they ran" in report.verdict.evidence[0].text


def test_which_layers_are_refused(runs):
    """A run with layers stands in for a side that has none, and for one alone."""
    trainer, engine, rollout = runs
    with pytest.raises(UsageError, match="both runs hold layers"):
        compare(trainer, engine, layers=engine)
    with pytest.raises(UsageError, match="no --layers stands in for it"):
        compare(rollout, rollout.path, layers=engine)
    with pytest.raises(UsageError, match="stands in for no side"):
        compare(trainer, rollout, layers=[engine, engine])
    with pytest.raises(UsageError, match="log-probabilities alone"):
        compare(trainer, rollout, layers=rollout)


@pytest.mark.slow
def test_the_expert_whose_tokens_differ(tmp_path):
    """One expert's weights are wrong in the engine: the trainer's routing names it."""
    from safetensors.torch import load_file, save_file

    model = build("qwen3-moe", tmp_path / "model")
    prompts = [[5 + n, 6 + n % 3, 7 * n + 8, 9, 10 + 3 * n] for n in range(24)]
    trainer = capture(model, out=tmp_path / "trainer", prompts=prompts, **OPTIONS)
    weights = load_file(model / "model.safetensors")
    names = [name for name in weights if "layers.1.mlp.experts.3.down_proj" in name]
    assert names, sorted(weights)
    for name in names:
        weights[name] = weights[name] * -6
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    engine = capture(
        like=trainer,
        model=model,
        out=tmp_path / "engine",
        device="cpu",
        recording=RecordOptions(anchor=False),
        probe=False,
        force=True,
    )
    report = compare(trainer, as_scores(engine, tmp_path / "rollout"))
    found = report.logprobs.expert
    assert found is not None and (found.block, found.expert) == ("model.layers.1", 3)
    assert found.mean_abs > 3 * found.rest_abs
    if found.mean_abs > report.logprobs.explained:
        assert "expert 3 of model.layers.1" in report.verdict.summary
