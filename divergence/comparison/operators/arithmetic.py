"""From the operator that is to blame to the arithmetic that it stands on.

The probes looked at operators of their own, at shapes of their own. A fact is shown beside an
operator where it is about the same operation in the same dtype: as an explanation where the sides
differ, and where all that was verified is equal, as a reason to look elsewhere than at the
hardware.
"""

from __future__ import annotations

import msgspec

from divergence.comparison.arithmetic.facts import Explained, sentences
from divergence.comparison.operators.result import OperatorsResult
from divergence.comparison.result import Evidence, Verdict
from divergence.run.schema.arithmetic import ArithmeticFact, is_about

__all__ = ["with_arithmetic"]

_MOST = 3


def with_arithmetic(
    verdict: Verdict, operators: OperatorsResult | None, found: Explained
) -> Verdict:
    """The verdict with what the arithmetic says of the operator at the onset, behind the first
    piece of evidence; unchanged where no operator is to blame or nothing was probed."""
    if operators is None or operators.onset is None:
        return verdict
    first = next((r for r in operators.results if r.site == operators.onset), None)
    if first is None:
        return verdict
    dtypes = {first.reference_dtype, first.candidate_dtype}

    def about(fact: ArithmeticFact) -> bool:
        return is_about(fact, first.operator, dtypes)

    differ = [pair for pair in found.differing if about(pair[0])]
    same = [fact for fact in found.equal if about(fact)]
    name = f"{first.operator} in {' and '.join(sorted(dtypes))}"
    if differ:
        said = sentences(differ, found)[:_MOST]
        evidence = [
            Evidence(text=f"arithmetic behind {name}: {item.text}", values=item.values)
            for item in said
        ]
        known = {item.text for item in said}
    elif same:
        probes = ", ".join(dict.fromkeys(fact.probe for fact in same))
        evidence = [
            Evidence(
                text=f"what was probed behind {name} is the same on both sides ({probes}): look at "
                "software and data first"
            )
        ]
        known = set()
    else:
        return verdict
    rest = [item for item in verdict.evidence[1:] if item.text not in known]
    return msgspec.structs.replace(verdict, evidence=[*verdict.evidence[:1], *evidence, *rest])
