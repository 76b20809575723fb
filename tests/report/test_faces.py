"""One document, many faces: what the first screen says, every other face says in the same words."""

import functools
import html
import json
import random
import re

import msgspec
import pytest

import divergence
from divergence import capture, check, compare
from divergence.comparison.result import Visible
from divergence.options.commands import RecordOptions
from divergence.report.bundle import Redaction, bundle_files
from divergence.run.command import command
from divergence.words import HEADLINES
from tests import by_hand

pytestmark = pytest.mark.whole
MLP = "model.layers.1.mlp:out"
RUNS = {
    "healthy": {"attn_implementation": "sdpa"},
    "equal": {},
    "one block": {"plants": [f"{MLP}=scale:1.3"]},
    "one prompt": {"plants": [f"{MLP}=scale:1.3@sample=1"]},
    "every block": {"plants": [f"model.layers.{n}.mlp:out=scale:1.5" for n in range(2)]},
    "nan": {"plants": [f"{MLP}=nan:3"]},
    "another dtype": {"dtype": "bfloat16"},
    "operators": {"plants": ["model.layers.1.mlp.act_fn:out=scale:1.1"]},
    "training": {"plants": [f"{MLP}=scale:1.2"]},
    "wrong reference": {},
    "prefill alone": {"steps": "prefill"},
    "the head": {"plants": ["lm_head:out=scale:1.5"]},
    "one step": {"plants": [f"{MLP}=scale:1.3@step=1"]},
    **{store: {"plants": [f"{MLP}=scale:1.3"]} for store in ("sketch", "stats", "hash")},
}
"""What is done to the second run."""
MADE = {
    "operators": {
        "sites": ["blocks", "ops@model.layers.1"],
        "recording": RecordOptions(weights=True),
    },
    "training": {"train": True, "max_new_tokens": None},
    "wrong reference": {"plants": [f"{MLP}=scale:1.2"]},
    **{store: {"store": store} for store in ("sketch", "stats", "hash")},
}
"""How the first run is made, where it is not as usual."""


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def first(tmp_path_factory, llama):
    """``first(case)``: the run that its second one repeats."""

    @functools.cache
    def make(case):
        folder = tmp_path_factory.mktemp("faces") / "a"
        options = {"max_new_tokens": 2} | MADE.get(case, {})
        return capture(
            llama,
            out=folder,
            probe=False,
            dtype="float32",
            prompts=["Snow fell on", "One"],
            **options,
        )

    return lambda case: make(case if case in MADE else "")


def of_suites(folder):
    """Two suites of operators, of which one is another implementation."""
    a = capture("suite:quick", out=folder / "a", sites=["rms_norm.float32.odd*"])
    return a, capture(like=a, out=folder / "b", impl=["rms_norm=mine:rms_norm"])


def of_log_probabilities(folder, way=0.0):
    """What a server and a trainer say of the same tokens; ``way``: how much lower the trainer's."""
    draw = random.Random(7)
    rows = []
    for number in range(12):
        said = [-abs(draw.gauss(0, 1)) - 0.01 for _ in range(12)]
        trained = [min(-1e-4, value + way + 0.01 * draw.gauss(0, 1)) for value in said]
        rows.append(
            {
                "prompt_ids": [3, 5, 7 + number],
                "response_ids": [draw.randrange(40) for _ in said],
                "rollout_log_probs": said,
                "old_log_probs": trained,
                "response_mask": [1] * len(said),
            }
        )
    (folder / "rollouts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    make = functools.partial(divergence.import_dump, folder / "rollouts.jsonl")
    return make(out=folder / "a"), make(out=folder / "b", layout="trainer")


OTHERS = {
    "suite": of_suites,
    "log-probabilities": of_log_probabilities,
    "other log-probabilities": functools.partial(of_log_probabilities, way=-0.5),
}
"""Pairs of no model's layers."""


@pytest.mark.parametrize("case", [*RUNS, *OTHERS])
def test_each_fact_of_the_screen_stands_on_every_face(
    first, faces, printed, lines_of, ci_texts, tmp_path, monkeypatch, case
):
    """Of runs that were captured: in the page, under -v, in JSON, Markdown and the bundle."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("def rms_norm(x, weight, eps):\n    return x * weight\n")
    if case in OTHERS:
        reference, candidate = OTHERS[case](tmp_path)
    else:
        reference = first(case)
        candidate = capture(like=reference, out=tmp_path / "b", probe=False, **RUNS[case])
    report = compare(reference, candidate)
    shown = {face: words(text) for face, text in faces(report).items() if face != "notebook"}
    shown["Markdown"] = words(html.unescape(re.sub(r"</?code>|<br>", "", report.to_markdown())))
    first_line, *rest = lines_of(report)
    told = {"answer": first_line.partition(": ")[2]}
    for line in rest[: rest.index("next") if "next" in rest else None]:
        told.setdefault(line[:12].strip(), line[12:])
    assert {"answer", "confidence"} <= told.keys()
    # elsewhere names of folders are not so long, and no fault is planted
    usual = {"path": "run", "model": "tiny", "plants": [], "substitutes": []}
    sides = {
        side: msgspec.structs.replace(getattr(report, side), **usual)
        for side in ("reference", "candidate")
    }
    here = msgspec.structs.replace(report, **sides)
    # where names are long, a reason takes the line of what is as usual
    assert any(line.startswith("compared") for line in lines_of(here))
    verdict = report.verdict
    quiet = verdict.kind in ("identical", "within_floor") and verdict.side in (None, "neither")
    assert len(printed(here).splitlines()) <= (12 if quiet else 18)
    if case == "nan":  # below the rules that are not met
        side = msgspec.structs.replace(here.candidate, plants=RUNS[case]["plants"])
        whole = msgspec.structs.replace(here, candidate=side)
        checked = msgspec.structs.replace(check(reference, candidate), report=whole)
        assert len(printed(checked).splitlines()) <= 18
    for name in ("answer", "onset", "side", "confidence", "not seen", "because", "found"):
        for face, text in shown.items():
            assert words(told.get(name, "")).casefold() in text.casefold(), (name, face)
    for share in re.findall(r"(\S+)(?: of)? its limit", told.get("worst", "")):
        for face, text in shown.items():
            assert share in text, ("worst", face)
    assert ("operators" in told) == (case == "operators")
    for name in (
        "settings",
        "tokens",
        "compared",
        "operators",
    ):  # whose parts -v has in sections of their own
        for face in ("page", "Markdown", "bundle"):
            assert words(told.get(name, "")) in shown[face], (name, face)
    values = json.loads(report.to_json())
    assert values["verdict"]["summary"] == told["answer"]
    assert values["verdict"]["confidence"] == told["confidence"].partition(":")[0]
    # a wrong reference is planted, which is no golden
    ci = {} if case == "wrong reference" else ci_texts(reference, candidate, report)
    for name, text in ci.items():  # what CI shows says the same in the same words
        for word in ("answer", "confidence", "side")[: 1 if name == "annotations" else 3]:
            assert words(told.get(word, "")) in words(text), (word, name)
    because = [fact["text"] for fact in values["verdict"]["evidence"]]
    assert "because" not in told or any(told["because"] in text for text in because)
    for line in values["preflight"]:
        if line["status"] == "differs":
            assert line["check"] in shown["-v"] and line["check"] in shown["page"]


@pytest.fixture
def ci_texts(printed, tmp_path, monkeypatch):
    """What a CI server is told where the policy allows no such verdict."""

    def texts(reference, candidate, report) -> dict[str, str]:
        others = sorted({"identical", "within_floor", "drift"} - {report.verdict.kind})
        result = check(
            reference, candidate, policy=by_hand.policy(verdicts=others, min_coverage=0.0)
        )
        junit, summary = tmp_path / "junit.xml", tmp_path / "summary.md"
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
        out = printed(result, "--github", "--junit", junit)
        notes = [line for line in out.splitlines() if line.startswith("::error")]
        return {
            "JUnit": html.unescape(junit.read_text(encoding="utf-8")),
            "summary": html.unescape(re.sub(r"<[^>]*>", "", summary.read_text(encoding="utf-8"))),
            "annotations": "\n".join(notes).replace("%25", "%").replace("%0A", "\n"),
        }

    return texts


@pytest.fixture
def faces(lines_of):
    """``faces(report)``: the text of each face. A table of a notebook is short, and so left to its
    own tests."""

    def texts(report) -> dict[str, str]:
        page = re.sub(r"<(style|script).*?</\1>", "", report.html(), flags=re.DOTALL)
        files = bundle_files(report, {}, Redaction({}, private=()))
        return {
            "screen": "\n".join(lines_of(report)),
            "-v": "\n".join(lines_of(report, "-v")),
            "page": html.unescape(re.sub(r"<[^>]*>", " ", page)),
            "bundle": files["report.md"].decode(),
            "notebook": html.unescape(re.sub(r"<[^>]*>", " ", report._repr_html_())),
        }

    return texts


CASES = {
    "healthy": {"visible": Visible(block=5e-3, forward=0.02, token=0.03)},
    "faulty": {"kind": "localized", "side": "candidate"},
    "no side": {
        "kind": "localized",
        "side": None,
        "commands": [command("truth", "a", o="a-truth")],
    },
    "stopped": {"kind": "incomparable"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_first_screen_holds_on_every_face(reports, faces, case):
    """Its first word and sentence, side, confidence, and what it could not see."""
    changes = dict(CASES[case])
    visible, kind = changes.pop("visible", None), changes.pop("kind", "within_floor")
    report = reports.make_long_report()
    report = msgspec.structs.replace(
        report, visible=visible, verdict=reports.make_verdict(kind, **changes)
    )
    shown = faces(report)
    told = shown["screen"].partition("\n\n")[0]
    facts = [words(line[12:]) for line in told.splitlines()[1:] if not line.startswith("because")]
    assert ("not seen" in told) == (visible is not None)
    assert "confidence" in told and ("side  " in told) == (kind == "localized")
    for face, text in shown.items():
        assert HEADLINES[kind] in text, face
        assert words(report.verdict.summary).casefold() in words(text).casefold(), face
        for fact in facts:
            assert fact in words(text), face


@pytest.mark.parametrize("make", ["make_report", "make_long_report", "make_nonfinite_report"])
def test_what_was_compared_is_on_the_page_and_in_the_bundle(reports, faces, make):
    """The settings, the tokens and how much was compared, as on the first screen."""
    shown = faces(getattr(reports, make)())
    lines = [
        line
        for line in shown["screen"].splitlines()
        if line.startswith(("settings", "tokens", "compared"))
    ]
    assert len(lines) >= 2
    for line in lines:
        for face in ("page", "bundle"):
            assert words(line[12:]) in words(shown[face]), face


def test_the_bundle_begins_with_the_screens_first_word(reports, faces):
    """Two dtypes are no plain OK there either."""
    report = reports.make_report()
    other = msgspec.structs.replace(report.candidate, dtype="float16")
    report = msgspec.structs.replace(report, candidate=other)
    assert faces(report)["bundle"].startswith("# DIFFERENT PRECISION\n")


@pytest.mark.parametrize(("usage", "text"), [(0.0, "0%"), (0.56, "56%"), (3.1, "310%")])
def test_the_share_of_a_limit_is_a_percentage_everywhere(reports, faces, usage, text):
    """Below the limit and beyond it, on the first screen and on the page."""
    site = reports.make_site(
        "model.layers.0:out",
        block="model.layers.0",
        role="block",
        limit_usage=usage,
        usage=usage,
        flagged=usage > 1,
    )
    other = reports.make_site("lm_head:out", order=1, limit_usage=0.0, usage=0.0)
    shown = faces(reports.make_report(sites=[site, other]))
    for face in ("screen", "page"):
        assert re.search(rf"(?<!\d){text}", shown[face]), face


def test_what_was_measured_in_the_free_pass_is_marked_wherever_rows_are_listed(reports, faces):
    """A block that no anchored pass reached stands among those that one did: the first screen and
    the page say so in the same words."""
    sites = [
        reports.make_site(
            f"model.layers.{n}:out",
            order=n,
            block=f"model.layers.{n}",
            role="block",
            pass_="anchored",
            limit_usage=0.5,
            usage=0.5,
        )
        for n in range(3)
    ]
    sites.append(
        reports.make_site(
            "model.layers.3:out",
            order=3,
            block="model.layers.3",
            role="block",
            step=2,
            limit_usage=1.5,
            usage=1.5,
            flagged=True,
            worst_position=None,
        )
    )
    shown = faces(reports.make_report(sites=sites))
    for face in ("screen", "page"):
        (place,) = set(re.findall(r"prompt \d+, step \d+[^<\n]*?free pass", shown[face]))
        assert place == "prompt 0, step 2, free pass", face
        assert re.search(r"150%", shown[face])
