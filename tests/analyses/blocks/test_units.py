"""Units: what is judged, and how wide the limits are."""

from __future__ import annotations

import math
from types import SimpleNamespace

import msgspec
import pytest

from divergence.analyses.blocks.find import _only_rounds
from divergence.analyses.blocks.sides import judge
from divergence.analyses.blocks.units import build_units
from divergence.comparison.results import SiteResult
from divergence.numerics.floor import THRESHOLDS


def site(name: str, ratio: float, *, features: int = 64, rows: int = 8, **changes) -> SiteResult:
    """A measured site with a given ratio; everything else is beside the point."""
    path = name.partition(":")[0]
    block = ".".join(path.split(".")[:2]) if path.startswith(("h.", "g.")) else None
    values = {
        "pass_": "anchored",
        "sample": 0,
        "step": 0,
        "site": name,
        "order": 0,
        "block": block,
        "role": "block" if path == block else "trunk" if block is None else "inner",
        "kind": "Block",
        "shape": (1, rows, features),
        "numel": rows * features,
        "reference_dtype": "float32",
        "candidate_dtype": "float32",
        "identical": False,
        "rel_l2": 0.0,
        "cosine": 1.0,
        "one_minus_cosine": 0.0,
        "sqnr_db": math.inf,
        "max_abs": 0.0,
        "reference_norm": 1.0,
        "candidate_norm": 1.0,
        "gain": 0.0,
        "gain_se": 0.0,
        "token_rel_l2_median": 0.0,
        "token_rel_l2_p99": 0.0,
        "token_rel_l2_max": 0.0,
        "channel_rel_l2_max": 0.0,
        "ratio": ratio,
        "ratio_max": ratio,
    }
    return SiteResult(**(values | changes))


def flagged(sites, pass_="anchored", **options) -> set[str]:
    return {unit.site for unit in judge(build_units(sites, pass_), **options)}


def blocks(*ratios: float, **changes) -> list[SiteResult]:
    return [site(f"h.{n}:out", ratio, **changes) for n, ratio in enumerate(ratios)]


def test_the_absolute_limit_needs_no_siblings():
    """A site that has none is held against the model alone."""
    limit = THRESHOLDS.typical
    assert flagged([site("head:out", 1.01 * limit)]) == {"head:out"}
    assert flagged([site("head:out", 0.99 * limit)]) == set()


def test_siblings_are_controls():
    """A block four times as wrong as the others is flagged below the absolute limit; one three
    times as wrong as those that make no error to speak of is not."""
    assert flagged(blocks(0.5, 0.5, 2.1, 0.5)) == {"h.2:out"}
    assert flagged(blocks(0.5, 0.5, 1.5, 0.5)) == set()


def test_equal_siblings_do_not_make_rounding_an_alarm():
    """Where the others agree bit for bit, a difference of the floor's size is still rounding."""
    assert flagged(blocks(0.0, 0.0, 1.0, 0.0)) == set()
    assert flagged(blocks(0.0, 0.0, 1.5, 0.0)) == {"h.2:out"}


@pytest.mark.parametrize(("usual", "limit"), [(0.0, 1.2), (0.5, 1.8), (1.0, 2.9)])
def test_the_limits_that_siblings_make_are_those_that_the_docs_tell(usual, limit):
    """Of a few blocks of 512 numbers."""
    units = build_units(blocks(usual, usual, usual, usual), "anchored")
    judge(units)
    assert [round(unit.limit, 1) for unit in units] == [limit] * 4


def test_free_runs_have_no_controls():
    """There a first block inherits nothing and is allowed nothing for it: only the model counts."""
    sites = [site(f"h.{n}:out", r, pass_="free") for n, r in enumerate((2.1, 0.3, 0.3, 0.3))]
    assert flagged(sites, "free") == set()


def test_encoder_and_decoder_blocks_are_no_siblings():
    """They run at other shapes."""
    sites = blocks(0.5, 0.5) + [site(f"g.{n}:out", 2.1) for n in range(2)]
    assert flagged(sites) == set()


@pytest.mark.parametrize("values", [(1, 2), (1, 4), (2, 8), (1, 16)])
def test_few_numbers_have_wider_limits(values):
    """The relative error of a router's four logits varies more than that of a hidden state."""
    rows, features = values
    few = {"rows": rows, "features": features}
    assert flagged(blocks(0.5, 0.5, 2.5, 0.5)) == {"h.2:out"}
    assert flagged(blocks(0.5, 0.5, 2.5, 0.5, **few)) == set()
    assert flagged(blocks(0.5, 0.5, 1e4, 0.5, **few)) == {"h.2:out"}


def test_the_width_is_that_of_the_f_distribution():
    """Ratios of two independent norms over n numbers, drawn: at most one in 1,000 lies beyond the
    width, whatever n is."""
    import torch

    from divergence.numerics.floor import spread as _spread

    assert _spread(64) == _spread(10**6) == 1.0
    draw = torch.Generator().manual_seed(0)
    for n in (4, 8, 16, 32):
        one, two = (torch.randn(200_000, n, generator=draw).norm(dim=1) for _ in range(2))
        beyond = (one / two > 1.6 * _spread(n)).double().mean()  # 1.6: the width at 64
        assert beyond < 1e-3


def test_single_tokens_count_unless_they_are_routed():
    """One token far out is a fault, but in a block with experts it may have met another expert."""
    sites = blocks(0.5, 0.5, 0.5, 0.5)
    sites[1] = msgspec.structs.replace(sites[1], ratio_max=30.0)
    assert flagged(sites) == {"h.1:out"}
    assert flagged(sites, routed=frozenset({"h.1"})) == set()
    assert flagged(blocks(0.5, 30.0, 0.5), routed=frozenset({"h.1"})) == {"h.1:out"}


def test_what_comes_in_is_not_judged_twice():
    """Inputs of blocks, and in free passes all inputs and whole stacks, answer for nothing."""
    wrong = 100.0
    assert flagged([site("h.0:in", wrong), site("h.0:in.rotary.0", wrong)]) == set()
    assert flagged([site("h.0.mlp:in", wrong)]) == {"h.0.mlp:in"}
    free = [
        site(name, wrong, pass_="free", block=None if name[:2] != "m.h" else "m.h.0")
        for name in ("m.h.0.mlp:in", "m:out", ".:out")
    ]
    assert flagged([*free, site("m.h.0:out", 0.1, pass_="free", block="m.h.0")], "free") == set()


def test_rows_of_experts_are_not_tokens():
    """What lies inside the experts is measured and shown, but judged where it comes together."""
    assert flagged([site("h.0.experts.act:in", 100.0)]) == set()
    assert flagged([site("h.0.experts:out", 100.0)]) == {"h.0.experts:out"}


def test_a_free_run_that_is_off_in_one_prompt_says_nothing_of_the_others():
    """What only rounds in the anchored pass is known by prompt, as far as its own free run goes."""
    sites = [
        site(
            f"h.{number}:out",
            90.0 if (pass_, sample, step, number) == ("free", 1, 1, 3) else 0.9,
            pass_=pass_,
            sample=sample,
            step=step,
            order=number,
        )
        for pass_ in ("anchored", "free")
        for sample in range(5)
        for step in (0, 1)
        for number in range(6)
    ]
    tokens = SimpleNamespace(groups=[[n] for n in range(5)], group_of=lambda sample: [sample])
    run = SimpleNamespace(manifest=SimpleNamespace(tokens=tokens))
    measured = SimpleNamespace(
        sites=sites, routed=frozenset(), thresholds=THRESHOLDS, reference=run, candidate=run
    )
    assert _only_rounds(measured) == {0: 2, 1: 1, 2: 2, 3: 2, 4: 2}
