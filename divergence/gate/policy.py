"""The policy: which differences a team has decided to live with, as a TOML file. configs/ci.toml
is one, with every table.

All rules must hold. A tolerance tightens: it never excuses a verdict that is not in ``verdicts``; a
known difference does (gate.known). There is no default tolerance here, since a number without a
source (a dtype, a floor, or the user who writes it down) is a guess.

A limit of zero floors would flag every healthy pair, one of a billion would excuse every fault, and
nan is above and below nothing: a policy that holds such a number is refused when it is read, with
the file, the key and the range. Where the ranges (``RANGES``, docs/verdicts.md) come from:

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

import datetime
import fnmatch
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

import msgspec

from divergence.comparison.result import SiteResult, VerdictKind
from divergence.config import config_folders, decode, find_config, load_toml
from divergence.domain import added, placed
from divergence.errors import ConfigError, UsageError
from divergence.numerics.floor import THRESHOLDS, Thresholds, check_range, check_thresholds
from divergence.numerics.formats import FORMATS
from divergence.run.record import PassName
from divergence.run.site import compile_patterns, did_you_mean

LIMITS = ("rel_l2", "one_minus_cosine", "max_abs", "ratio", "ratio_max")
"""Numbers of a SiteResult that a tolerance may bound; ``ratio`` is the median token's difference
in floor units, ``ratio_max`` the worst token's."""

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shared strictness; no fields of its own."""


class _AtSites:
    """Says of which records a rule is."""

    __slots__ = ()
    sites: str | tuple[str, ...]
    dtype: str | None
    pass_: PassName | None

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.sites,) if isinstance(self.sites, str) else self.sites

    @property
    def text(self) -> str:
        """The patterns, for people."""
        return ", ".join(self.patterns)

    def matches(self, site: SiteResult) -> bool:
        """Is the rule about ``site``? A dtype must be that of both sides."""
        alike = site.reference_dtype == site.candidate_dtype == self.dtype
        return (self.dtype is None or alike) and self.names(site)

    def names(self, site: SiteResult) -> bool:
        """Do ``sites`` and ``pass`` mean the site, whatever its dtype?"""
        return self.pass_ in (None, site.pass_) and compile_patterns(self.patterns)(site.site)


class SiteLimits(_Strict, frozen=True, kw_only=True):
    """Upper limits of numbers of a SiteResult."""

    rel_l2: float | None = None
    one_minus_cosine: float | None = None
    max_abs: float | None = None
    ratio: float | None = None
    ratio_max: float | None = None

    def limits(self) -> dict[str, float]:
        """The limits that are set, by the name of the number they bound."""
        values = {name: getattr(self, name) for name in LIMITS}
        return {name: value for name, value in values.items() if value is not None}


class Tolerance(SiteLimits, _AtSites, frozen=True, kw_only=True):
    """Upper limits at the sites that match.

    A tolerance that matches no compared site is a failure, since nothing was held against its
    limits.
    """

    sites: str | tuple[str, ...] = "*"
    """Glob, ``re:`` pattern, or several."""
    dtype: str | None = None
    """Only sites of this dtype on both sides."""
    pass_: PassName | None = msgspec.field(name="pass", default=None)
    """Only this pass."""
    optional: bool = False
    """Matching no site is no failure, for a policy that serves several models."""


class Known(_Strict, _AtSites, frozen=True, kw_only=True):
    """A difference that a team has decided to live with. gate.known says what it excuses."""

    sites: str | tuple[str, ...]
    max: SiteLimits
    """How large the difference may be; at least one limit."""
    reason: str
    """Why it is accepted."""
    until: datetime.date | None = None
    """The last day on which it excuses anything."""
    dtype: str | None = None
    """Only sites of this dtype on both sides."""
    pass_: PassName | None = msgspec.field(name="pass", default=None)
    """Only this pass."""


class PreflightPolicy(_Strict, frozen=True, kw_only=True):
    """Names or globs of preflight checks that may differ. A blocking check never may."""

    allow: tuple[str, ...] = ()
    """Checks that may differ."""
    refuse: tuple[str, ...] = ()
    """Checks that may not; stronger than ``allow``. "Everything but these" is allow ``*`` and
    refuse these."""
    code: Literal["fail", "warn", "allow"] = "fail"
    """What other code or constants do that no version, kernel or setting explains: ``warn`` says it
    beside PASSED."""

    def allows(self, check: str) -> bool:
        allowed, refused = (
            any(fnmatch.fnmatchcase(check, pattern) for pattern in patterns)
            for patterns in (self.allow, self.refuse)
        )
        return allowed and not refused


class TokensPolicy(_Strict, frozen=True, kw_only=True):
    """Agreement of generated tokens."""

    min_equal: Share | None = None
    """The least share of tokens that must agree."""
    min_equal_count: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The same as a count, in place of ``min_equal``."""
    tie_margin: float | dict[str, float] | None = None
    """In logits: one number, or one for each dtype of the golden. A flip is a tie where both sides
    preferred their own choice by at most this."""
    tie_z: float | None = None
    """A flip is also a tie where the gap is at most this many standard deviations of the logits'
    rounding: of the floor that a truth shows, or else of the rounding model of all blocks
    together."""


class PartLimits(_Strict, frozen=True, kw_only=True):
    """Limits of the numbers of a part of the report, by name (``ReportPart.numbers``)."""

    max: dict[str, Annotated[float, msgspec.Meta(ge=0.0)]] = {}
    min: dict[str, Annotated[float, msgspec.Meta(ge=0.0)]] = {}


class PolicyTable(_Strict, frozen=True, kw_only=True):
    """A table that a domain reads (Domain.policies), under its name in the file."""

    def check(self, where: str) -> None:
        """Raises ConfigError for a value that cannot decide anything."""


class Policy(_Strict, frozen=True, kw_only=True):
    """Says what `check` accepts. One that was loaded has each domain's tables as fields too."""

    name: str = ""
    """Filled in from where the policy was found."""
    description: str = ""
    verdicts: tuple[VerdictKind, ...] = ("identical", "within_floor")
    """Any other verdict fails."""
    min_coverage: Share = 1.0
    """The least share of the golden's records that must be compared."""
    preflight: PreflightPolicy = PreflightPolicy()
    tokens: TokensPolicy = TokensPolicy()
    parts: dict[str, PartLimits] = {}
    """Of what domains add to the report, by the name of the part, which is a table of the file."""
    tolerance: tuple[Tolerance, ...] = ()
    """The first one that matches a site applies."""
    known: tuple[Known, ...] = ()
    """Differences that are known and lived with."""
    thresholds: Thresholds = THRESHOLDS
    """Multiples of the floor at which a site is flagged."""


GONE = {"lone", "channel_spread", "ratio_forward_spread", "operator_row", "operator_column"}
"""Thresholds of earlier versions, which are taken for nothing, with a warning."""

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
    for name in policy.__struct_fields__:
        if isinstance(table := getattr(policy, name), PolicyTable):
            table.check(f"{where}: {name}")
    for number, tolerance in enumerate(policy.tolerance):
        place = f"{where}: tolerance[{number}]"
        _check_rule(tolerance, place)
        if not tolerance.limits():
            raise ConfigError(
                "a tolerance sets no limit", where=place, hint=f"set one of {', '.join(LIMITS)}"
            )
    if isinstance(policy.tokens.tie_margin, dict):
        for dtype in policy.tokens.tie_margin:
            _check_dtype(dtype, f"{where}: tokens.tie_margin")
    for number, entry in enumerate(policy.known):
        place = f"{where}: known[{number}]"
        _check_rule(entry, place)
        if not entry.max.limits():
            raise ConfigError(
                "a known difference has no upper limit",
                where=f"{place}.max",
                hint=f"set one of {', '.join(LIMITS)}, for example max = {{ rel_l2 = 1e-2 }}",
            )
        if not entry.reason.strip():
            raise ConfigError(
                "a known difference has no reason",
                where=f"{place}.reason",
                hint="say why it is accepted, so that the next reader can tell",
            )


def _numbers(policy: Policy) -> Iterator[tuple[str, str, float]]:
    """(key path, name, value) of each number that RANGES bounds."""
    tokens = policy.tokens
    yield "min_coverage", "min_coverage", policy.min_coverage
    for name in ("min_equal", "tie_z"):
        if (value := getattr(tokens, name)) is not None:
            yield f"tokens.{name}", name, value
    if isinstance(tokens.tie_margin, dict):
        for dtype, value in tokens.tie_margin.items():
            yield f"tokens.tie_margin.{dtype}", "tie_margin", value
    elif tokens.tie_margin is not None:
        yield "tokens.tie_margin", "tie_margin", tokens.tie_margin
    for key, all_limits in (
        ("tolerance[{}]", [tolerance.limits() for tolerance in policy.tolerance]),
        ("known[{}].max", [entry.max.limits() for entry in policy.known]),
    ):
        for number, limits in enumerate(all_limits):
            for name, value in limits.items():
                yield f"{key.format(number)}.{name}", name, value


def _check_rule(rule: _AtSites, place: str) -> None:
    patterns = rule.patterns
    if not patterns or not all(patterns):
        raise ConfigError("no site is named", where=f"{place}.sites", hint='"*" means all')
    try:
        compile_patterns(patterns)
    except UsageError as error:
        raise ConfigError(error.message, where=f"{place}.sites", hint=error.hint) from error
    _check_dtype(rule.dtype, place)


def _check_dtype(dtype: str | None, place: str) -> None:
    if dtype is not None and dtype not in FORMATS:
        raise ConfigError(
            f"no dtype is called {dtype!r}",
            where=place,
            hint=did_you_mean(dtype, FORMATS) or f"one of {', '.join(FORMATS)}",
        )


@functools.cache
def _with_tables(places: tuple[tuple[str, str], ...]) -> type[Policy]:
    """A policy that has these tables of domains."""
    structs = [(name, placed(place)) for name, place in places]
    kind: Any = msgspec.defstruct(
        "Policy",
        [(name, struct, struct()) for name, struct in structs],
        bases=(Policy,),
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )
    return cast(type[Policy], kind)


def load_policy(policy: Policy | str | os.PathLike[str] | None = None) -> Policy:
    """A policy by path or name; ``None`` is configs/ci.toml."""
    if isinstance(policy, Policy):
        check_bounds(policy, where=policy.name or "the policy")
        return policy
    path = find_config("ci" if policy is None else policy, what="policy")
    table = load_toml(path)
    parts = {name: table.pop(name) for name in added("parts") if name in table}
    limits = table.get("thresholds")
    if isinstance(limits, dict) and (gone := sorted(GONE & limits.keys())):
        table["thresholds"] = {name: x for name, x in limits.items() if name not in GONE}
        warnings.warn(
            f"{path}: thresholds.{', thresholds.'.join(gone)}: there is no such limit any more, "
            "one question judges it with all others (docs/verdicts.md); take it out",
            stacklevel=2,
        )
    places = added("policies")
    if table.keys() <= {*Policy.__struct_fields__, *places}:  # else an error lists them all
        places = {name: place for name, place in places.items() if name in table}
    kind = _with_tables(tuple(places.items()))
    if path.parent in config_folders():  # whose domains may not be installed
        table = {name: value for name, value in table.items() if name in kind.__struct_fields__}
    loaded = decode(table | ({"parts": parts} if parts else {}), kind, where=str(path))
    check_bounds(loaded, where=str(path))
    return msgspec.structs.replace(loaded, name=loaded.name or path.stem)
