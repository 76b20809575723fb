"""The policy: which differences a team has decided to live with, as a TOML file.

    verdicts = ["identical", "within_floor"]      # any other verdict fails
    min_coverage = 1.0                            # share of the golden's records that were compared

    [preflight]
    allow = ["*"]                                 # checks that may differ, by name or glob
    refuse = ["dtype"]                            # and those that may not

    [tokens]
    min_equal = 1.0                               # share of generated tokens that must agree
    tie_margin = { bfloat16 = 0.125 }             # logits; a flip closer than this is a tie

    [[tolerance]]                                 # the first that matches a site applies
    sites = "model.layers.*:out"
    dtype = "bfloat16"
    rel_l2 = 1e-2

    [[known]]                                     # a difference that is known and lived with
    sites = "model.layers.3*:out"
    max = { rel_l2 = 1e-2 }                       # no more of it than this
    reason = "fused kernel of vendor X, ticket 17"
    until = 2027-01-31                            # from the next day on it excuses nothing

    [thresholds]                                  # multiples of the floor, docs/verdicts.md
    typical = 6.0                                 # those that are not given keep their value

All rules must hold. A tolerance tightens: it never excuses a verdict that is not
in ``verdicts``; a known difference does (gate.known). There is no default tolerance here,
since a number without a source (a dtype, a floor, or the user who writes it down) is a guess.
Every number is held against the bounds in docs/verdicts.md when the file is read
(gate.bounds): one that would excuse everything, or nothing, is refused.
"""

from __future__ import annotations

import datetime
import fnmatch
from typing import Annotated

import msgspec

from divergence.comparison.result import SiteResult, VerdictKind
from divergence.numerics.rounding.floor import THRESHOLDS, Thresholds
from divergence.run.schema.record import PassName
from divergence.run.schema.site import compile_patterns

__all__ = [
    "LIMITS",
    "Known",
    "Policy",
    "PreflightPolicy",
    "TokensPolicy",
    "Tolerance",
]

LIMITS = ("rel_l2", "one_minus_cosine", "max_abs", "ratio", "ratio_max")
"""Numbers of a SiteResult that a tolerance may bound; ``ratio`` is the median token's difference
in floor units, ``ratio_max`` the worst token's."""

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shared strictness; no fields of its own."""


class Tolerance(_Strict, frozen=True, kw_only=True):
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
    rel_l2: float | None = None
    one_minus_cosine: float | None = None
    max_abs: float | None = None
    ratio: float | None = None
    ratio_max: float | None = None

    def matches(self, site: SiteResult) -> bool:
        """Whether this is the tolerance for ``site``; a dtype must be that of both sides."""
        return _is_meant(self, site)

    def names(self, site: SiteResult) -> bool:
        """Whether ``sites`` and ``pass`` mean the site, whatever its dtype."""
        return (self.pass_ is None or self.pass_ == site.pass_) and _named(self.sites, site.site)

    def limits(self) -> dict[str, float]:
        """The limits that are set, by the name of the number they bound."""
        set_ = {name: getattr(self, name) for name in LIMITS}
        return {name: value for name, value in set_.items() if value is not None}


class KnownLimits(_Strict, frozen=True, kw_only=True):
    """How large a known difference may be: the numbers of a tolerance."""

    rel_l2: float | None = None
    one_minus_cosine: float | None = None
    max_abs: float | None = None
    ratio: float | None = None
    ratio_max: float | None = None

    def limits(self) -> dict[str, float]:
        """The limits that are set, by the name of the number they bound."""
        set_ = {name: getattr(self, name) for name in LIMITS}
        return {name: value for name, value in set_.items() if value is not None}


class Known(_Strict, frozen=True, kw_only=True):
    """A difference that a team has decided to live with. gate.known says what it excuses."""

    sites: str | tuple[str, ...]
    max: KnownLimits
    """How large the difference may be; at least one limit."""
    reason: str
    """Why it is accepted."""
    until: datetime.date | None = None
    """The last day on which it excuses anything."""
    dtype: str | None = None
    """Only sites of this dtype on both sides."""
    pass_: PassName | None = msgspec.field(name="pass", default=None)
    """Only this pass."""

    def matches(self, site: SiteResult) -> bool:
        """Whether this entry is about ``site``."""
        return _is_meant(self, site)

    def describe(self) -> str:
        """The sites and limits, for people."""
        sites = self.sites if isinstance(self.sites, str) else ", ".join(self.sites)
        return sites + "".join(
            f", {name} <= {value:g}" for name, value in self.max.limits().items()
        )


def _is_meant(rule: Tolerance | Known, site: SiteResult) -> bool:
    if rule.pass_ is not None and rule.pass_ != site.pass_:
        return False
    if rule.dtype is not None and {site.reference_dtype, site.candidate_dtype} != {rule.dtype}:
        return False
    return _named(rule.sites, site.site)


def _named(sites: str | tuple[str, ...], site: str) -> bool:
    return compile_patterns((sites,) if isinstance(sites, str) else sites)(site)


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class PreflightPolicy(_Strict, frozen=True, kw_only=True):
    """Names or globs of preflight checks that may differ. A blocking check never may."""

    allow: tuple[str, ...] = ()
    """Checks that may differ."""
    refuse: tuple[str, ...] = ()
    """Checks that may not; stronger than ``allow``. "Everything but these" is allow ``*`` and
    refuse these."""

    def allows(self, check: str) -> bool:
        return _any(check, self.allow) and not _any(check, self.refuse)


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

    def tie_margin_for(self, dtype: str) -> float | None:
        """The margin for a run of this dtype (``torch.bfloat16`` and ``bfloat16`` alike)."""
        if isinstance(self.tie_margin, dict):
            return self.tie_margin.get(dtype.removeprefix("torch."))
        return self.tie_margin


class Policy(_Strict, frozen=True, kw_only=True):
    """What `check` accepts."""

    name: str = ""
    """Filled in from where the policy was found."""
    description: str = ""
    verdicts: tuple[VerdictKind, ...] = ("identical", "within_floor")
    """Any other verdict fails."""
    min_coverage: Share = 1.0
    """The least share of the golden's records that must be compared."""
    preflight: PreflightPolicy = PreflightPolicy()
    tokens: TokensPolicy = TokensPolicy()
    tolerance: tuple[Tolerance, ...] = ()
    """The first one that matches a site applies."""
    known: tuple[Known, ...] = ()
    """Differences that are known and lived with."""
    thresholds: Thresholds = THRESHOLDS
    """Multiples of the floor at which a site is flagged."""

    def tolerance_for(self, site: SiteResult) -> Tolerance | None:
        """The first tolerance that matches, or None."""
        return next((item for item in self.tolerance if item.matches(site)), None)
