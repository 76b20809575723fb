"""The smallest size of each fault that is seen: searched by bisection, confirmed by real plants.

The grid of sizes is logarithmic and has eight points to a doubling, so a size is found to 9 %. What
is seen need not grow with the size (rounding of a format, a question that one size answers and a
larger one does not), so twice and four times the found size must be seen as well; where they are
not, the search goes on above them.

A trial changes recorded tensors; a real plant changes the running model. Where the model is at
hand, each fault is captured twice for one block: 1.3 times the found size must be seen there by the
ordinary compare, and 0.7 times must not. Where nothing was planted that capture must repeat the
candidate: on another machine it would confirm what that machine sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from divergence.comparison.result import Report
from divergence.errors import UsageError
from divergence.experiments.localization.repetition import check_substituted, why_not_bits
from divergence.experiments.result import Confirmation, FaultSize
from divergence.experiments.sensitivity.faults import FAULTS, SizedFault
from divergence.experiments.sensitivity.trials import SensitivityTrials, sees
from divergence.facts import Fact, fact, sentence
from divergence.run.reader import Run
from divergence.run.trust import recorded_attention
from divergence.words import Progress

__all__ = ["LOWEST", "confirm_sizes", "search_sizes", "smallest_seen"]

LOWEST = 1e-8
"""The smallest size tried: a tenth of the rounding of float32."""
PER_DOUBLING = 8
_DOUBLINGS_ABOVE = (1, 2)


def smallest_seen(
    seen: Callable[[float], bool], *, high: float, low: float = LOWEST, guess: float | None = None
) -> float | None:
    """The smallest size in [low, high] from which on it is seen, at the found size, twice and
    four times that (as far as they are below ``high``). None where ``high`` itself is not seen.

    ``guess``: where to begin, for example what was found elsewhere; saves trials.
    """
    top = math.ceil(math.log2(high / low) * PER_DOUBLING)
    known: dict[int, bool] = {}

    def size(place: int) -> float:
        return min(low * math.pow(2.0, place / PER_DOUBLING), high)

    def at(place: int) -> bool:
        if place not in known:
            known[place] = seen(size(place))
        return known[place]

    if not at(top):
        return None
    below, above = -1, top  # not seen (nothing is tried there), seen
    if guess is not None:
        below, above = _around(at, round(math.log2(guess / low) * PER_DOUBLING), top)
    while True:
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (below, middle) if at(middle) else (middle, above)
        missed = [
            above + n * PER_DOUBLING
            for n in _DOUBLINGS_ABOVE
            if above + n * PER_DOUBLING <= top and not at(above + n * PER_DOUBLING)
        ]
        if not missed:
            return size(above)
        below, above = max(missed), top


def _around(at: Callable[[int], bool], guess: int, top: int) -> tuple[int, int]:
    """(not seen, seen) near a guess, in strides that double."""
    place, stride = min(max(guess, 0), top), 2
    if at(place):
        while place - stride >= 0 and at(place - stride):
            place, stride = place - stride, 2 * stride
        return max(place - stride, -1), place
    while place + stride < top and not at(place + stride):
        place, stride = place + stride, 2 * stride
    return place, min(place + stride, top)


def search_sizes(
    trials: SensitivityTrials,
    blocks: list[str],
    faults: list[SizedFault],
    progress: Progress | None,
) -> list[FaultSize]:
    """Every fault at every block; a neighbour's size is where the next search begins."""
    sizes: list[FaultSize] = []
    for number, fault in enumerate(faults):
        guesses: dict[bool, float | None] = {}
        for place, block in enumerate(blocks):
            if progress is not None:
                done = number * len(blocks) + place
                progress("plant", done, len(faults) * len(blocks), f"{fault.name} in {block}")
            sizes.append(_search(trials, block, fault, guesses))
    return sizes


def _search(
    trials: SensitivityTrials, block: str, fault: SizedFault, guesses: dict[bool, float | None]
) -> FaultSize:
    reason = trials.unfit(block, fault)
    if reason is not None:
        return FaultSize(block=block, fault=fault.name, size=None, tried=0.0, why=reason)
    num_features = trials.num_features(block)
    by_pass: dict[bool, tuple[float | None, list[Fact]]] = {False: (None, []), True: (None, [])}
    for escalated in (False, True)[: 1 + trials.escalated]:
        why: dict[float, list[Fact]] = {}

        def seen(
            size: float, escalated: bool = escalated, why: dict[float, list[Fact]] = why
        ) -> bool:
            verdict = trials.judge(block, fault, size, escalated=escalated)
            here = sees(verdict, block)
            seen_as = fact("experiments.verdict", kind=verdict.kind, what=verdict.headline)
            why[size] = verdict.evidence[:1] if here else [seen_as]
            return here

        size = smallest_seen(
            seen,
            high=fault.high,
            low=1 / num_features if fault.in_features else LOWEST,
            guess=guesses.get(escalated),
        )
        if size is None:
            by_pass[escalated] = None, why[fault.high]
            continue
        guesses[escalated] = size
        by_pass[escalated] = fault.rounded(size, num_features), why[size]
    return FaultSize(
        block=block,
        fault=fault.name,
        size=by_pass[False][0],
        tried=fault.high,
        evidence=by_pass[False][1],
        escalated_size=by_pass[True][0],
        escalated_evidence=by_pass[True][1],
    )


_AROUND = ((1.3, True), (0.7, False))


def confirm_sizes(
    a: Run,
    b: Run,
    trials: SensitivityTrials,
    sizes: Sequence[FaultSize],
    *,
    block: str,
    capturing: Callable[..., Run],
    comparing: Callable[..., Report],
) -> list[Confirmation]:
    """Two captures a fault that has a plant and was seen at ``block``, with the candidate's dtype
    and attention; faults that come in whole features are left out. ``capturing`` repeats ``a``
    with other options, ``comparing`` judges as the trials did."""
    confirmations: list[Confirmation] = []
    own = b.manifest.model
    for entry in sizes:
        fault = FAULTS[entry.fault]
        if entry.block != block or entry.size is None or fault.spelled is None or fault.in_features:
            continue
        for factor, expected in _AROUND:
            size = entry.size * factor
            spelled = fault.spelled(size, trials.channel(block), trials.num_features(block))
            plant = f"{block}:out={spelled}"
            faulty = capturing(
                dtype=None if own.dtype == a.manifest.model.dtype else own.dtype,
                attn_implementation=recorded_attention(b.manifest),
                plants=[plant],
            )
            try:
                _check(faulty, b, block)
                report = comparing(a, faulty)
            finally:
                faulty.close()
            verdict = report.verdict
            confirmations.append(
                Confirmation(
                    block=block,
                    fault=fault.name,
                    plant=plant,
                    size=size,
                    expected=expected,
                    seen=sees(verdict, block),
                    verdict=verdict.kind,
                    summary=verdict.summary,
                )
            )
    return confirmations


def _check(faulty: Run, b: Run, block: str) -> None:
    """Raises UsageError where this machine does not repeat ``b`` at what the plant leaves alone."""
    name = sentence(fact("experiments.planted_run"))
    repetition = check_substituted(faulty, b, site=f"{block}:out", block=block, name=name)
    if repetition.how == "differs" and why_not_bits(b.manifest, faulty.manifest) is None:
        raise UsageError(
            f"this is not the machine of {b.path}: {repetition.site} differs where nothing was "
            "planted, so a plant here confirms nothing",
            where=f"{repetition.num_different} of {repetition.num_compared} shared tensors differ",
            hint="run it on that machine, or without --candidate, or without --confirm",
        )
