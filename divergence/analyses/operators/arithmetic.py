"""From the operator that is to blame to the arithmetic that it stands on.

The probes looked at operators of their own, at shapes of their own. A fact is shown beside an
operator where it is about the same operation in the same dtype: as an explanation where the sides
differ, and where all that was verified is equal, as a reason to look elsewhere than at the
hardware.
"""

from __future__ import annotations

from divergence.comparison.facts import Explained, sentences
from divergence.comparison.results.findings import Evidence
from divergence.comparison.results.operators import OperatorResult
from divergence.run.schema.arithmetic import ArithmeticFact, is_about

__all__ = ["behind_operator"]

_MOST = 3


def behind_operator(first: OperatorResult, found: Explained) -> list[Evidence]:
    """What the arithmetic says of the operator at the onset; nothing where nothing was probed."""
    dtypes = {first.reference_dtype, first.candidate_dtype}

    def about(fact: ArithmeticFact) -> bool:
        return is_about(fact, first.operator, dtypes)

    differ = [pair for pair in found.differing if about(pair[0])]
    same = [fact for fact in found.equal if about(fact)]
    name = f"{first.operator} in {' and '.join(sorted(dtypes))}"
    if differ:
        return [
            Evidence(text=f"arithmetic behind {name}: {item.text}", values=item.values)
            for item in sentences(differ, found)[:_MOST]
        ]
    if not same:
        return []
    probes = ", ".join(dict.fromkeys(fact.probe for fact in same))
    return [
        Evidence(
            text=f"what was probed behind {name} is the same on both sides ({probes}): look at "
            "software and data first"
        )
    ]
