"""Answers of many runs, localize, sensitivity, selfcheck: on the terminal and as a page."""

import base64
import gzip
import html
import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from divergence.layout import MAX_WIDTH
from divergence.words import share

SNAPSHOTS = Path(__file__).parent / "snapshots"
BLOCKS = ["model.layers.0", "model.layers.6", "model.layers.11"]
EVIL = "</script><script>window.pwned=1</script>\u202e"
ODD = "runs/host-[17]"


def assert_snapshot(text: str, name: str) -> None:
    """Equal to the stored text. UPDATE_SNAPSHOTS=1 writes it anew."""
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))


def attached(page: str) -> dict:
    packed = re.search(r'id="attachment">(.*?)</script>', page, re.S).group(1)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def onset(site: str, block: str | None = None) -> dict:
    return {"site": site, "block": block, "sample": 0, "step": 0, "position": 5}


# --- many runs ---------------------------------------------------------------------------------


@pytest.fixture
def row(reports):
    """``row(path, **changes)``: a healthy run's row."""

    def make(path, **changes):
        usual = {
            "path": path,
            "run": reports.make_run(path),
            "verdict": "within_floor",
            "summary": "rounding",
            "confidence": "high",
            "limit_usage": 0.31,
            "logits_rel_l2": 9.1e-3,
            "top1_agreement": 1.0,
            "num_equal": 32,
            "num_tokens": 32,
        }
        return usual | changes

    return make


@pytest.fixture
def matrix(row, reports, answer_of):
    """``matrix(**changes)``: of six, one odd machine, one that diverges elsewhere too, one that
    cannot be read. ``odd``: what the odd one is called; ``more``: further rows."""

    def make(odd=ODD, more=(), **changes):
        place = onset("model.layers.30.mlp.down_proj:out", "model.layers.30")
        faulty = row(
            odd,
            verdict="localized",
            side="candidate",
            limit_usage=7.4,
            logits_rel_l2=0.044,
            top1_agreement=0.9,
            num_equal=30,
            onset=place,
        )
        gone = {"path": "runs/gone", "problem": "runs/gone does not exist\n  try:   a run"}
        same = row("runs/same", verdict="identical", limit_usage=0.0, logits_rel_l2=0.0)
        others = [faulty, gone, row("runs/c", verdict="undetermined")]
        usual = {
            "tool_version": "0.0.0",
            "reference": reports.make_run("runs/first"),
            "rows": [*more, same, row("runs/b"), *others],
            "identical": [["runs/first", "runs/same"]],
            "groups": [{"runs": ["runs/first", "runs/same", "runs/b"]}],
            "cross_checks": [
                {
                    "reference": "runs/b",
                    "candidate": "runs/c",
                    "verdict": None,
                    "problem": "why\nmore",
                }
            ],
            "odd": [odd],
            "agreement": f"3 of 4 runs agree as far as rounding goes; {odd} differs from them",
            "only_odd": ["driver: 12 (the others: 13)"],
            "next": [f"divergence compare runs/first '{odd}'"],
        }
        return answer_of("compare_many", **usual | changes)

    return make


def test_the_matrix_is_printed_whole(matrix, printed):
    """Who is odd comes first, then one row a run; UPDATE_SNAPSHOTS=1 writes the text anew."""
    assert_snapshot(printed(matrix()), "matrix")


def test_quiet_is_who_is_odd(matrix, printed):
    """The sentence, what is only there and why a run was not compared; no table."""
    whole, quiet = printed(matrix()), printed(matrix(), "-q")
    assert quiet.startswith("ODD: 3 of 4 runs agree")
    begin, _, problems = quiet.partition("\nnot compared runs/gone: ")
    assert whole.startswith(begin)
    assert problems and all(part in whole for part in problems.strip().split("; "))


def test_a_notebook_shows_the_answer(matrix):
    """Its first line, what is known at once, and what to run next."""
    text = html.unescape(matrix()._repr_html_())
    assert "<b>ODD: 3 of 4 runs agree" in text
    assert "runs/first: tiny/llama" in text and "divergence compare runs/first" in text


@pytest.mark.parametrize(
    ("groups", "verdicts", "word"),
    [
        (["abc"], ["identical", "within_floor"], "AGREE"),
        (["ab"], ["within_floor", None], "AGREE"),
        (["a", "b"], ["localized", "drift"], "SPLIT"),
        (["ab"], ["within_floor", "localized"], "SPLIT"),
        (["a"], ["undetermined", None], "NO ANSWER"),
    ],
)
def test_the_first_word(matrix, row, printed, groups, verdicts, word):
    """Nobody is odd: all agree, no majority, or nobody can tell."""
    rows = [row(name, verdict=kind) for name, kind in zip("bc", verdicts, strict=True)]
    groups = [{"runs": [*runs]} for runs in groups]
    answer = msgspec.structs.replace(matrix(rows=rows, groups=groups), odd=[])
    assert printed(answer).startswith(f"{word}: ")


def test_a_long_list_keeps_what_does_not_agree(matrix, row, printed):
    """Hundreds of machines: the odd one is seen, the healthy ones are counted, --all shows them."""
    fleet = [row(f"runs/host-{number}", limit_usage=number / 1000) for number in range(300)]
    text = printed(matrix(more=fleet))
    assert len(text.splitlines()) < 60
    assert ODD in text
    assert "more that agree, at most 31% of a limit" in text
    assert "host-299 " in printed(matrix(more=fleet), "--all")


def test_names_give_way_to_numbers(matrix, row, reports, printed):
    """Long paths, labels and sites are cut from the left; no line of the table is wider than it may
    be, and no number is cut."""
    long = "x" * 80
    run = reports.make_run("y", label=long)
    last = row(f"runs/{long}/last", run=run, verdict="localized", onset=onset(f"{long}:out"))
    lines = printed(matrix(more=[last])).splitlines()
    table = [line for line in lines if line.endswith(("tokens", "/32"))]
    assert len(table) == 6
    assert max(map(len, table)) <= MAX_WIDTH
    assert any("x/last  …xxx" in line for line in table)


def test_the_page_of_many_runs(matrix, tmp_path):
    """Who is odd, a figure in which a run can be chosen, and why one was not compared."""
    text = matrix().to_html(tmp_path / "m.html").read_text(encoding="utf-8")
    for part in (
        ">ODD<",
        "3 of 4 runs agree",
        "divergence compare runs/first",
        "does not exist",
        "Among themselves",
        'class="odd"',
    ):
        assert part in text
    data = data_of(text)
    assert data["noun"] == "Run"
    usage = f"{ODD}: DIVERGED, 740% of a limit, not like most of the others"
    assert usage in data["figures"]["usage"]["says"]
    assert ["onset", "model.layers.30.mlp.down_proj:out"] in data["blocks"][ODD]["facts"]
    assert attached(text)["odd"] == [ODD]
    assert "download-csv" not in text[: text.index("<script>")]


def test_names_of_runs_inject_nothing(matrix):
    """A run that is called like a script adds none to the page."""
    text = matrix(EVIL).html()
    assert text.count("<script") == matrix().html().count("<script")
    assert "\u202e" not in text


# --- sensitivity -------------------------------------------------------------------------------


def sizes_of(fault: str, sizes, deep=(None,) * 5, blocks=BLOCKS, **changes) -> list[dict]:
    return [
        {
            "block": block,
            "fault": fault,
            "tried": 1.0,
            "size": size,
            "by": f"{block}:out: why",
            "escalated_size": other,
            "escalated_by": other and f"{block}:out: why in float32",
        }
        | changes
        for block, size, other in zip(blocks, sizes, deep, strict=False)
    ]


@pytest.fixture
def sensitivity(reports, answer_of):
    """``sensitivity(**changes)``: of two faults in three of twelve blocks."""

    def make(**changes):
        usual = {
            "tool_version": "0",
            "reference": reports.make_run("a"),
            "candidate": reports.make_run("b"),
            "made_here": False,
            "truth": "a-truth",
            "num_floor_runs": 0,
            "dtype": "bfloat16",
            "escalated": True,
            "verdict": reports.make_verdict("within_floor"),
            "num_blocks": 12,
            "num_prompt_tokens": 41,
            "num_trials": 96,
            "blocks": BLOCKS,
            "units": {"scale": "the block's output", "update-scale": "what the block adds"},
            "phrases": {
                "scale": "a scale error of {size}",
                "update-scale": "a scale error of {size} in what a block adds",
            },
            "sizes": [
                *sizes_of("scale", (0.0022, 0.0031, 0.0041), (1.2e-6, 1.1e-6, 2e-6)),
                *sizes_of("update-scale", (0.02, None, 0.031), (3e-6, 3e-6, None)),
            ],
            "notes": ["a note"],
            "next": ["divergence truth a -o a-truth", "divergence sensitivity a"],
        }
        return answer_of("sensitivity", **usual | changes)

    return make


def test_sensitivity_is_printed_whole(sensitivity, printed):
    """A sentence a fault, the set-up, a table a pass, the units, and the way to see more."""
    confirmation = {
        "block": BLOCKS[1],
        "fault": "scale",
        "plant": f"{BLOCKS[1]}:out=scale:1.00403",
        "size": 0.00403,
        "expected": True,
        "seen": True,
        "verdict": "localized",
        "summary": "",
    }
    assert_snapshot(printed(sensitivity(confirmations=[confirmation]), "-v"), "sensitivity")


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (
            sizes_of("scale", (0.0022, 0.003, 0.0041)),
            "in bfloat16 you would see a scale error of 0.41% in any block (worst: "
            "model.layers.11; best 0.22% at model.layers.0)\n",
        ),
        (sizes_of("scale", (None,) * 3, reason="no input", by=None), "scale: no input"),
    ],
)
def test_one_sentence_a_fault(sensitivity, printed, sizes, text):
    """The size that is seen in any block is the worst one's, with the best beside it; what cannot
    be planted has a reason in place of a number."""
    phrases = {"scale": "a scale error of {size}"}
    answer = sensitivity(num_blocks=3, escalated=False, sizes=sizes, phrases=phrases)
    assert text in printed(answer, "-q")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "100%"),
        (0.41, "41%"),
        (0.0999, "10%"),
        (0.0041, "0.41%"),
        (0.00012, "0.012%"),
        (9.9e-5, "9.9e-05"),
        (1.2e-6, "1.2e-06"),
        (100.0, "10000%"),
        (None, "-"),
    ],
)
def test_share(value, text):
    """Per cent down to a hundredth of one, then powers of ten."""
    assert share(value) == text


def test_the_page_of_sensitivity(sensitivity):
    """Its sentences, a table of blocks and faults, and a figure a fault where there are blocks."""
    blocks = [f"model.layers.{number}" for number in range(5)]
    sizes = [
        *sizes_of("scale", (0.003,) * 5, blocks=blocks),
        *sizes_of("bias", (None,) * 5, blocks=blocks),
    ]
    phrases = {"scale": "a scale error of {size}", "bias": "a bias of {size}"}
    units = {"scale": "the block's output", "bias": "its largest value"}
    answer = sensitivity(
        blocks=blocks, sizes=sizes, phrases=phrases, units=units, escalated=False, num_blocks=5
    )
    text = answer.html()
    assert "In bfloat16 you would see a scale error of 0.30% in any block" in text
    assert "you would not see a bias of up to 100% in model.layers.0" in text
    assert text.count("<figure") == 2
    assert "not to 100%" in text
    assert "divergence truth a -o a-truth" in text
    assert attached(text)["num_trials"] == 96


# --- localize and selfcheck --------------------------------------------------------------------


def test_the_page_of_localize_has_its_report(reports, answer_of):
    """The descent stands before the report of the last comparison, whose data is in the page."""
    level = {"level": "block", "verdict": "localized", "site": f"{BLOCKS[1]}:out", "why": "because"}
    answer = answer_of(
        "localize",
        reference="a",
        candidate="b",
        out="o",
        levels=[level],
        stopped="the model is not here",
        commands=["divergence localize a b -o o"],
    )
    answer = msgspec.structs.replace(answer, report=reports.make_long_report())
    text = answer.html()
    assert text.index(">STOPPED<") < text.index(">Descent<") < text.index('id="blocks"')
    assert "because" in text
    assert attached(text)["verdict"]["kind"] == answer.report.verdict.kind


def test_the_page_of_localize_that_compared_nothing(answer_of):
    """It says what stopped it."""
    answer = answer_of("localize", reference="a", candidate="b", out="o", stopped="no model")
    text = answer.html()
    assert ">STOPPED<" in text
    assert "no model" in text.casefold()
    assert attached(text)["out"] == "o"


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ((0, 0), "3 of 8 tensors differ"),
        ((12, 0), "every block bit-identical on equal inputs"),
        ((12, 1), f"1 of 12 blocks differ in bits: {BLOCKS[1]}"),
        ((12, 2), "2 of 12 blocks differ in bits"),
    ],
)
def test_a_way_within_the_floor_says_what_differs_in_bits(answer_of, lines_of, blocks, text):
    """Blocks where there are any, else tensors."""
    way = {"name": "cache", "against": "base", "same_bits": True, "status": "within_floor"}
    way |= {"num_different": 3, "num_compared": 8, "first_different": BLOCKS[1]}
    way |= dict(zip(("num_blocks", "num_blocks_different"), blocks, strict=True))
    made_of = {"dtype": "float32", "device": "cpu", "attention": "eager", "num_threads": 1}
    made_of |= {"num_prompts": 1, "num_prompt_tokens": 4, "max_new_tokens": 3, "truth": False}
    answer = answer_of("selfcheck", tool_version="0", model="m", lines=[way], **made_of)
    assert any(line.endswith(text) for line in lines_of(answer)), lines_of(answer)
    untold = {"name": "cache", "against": "base", "same_bits": False, "status": "undetermined"}
    untold |= {"summary": "one token alone"}
    answer = answer_of("selfcheck", tool_version="0", model="m", lines=[untold], **made_of)
    assert any(line.endswith("not told: one token alone") for line in lines_of(answer))


def test_the_page_of_selfcheck(answer_of):
    """A row a way of running, and the command that looks closer at the one that diverged."""
    again = {"name": "again", "same_bits": True, "status": "identical", "verdict": "identical"}
    batch = {
        "name": "batch",
        "same_bits": False,
        "status": "diverged",
        "verdict": "localized",
        "block": BLOCKS[1],
        "summary": "off",
        "next": ["divergence compare base batch"],
    }
    text = answer_of(
        "selfcheck",
        tool_version="0",
        model="m",
        dtype="bfloat16",
        device="cpu",
        attention="eager",
        num_threads=2,
        num_prompts=4,
        num_prompt_tokens=40,
        max_new_tokens=3,
        truth=False,
        lines=[{"against": "base"} | again, {"against": "base"} | batch],
    ).html()
    assert f"batch (from {BLOCKS[1]} on) diverged" in text
    assert "divergence compare base batch" in text
    assert "bit-identical" in text
