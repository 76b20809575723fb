"""doctor(): two runs → a Checkup: eight points to settle, and a ladder of causes.

Nothing is measured here that `compare` does not measure. It is asked first, and its verdict stands;
where it stops early, at other tokens or other weights, the checklist tells what to settle.

The rungs are tokens, weights, code, prefill, decode, sampling, ranks. Each may explain all those
below it, so the ladder stops at the first that does. What it says of numbers is what compare says:
where that abstains the rung is unknown, for compare's own reason. A rung that differs without
explaining what was found fails too, and the ladder goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from divergence._version import __version__
from divergence.comparison.advice import advise
from divergence.comparison.align import load_name_map, opened
from divergence.comparison.api import compare
from divergence.comparison.decide import tells
from divergence.comparison.preflight import (
    CPU_OPERATORS,
    CodeDifference,
    code_differences,
    preflight,
)
from divergence.comparison.result import (
    Finding,
    PreflightLine,
    Report,
    Verdict,
    summary_of,
)
from divergence.domain import added
from divergence.domains.doctor.result import (
    Checkup,
    Point,
    PointName,
    PointState,
    Rung,
    RungName,
)
from divergence.errors import IncomparableError, UsageError
from divergence.facts import Fact, fact, has, in_one, plain, sentence, worded
from divergence.run.command import command_line
from divergence.run.contents import records_at
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.site import ROOT, module_of, starred
from divergence.words import HEADLINES, Progress, printable

# Two runs as the checklist sees them: manifests, the lines of preflight, and what compare says.

_STATES: dict[str, PointState] = {"same": "pass", "differs": "fail", "blocking": "fail"}
_DIVERGED = ("localized", "systematic", "nonfinite", "drift")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPair:
    """``report``: compare's, or None where it had nothing to compare, for ``reason``."""

    a: Run
    b: Run
    lines: Mapping[str, PreflightLine]
    report: Report | None
    reason: str = ""

    @property
    def manifests(self) -> tuple[Manifest, Manifest]:
        return self.a.manifest, self.b.manifest

    @property
    def verdict(self) -> Verdict | None:
        return None if self.report is None else self.report.verdict

    @property
    def why_unjudged(self) -> list[Fact] | None:
        """Say why compare says nothing of the numbers; None where it does."""
        if self.report is None:
            return [plain(self.reason)]
        verdict = self.report.verdict
        if verdict.kind not in ("incomparable", "undetermined"):
            return None
        behind = verdict.headline[0]["beyond"] if verdict.headline else False
        return verdict.headline[1 if behind else 0 :]

    @property
    def diverged(self) -> bool:
        """Does compare find more than rounding explains?"""
        return self.verdict is not None and self.verdict.kind in _DIVERGED

    def state_of(self, check: str) -> PointState:
        """Return what a line of preflight says; one that is not there, since neither run has
        anything to say of it, is the same."""
        status: str = self.lines[check].status if check in self.lines else "same"
        return _STATES.get(status, "unknown")

    def differs(self, check: str) -> bool:
        """Does this line of preflight differ?"""
        return self.state_of(check) == "fail"

    @property
    def untold(self) -> list[str]:
        """The runs that say nothing of how they were made: no engine, and no weights."""
        return [
            name
            for name, manifest in zip("AB", self.manifests, strict=True)
            if manifest.engine is None and not manifest.model.digest
        ]

    @property
    def convicting(self) -> list[Finding]:
        """Return what the analyses claim that can be a verdict, or a part of one."""
        findings = [] if self.report is None else self.report.findings
        return [finding for finding in findings if finding.role in ("convicts", "refines")]

    def claims(self, claim: str) -> list[Finding]:
        """Those of one kind."""
        return [finding for finding in self.convicting if finding.claim == claim]

    @property
    def sampled(self) -> bool:
        """Is the verdict about a token that its own logits do not decide?"""
        return any(map(self.is_verdict, self.claims("not_the_largest_logit")))

    def is_verdict(self, finding: Finding) -> bool:
        """Is it what the verdict says?"""
        verdict = self.verdict
        return verdict is not None and verdict.onset == finding.onset and tells(verdict, finding)


def worst(*states: PointState) -> PointState:
    """Return the worst of several conditions together."""
    return "fail" if "fail" in states else "unknown" if "unknown" in states else "pass"


def both(pair: CheckedPair, say: Callable[[Manifest], Any]) -> Fact:
    """``both: bfloat16``, or ``A: bfloat16, B: float16``."""
    return in_both(*map(say, pair.manifests))


def in_both(reference: Any, candidate: Any, *, apart: bool = False) -> Fact:
    """The same of two values, with a semicolon between those that stand ``apart``."""
    if reference == candidate:
        return fact("checklist.both", what=reference)
    return fact("checklist.each", reference=reference, candidate=candidate, apart=apart)


def differs(line: PreflightLine) -> Fact:
    """``attention eager / sdpa``, with what is known of it."""
    return fact(
        "checklist.line_differs",
        check=line.check,
        reference=line.reference,
        candidate=line.candidate,
        details=line.details,
    )


def choices_off(finding: Finding) -> list[Fact]:
    """Say which tokens are not the largest of their own logits."""
    return [Fact(code="checklist.choices_off", values=finding.evidence[0].values)]


def logits_kept(run: Run) -> tuple[int, int]:
    """(forwards of which the logits were recorded, those of them whose values were kept)."""
    site = run.manifest.plan.logits_site
    records = [] if site is None else records_at(run.records, [site])
    free = [record for record in records if record.pass_ == "free"]
    return len(free), sum(run.has_bytes(record) for record in free)


# The rungs that rest on numbers: prefill, decode, sampling, ranks. All of it is compare's.
#
# A rung explains what is below it only where it is the verdict itself. What stands beside the
# verdict (another fault, in the other phase) fails without explaining.

Said = tuple[PointState, Sequence[Fact], bool]
"""Of a point or a rung: (state, evidence, does it explain the rungs below)."""

_SAMPLED = "not_the_largest_logit"
_OTHER_RUNGS = (_SAMPLED, "replicas_disagree")
"""Claims of more than rounding that other rungs tell of."""


def phase(pair: CheckedPair, *, decode: bool) -> Said:
    """The first forward of each prompt, or those of one token each."""
    if pair.why_unjudged is not None:
        return "unknown", pair.why_unjudged, False
    assert pair.report is not None
    verdict = pair.report.verdict
    sites = [site for site in pair.report.sites if (site.step > 0) == decode]
    if pair.diverged:
        facts = _told_by_ranks(pair)
        made = [
            finding
            for finding in pair.convicting
            if finding.claim not in _OTHER_RUNGS
            and (finding.role == "refines" or finding.kind in _DIVERGED)
            and (at := finding.step if finding.onset is None else finding.onset.step) is not None
            and (at > 0) == decode
        ]
        # the forward that the verdict names, if it names one; sampling is in none
        drifts = [claim.step for claim in pair.claims("drift") if tells(verdict, claim)]
        step = drifts[0] if drifts else None
        if pair.sampled:
            step = None
        elif verdict.onset is not None:
            step = verdict.onset.step
        if step is not None and (step > 0) == decode and (made or facts is None):
            return "fail", verdict.headline, facts is None
        # sites that are flagged since ranks disagree there
        shown = {key for claim in pair.claims("replicas_disagree") for key in claim.flags}
        beyond = [site for site in sites if site.flagged and site.key not in shown]
        if made or beyond:
            if made:
                return "fail", made[0].headline, False
            return _said("fail", "beyond_too", site=beyond[0].site)
        if verdict.kind == "drift" and step is None:
            return _said("unknown", "forward_not_told", what=verdict.headline)
        if verdict.kind == "nonfinite" and not all(site.identical for site in sites):
            return _said("unknown", "beside_nonfinite")
    if not sites:
        return _said("unknown", "nothing_of_phase", decode=decode)
    if unmeasured := [site for site in sites if site.is_unmeasured]:
        return _said("unknown", "phase_unmeasured", num=len(unmeasured), total=len(sites))
    # what was compared, where none of it is beyond rounding
    num_equal = sum(site.identical for site in sites)
    if num_equal == len(sites):
        return _said("pass", "all_equal", num=num_equal)
    judged = [site for site in sites if site.limit_usage is not None]
    free = all(site.pass_ == "free" for site in judged)
    site, usage = None, None
    if not free:
        most = max(judged, key=lambda site: site.limit_usage or 0.0)
        if (most.limit_usage or 0.0) <= 1:
            site, usage = most.site, 100 * (most.limit_usage or 0.0)
    figures = {"total": len(sites), "num_equal": num_equal, "site": site, "usage": usage}
    return _said("pass", "within", **figures, free=free)


def _said(state: PointState, code: str, **values: Any) -> Said:
    """One fact, which explains nothing below."""
    return state, [fact(f"checklist.{code}", **values)], False


def sampling(pair: CheckedPair) -> Said:
    """Does each token follow from its own logits?"""
    if pair.why_unjudged is not None:
        return "unknown", pair.why_unjudged, False
    assert pair.report is not None
    if sampled := pair.claims(_SAMPLED):
        return "fail", choices_off(sampled[0]), pair.is_verdict(sampled[0])
    tokens = pair.report.tokens
    if tokens is None or not tokens.num_tokens:
        if pair.report.reference.generates or pair.report.candidate.generates:
            return _said("unknown", "no_common_token")
        return _said("pass", "chooses_none")
    flips = tokens.differences
    made = {"forced": tokens.forced, "num_tokens": tokens.num_tokens}
    if not flips:
        equal = {"num_equal": tokens.num_equal, "num_missing": tokens.num_missing}
        return _said("pass", "choices_equal", **made, **equal)
    first = flips[0]
    kept = not any(None in (flip.margin, flip.candidate_margin) for flip in flips)
    place = {"sample": first.sample, "step": first.step, "judgement": first.judgement}
    state: PointState = "pass" if kept else "unknown"
    return _said(state, "choices_differ", num=len(flips), kept=kept, **made, **place)


def ranks(pair: CheckedPair) -> Said:
    """Do the processes of a run agree on what several of them hold?"""
    processes = both(pair, lambda manifest: manifest.processes)
    if pair.untold:
        return _said("unknown", "not_recorded", sides=pair.untold, what="processes")
    if all(manifest.mesh is None for manifest in pair.manifests):
        return _said("pass", "processes", processes=processes, copies=None)
    if pair.why_unjudged is not None:
        return "unknown", pair.why_unjudged, False
    assert pair.report is not None
    if (facts := _told_by_ranks(pair)) is not None:
        return "fail", facts.evidence[:1], True
    if apart := pair.claims("replicas_disagree"):
        return "fail", apart[0].evidence[:1], False
    replicas = pair.report.replicas
    num_held = sum(replica.num_tensors for replica in replicas)
    if not num_held:
        return _said("unknown", "processes", processes=processes, copies="lone")
    copies = "order" if any(replica.num_different for replica in replicas) else "agree"
    return _said("pass", "processes", processes=processes, copies=copies, num=num_held)


def _told_by_ranks(pair: CheckedPair) -> Finding | None:
    """Say what makes a rank the verdict: copies that disagree there, or its own part."""
    if pair.report is None:
        return None
    verdict = pair.report.verdict
    for finding in pair.claims("replicas_disagree"):
        inside = all(item in verdict.headline for item in finding.addition)
        if pair.is_verdict(finding) or (finding.addition and inside):
            return finding
    for finding in pair.report.findings:
        if finding.claim == "explanation" and has(finding.addition, "rank_share"):
            return finding
    return None


# Weights and precision, and code: what is computed with, and what computes.
#
# The first point and the second rung ask for weights and precision. A digest that both sides lack,
# or that stands for a parameter that was not read, proves nothing: such weights are unknown, though
# preflight finds two equal texts.
#
# The rung of code explains what was found where all of this holds: the onset lies in a module of a
# class whose code differs; the difference is somebody's doing, or cannot be a matter of another
# version; and the error is made wherever that code runs. Other code elsewhere, another
# configuration or another attention fails without explaining, since a correct one makes no more
# than rounding.

_UNREAD = "offloaded"


def weights(pair: CheckedPair) -> tuple[PointState, list[Fact]]:
    """Are the values the same, as far as both runs tell?"""
    line, state = pair.lines["weights"], pair.state_of("weights")
    models = [manifest.model for manifest in pair.manifests]
    lacking = [name for name, model in zip("AB", models, strict=True) if not model.digests]
    digests = [model.digest for model in models]
    if state == "unknown" or (lacking and not (digests[0] and state == "pass")):
        if line.details and not lacking:
            return "unknown", line.details
        return "unknown", [fact("checklist.digests_not_recorded", sides=lacking or None)]
    blocking: list[Fact] = []
    for check in ("weights", "blocks"):
        if check in pair.lines and pair.lines[check].status == "blocking":
            blocking += pair.lines[check].details or [fact("checklist.other_check", check=check)]
    if blocking:
        return "fail", in_one(blocking)
    values = [item for model in models for item in model.digests.items()]
    unread = {name for name, digest in values if digest == _UNREAD}
    if unread:
        return "unknown", [fact("checklist.offloaded", num=len(unread))]
    if state == "fail":
        two_dtypes = pair.differs("dtype") or pair.differs("quantization")
        details = line.details or [fact("checklist.same_values")]
        if two_dtypes:
            return "unknown", [fact("checklist.weights_detail", details=details)]
        return "pass", details
    return "pass", line.details or [fact("checklist.same_weights", digest=digests[0][:12])]


def precision(pair: CheckedPair) -> tuple[PointState, Fact]:
    """Dtype and quantization, and what a truth was computed in."""

    def say(manifest: Manifest) -> Fact:
        model = manifest.model
        return fact(
            "checklist.computed_as",
            dtype=model.dtype,
            computed=manifest.settings.compute_dtype,
            quantized=model.quantization.name if model.quantization else None,
        )

    a, b = (manifest.settings.compute_dtype for manifest in pair.manifests)
    computed: PointState = "pass" if a == b else "fail"
    return worst(computed, pair.state_of("dtype"), pair.state_of("quantization")), both(pair, say)


_LIBRARIES = ("torch", "transformers")
_SETTINGS = ("engine", "model class", "config", "attention")
_LINES = (*_SETTINGS, CPU_OPERATORS, "substituted operators")
"""Lines of preflight about what computes, beside the code itself."""


def code(pair: CheckedPair) -> Said:
    """Is the same computed, by the same code?"""
    a, b = pair.manifests
    differences = code_differences(a, b)
    lines = [pair.lines[name] for name in _LINES if pair.differs(name)]
    texts = [*map(differs, lines), *(difference.text for difference in differences)]
    lacking = [name for name, manifest in (("A", a), ("B", b)) if not manifest.model.code]
    untold = [name for name in _LINES if pair.state_of(name) == "unknown"]
    if untold:
        texts.append(fact("checklist.lines_not_known", checks=untold))
    if lacking:
        texts.append(fact("checklist.code_not_recorded", sides=lacking))
    if not texts:
        same = both(pair, lambda side: fact("checklist.same_code", num=len(side.model.code)))
        return "pass", [same], False
    text = fact("checklist.first_parts", parts=texts)
    verdict = pair.verdict
    if not lines and not differences:
        return "unknown", [text], False
    if verdict is not None and verdict.kind in ("identical", "within_floor"):
        return _said("pass", "effect", what=text, identical=verdict.kind == "identical")
    if not pair.diverged:  # compare abstains: whether it makes a difference is not known
        return _said("unknown", "unjudged_code", what=text, why=pair.why_unjudged)
    assert verdict is not None
    guilty = [difference for difference in differences if _explains(difference, verdict, pair)]
    if guilty:
        assert verdict.onset is not None
        begin = fact("checklist.code_explains", difference=guilty[0].text, site=verdict.onset.site)
        return "fail", [begin], True
    return "fail", [text], False


def _explains(difference: CodeDifference, verdict: Verdict, pair: CheckedPair) -> bool:
    """Is the onset where this code runs, and is the error in the blocks that run it and in no
    other?"""
    onset = verdict.onset
    if onset is None or not difference.places:
        return False
    # does a module of this class lie in the one that the onset names? What enters a module was made
    # by those around it
    path = starred(module_of(onset.site))
    around = ":in" in onset.site and any(
        place == ROOT or path.startswith(f"{place}.") for place in difference.places
    )
    if not (around or difference.concerns(module_of(onset.site))):
        return False
    versions = [manifest.environment.versions for manifest in pair.manifests]
    upgraded = any(versions[0].get(name) != versions[1].get(name) for name in _LIBRARIES)
    if upgraded and not difference.deliberate:
        return False
    assert pair.report is not None
    blocks = {site.block for site in pair.report.sites if site.block is not None}
    beyond = {site.block for site in pair.report.sites if site.flagged and site.block is not None}
    running = {block for block in blocks if difference.concerns(block)}
    return not running or (
        beyond <= running and (verdict.kind == "systematic" or running <= beyond)
    )


# The eight points to settle before one model's two outputs are compared.
#
# Each is a condition on the settings of both runs, or a question to the comparison that was made.
# What a run does not tell is unknown, and never met.


def points_of(pair: CheckedPair) -> list[Point]:
    """All eight, in the order in which they are settled."""
    points: tuple[tuple[PointName, Callable[[CheckedPair], Said]], ...] = (
        ("weights", _settle_weights),
        ("greedy", _greedy),
        ("seed", _seed),
        ("engine", _engine),
        ("deterministic", _deterministic),
        ("tokens", tokens),
        ("logprobs", _logprobs),
        ("logprob_diff", _logprob_diff),
    )
    settled = []
    for number, (name, ask) in enumerate(points, start=1):
        state, facts, _ = ask(pair)
        title = sentence(fact(f"checklist.point_{name}"))
        settled.append(Point(number=number, name=name, title=title, state=state, facts=list(facts)))
    return settled


def _settle_weights(pair: CheckedPair) -> Said:
    (same, how), (state, details) = precision(pair), weights(pair)
    return worst(same, state), in_one([how, *details]), False


def _greedy(pair: CheckedPair) -> Said:
    sampled = pair.claims("not_the_largest_logit")
    if sampled:
        return "fail", choices_off(sampled[0]), False
    if pair.untold:
        return _said("unknown", "not_recorded", sides=pair.untold, what="tokens")

    def say(manifest: Manifest) -> Fact:
        chooses = any(sample.chosen_ids for sample in manifest.tokens.samples)
        how = "forced" if manifest.tokens.forced_by else "greedy"
        return fact("checklist.choice_of_tokens", how=how if chooses else None)

    return "pass", [both(pair, say)], False


def _seed(pair: CheckedPair) -> Said:
    if pair.untold:
        return _said("unknown", "not_recorded", sides=pair.untold, what="seed")
    seeds = both(pair, lambda side: side.settings.seed)
    seed_a, seed_b = (manifest.settings.seed for manifest in pair.manifests)
    return _said("pass", "seeds", seeds=seeds, same=seed_a == seed_b)


def _engine(pair: CheckedPair) -> Said:
    if pair.untold:
        return _said("unknown", "not_recorded", sides=pair.untold, what="prefixes")
    a, b = map(_shortcuts, pair.manifests)
    return worst(a[0], b[0]), [in_both(a[1], b[1])], False


def _shortcuts(manifest: Manifest) -> tuple[PointState, Fact]:
    """Return what an engine does besides each forward as it stands."""
    name = "transformers" if manifest.engine is None else manifest.engine.name
    engines = added("engines")
    if name in ("transformers", "compile") or (name in engines and engines[name].plain):
        return "pass", fact("checklist.plain_engine", name=name)
    assert manifest.engine is not None
    states: list[PointState] = []
    parts: list[Fact] = []
    for word, needed in (("prefix", True), ("specul", True), ("chunk", False)):
        facts = {key: text for key, text in manifest.engine.facts.items() if word in key.lower()}
        if needed and not facts:
            states.append("unknown")
            parts.append(fact("checklist.engine_silent", what=word))
        for key, text in facts.items():
            state = text.strip().lower()
            states.append("pass" if state in _OFF else "unknown" if state in _NOT_TOLD else "fail")
            parts.append(fact("checklist.engine_fact", key=key, state=text))
    return worst(*states), fact("checklist.engine_facts", name=manifest.engine.name, parts=parts)


_OFF = ("off", "false", "no", "none", "disabled", "0")
_NOT_TOLD = ("", "-", "unknown", "not told", "not recorded")


def _deterministic(pair: CheckedPair) -> Said:
    """Asked for, granted, and as far as it was tried, kept."""
    if pair.untold:
        return _said("unknown", "not_recorded", sides=pair.untold, what="settings")
    a, b = pair.manifests
    (state, trouble), (other_state, other_trouble) = _trouble(a), _trouble(b)
    text = in_both(trouble, other_trouble, apart=True)
    set_a, set_b = _switches(a), _switches(b)
    other = [name for name, value in set_a.items() if set_b.get(name, value) != value]
    if other and "fail" not in (state, other_state):
        text = fact("checklist.set_otherwise", what=text, names=other)
    return worst(state, other_state, "fail" if other else "pass"), [text], False


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
        return "unknown", line.details or [fact("checklist.tokens_not_told")], False
    if state == "fail":
        template = None
        if pair.differs("chat template"):
            details = pair.lines["chat template"].details
            template = details or [fact("checklist.another_template")]
        other = fact(
            "checklist.prompts_differ",
            reference=line.reference,
            candidate=line.candidate,
            details=line.details or None,
            template=template,
        )
        return "fail", [other], True
    num = sum(len(sample.prompt_ids) for sample in pair.a.manifest.tokens.samples)
    if not num:
        return _said("unknown", "no_prompt_ids")
    others = [check for check in ("tokenizer", "chat template") if pair.differs(check)]
    return _said("pass", "tokens_equal", num=num, other=others)


def _logprobs(pair: CheckedPair) -> Said:
    if all(manifest.plan.logits_site is None for manifest in pair.manifests):
        return _said("unknown", "logits_not_named")
    counts = logits_kept(pair.a), logits_kept(pair.b)
    sides = [
        fact("checklist.logits_kept", kept=kept, seen=seen) if seen else fact("checklist.no_logits")
        for seen, kept in counts
    ]
    met = all(kept for _, kept in counts)
    return "pass" if met else "fail", [in_both(*sides)], False


def _logprob_diff(pair: CheckedPair) -> Said:
    if pair.why_unjudged is not None:
        return "unknown", pair.why_unjudged, False
    assert pair.report is not None
    names = {manifest.plan.logits_site for manifest in pair.manifests}
    rows = [site for site in pair.report.sites if site.site in names and site.pass_ == "free"]
    if not rows:
        return _said("unknown", "logits_not_compared")
    if all(row.identical for row in rows):
        return _said("pass", "logits_equal", num=len(rows))
    changes = [row.logits.chosen_logprob_diff_max for row in rows if row.logits is not None]
    if not changes and any(row.nonfinite for row in rows):
        return _said("fail", "logits_nonfinite")
    if not changes:
        return _said("unknown", "logits_unmeasured", num=len(rows))
    tokens = pair.report.tokens
    nums: dict[str, int | None] = {"num_equal": None, "num_tokens": None}
    if tokens is not None and tokens.num_tokens:
        nums = {"num_equal": tokens.num_equal, "num_tokens": tokens.num_tokens}
    met = not pair.diverged or (pair.sampled and not pair.claims("drift"))
    verdict = None if met else HEADLINES[pair.report.verdict.kind]
    state: PointState = "pass" if met else "fail"
    return _said(state, "logprob_changes", nats=max(changes), **nums, verdict=verdict)


_TOLD = {
    *_LINES,
    *("code", "weights", "blocks", "quantization", "dtype"),
    *("prompt ids", "tokenizer", "chat template", "generated ids"),
    *("determinism", "repeatability", "ranks", "planted faults", "completeness"),
}
"""Lines of preflight that a point, a rung or a note of its own tells of."""


def doctor(
    reference: str | Path | Run,
    candidate: str | Path | Run,
    *,
    name_map: str | Path | None = None,
    truth: str | Path | Run | None = None,
    floor: str | Path | Run | Sequence[str | Path | Run] = (),
    progress: Progress | None = None,
) -> Checkup:
    """Compare two runs of a model, and lay out what is known as a checklist and a ladder of causes.

    The options are those of ``compare``, and so is the verdict.

    Raises RunFormatError for unreadable runs, and UsageError for runs of operators alone and for a
    truth or a floor that belongs to other runs.
    """
    a, b = opened(reference), opened(candidate)
    for run in (a, b):
        operators = run.manifest.model.task == "operators"
        if operators or run.manifest.scores_alone:
            raise UsageError(
                f"doctor is for runs of models, and {run.path} "
                f"{'is one of operators' if operators else 'holds log-probabilities'} alone",
                hint=command_line("compare", a.path, b.path),
            )
    report, reason = None, ""
    try:
        report = compare(a, b, name_map=name_map, truth=truth, floor=floor, progress=progress)
        lines = report.preflight
    except IncomparableError as error:
        names = None if name_map is None else load_name_map(name_map)
        lines, reason = preflight(a, b, names=names), error.message
    by_check = {line.check: line for line in lines}
    pair = CheckedPair(a=a, b=b, lines=by_check, report=report, reason=reason)
    rungs, stop = ladder_of(pair)
    checkup = worded(
        Checkup(
            tool_version=__version__,
            reference=summary_of(a),
            candidate=summary_of(b),
            verdict=pair.verdict,
            reason=reason or None,
            points=points_of(pair),
            ladder=rungs,
            explained_by=stop,
            facts=_notes(pair),
        )
    )
    # texts that add no line and no escape code, whatever a run is called
    points, ladder = (
        [replace(row, evidence=printable(row.evidence)) for row in rows]
        for rows in (checkup.points, checkup.ladder)
    )
    notes = list(map(printable, checkup.notes))
    return replace(checkup, points=points, ladder=ladder, notes=notes)


def _notes(pair: CheckedPair) -> list[Fact]:
    notes = []
    for side, manifest in zip(("reference", "candidate"), pair.manifests, strict=True):
        if manifest.plan.plants:
            notes.append(fact("checklist.planted", side=side, plants=manifest.plan.plants))
        if not manifest.complete:
            why = manifest.stopped_by or None
            notes.append(fact("checklist.incomplete", side=side, why=why))
    verdict = pair.verdict
    if verdict is not None and verdict.kind == "identical" and verdict.side == "both":
        notes.append(fact("checklist.equally_wrong"))
    other = [
        line.check
        for line in pair.lines.values()
        if line.status == "differs" and line.check not in _TOLD
    ]
    if other:
        notes.append(fact("checklist.other_settings", num=len(other), checks=other))
    return notes


def ladder_of(pair: CheckedPair) -> tuple[list[Rung], RungName | None]:
    """All seven rungs, in order, and the one at which the ladder stops."""
    asks: dict[RungName, Callable[[CheckedPair], Said]] = {
        "tokens": tokens,
        "weights": _weights,
        "code": code,
        "prefill": partial(phase, decode=False),
        "decode": partial(phase, decode=True),
        "sampling": sampling,
        "ranks": ranks,
    }
    rungs: list[Rung] = []
    stop: RungName | None = None
    for name, ask in asks.items():
        title = sentence(fact(f"checklist.rung_{name}"))
        if stop is not None:
            facts = [fact("checklist.explained_by", rung=stop)]
            rungs.append(Rung(name=name, title=title, state="not_reached", facts=facts))
            continue
        state, evidence, explains = ask(pair)
        rung = Rung(name=name, title=title, state=state, explains=explains, facts=list(evidence))
        rungs.append(replace(rung, next=_next(name, pair)) if state == "fail" else rung)
        stop = name if explains else None
    return rungs, stop


def _weights(pair: CheckedPair) -> Said:
    """Other values make another computation. Another precision of the same values is allowed for
    in every limit, so it explains what is within them."""
    (state, details), (same, how) = weights(pair), precision(pair)
    evidence = in_one([how, *details])
    if state == "fail":
        return "fail", evidence, True
    verdict = pair.verdict
    if same == "fail" and not (verdict is not None and verdict.kind == "identical"):
        within = verdict is not None and verdict.kind == "within_floor"
        return "fail", evidence, within
    if same == "fail":  # and every bit is equal
        same = "pass"
    return worst(state, same), evidence, False


def _next(name: RungName, pair: CheckedPair) -> str:
    if pair.verdict is not None and pair.verdict.kind == "incomparable" and pair.verdict.commands:
        return pair.verdict.commands[0].alone
    # is there a difference that capturing the candidate like the reference takes away?
    if name in ("tokens", "weights") or (name == "code" and any(map(pair.differs, _SETTINGS))):
        alike = advise(pair.a, pair.b).made_alike(other_model=False)
        if again := [item.text for item in alike if "like" in item.options]:
            return again[0]
    if pair.verdict is not None and pair.verdict.commands:
        return pair.verdict.commands[0].alone
    return command_line("compare", pair.a.path, pair.b.path, verbose=True)
