"""Cases of benchmarks/trust.py about the gate: sites that vanish, goldens compared in part,
runs that prove nothing, policies that are not what they seem."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarks._trust import BLOCK, Bench, Case, Told, abstained, checks, fails, right, said, wrong
from divergence import compare

__all__ = ["CASES"]


# ── names and coverage ──────────────────────────────────────────────────────────────────────────


def slash_in_names(bench: Bench) -> Told:
    """Sites with a slash in their module's name are compared."""

    def renamed(model: Any) -> None:
        layers = model.model.layers
        del model.model._modules["layers"]
        model.model.__dict__["layers"] = layers
        model.model.add_module("part/layers", layers)

    def faulty(model: Any) -> None:
        renamed(model)
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda _, __, out: out * -3.7)

    a = bench.capture(str(bench.model()), prompts=("A slash.",), max_new_tokens=2, prepare=renamed)
    return checks(bench, a, bench.capture(like=a, prepare=faulty))


def _lacking(bench: Bench, golden: dict[str, Any], new: dict[str, Any]) -> Told:
    a = bench.reference(prompts=1, tokens=4, **golden)
    b = bench.capture(like=a, **new)
    return checks(bench, a, b)


def lacks_operators(bench: Bench) -> Told:
    """A new run without the golden's operators fails."""
    return _lacking(bench, {"sites": ("blocks", f"ops@{BLOCK}")}, {"sites": ("blocks",)})


def lacks_modules(bench: Bench) -> Told:
    """A new run without the golden's inner modules fails."""
    return _lacking(bench, {"sites": ("modules",)}, {"sites": ("blocks",)})


def lacks_steps(bench: Bench) -> Told:
    """A new run that recorded the prefill alone fails."""
    return _lacking(bench, {}, {"steps": "prefill"})


def truncated_generation(bench: Bench) -> Told:
    """A new run of two of the four tokens fails."""
    return _lacking(bench, {}, {"max_new_tokens": 2})


def lacks_anchored(bench: Bench) -> Told:
    """A golden with an anchored pass, a new run without one: fails."""
    first = bench.reference(prompts=1, tokens=4)
    golden = bench.capture(like=first)
    return checks(bench, golden, bench.capture(like=first, anchor=False))


def lacks_escalated(bench: Bench) -> Told:
    """A golden with an escalated pass, a new run without one: fails."""
    first = bench.reference(prompts=1, tokens=4)
    golden = bench.capture(like=first, escalate=True)
    return checks(bench, golden, bench.capture(like=first))


def lacks_a_prompt(bench: Bench) -> Told:
    """A new run of one of the golden's two prompts fails."""
    a = bench.reference(prompts=2, tokens=4)
    b = bench.reference(prompts=1, tokens=4)
    return checks(bench, a, b)


def longer_generation(bench: Bench) -> Told:
    """Of a new run that goes on for longer than the golden, it is said that the rest had no
    partner."""
    a = bench.reference(prompts=2, tokens=3)
    report = compare(a, bench.reference(prompts=2, tokens=6))
    if report.verdict.confidence != "high" and "no partner" in report.verdict.summary:
        return right(said(report))
    return wrong(said(report))


def prefill_fault_unrecorded(bench: Bench) -> Told:
    """A golden of decode steps alone: a gross fault of the prefill fails, or it is said that
    nothing of the prefill was checked."""
    a = bench.reference(prompts=2, tokens=6, steps="decode")
    b = bench.capture(like=a, plants=[f"{BLOCK}:out=scale:1.3@step=0"])
    ran = bench.cli("check", a, b)
    if "the prefill was not recorded" in ran.text:
        return right(f"exit {ran.code}, and says that the prefill was not recorded")
    return fails(ran)


def truth_as_new(bench: Bench) -> Told:
    """The golden's own truth is no new run."""
    a = bench.reference(prompts=1, tokens=4)
    return checks(bench, a, bench.truth(a))


def against_itself(bench: Bench) -> Told:
    """A run against itself proves nothing."""
    a = bench.reference(prompts=1, tokens=4)
    return checks(bench, a, a)


def against_its_copy(bench: Bench) -> Told:
    """Nor does a run against a copy of its folder."""
    a = bench.reference(prompts=1, tokens=4)
    copy = bench.folder("copy")
    shutil.copytree(a, copy)
    return checks(bench, a, copy)


def zero_tokens(bench: Bench) -> Told:
    """A golden in which no token was generated holds nothing to check them by."""
    a = bench.reference(prompts=1, tokens=0)
    return checks(bench, a, bench.capture(like=a))


# ── policies ────────────────────────────────────────────────────────────────────────────────────

PERMISSIVE = (
    'verdicts = ["identical", "within_floor", "localized", "systematic", "drift"]\n'
    'min_coverage = 0.0\n[preflight]\nallow = ["*"]\n'
)


def _faulty(bench: Bench) -> tuple[Path, Path]:
    a = bench.reference(prompts=1, tokens=4)
    return a, bench.capture(like=a, plants=[f"{BLOCK}:out=scale:1.5"])


def file_named_ci(bench: Bench) -> Told:
    """A file `ci` in the working directory is not the policy `ci`."""
    a, b = _faulty(bench)
    folder = bench.folder("work")
    folder.mkdir()
    (folder / "ci").write_text(PERMISSIVE)
    told = [fails(bench.cli("check", a, b, *more, cwd=folder)) for more in ((), ("--policy", "ci"))]
    return max(told, key=lambda one: ("right", "abstained", "wrong").index(one.outcome))


def _with_policy(bench: Bench, text: str) -> Told:
    """right: refused with 2 and the key's name; wrong: taken as it is, or exit 3."""
    a, b = _faulty(bench)
    policy = bench.folder("policy").with_suffix(".toml")
    policy.write_text(text)
    ran = bench.cli("check", a, b, "--policy", policy)
    text = f"exit {ran.code}: {' '.join((ran.err or ran.out).split())[:90]}"
    return right(text) if ran.code == 2 else wrong(text)


def threshold_of_zero(bench: Bench) -> Told:
    """A threshold of zero is an error in the policy."""
    return _with_policy(bench, "[thresholds]\ntypical = 0\n")


def threshold_of_nan(bench: Bench) -> Told:
    """So is one that is not a number."""
    return _with_policy(bench, "[thresholds]\ntypical = nan\n")


def threshold_without_bound(bench: Bench) -> Told:
    """So is one beyond any bound."""
    return _with_policy(bench, "[thresholds]\ntypical = 1e30\n")


def tolerance_of_nan(bench: Bench) -> Told:
    """So is a tolerance that is not a number."""
    return _with_policy(bench, '[[tolerance]]\nsites = "*"\nrel_l2 = nan\n')


def known_difference(bench: Bench) -> Told:
    """A known difference with its reason and date lets that site pass, and is printed."""
    a, b = _faulty(bench)
    policy = bench.folder("policy").with_suffix(".toml")
    policy.write_text(
        f'[[known]]\nsites = "{BLOCK}:out"\nreason = "bug 17"\n'
        "max = { rel_l2 = 2.0 }\n"
        'until = "2099-01-01"\n'
    )
    ran = bench.cli("check", a, b, "--policy", policy)
    if ran.code in (0, 1) and "bug 17" in ran.text:
        return right(f"exit {ran.code}, the reason is printed")
    return abstained(ran.err) if ran.code == 2 else wrong(f"exit {ran.code}: {ran.text[:100]}")


def known_difference_expired(bench: Bench) -> Told:
    """One whose date has passed excuses nothing."""
    a, b = _faulty(bench)
    policy = bench.folder("policy").with_suffix(".toml")
    policy.write_text(
        '[[known]]\nsites = "*"\nmax = { rel_l2 = 2.0 }\nreason = "old"\nuntil = "2020-01-01"\n'
    )
    return fails(bench.cli("check", a, b, "--policy", policy))


def healthy_passes(bench: Bench) -> Told:
    """A healthy pair under another kernel still passes."""
    a = bench.reference(tokens=4)
    ran = bench.cli("check", a, bench.capture(like=a, attn_implementation="sdpa"))
    text = f"exit {ran.code}: {' '.join((ran.out or ran.err).split())[:90]}"
    return right(text) if ran.code == 0 else wrong(text)


def healthy_passes_float16(bench: Bench) -> Told:
    """So does one in float16 of another architecture."""
    a = bench.reference(bench.model("gpt2", dtype="float16"), tokens=4)
    ran = bench.cli("check", a, bench.capture(like=a, attn_implementation="sdpa"))
    text = f"exit {ran.code}: {' '.join((ran.out or ran.err).split())[:90]}"
    return right(text) if ran.code == 0 else wrong(text)


CASES: tuple[Case, ...] = (
    Case("16", "MLP × -3.7 under a name with a slash", slash_in_names),
    Case("17", "operators missing", lacks_operators),
    Case("17", "inner modules missing", lacks_modules),
    Case("17", "decode steps missing", lacks_steps),
    Case("17", "two of four tokens", truncated_generation),
    Case("17", "anchored pass missing", lacks_anchored),
    Case("17", "escalated pass missing", lacks_escalated),
    Case("17", "one prompt missing", lacks_a_prompt),
    Case("17", "six tokens against three", longer_generation),
    Case("17", "block × 1.3 in the prefill, decode recorded", prefill_fault_unrecorded),
    Case("17", "a run against its truth", truth_as_new),
    Case("17", "a run against itself", against_itself),
    Case("17", "a run against its copy", against_its_copy),
    Case("17", "no token", zero_tokens),
    Case("18", "block × 1.5, a file named ci", file_named_ci),
    Case("18", "typical = 0", threshold_of_zero),
    Case("18", "typical = nan", threshold_of_nan),
    Case("18", "typical = 1e30", threshold_without_bound),
    Case("18", "rel_l2 = nan", tolerance_of_nan),
    Case("18", "[[known]]", known_difference),
    Case("18", "[[known]] out of date", known_difference_expired),
    Case("-", "nothing: sdpa, check", healthy_passes),
    Case("-", "nothing: sdpa, float16 gpt2, check", healthy_passes_float16),
)
