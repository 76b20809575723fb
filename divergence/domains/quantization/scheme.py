"""Schemes by name: what of a model is quantised, and how.

    w8a8            int8 weights per channel, int8 activations per token (scales made as it runs)
    w8a8-static     the activations per tensor, with scales from calibration
    w8a16, w4a16    weights alone: int8 per channel, int4 per group of 128 (w4a16-g32: of 32)
    w4a8            int4 weights per group, int8 activations per token
    fp8             e4m3 weights per channel, e4m3 activations per token
    fp8-static      the activations per tensor, with scales from calibration
    kv8             keys and values in the cache int8, per token and head
    w8a8+kv8        both

A weight W (N, K) has output channels N; activations (..., K) have a token in each row.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from divergence.domains.quantization.coding import Quantizer
from divergence.errors import UsageError
from divergence.facts import fact, sentence
from divergence.run.site import did_you_mean

_CHANNEL, _TOKEN = Quantizer(per="channel"), Quantizer(per="token")
_TENSOR = Quantizer(per="tensor")
_INT4 = Quantizer(format="int4", per="group", group=128)
_E4M3: Literal["float8_e4m3fn"] = "float8_e4m3fn"


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """Says what is quantised, and how. None is left in floating point."""

    name: str
    weights: Quantizer | None = None
    activations: Quantizer | None = None
    static: bool = False
    """Scales of activations are known before it runs, from calibration."""
    kv: Quantizer | None = None
    """Keys and values in the cache."""
    smooth: float | None = None
    """Strength α of SmoothQuant's migration; None: none."""

    def __str__(self) -> str:
        when = "static" if self.static else "dynamic"
        parts = []
        every = {"weights": self.weights, "activations": self.activations, "cache": self.kv}
        for what, how in every.items():
            if how is not None:
                kind = "" if how.symmetric else "asymmetric "
                name = kind + ("e4m3" if how.is_float else how.format)
                per = f"group of {how.group}" if how.per == "group" else how.per
                words = {"format": name, "per": per, "when": when}
                parts.append(sentence(fact(f"quantization.{what}", **words)))
        if self.smooth is not None:
            parts.append(sentence(fact("quantization.migrated", alpha=self.smooth)))
        return ", ".join(parts)


SCHEMES = {
    "w8a8": Scheme(name="w8a8", weights=_CHANNEL, activations=_TOKEN),
    "w8a8-static": Scheme(name="w8a8-static", weights=_CHANNEL, activations=_TENSOR, static=True),
    "w8a16": Scheme(name="w8a16", weights=_CHANNEL),
    "w4a16": Scheme(name="w4a16", weights=_INT4),
    "w4a8": Scheme(name="w4a8", weights=_INT4, activations=_TOKEN),
    "fp8": Scheme(
        name="fp8",
        weights=Quantizer(format=_E4M3, per="channel"),
        activations=Quantizer(format=_E4M3, per="token"),
    ),
    "fp8-static": Scheme(
        name="fp8-static",
        static=True,
        weights=Quantizer(format=_E4M3, per="channel"),
        activations=Quantizer(format=_E4M3, per="tensor"),
    ),
    "kv8": Scheme(name="kv8", kv=_TOKEN),
}
_SAME = {"w8a8-dynamic": "w8a8", "fp8-dynamic": "fp8", "int8": "w8a8", "w4a16-g128": "w4a16"}
_GROUPED = re.compile(r"^(w4a16|w4a8)-g(\d+)$")


def scheme_named(
    text: str,
    *,
    smooth: float | None = None,
    asymmetric: str = "",
    weights_per: str = "",
    activations_per: str = "",
) -> Scheme:
    """The scheme. ``text``: a name, or several joined by ``+``.

    ``asymmetric``: ``weights``, ``activations`` or ``both``; ``weights_per``, ``activations_per``:
    ``tensor``, ``channel`` or ``token``, ``group:N``. Empty: as the name says.

    Raises UsageError for a name that there is none of (with near ones), and for an option that the
    scheme cannot have.
    """
    names = [_SAME.get(part, part) for part in text.strip().lower().split("+")]
    scheme = _named(names[0])
    for name in names[1:]:
        scheme = _joined(scheme, _named(name))
    zeros = ("weights", "activations") if asymmetric == "both" else (asymmetric,)
    weights = _changed(scheme.weights, "weights", weights_per, zeros)
    activations = _changed(scheme.activations, "activations", activations_per, zeros)
    if asymmetric not in ("", "weights", "activations", "both"):
        raise UsageError(
            f"asymmetric {asymmetric!r}: what gets a zero point?", hint="weights, activations, both"
        )
    if scheme.static and activations is not None and activations.per != "tensor":
        raise UsageError(
            f"{scheme.name}: scales known beforehand are per tensor, not per {activations.per}",
            hint="a dynamic scheme, such as w8a8",
        )
    if smooth is not None and (weights is None or activations is None):
        raise UsageError(
            f"{scheme.name} quantises no activations, so there is nothing to migrate",
            hint="--smooth is for w8a8, w8a8-static, fp8 and w4a8",
        )
    if smooth is not None and not 0 <= smooth <= 1:
        raise UsageError(f"alpha is from 0 to 1, not {smooth:g}", hint="--smooth 0.5")
    return msgspec.structs.replace(
        scheme, name="+".join(names), weights=weights, activations=activations, smooth=smooth
    )


def _named(name: str) -> Scheme:
    if name in SCHEMES:
        return SCHEMES[name]
    match = _GROUPED.match(name)
    if match and int(match[2]) > 0:
        base = SCHEMES[match[1]]
        group = Quantizer(format="int4", per="group", group=int(match[2]))
        return msgspec.structs.replace(base, name=name, weights=group)
    near = did_you_mean(name, [*SCHEMES, *_SAME], count=2)
    raise UsageError(f"there is no scheme {name!r}", hint=near or f"one of {', '.join(SCHEMES)}")


def _joined(first: Scheme, second: Scheme) -> Scheme:
    for field in ("weights", "activations", "kv"):
        if getattr(first, field) is not None and getattr(second, field) is not None:
            raise UsageError(
                f"{first.name}+{second.name}: both say how {field} are quantised",
                hint="w8a8+kv8, for example",
            )
    return Scheme(
        name=first.name,
        weights=first.weights or second.weights,
        kv=first.kv or second.kv,
        activations=first.activations or second.activations,
        static=first.static or second.static,
    )


def _changed(
    quantizer: Quantizer | None, what: str, per: str, zeros: tuple[str, ...]
) -> Quantizer | None:
    """``zeros``: what gets a zero point."""
    if quantizer is None:
        if per or what in zeros:
            raise UsageError(f"the scheme leaves the {what} in floating point")
        return None
    changes: dict[str, object] = {}
    if per:
        word, _, size = per.partition(":")
        rows = "channel" if what == "weights" else "token"
        if word not in ("tensor", rows, "group") or (word == "group") != size.isdecimal():
            raise UsageError(
                f"{what} per {per!r}", hint=f"tensor, {rows}, or group:N such as group:128"
            )
        if word == "group" and not int(size):
            raise UsageError(f"{what} per {per!r}: a group has at least one number")
        changes |= {"per": word, "group": int(size) if size else None}
    if what in zeros:
        if quantizer.is_float:
            raise UsageError(f"8-bit floats have no zero point ({what})")
        changes["symmetric"] = False
    return msgspec.structs.replace(quantizer, **changes)
