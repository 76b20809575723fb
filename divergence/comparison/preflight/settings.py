"""Settings that change what is computed: said first, before what is judged beyond them.

A float16 run against a bfloat16 one is no more than rounding apart, and yet nobody would call the
two alike. So where preflight found such a setting to differ, the summary begins with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from divergence.comparison.result import PreflightLine, Verdict

__all__ = ["COMPUTED_OTHERWISE", "with_settings"]

COMPUTED_OTHERWISE = ("dtype", "quantization", "attention", "batch shape", "engine")
"""Checks of preflight whose difference lets a correct machine compute other numbers."""
_PRECISION = ("dtype", "quantization")
_QUIET = ("within_floor", "undetermined", "drift")
"""Where nothing else is named, every setting is said first; beside a named place, the precision."""
_SILENT = ("incomparable", "identical")


def with_settings(verdict: Verdict, preflight: Sequence[PreflightLine]) -> Verdict:
    """``verdict`` with the settings that differ at the head of its summary."""
    checks = COMPUTED_OTHERWISE if verdict.kind in _QUIET else _PRECISION
    differing = [
        f"{line.check} {line.reference} / {line.candidate}"
        for line in preflight
        if line.check in checks and line.status == "differs"
    ]
    if not differing or verdict.kind in _SILENT:
        return verdict
    verb = "differs" if len(differing) == 1 else "differ"
    return msgspec.structs.replace(
        verdict, summary=f"{', '.join(differing)} {verb}; beyond that, {verdict.summary}"
    )
