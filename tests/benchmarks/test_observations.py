"""Recorded pairs answer as the pairs did, and their columns are what they are said to be."""

import lzma
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from divergence import RecordOptions

# benchmarks/ is beside the package, not in it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import observations
from benchmarks._observed import logarithm, of_logarithm
from benchmarks._recorded import COARSE, EXACT, Columns, Objects, load
from benchmarks._taken import Line, Store, Taking, read_columns
from divergence import capture, compare
from divergence.numerics.pairs import RowMetrics

PROMPTS = ("The quick brown fox jumps over the lazy dog.", "2 + 2 = 4")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, llama):
    """A, and B with a block that is 1.05 times as large."""
    root = tmp_path_factory.mktemp("runs")
    values = {"device": "cpu", "probe": False}
    a = capture(llama, out=root / "a", prompts=PROMPTS, max_new_tokens=2, truth="full", **values)
    plants = ["model.layers.1:out=scale:1.05"]
    b = capture(
        like=a, out=root / "b", plants=plants, recording=RecordOptions(escalate=True), **values
    )
    return a, b


@pytest.fixture(scope="module")
def store(tmp_path_factory, runs):
    """The pair, taken as the benchmark takes it."""
    made = Store(tmp_path_factory.mktemp("store"))
    planted = {"side": "candidate", "place": "model.layers.1", "dtype": "bfloat16"}
    taking = Taking(made, "massive", "a pair", planted)
    taking.compare(*runs)
    taking.finish({"alarm": True})
    return made


@pytest.mark.slow
def test_a_recorded_pair_answers_as_the_pair_did(store, runs, capsys):
    """Kind, place, side and confidence come from the recording alone, with a truth and without."""
    assert observations.replay(store, ["massive"])
    assert "| massive | 1 | 2 | 2 | 0 | 0 |" in capsys.readouterr().out
    (line,) = store.lines()
    report = compare(*runs)
    assert line.answers["carried"].said[0] == report.verdict.kind == "localized"
    assert line.answers["carried"].block == report.verdict.onset.block == "model.layers.1"
    assert line.answers["carried"].side == "candidate"
    assert line.answers["none"].side != "reference"


def test_a_recording_needs_no_run(store, runs):
    """No tensor is read from the runs: their files could be gone."""
    recording = load(store.file("recordings", "massive", "a pair"))
    assert not recording.tensors.sources
    assert all(not Path(path).exists() for path, _, _ in recording.runs)


def test_what_is_lost_is_noticed(store):
    """A number that is another, or a call that is missing, is another answer."""
    recording = load(store.file("recordings", "massive", "a pair"))
    asked = recording.asked[0]
    asked.calls[0].pop()
    with pytest.raises(LookupError, match="are asked for"):
        recording.replay(asked)


def test_columns_are_sums_over_the_tensors(store, runs):
    """s2, its participation ratio and the masks of a block's output, from the runs themselves."""
    table = read_columns(store.file("columns", "massive", "a pair"))
    a, b = runs
    place = "model.layers.1:out"
    (number,) = [
        n
        for n, site in enumerate(table["text.site"])
        if site == place
        and table["text.pass"][n] == "anchored"
        and table["pairs.sample"][n] == 0
        and table["pairs.step"][n] == 0
    ]
    x = a.read(a.find(("free", 0, 0, place))).double()
    y = b.read(b.find(("anchored", 0, 0, place))).double()
    square = (y - x).square().reshape(-1, x.shape[-1]).numpy()
    tokens = table["tokens.pair"] == number
    assert tokens.sum() == len(square) == table["pairs.rows"][number]
    second = of_logarithm(table["tokens.s2.D"][tokens])
    np.testing.assert_allclose(second, square.sum(1), rtol=0.003)
    ratio = of_logarithm(table["tokens.sn.D"][tokens])
    np.testing.assert_allclose(ratio, square.sum(1) ** 2 / (square**2).sum(1), rtol=0.003)
    assert not table["tokens.mask"][tokens].any()
    gain = int(table["pairs.gain.D"][number])
    assert 2 ** ((gain >> 1) / 64) == pytest.approx(0.05, rel=0.05)
    assert not gain & 1  # above zero


def test_figures_hold_what_was_planted_against_what_was_answered(store, capsys):
    """The exact place and the side are counted for each way of asking."""
    observations.figures(store)
    row = next(
        line for line in capsys.readouterr().out.splitlines() if "massive, faults | all" in line
    )
    assert "| - - 1/1 1/1 | - - 1/1 1/1 | - - 0/1 0/1 | - - 1/1" in row


@pytest.mark.parametrize("bits", [COARSE, EXACT])
def test_floats_keep_as_many_bits_as_asked(bits):
    """Zeros, infinities and nan stay; numbers are off by at most half of the last bit."""
    values = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 1.5, -3.3e-300, 7.7e300, 1e-8])
    rows = RowMetrics(rel_l2=values, diff=values[5:], norm=values[:0], update_norm=None)
    columns = Columns()
    form = columns.add(rows)
    made = Objects(columns.encoded(bits)).next(form)
    np.testing.assert_allclose(made.rel_l2, values, rtol=2.0 ** -(bits + 1))
    assert made.norm.shape == (0,) and made.update_norm is None


def test_logarithms():
    """Zero and infinity have codes of their own; the rest is within 0.3%."""
    values = np.array([0.0, math.inf, 1.0, 3.7e-22, 1e30])
    codes = logarithm(values)
    assert codes.dtype == np.int16 and codes[0] == -32768 and codes[1] == 32767
    np.testing.assert_allclose(of_logarithm(codes), values, rtol=0.003)


@pytest.mark.slow
def test_the_program_says_what_it_does():
    """Its help names the commands."""
    program = Path(observations.__file__)
    done = subprocess.run(
        [sys.executable, str(program), "--help"], capture_output=True, text=True, check=True
    )
    assert "record" in done.stdout and "replay" in done.stdout


def test_a_line_that_was_cut_short_costs_its_own_pair_alone(tmp_path):
    """A recording that is killed in the middle of a line goes on: the pair is made again."""
    store = Store(tmp_path)
    line = Line(
        kind="trust",
        key="a",
        planted={},
        row=None,
        answers={},
        why_not={},
        bits=12,
        seconds=1.0,
        num_bytes=0,
    )
    store.add(line)
    file = tmp_path / "answers" / "trust.jsonl"
    file.write_bytes(file.read_bytes() + file.read_bytes()[:20])
    store.add(msgspec.structs.replace(line, key="b"))
    assert [item.key for item in store.lines("trust")] == ["a", "b"]


@pytest.mark.slow
def test_replaying_nothing_is_no_success(tmp_path):
    """An empty store, and a kind that does not exist, are errors."""
    for arguments in (["replay", "--store", str(tmp_path)], ["replay", "--kinds", "nosuch"]):
        done = subprocess.run(
            [sys.executable, "benchmarks/observations.py", *arguments],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode and "Traceback" not in done.stderr


PACKED = sorted((Path(__file__).parents[2] / "benchmarks" / "observations").rglob("*.columns.xz"))


@pytest.mark.parametrize("file", PACKED, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_what_is_packed_is_read(file):
    """Each pair of tensors is a line of every column, and belongs to an answered pair of runs."""
    table = read_columns(file)
    answers = lzma.decompress(file.with_name(file.name.replace("columns", "answers")).read_bytes())
    lengths = {len(table[name]) for name in ("recording", "text.site", "text.pass")}

    assert len(lengths) == 1
    assert table["recording"].max() < len(answers.splitlines())


def test_packing_adds_to_what_is_packed(store, tmp_path):
    """A pair that is packed already stays, with its own lines of every table."""
    line = store.lines("massive")[0]
    columns = store.file("columns", "massive", line.key)
    for number in range(2):
        other = Store(tmp_path / str(number))
        other.add(msgspec.structs.replace(line, key=f"pair {number}"))
        file = other.file("columns", "massive", f"pair {number}")
        file.parent.mkdir(parents=True)
        file.write_bytes(columns.read_bytes())
        observations.pack(other, tmp_path / "packed", 1e9)

    table = read_columns(tmp_path / "packed" / "massive.columns.xz")
    answers = lzma.decompress((tmp_path / "packed" / "massive.answers.xz").read_bytes())
    keys = [msgspec.json.decode(text, type=Line).key for text in answers.splitlines()]
    assert keys == ["pair 0", "pair 1"]
    original = read_columns(columns)
    for name in ("pairs.r2", "logits.kl"):
        numbers = table["recording" if name == "pairs.r2" else "logits.recording"]
        for number in range(2):
            np.testing.assert_array_equal(table[name][numbers == number], original[name])
