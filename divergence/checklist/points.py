"""The eight points to settle before one model's two outputs are compared.

Each is a condition on the settings of both runs, or a question to the comparison that was made.
What a run does not tell is unknown, and never met.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from divergence.checklist.code import precision, weights
from divergence.checklist.pair import (
    CheckedPair,
    both,
    choices_off,
    in_both,
    logits_kept,
    not_recorded,
    worst,
)
from divergence.checklist.result import Point, PointName, PointState
from divergence.facts import Fact, apart, fact, sentence
from divergence.run.manifest import Manifest
from divergence.words import HEADLINES

__all__ = ["points_of"]

Said = tuple[PointState, Sequence[Fact]]


def points_of(pair: CheckedPair) -> list[Point]:
    """All eight, in the order in which they are settled."""
    points: tuple[tuple[PointName, Callable[[CheckedPair], Said]], ...] = (
        ("weights", _weights), ("greedy", _greedy), ("seed", _seed), ("engine", _engine),
        ("deterministic", _deterministic), ("tokens", tokens), ("logprobs", _logprobs),
        ("logprob_diff", _logprob_diff),
    )  # fmt: skip
    settled = []
    for number, (name, ask) in enumerate(points, start=1):
        state, facts = ask(pair)
        title = sentence(fact(f"checklist.point_{name}"))
        settled.append(Point(number=number, name=name, title=title, state=state, facts=list(facts)))
    return settled


def _weights(pair: CheckedPair) -> Said:
    (same, how), (state, details) = precision(pair), weights(pair)
    return worst(same, state), apart([how, *details])


def _say(state: PointState, code: str, **values: Any) -> Said:
    return state, [fact(f"checklist.{code}", **values)]


def _greedy(pair: CheckedPair) -> Said:
    sampled = pair.claims("not_the_largest_logit")
    if sampled:
        return "fail", choices_off(sampled[0])
    if pair.untold:
        return "unknown", [not_recorded(pair.untold, "tokens")]

    def say(manifest: Manifest) -> Fact:
        chooses = any(sample.chosen_ids for sample in manifest.tokens.samples)
        how = "forced" if manifest.tokens.forced_by else "greedy"
        return fact("checklist.choice_of_tokens", how=how if chooses else None)

    return "pass", [both(pair, say)]


def _seed(pair: CheckedPair) -> Said:
    if pair.untold:
        return "unknown", [not_recorded(pair.untold, "seed")]
    seeds = both(pair, lambda side: side.settings.seed)
    seed_a, seed_b = (manifest.settings.seed for manifest in pair.manifests)
    return _say("pass", "seeds", seeds=seeds, same=seed_a == seed_b)


def _engine(pair: CheckedPair) -> Said:
    if pair.untold:
        return "unknown", [not_recorded(pair.untold, "prefixes")]
    a, b = map(_shortcuts, pair.manifests)
    return worst(a[0], b[0]), [in_both(a[1], b[1])]


def _shortcuts(manifest: Manifest) -> tuple[PointState, Fact]:
    """What an engine does besides each forward as it stands."""
    if manifest.engine is None or manifest.engine.name in _PLAIN_ENGINES:
        name = "transformers" if manifest.engine is None else manifest.engine.name
        return "pass", fact("checklist.plain_engine", name=name)
    states: list[PointState] = []
    told: list[Fact] = []
    for word, needed in (("prefix", True), ("specul", True), ("chunk", False)):
        facts = {key: text for key, text in manifest.engine.facts.items() if word in key.lower()}
        if needed and not facts:
            states.append("unknown")
            told.append(fact("checklist.engine_silent", what=word))
        for key, text in facts.items():
            states.append(_switched(text))
            told.append(fact("checklist.engine_fact", key=key, state=text))
    return worst(*states), fact("checklist.engine_facts", name=manifest.engine.name, parts=told)


_PLAIN_ENGINES = ("transformers", "compile", "onnx")
"""Engines that run a model's own forward, once for each step."""
_OFF = ("off", "false", "no", "none", "disabled", "0")
_NOT_TOLD = ("", "-", "unknown", "not told", "not recorded")


def _switched(text: str) -> PointState:
    word = text.strip().lower()
    return "pass" if word in _OFF else "unknown" if word in _NOT_TOLD else "fail"


def _deterministic(pair: CheckedPair) -> Said:
    """Asked for, granted, and as far as it was tried, kept."""
    if pair.untold:
        return "unknown", [not_recorded(pair.untold, "settings")]
    a, b = pair.manifests
    (state, trouble), (other_state, other_trouble) = _trouble(a), _trouble(b)
    text = in_both(trouble, other_trouble, apart=True)
    set_a, set_b = _switches(a), _switches(b)
    other = [name for name, value in set_a.items() if set_b.get(name, value) != value]
    if other and "fail" not in (state, other_state):
        text = fact("checklist.set_otherwise", what=text, names=other)
    return worst(state, other_state, "fail" if other else "pass"), [text]


def _trouble(manifest: Manifest) -> tuple[PointState, Fact]:
    settings, repeated = manifest.settings, manifest.repeatability
    if repeated.num_different:
        return "fail", fact("checklist.repeats_not", site=repeated.first_difference or None)
    repeats = repeated.num_runs > 1
    kept = fact("checklist.determinism", deterministic=settings.deterministic, repeats=repeats)
    if not settings.deterministic:
        return "fail", kept
    refused = [switch.name for switch in settings.switches if switch.status == "refused"]
    noisy = settings.nondeterministic_warnings
    if not (refused or noisy or not settings.switches):
        return "pass", kept
    doubts = [fact("checklist.refused", names=refused)] if refused else []
    doubts += [fact("checklist.nondeterministic", names=noisy)] if noisy else []
    doubts += [] if settings.switches else [fact("checklist.no_switch")]
    if repeats:
        return "pass", kept.with_values(parts=doubts)
    return "unknown", fact("checklist.not_repeated", parts=doubts)


def _switches(manifest: Manifest) -> dict[str, str]:
    """The switches that stand, and to what."""
    return {
        switch.name: switch.found if switch.asked == "-" else switch.asked
        for switch in manifest.settings.switches
        if switch.status in ("accepted", "set")
    }


def tokens(pair: CheckedPair) -> Said:
    """The prompts as token ids; a rung of the ladder asks it too."""
    line, state = pair.lines["prompt ids"], pair.state_of("prompt ids")
    if state == "unknown":
        return "unknown", line.details or [fact("checklist.tokens_not_told")]
    if state == "fail":
        template = None
        if pair.differs("chat template"):
            details = pair.lines["chat template"].details
            template = details or [fact("checklist.another_template")]
        return _say(
            "fail", "prompts_differ", reference=line.reference, candidate=line.candidate,
            details=line.details or None, template=template,
        )  # fmt: skip
    num = sum(len(sample.prompt_ids) for sample in pair.a.manifest.tokens.samples)
    if not num:
        return _say("unknown", "no_prompt_ids")
    other = [check for check in ("tokenizer", "chat template") if pair.differs(check)]
    return _say("pass", "tokens_equal", num=num, other=other)


def _logprobs(pair: CheckedPair) -> Said:
    if all(manifest.plan.logits_site is None for manifest in pair.manifests):
        return _say("unknown", "logits_not_named")
    counts = logits_kept(pair.a), logits_kept(pair.b)
    sides = [
        fact("checklist.logits_kept", kept=kept, seen=seen) if seen else fact("checklist.no_logits")
        for seen, kept in counts
    ]
    met = all(kept for _, kept in counts)
    return "pass" if met else "fail", [in_both(*sides)]


def _logprob_diff(pair: CheckedPair) -> Said:
    if pair.why_unjudged is not None:
        return "unknown", pair.why_unjudged
    assert pair.report is not None
    names = {manifest.plan.logits_site for manifest in pair.manifests}
    rows = [site for site in pair.report.sites if site.site in names and site.pass_ == "free"]
    if not rows:
        return _say("unknown", "logits_not_compared")
    if all(row.identical for row in rows):
        return _say("pass", "logits_equal", num=len(rows))
    changes = [row.logits.chosen_logprob_diff_max for row in rows if row.logits is not None]
    if not changes and any(row.nonfinite for row in rows):
        return _say("fail", "logits_nonfinite")
    if not changes:
        return _say("unknown", "logits_unmeasured", num=len(rows))
    tokens = pair.report.tokens
    if tokens is not None and not tokens.num_tokens:
        tokens = None
    met = not pair.diverged or (pair.sampled and not pair.claims("drift"))
    return _say(
        "pass" if met else "fail", "logprob_changes", nats=max(changes),
        num_equal=tokens and tokens.num_equal, num_tokens=tokens and tokens.num_tokens,
        verdict=None if met or pair.verdict is None else HEADLINES[pair.verdict.kind],
    )  # fmt: skip
