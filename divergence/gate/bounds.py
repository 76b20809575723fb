"""What the numbers of a policy may be: finite, and in a range in which they decide something.

A limit of zero floors would flag every healthy pair, one of a billion would excuse every fault, and
nan is above and below nothing: a policy that holds such a number is refused when it is read, with
the file, the key and the range. Where the ranges come from:

* ``thresholds``: multiples of the floor (numerics.floor). Correct kernels reach 2.2 floors, a
  fault that leaves no digit right some 1 / u = 256 in bfloat16; 0.01 to 1000 holds both.
* ``rel_l2``: two tensors that have nothing to do with each other differ by √2, a tensor and its
  opposite by 2; ``one_minus_cosine`` is at most 2 by definition. 0 asks for equal bits.
* ``ratio``, ``ratio_max``: floors again.
* ``max_abs``: in the tensor's own unit; 65504 is the largest float16.
* ``tie_margin``: logits. Two spacings of bfloat16 at 128 <= |logit| < 256 are 2; at most 4.
* ``tie_z``: standard deviations of the floor; ``flip``, from which on a flip is a fault, is 6.6.
"""

from __future__ import annotations

from collections.abc import Iterator

from divergence.errors import ConfigError, UsageError
from divergence.gate.policy import LIMITS, Policy
from divergence.numerics.formats import FORMATS
from divergence.numerics.rounding.thresholds import check_range, check_thresholds
from divergence.run.schema.site import compile_patterns, near_names

__all__ = ["RANGES", "check_bounds"]

RANGES: dict[str, tuple[float, float]] = {
    "rel_l2": (0.0, 2.0),
    "one_minus_cosine": (0.0, 2.0),
    "max_abs": (0.0, 65504.0),
    "ratio": (0.0, 1000.0),
    "ratio_max": (0.0, 1000.0),
    "tie_margin": (0.0, 4.0),
    "tie_z": (0.0, 6.6),
    "min_coverage": (0.0, 1.0),
    "min_equal": (0.0, 1.0),
}
"""By key, the least and the largest value that is allowed."""


def check_bounds(policy: Policy, *, where: str) -> None:
    """Raise ConfigError for the first value of ``policy`` that cannot decide anything."""
    if not policy.verdicts:
        raise ConfigError("the policy allows no verdict", where=f"{where}: verdicts")
    if "incomparable" in policy.verdicts:
        raise ConfigError(
            "no policy can accept runs that cannot be compared", where=f"{where}: verdicts"
        )
    for key, name, value in _numbers(policy):
        check_range(value, RANGES[name], where=f"{where}: {key}")
    check_thresholds(policy.thresholds, where=where)
    for number, tolerance in enumerate(policy.tolerance):
        place = f"{where}: tolerance[{number}]"
        _check_sites(tolerance.sites, place)
        _check_dtype(tolerance.dtype, place)
        if not tolerance.limits():
            raise ConfigError(
                "a tolerance sets no limit", where=place, hint=f"set one of {', '.join(LIMITS)}"
            )
    if isinstance(policy.tokens.tie_margin, dict):
        for dtype in policy.tokens.tie_margin:
            _check_dtype(dtype, f"{where}: tokens.tie_margin")
    for number, known in enumerate(policy.known):
        place = f"{where}: known[{number}]"
        _check_sites(known.sites, place)
        _check_dtype(known.dtype, place)
        if not known.max.limits():
            raise ConfigError(
                "a known difference has no upper limit",
                where=f"{place}.max",
                hint=f"set one of {', '.join(LIMITS)}, for example max = {{ rel_l2 = 1e-2 }}",
            )
        if not known.reason.strip():
            raise ConfigError(
                "a known difference has no reason",
                where=f"{place}.reason",
                hint="say why it is accepted, so that the next reader can tell",
            )


def _numbers(policy: Policy) -> Iterator[tuple[str, str, float]]:
    """(key path, name, value) of each number that RANGES bounds."""
    yield "min_coverage", "min_coverage", policy.min_coverage
    tokens = policy.tokens
    for name in ("min_equal", "tie_z"):
        if (value := getattr(tokens, name)) is not None:
            yield f"tokens.{name}", name, value
    if isinstance(tokens.tie_margin, dict):
        for dtype, value in tokens.tie_margin.items():
            yield f"tokens.tie_margin.{dtype}", "tie_margin", value
    elif tokens.tie_margin is not None:
        yield "tokens.tie_margin", "tie_margin", tokens.tie_margin
    for number, tolerance in enumerate(policy.tolerance):
        for name, value in tolerance.limits().items():
            yield f"tolerance[{number}].{name}", name, value
    for number, known in enumerate(policy.known):
        for name, value in known.max.limits().items():
            yield f"known[{number}].max.{name}", name, value


def _check_sites(sites: str | tuple[str, ...], place: str) -> None:
    if not sites or (not isinstance(sites, str) and not all(sites)):
        raise ConfigError("no site is named", where=f"{place}.sites", hint='"*" means all')
    try:
        compile_patterns((sites,) if isinstance(sites, str) else sites)
    except UsageError as error:
        raise ConfigError(error.message, where=f"{place}.sites", hint=error.hint) from error


def _check_dtype(dtype: str | None, place: str) -> None:
    if dtype is not None and dtype not in FORMATS:
        near = near_names(dtype, FORMATS)
        raise ConfigError(
            f"no dtype is called {dtype!r}",
            where=place,
            hint=f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(FORMATS)}",
        )
