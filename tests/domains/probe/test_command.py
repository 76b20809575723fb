"""`divergence probe`: facts as text and JSON, exit codes, and what follows from them."""

import json

import pytest


@pytest.fixture
def probe(invoke):
    """``probe("here", *options)``: the quick form at 64 terms."""
    return lambda out, *options: invoke(
        "probe", "-o", out, "--quick", "--terms", 64, "--device", "cpu", *options
    )


@pytest.mark.slow
def test_facts_are_printed_and_two_probes_compared(probe, invoke):
    """The answer first, then sections, then what to do with it."""
    code, out, _ = probe("here")
    assert code == 0
    assert out.startswith("probed here: ")
    assert "of additions replayed bit by bit" in out.splitlines()[0]
    assert "order of additions" in out
    assert "divergence compare here OTHER" in out
    assert probe("there", "-q")[:2] == (0, "there\n")
    code, out, _ = invoke("compare", "here", "there")
    assert code == 0
    assert out.startswith("IDENTICAL: the probed arithmetic is the same")
    code, out, _ = invoke("inspect", "here", "-v")
    assert code == 0
    assert "arithmetic  " in out
    assert "capture --like" not in out


def test_json_holds_every_fact(probe):
    """As in the manifest."""
    code, out, _ = probe("here", "--json", "--svg", "trees")
    assert code == 0
    facts = json.loads(out)["manifest"]["arithmetic"]
    assert {"name", "value", "verified"} <= set(facts[0])
    assert any(fact["name"].startswith("order: linear M=1 K=64") for fact in facts)


def test_wrong_use_is_said(probe, invoke):
    """Exit code 2, and what to do."""
    code, _, err = invoke("probe")
    assert (code, "-o RUN" in err) == (2, True)
    code, _, err = invoke("probe", "-o", "here", "--terms", "100")
    assert (code, "power of two" in err) == (2, True)
    code, _, err = invoke("probe", "-o", "here", "--device", "abacus")
    assert (code, "unknown device" in err) == (2, True)
    probe("here")
    code, _, err = probe("here")
    assert (code, "--force" in err) == (2, True)


def test_a_capture_can_do_without(invoke, llama):
    """--no-probe leaves the facts out of the manifest."""
    code, _, _ = invoke(
        "capture", llama, "-o", "a", "--prompt", "hi", "--max-new-tokens", 1, "--no-probe"
    )
    assert code == 0
    _, out, _ = invoke("inspect", "a", "--json")
    assert json.loads(out)["manifest"]["arithmetic"] == []
