"""Two machines that no field of a run tells apart: kernels, code, and whose truth it is."""

import contextlib
import sys
from pathlib import Path

import pytest
import transformers.models.llama.modeling_llama as modeling

from divergence import Run, capture, localize
from divergence import truth as make_truth
from divergence.errors import IncomparableError

# benchmarks/ is beside the package, not in it.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

BLOCK = "model.layers.0"
SITES = ["blocks", f"{BLOCK}.*", f"ops@{BLOCK}"]


@contextlib.contextmanager
def other_code():
    """A machine whose plugin replaces the MLP: the activation is another one."""
    healthy = modeling.LlamaMLP.forward

    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj((gate * (1.3 * gate).sigmoid()) * self.up_proj(x))

    modeling.LlamaMLP.forward = forward
    try:
        yield
    finally:
        modeling.LlamaMLP.forward = healthy


@contextlib.contextmanager
def other_kernel():
    """A machine whose float32 silu has 9 bits; its float64 is right."""
    from benchmarks import _machine_faults as faults

    faults.install("silu")
    try:
        yield
    finally:
        faults._kept.pop()._destroy()


def made(folder, llama, first, second):
    """a on the machine ``first``, b on ``second``; its truth on ``first``."""
    with first():
        a = capture(
            llama,
            out=folder / "a",
            prompts=["one two three four five"],
            dtype="float32",
            max_new_tokens=1,
        )
        make_truth(a, out=folder / "truth")
    with second():
        capture(like=a, out=folder / "b")
    return {"reference": folder / "a", "candidate": folder / "b", "out": folder / "ab"}


healthy = contextlib.nullcontext


def tells_code(run):
    """Does the run record which code its modules ran?"""
    return bool(getattr(Run.open(run).manifest.model, "code", None))


@pytest.mark.slow
def test_a_wrong_kernel_is_found_by_the_same_command_on_both_machines(llama, tmp_path):
    """First on the reference's, which is not the candidate's; then there: side, cause, module."""
    options = {**made(tmp_path, llama, healthy, other_kernel), "truth": tmp_path / "truth"}
    first = localize(**options)
    assert (first.operator, first.side, first.refused) == (None, None, True)
    assert "this is not B's machine" in first.stopped
    with other_kernel():
        there = localize(**options)
    assert there.operator.site == f"{BLOCK}.mlp.act_fn/aten.silu"
    assert (there.side, there.doubt, there.contradiction) == ("candidate", None, None)
    assert there.causal.holds


@pytest.mark.slow
def test_a_wrong_kernel_of_the_reference_is_found_too(llama, tmp_path):
    """The truth is made by its machine, and float64 is right there."""
    options = {**made(tmp_path, llama, other_kernel, healthy), "truth": tmp_path / "truth"}
    with other_kernel():
        localize(**options)
    on_c = localize(**options)
    assert on_c.side == "reference"
    assert on_c.causal is None  # that takes the reference's machine
    with other_kernel():
        there = localize(**options)
    assert (there.side, there.operator.site) == ("reference", f"{BLOCK}.mlp.act_fn/aten.silu")
    assert there.causal.holds


@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_code_that_differs_names_the_module_and_no_side(llama, tmp_path, side, lines_of):
    """By each side's code the other is wrong: the truth has the reference's."""
    a, c = (healthy, other_code) if side == "candidate" else (other_code, healthy)
    options = {**made(tmp_path, llama, a, c), "truth": tmp_path / "truth"}
    with a():
        assert localize(**options).refused
    with c():
        there = localize(**options)
    named = [there.operator.site, *there.operator.fed_by]
    assert any(site.startswith(f"{BLOCK}.mlp") for site in named)
    assert there.code.startswith(f"{BLOCK}.mlp")
    if tells_code(tmp_path / "a") and side == "candidate":  # replaced there alone
        assert there.side == "candidate"
        return
    assert (there.side, there.causal) == (None, None)
    assert "whose code is right it cannot tell" in there.doubt
    lines = lines_of(there)
    assert ", by " not in lines[0]
    assert any(
        line.startswith("side        not named: the sides run different code") for line in lines
    )


@pytest.mark.slow
def test_the_truth_is_not_made_by_the_candidates_code(llama, tmp_path):
    """Its machine looks like the reference's in every field, and does not repeat its run."""
    options = made(tmp_path, llama, healthy, other_code)
    with other_code():
        for here in ("auto", "candidate"):
            there = localize(**options, here=here)
            assert there.truth is None
            assert not (options["out"] / "truth").exists()
            assert there.commands[0].endswith("# on A's machine: makes truth")
            assert there.refused == (here == "auto")
    assert localize(**options).truth == str(options["out"] / "truth")


@pytest.mark.slow
def test_two_truths_that_disagree_are_refused(llama, tmp_path):
    """One was made by the candidate's code; where it is known which, it is said."""
    options = made(tmp_path, llama, healthy, other_code)
    with other_code():
        make_truth(tmp_path / "a", out=tmp_path / "theirs")
        make_truth(tmp_path / "a", out=options["out"] / "truth-operators", sites=SITES)
    found = localize(**options, truth=tmp_path / "truth")
    assert (found.operator, found.side, found.refused) == (None, None, True)
    assert f"{BLOCK}:out (prompt 0, step 0) differs by" in found.stopped
    assert "one of them was not made by A's code" in found.stopped
    options["out"] = tmp_path / "new"
    if tells_code(tmp_path / "a"):
        with pytest.raises(IncomparableError, match="made by other code than the run it repeats"):
            localize(**options, truth=tmp_path / "theirs")
        return
    found = localize(**options, truth=tmp_path / "theirs")
    assert (found.operator, found.side, found.refused) == (None, None, True)
    assert f"so {tmp_path / 'theirs'} was not made by A's code" in found.stopped
