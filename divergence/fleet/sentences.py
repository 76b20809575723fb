"""The sentences of many runs: who agrees with whom. See divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

_SILENT = "{num_silent:0=|*= ({num_silent} could not tell)}"
_HOW = "{identical:yes=bit for bit|no=as far as rounding goes}"

SENTENCES: Mapping[str, str] = {
    "none_told_apart": "no two runs could be told apart" + _SILENT,
    "all_agree": f"{{num_silent:0=all|*={{total}} of}} {{num_runs}} runs agree {_HOW}{_SILENT}",
    "no_majority": (
        f"no majority among {{total}} runs: {{num:1=no two agree|*=at most {{num}} agree {_HOW}}}"
        + _SILENT
    ),
    "majority": (
        f"{{num}} of {{total}} runs agree {_HOW}; {{odd}} {{num_odd:1=differs|*=differ}} from them"
        + _SILENT
    ),
    "few": "{runs:list  and }",
    "many": "{runs:list}, {num_more} more",
    "only_there": "{name}: {here} (the others: {others})",
}
