"""What is said of tensors that were estimated, or not measured at all."""

from __future__ import annotations

from types import SimpleNamespace

from divergence.analyses.blocks.find import estimated_evidence, unmeasured_evidence
from divergence.facts import sentence


def site(step, *, error=None, at_least=None, rel_l2=None, identical=False):
    estimated = None if error is None else SimpleNamespace(relative_error=error)
    return SimpleNamespace(
        step=step,
        estimated=estimated,
        at_least=at_least,
        rel_l2=rel_l2,
        identical=identical,
        statistics_agree=False,
        is_unmeasured=not identical and rel_l2 is None,
        site=f"m{step}:out",
        pass_="free",
    )


def test_estimates_of_prefill_and_decode_steps_are_told_apart():
    """A decode step has one row, and is known worse: the prefill's figure is its own."""
    sites = [site(0, error=0.02), site(0, error=0.04), site(1, error=0.2), site(2, rel_l2=0.1)]
    (said,) = estimated_evidence(sites)
    assert said["num_estimated"] == 3 and sentence(said).startswith("3 of 4 ")
    assert {error["phase"]: error["typical"] for error in said["errors"]} == {
        "prefill": 0.03,
        "decode": 0.2,
    }
    assert "in the prefill ±3% (at worst ±4%), in the decode ±20% (at worst ±20%)" in sentence(said)


def test_the_most_that_statistics_prove_is_told():
    """Of what was not measured; what is equal, or was, does not count."""
    sites = [site(0, at_least=0.1), site(1, at_least=0.3), site(2), site(3, identical=True)]
    said = unmeasured_evidence([*sites, site(4, rel_l2=0.5, at_least=0.9)])
    assert said[0]["num_unmeasured"] == 3
    assert said[1]["at_least"] == 0.3 and "m1:out" in sentence(said[1])
    assert unmeasured_evidence([site(0, identical=True)]) == estimated_evidence([site(0)]) == []
