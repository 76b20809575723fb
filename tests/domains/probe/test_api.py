"""A probe is a run: it opens, verifies, and others can check its claims from it."""

import numpy as np
import pytest
import torch

import divergence
from divergence.domains.probe.additions import Arithmetic, replay, summing
from divergence.errors import RunExistsError, UsageError
from tests.models.trees import tree_of_parents


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """One probe of 64 and 128 terms, and where its drawings lie."""
    folder = tmp_path_factory.mktemp("probe")
    run = divergence.probe(
        out=folder / "run", device="cpu", quick=True, terms=[64, 128], svg=folder / "svg"
    )
    return run, folder


def test_it_is_a_complete_run(probed):
    """Of no model, with facts in its manifest and tensors with checksums."""
    run, _ = probed
    assert run.manifest.complete
    assert run.verify() == []
    assert (run.manifest.model.source, run.manifest.model.task) == ("probe", "operators")
    assert any(fact.verified for fact in run.manifest.arithmetic)
    assert len(run.records) > 100
    assert all(record.site.startswith("probe.") for record in run.records)


def test_a_claimed_order_can_be_checked_from_the_run_alone(probed):
    """Stored tree, stored inputs, replayed: the stored outputs, bit for bit."""
    run, _ = probed
    name = "order: linear M=1 K=128 N=64 float32"
    fact = next(fact for fact in run.manifest.arithmetic if fact.name == name)
    if not fact.verified:  # an honest answer of some CPUs, which proves nothing
        pytest.skip(f"this CPU's order: {fact.evidence}")
    stem = "probe.order.linear-M=1-K=128-N=64-float32"

    def read(site: str) -> torch.Tensor:
        return torch.as_tensor(run.read(run.find(("free", 0, 0, f"{stem}-{site}"))))

    tree = tree_of_parents(read("tree-0:out.parents").tolist())
    assert tree.partials == fact.numbers["partials"]
    cells = read("tree-0:out.cells").bool()
    fused = None if fact.numbers["rounded_products"] else "first"
    operator = summing("linear", 128, torch.float32)
    for kind in ("plain", "zero"):
        leaves, partner = read(f"{kind}:in"), read(f"{kind}:in.partner")
        again = replay(operator, tree, Arithmetic(fused=fused), leaves, partner)
        assert np.array_equal(again[cells].numpy(), read(f"{kind}:out")[cells].numpy())


def test_drawings_are_written(probed):
    """One SVG a tree, named after the operator."""
    from xml.etree import ElementTree

    run, folder = probed
    files = sorted((folder / "svg").glob("*.svg"))
    orders = [fact for fact in run.manifest.arithmetic if fact.probe == "order"]
    assert len(files) >= len(orders)
    assert "linear-M=1-K=128-N=64-float32.svg" in {file.name for file in files}
    for file in files:
        assert ElementTree.parse(file).getroot().tag.endswith("svg")


@pytest.mark.parametrize("terms", [[3], [100], [8192], [0]])
def test_other_lengths_are_refused(terms, tmp_path):
    """Before anything is written."""
    with pytest.raises(UsageError, match="no length that can be probed"):
        divergence.probe(out=tmp_path / "run", device="cpu", terms=terms)
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten(probed):
    """Unless asked."""
    run, _ = probed
    with pytest.raises(RunExistsError):
        divergence.probe(out=run.path, device="cpu", quick=True)


@pytest.mark.slow
def test_two_probes_of_one_machine_are_identical(probed, tmp_path):
    """Facts and tensors."""
    run, _ = probed
    again = divergence.probe(out=tmp_path / "run", device="cpu", quick=True, terms=[64, 128])
    report = divergence.compare(run, again)
    assert report.verdict.kind == "identical"
    assert report.verdict.summary.startswith("the probed arithmetic is the same")


def test_an_interrupted_probe_keeps_what_it_found(tmp_path):
    """Readable, incomplete, with the facts and tensors made so far."""

    def stop(event, done, total, detail):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        divergence.probe(out=tmp_path / "p", quick=True, progress=stop)
    run = divergence.Run.open(tmp_path / "p")
    assert (run.manifest.complete, run.manifest.stopped_by) == (False, "interrupted")
    assert run.manifest.arithmetic
    assert run.records


def test_the_command_names_no_home(tmp_path, monkeypatch):
    """As in every other run."""
    monkeypatch.setenv("HOME", "/home/somebody")
    command = "divergence probe -o /home/somebody/p"
    run = divergence.probe(out=tmp_path / "p", quick=True, terms=(64,), command=command)
    assert run.manifest.command == "divergence probe -o ~/p"
