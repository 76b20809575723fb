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

    [thresholds]                                  # multiples of the floor, docs/verdicts.md
    typical = 6.0                                 # those that are not given keep their value

All rules must hold. A tolerance tightens: it never excuses a verdict that is not
in ``verdicts``. There is no default tolerance here, since a number without a
source (a dtype, a floor, or the user who writes it down) is a guess.
"""

from __future__ import annotations

import fnmatch
import os
from typing import Annotated

import msgspec

from divergence.compare.result import SiteResult, VerdictKind
from divergence.config import decode, find_config, load_toml
from divergence.errors import ConfigError
from divergence.numerics.floor import THRESHOLDS, Thresholds
from divergence.run.site import compile_patterns

__all__ = [
    "DEFAULT_POLICY",
    "Policy",
    "PreflightPolicy",
    "TokensPolicy",
    "Tolerance",
    "load_policy",
]

DEFAULT_POLICY = "ci"

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Limit = Annotated[float, msgspec.Meta(ge=0.0)]

LIMITS = ("rel_l2", "one_minus_cosine", "max_abs", "ratio", "ratio_max")
"""Numbers of a SiteResult that a tolerance may bound; ``ratio`` is the median token's difference
in floor units, ``ratio_max`` the worst token's."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shared strictness; no fields of its own."""


class Tolerance(_Strict, frozen=True, kw_only=True):
    """Upper limits at the sites that match. ``dtype`` and ``pass`` narrow it further."""

    sites: str | tuple[str, ...] = "*"
    dtype: str | None = None
    pass_: str | None = msgspec.field(name="pass", default=None)
    rel_l2: Limit | None = None
    one_minus_cosine: Limit | None = None
    max_abs: Limit | None = None
    ratio: Limit | None = None
    ratio_max: Limit | None = None

    def matches(self, site: SiteResult) -> bool:
        """Whether this is the tolerance for ``site``; a dtype must be that of both sides."""
        if self.pass_ is not None and self.pass_ != site.pass_:
            return False
        if self.dtype is not None and {site.reference_dtype, site.candidate_dtype} != {self.dtype}:
            return False
        patterns = (self.sites,) if isinstance(self.sites, str) else self.sites
        return compile_patterns(patterns)(site.site)

    def limits(self) -> dict[str, float]:
        """The limits that are set, by the name of the number they bound."""
        set_ = {name: getattr(self, name) for name in LIMITS}
        return {name: value for name, value in set_.items() if value is not None}


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class PreflightPolicy(_Strict, frozen=True, kw_only=True):
    """Names or globs of preflight checks that may differ. Blocking ones never may.

    ``refuse`` is stronger than ``allow``: "everything but these" is allow ``*`` and refuse these.
    """

    allow: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()

    def allows(self, check: str) -> bool:
        return _any(check, self.allow) and not _any(check, self.refuse)


class TokensPolicy(_Strict, frozen=True, kw_only=True):
    """Agreement of generated tokens.

    ``min_equal``: share of 1, or a count if ``min_equal_count`` is used instead.
    ``tie_margin``: in logits, one number or one per dtype of the golden. A flipped token
    is a tie where both sides preferred their own choice by at most this. ``tie_z``: also
    where the gap is at most this many standard deviations of the logits' rounding: of the
    floor that a truth shows, or else of the rounding model of all blocks together.
    """

    min_equal: Share | None = None
    min_equal_count: Annotated[int, msgspec.Meta(ge=0)] | None = None
    tie_margin: Limit | dict[str, Limit] | None = None
    tie_z: Limit | None = None

    def tie_margin_for(self, dtype: str) -> float | None:
        """The margin for a run of this dtype (``torch.bfloat16`` and ``bfloat16`` alike)."""
        if isinstance(self.tie_margin, dict):
            return self.tie_margin.get(dtype.removeprefix("torch."))
        return self.tie_margin


class Policy(_Strict, frozen=True, kw_only=True):
    """What `check` accepts. ``name`` is filled in from where the policy was found."""

    name: str = ""
    description: str = ""
    verdicts: tuple[VerdictKind, ...] = ("identical", "within_floor")
    min_coverage: Share = 1.0
    preflight: PreflightPolicy = PreflightPolicy()
    tokens: TokensPolicy = TokensPolicy()
    tolerance: tuple[Tolerance, ...] = ()
    thresholds: Thresholds = THRESHOLDS

    def tolerance_for(self, site: SiteResult) -> Tolerance | None:
        """The first tolerance that matches, or None."""
        return next((item for item in self.tolerance if item.matches(site)), None)


def load_policy(policy: Policy | str | os.PathLike[str] | None = None) -> Policy:
    """A policy by path or name; ``None`` is configs/ci.toml."""
    if isinstance(policy, Policy):
        return policy
    wanted = DEFAULT_POLICY if policy is None else policy
    path = find_config(wanted, what="policy")
    loaded = decode(load_toml(path), Policy, where=str(path))
    if not loaded.verdicts:
        raise ConfigError("the policy allows no verdict", where=f"{path}: verdicts")
    if "incomparable" in loaded.verdicts:
        raise ConfigError(
            "no policy can accept runs that cannot be compared", where=f"{path}: verdicts"
        )
    for number, tolerance in enumerate(loaded.tolerance):
        place = f"{path}: tolerance[{number}]"
        compile_patterns(
            (tolerance.sites,) if isinstance(tolerance.sites, str) else tolerance.sites
        )
        if not tolerance.limits():
            raise ConfigError(
                "a tolerance sets no limit", where=place, hint=f"set one of {', '.join(LIMITS)}"
            )
    return msgspec.structs.replace(loaded, name=loaded.name or path.stem)
