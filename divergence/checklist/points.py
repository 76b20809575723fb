"""The eight points to settle before one model's two outputs are compared.

Each is a condition on the settings of both runs, or a question to the comparison that was made.
What a run does not tell is unknown, and never met.
"""

from __future__ import annotations

from collections.abc import Callable

from divergence.checklist.code import precision, weights
from divergence.checklist.pair import CheckedPair, both, in_both, logits_held, sampling_text, worst
from divergence.checklist.result import Point, PointName, PointState
from divergence.run.schema.manifest import Manifest
from divergence.words import HEADLINES, list_names, printable

__all__ = ["points_of"]

Said = tuple[PointState, str]


def points_of(pair: CheckedPair) -> list[Point]:
    """All eight, in the order in which they are settled."""
    points: tuple[tuple[PointName, str, Callable[[CheckedPair], Said]], ...] = (
        ("weights", "weights, precision", _weights),
        ("greedy", "greedy decoding", _greedy),
        ("seed", "seed", _seed),
        ("engine", "prefix cache etc. off", _engine),
        ("deterministic", "deterministic", _deterministic),
        ("tokens", "rendered tokens", tokens),
        ("logprobs", "log-probs recorded", _logprobs),
        ("logprob_diff", "log-probs agree", _logprob_diff),
    )
    settled = []
    for number, (name, title, ask) in enumerate(points, start=1):
        state, evidence = ask(pair)
        settled.append(
            Point(number=number, name=name, title=title, state=state, evidence=printable(evidence))
        )
    return settled


def _weights(pair: CheckedPair) -> Said:
    asked = precision(pair), weights(pair)
    return worst(*(state for state, _ in asked)), "; ".join(text for _, text in asked)


def _greedy(pair: CheckedPair) -> Said:
    sampled = pair.claims("not_the_largest_logit")
    if sampled:
        return "fail", sampling_text(sampled[0])
    if pair.untold:
        return "unknown", _untold(pair, "how tokens were chosen is")

    def say(manifest: Manifest) -> str:
        if not any(sample.chosen_ids for sample in manifest.tokens.samples):
            return "chooses no token"
        return "tokens forced" if manifest.tokens.forced_by else "greedy"

    return "pass", both(pair, say)


def _seed(pair: CheckedPair) -> Said:
    if pair.untold:
        return "unknown", _untold(pair, "a seed is")
    text = both(pair, lambda side: str(side.settings.seed))
    seed_a, seed_b = (manifest.settings.seed for manifest in pair.manifests)
    return "pass", text if seed_a == seed_b else f"{text}; decoding is greedy and draws nothing"


def _engine(pair: CheckedPair) -> Said:
    if pair.untold:
        return "unknown", _untold(pair, "whether an engine cached prefixes is")
    a, b = map(_shortcuts, pair.manifests)
    return worst(a[0], b[0]), in_both(a[1], b[1])


def _shortcuts(manifest: Manifest) -> Said:
    """What an engine does besides each forward as it stands."""
    if manifest.engine is None or manifest.engine.name in _PLAIN_ENGINES:
        name = "transformers" if manifest.engine is None else manifest.engine.name
        return "pass", f"{name}, which does neither"
    states: list[PointState] = []
    texts = []
    for word, needed in (("prefix", True), ("specul", True), ("chunk", False)):
        facts = {key: text for key, text in manifest.engine.facts.items() if word in key.lower()}
        if needed and not facts:
            states.append("unknown")
            texts.append({"prefix": "prefix caching", "specul": "speculation"}[word] + " not told")
        for key, text in facts.items():
            states.append(_switched(text))
            texts.append(f"{key} {text}")
    return worst(*states), f"{manifest.engine.name}: {', '.join(texts)}"


_PLAIN_ENGINES = ("transformers", "compile", "onnx")
"""Engines that run a model's own forward, once for each step."""
_OFF = ("off", "false", "no", "none", "disabled", "0")
_NOT_TOLD = ("", "-", "unknown", "not told", "not recorded")


def _switched(text: str) -> PointState:
    word = text.strip().lower()
    return "pass" if word in _OFF else "unknown" if word in _NOT_TOLD else "fail"


def _untold(pair: CheckedPair, what: str) -> str:
    return f"{' and '.join(pair.untold)}: {what} not recorded"


def _deterministic(pair: CheckedPair) -> Said:
    """Asked for, granted, and as far as it was tried, kept."""
    if pair.untold:
        return "unknown", _untold(pair, "settings are")
    a, b = pair.manifests
    (state, trouble), (other_state, other_trouble) = _trouble(a), _trouble(b)
    text = in_both(trouble, other_trouble, between="; ")
    set_a, set_b = _switches(a), _switches(b)
    other = [name for name, value in set_a.items() if set_b.get(name, value) != value]
    if other and "fail" not in (state, other_state):
        text += f"; set otherwise: {list_names(other, 3)}"
    return worst(state, other_state, "fail" if other else "pass"), text


def _trouble(manifest: Manifest) -> Said:
    settings, repeated = manifest.settings, manifest.repeatability
    if repeated.num_different:
        where = repeated.first_difference or "an unnamed tensor"
        return "fail", f"does not repeat itself, first at {where}"
    repeats = ", repeats itself bit for bit" if repeated.num_runs > 1 else ""
    if not settings.deterministic:
        return "fail", f"not deterministic{repeats}"
    refused = [switch.name for switch in settings.switches if switch.status == "refused"]
    noisy = settings.nondeterministic_warnings
    if not (refused or noisy or not settings.switches):
        return "pass", f"deterministic{repeats}"
    parts = [f"refused {list_names(refused, 2)}"] if refused else []
    parts += [f"nondeterministic {list_names(noisy, 2)}"] if noisy else []
    parts += [] if settings.switches else ["no switch is recorded"]
    if repeats:
        return "pass", f"deterministic ({'; '.join(parts)}){repeats}"
    return "unknown", f"{'; '.join(parts)}, and not captured with --repeat"


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
        return "unknown", line.detail or "a run does not tell the tokens it was fed"
    if state == "fail":
        template = pair.lines["chat template"]
        parts = [f"A: {line.reference}, B: {line.candidate}", line.detail or "other ids"]
        if pair.differs("chat template"):
            parts.append("chat template: " + (template.detail or "another one"))
        return "fail", "; ".join(parts)
    count = sum(len(sample.prompt_ids) for sample in pair.a.manifest.tokens.samples)
    if not count:
        return "unknown", "neither run records the ids of a prompt"
    text = f"{count:,} of {count:,} prompt tokens are equal"
    other = [check for check in ("tokenizer", "chat template") if pair.differs(check)]
    return "pass", f"{text}, though by another {' and '.join(other)}" if other else text


def _logprobs(pair: CheckedPair) -> Said:
    if all(manifest.plan.logits_site is None for manifest in pair.manifests):
        return "unknown", "neither run says which of its tensors are logits"
    held = logits_held(pair.a), logits_held(pair.b)

    def say(seen: int, kept: int) -> str:
        if not seen:
            return "no logits"
        return f"logits of {kept} of {seen} forwards" + ("" if kept else " (no values kept)")

    met = all(kept for _, kept in held)
    return "pass" if met else "fail", in_both(*(say(*counts) for counts in held))


def _logprob_diff(pair: CheckedPair) -> Said:
    if pair.why_unjudged is not None:
        return "unknown", pair.why_unjudged
    assert pair.report is not None
    names = {manifest.plan.logits_site for manifest in pair.manifests}
    rows = [site for site in pair.report.sites if site.site in names and site.pass_ == "free"]
    if not rows:
        return "unknown", "the logits of both sides were not compared"
    if all(row.identical for row in rows):
        return "pass", f"the logits of {len(rows)} forwards are equal bit for bit"
    changes = [row.logits.chosen_logprob_diff_max for row in rows if row.logits is not None]
    if not changes and any(row.nonfinite for row in rows):
        return "fail", "the logits hold nan or inf"
    if not changes:
        return "unknown", f"the logits of {len(rows)} forwards differ, by how much is not known"
    tokens = pair.report.tokens
    parts = [f"the likeliest token's changes by up to {max(changes):.1e} nats"]
    if tokens is not None and tokens.num_tokens:
        parts.append(f"{tokens.num_equal} of {tokens.num_tokens} chosen tokens are equal")
    if not pair.diverged or (pair.sampled and not pair.claims("drift")):
        return "pass", "; ".join([*parts, "no more than rounding explains"])
    assert pair.verdict is not None
    return "fail", "; ".join([*parts, f"compare says {HEADLINES[pair.verdict.kind]}"])
