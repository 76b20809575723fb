"""One document, many faces: what the first screen says, every other face says in the same words."""

from __future__ import annotations

import functools
import html
import json
import re

import msgspec
import pytest

from divergence import capture, compare
from divergence.comparison.results import Visible
from divergence.options.commands import RecordOptions, TrainOptions
from divergence.report.bundle import Redaction, bundle_files
from divergence.report.screen import screen_lines
from divergence.report.summary import document, report_lines
from divergence.report.text import document_markdown
from divergence.run.command import command
from divergence.words import HEADLINES

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
}
"""What is done to the second run."""
MADE = {
    "operators": {
        "sites": ["blocks", "ops@model.layers.1"], "recording": RecordOptions(weights=True),
    },
    "training": {"training": TrainOptions(train=True), "max_new_tokens": None},
}  # fmt: skip
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
        return capture(llama, out=folder, probe=False, dtype="float32",
                       prompts=["Snow fell on", "One"], **options)  # fmt: skip

    return lambda case: make(case if case in MADE else "")


@pytest.mark.parametrize("case", RUNS)
def test_each_fact_of_the_screen_stands_on_every_face(first, tmp_path, case):
    """Of runs that were captured: in the page, under -v, in JSON, Markdown and the bundle."""
    reference = first(case)
    candidate = capture(like=reference, out=tmp_path / "b", probe=False, **RUNS[case])
    report = compare(reference, candidate)
    markdown = document_markdown(document(report), made_by="compare")
    shown = {face: words(text) for face, text in faces(report).items() if face != "notebook"}
    shown["Markdown"] = words(html.unescape(re.sub(r"<[^>]*>", "", markdown)))
    screen = [item.text for item in screen_lines(report)]
    first_line, *rest = screen
    told = {"answer": first_line.partition(": ")[2]}
    for line in rest[: rest.index("next") if "next" in rest else None]:
        told.setdefault(line[:12].strip(), line[12:])
    assert {"answer", "confidence", "compared"} <= told.keys()
    for name in ("answer", "onset", "side", "confidence", "not seen", "because"):
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
    because = [fact["text"] for fact in values["verdict"]["evidence"]]
    assert "because" not in told or told["because"] in because[0]
    for line in values["preflight"]:
        if line["status"] == "differs":
            assert line["check"] in shown["-v"] and line["check"] in shown["page"]


def faces(report) -> dict[str, str]:
    """The text of each face. A table of a notebook is short, and so left to its own tests."""
    page = re.sub(r"<(style|script).*?</\1>", "", report.html(), flags=re.DOTALL)
    files = bundle_files(report, {}, Redaction({}, private=()))
    return {
        "screen": "\n".join(item.text for item in screen_lines(report)),
        "-v": "\n".join(item.text for item in report_lines(report, verbose=True)),
        "page": html.unescape(re.sub(r"<[^>]*>", " ", page)),
        "bundle": files["report.md"].decode(),
        "notebook": html.unescape(re.sub(r"<[^>]*>", " ", report._repr_html_())),
    }


CASES = {
    "healthy": {"visible": Visible(block=5e-3, forward=0.02, token=0.03)},
    "faulty": {"kind": "localized", "side": "candidate"},
    "no side": {"kind": "localized", "side": None,
                "commands": [command("truth", "a", o="a-truth")]},
    "stopped": {"kind": "incomparable"},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_first_screen_holds_on_every_face(reports, case):
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
def test_what_was_compared_is_on_the_page_and_in_the_bundle(reports, make):
    """The settings, the tokens and how much was compared, as on the first screen."""
    shown = faces(getattr(reports, make)())
    lines = [line for line in shown["screen"].splitlines()
             if line.startswith(("settings", "tokens", "compared"))]  # fmt: skip
    assert len(lines) >= 2
    for line in lines:
        for face in ("page", "bundle"):
            assert words(line[12:]) in words(shown[face]), face


def test_the_bundle_begins_with_the_screens_first_word(reports):
    """Two dtypes are no plain OK there either."""
    report = reports.make_report()
    other = msgspec.structs.replace(report.candidate, dtype="float16")
    report = msgspec.structs.replace(report, candidate=other)
    assert faces(report)["bundle"].startswith("# DIFFERENT PRECISION\n")


@pytest.mark.parametrize(("usage", "text"), [(0.0, "0%"), (0.56, "56%"), (3.1, "310%")])
def test_the_share_of_a_limit_is_a_percentage_everywhere(reports, usage, text):
    """Below the limit and beyond it, on the first screen and on the page."""
    site = reports.make_site("model.layers.0:out", block="model.layers.0", role="block",
                             limit_usage=usage, usage=usage, flagged=usage > 1)  # fmt: skip
    other = reports.make_site("lm_head:out", order=1, limit_usage=0.0, usage=0.0)
    shown = faces(reports.make_report(sites=[site, other]))
    for face in ("screen", "page"):
        assert re.search(rf"(?<!\d){text}", shown[face]), face


def test_what_was_measured_in_the_free_pass_is_marked_wherever_rows_are_listed(reports):
    """A block that no anchored pass reached stands among those that one did: the first screen and
    the page say so in the same words."""
    sites = [
        reports.make_site(f"model.layers.{n}:out", order=n, block=f"model.layers.{n}", role="block",
                          pass_="anchored", limit_usage=0.5, usage=0.5)
        for n in range(3)
    ]  # fmt: skip
    sites.append(
        reports.make_site("model.layers.3:out", order=3, block="model.layers.3", role="block",
                          step=2, limit_usage=1.5, usage=1.5, flagged=True, worst_position=None)
    )  # fmt: skip
    shown = faces(reports.make_report(sites=sites))
    for face in ("screen", "page"):
        (place,) = set(re.findall(r"prompt \d+, step \d+[^<\n]*?free pass", shown[face]))
        assert place == "prompt 0, step 2, free pass", face
        assert re.search(r"150%", shown[face])
