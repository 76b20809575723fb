"""Score logs that were made to harm whoever reads them: each is one error that names the file."""

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from divergence import outside, scores
from divergence.cli.main import app
from divergence.domains.scores.formats import lm_eval as module
from divergence.domains.scores.formats import prompts_of, read
from divergence.domains.scores.formats.reading import ReadRequest
from divergence.errors import DumpError


def review(metric: str = "acc", **fields: object) -> str:
    """One line of evalscope's."""
    score = {"status": "success", "value": {metric: 1.0}} | fields
    return json.dumps({"index": 0, "sample_score": {"sample_id": "q", "score": score}}) + "\n"


def evalscope(root: Path, settings: str | None, *, text: str | None = None) -> Path:
    """A folder as evalscope writes it; returns its file of reviews."""
    (root / "reviews/m").mkdir(parents=True)
    (root / "reviews/m/t.jsonl").write_text(review() if text is None else text)
    if settings is not None:
        (root / "configs").mkdir()
        (root / "configs/task_config.yaml").write_text(settings)
    return root / "reviews/m/t.jsonl"


def inspect(path: Path, *members: tuple[str, str], pack: int = zipfile.ZIP_DEFLATED) -> Path:
    """A log of inspect with a header, and with further members."""
    header = json.dumps({"status": "success", "eval": {"task": "t", "model": "m"}})
    with zipfile.ZipFile(path, "w", pack) as archive:
        for name, text in (("header.json", header), *members):
            archive.writestr(name, text)
    return path


SAMPLE = ("samples/a_epoch_1.json", json.dumps({"id": 1, "epoch": 1, "scores": {"s": 1.0}}))


def patched(path: Path, name: str, at: int, data: bytes) -> Path:
    """The log with bytes of a member's entry in the table of the zip replaced."""
    whole = path.read_bytes()
    place = whole.rindex(name.encode()) - 46 + at
    path.write_bytes(whole[:place] + data + whole[place + len(data) :])
    return path


LAUGHS = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 11))
MERGES = "".join(
    f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n  k{n}: 1\n" for n in range(1, 11)
)
LONG = "a0: &a0 [" + ", ".join([f"'{'x' * 1000}'"] * 9) + "]\n"
SETTINGS = {
    "aliases": ("a0: &a0 [x, x]\n" + LAUGHS + "generation_config: {x: *a10}\n", "values"),
    "merges": ("a0: &a0 {x: 1}\n" + MERGES, "values"),
    "long texts": (LONG + LAUGHS[: LAUGHS.index("a5:")] + "generation_config: *a4\n", "values"),
    "itself": ("generation_config: &a\n  x: *a\n", "no YAML|holds itself"),
    "deep": ("generation_config: " + "[" * 5000 + "]" * 5000, "RecursionError|nested"),
    "long": ("x: " + "y" * 300_000, "bytes"),
    "cut off": ("model: [", "no YAML"),
    "code": ("model: !!python/object/apply:os.system ['id'", "no YAML"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_grow(name, tmp_path):
    """Aliases and merges of YAML are counted as written out; nothing is computed."""
    text, words = SETTINGS[name]
    evalscope(tmp_path, text)
    with pytest.raises(DumpError, match=words) as caught:
        read(str(tmp_path), ReadRequest())
    assert str(caught.value.where).endswith("task_config.yaml")


def test_settings_are_text(tmp_path):
    """What evalscope writes twice by an alias stands in both places; no tag is followed."""
    evalscope(tmp_path, "model: !!python/name:os.system x\ngeneration_config: &a {t: 0.0}\nb: *a\n")
    (series,) = read(str(tmp_path), ReadRequest()).series
    assert series.settings["generation settings"] == '{"t": "0.0"}'


@pytest.mark.parametrize(
    ("named", "model"),
    [("", "m1"), ("..", "m1"), ("reviews", None), ("reviews/m", None), ("reviews/m/t.jsonl", "m1")],
)
def test_settings_lie_in_what_was_named(named, model, tmp_path):
    """Of a folder inside it, of a file in the folder that the tool wrote into."""
    root = tmp_path / "work"
    evalscope(root, "model: m1\n")
    assert read(str(root / named), ReadRequest()).model == model


@pytest.mark.parametrize("link", ["configs", "configs/task_config.yaml", "reviews", "reviews/m"])
def test_settings_are_reached_through_no_link(link, tmp_path):
    """A link among the folders makes that nothing beside the file is read."""
    root = tmp_path / "work"
    file = evalscope(root, "model: secret\n")
    (root / link).rename(tmp_path / "elsewhere")
    (root / link).symlink_to(tmp_path / "elsewhere")
    assert read(str(file), ReadRequest()).model is None


def test_a_folder_further_up_is_not_looked_into(tmp_path):
    """Another layout has no settings, whatever lies three levels higher."""
    evalscope(tmp_path, "model: secret\n")
    for place in ("reviews/m/n/t.jsonl", "t.jsonl", "results/m/t.jsonl"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(review())
        assert read(str(tmp_path / place), ReadRequest()).model is None


@pytest.mark.parametrize("link", ["results_2026-01-02T03-04-05.678901.json", "predictions"])
def test_results_beside_are_no_links(link, lm_eval, tmp_path):
    """lm-eval's results and opencompass's predictions are read where they lie, or not at all."""
    secret = tmp_path / "secret"
    if link.startswith("results"):
        folder = lm_eval("a", [LM_EVAL]) / "model"
        secret.write_text(json.dumps({"config": {"model": "secret"}}))
        (folder / link).symlink_to(secret)
        (file,) = folder.glob("samples*")
        assert read(str(file), ReadRequest()).model is None
        return
    file = tmp_path / "results/m/t.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"details": {"0": {"correct": True, "pred": "x"}}}))
    (secret / "m").mkdir(parents=True)
    (secret / "m/t.json").write_text(json.dumps({"0": {"origin_prompt": "secret"}}))
    (tmp_path / link).symlink_to(secret)
    (series,) = read(str(file), ReadRequest()).series
    assert prompts_of("opencompass", series, {1}) == {}


LM_EVAL = {"doc_id": 0, "doc": {}, "filter": "none", "metrics": ["acc"], "acc": 1.0}


def overlapping(path: Path) -> Path:
    """Many entries of the table of a zip that are one member."""
    inspect(path, *[(f"samples/{n:03}.json", SAMPLE[1]) for n in range(300)])
    data = path.read_bytes()
    entry = data.index(b"PK\x01\x02")
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        size = infos[0].compress_size
    for number in range(len(infos)):
        assert data[entry : entry + 4] == b"PK\x01\x02", number
        length = struct.unpack("<H", data[entry + 28 : entry + 30])[0]
        data = data[: entry + 20] + struct.pack("<I", size * 40) + data[entry + 24 :]
        entry += 46 + length
    path.write_bytes(data)
    return path


LOGS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "grows": (lambda p: growing(p, 1, 300 << 20), "larger"),
    "grows by many": (lambda p: growing(p, 6, 200 << 20), "would become"),
    "values": (lambda p: inspect(p, ("samples/a.json", "[" + "[]," * 11_000_000)), "values"),
    "deep": (lambda p: inspect(p, ("samples/a.json", "[" * 100_000)), "nested"),
    "twice": (lambda p: twice(p), "twice"),
    "overlap": (overlapping, "overlap"),
    "encrypted": (lambda p: patched(inspect(p, SAMPLE), SAMPLE[0], 8, b"\x01\x00"), "encrypted"),
    "unknown method": (lambda p: patched(inspect(p, SAMPLE), SAMPLE[0], 10, b"\x63\x00"), "99"),
    "bzip2": (lambda p: inspect(p, SAMPLE, pack=zipfile.ZIP_BZIP2), "method 12"),
    "lies: shorter": (
        lambda p: patched(inspect(p, SAMPLE), SAMPLE[0], 24, struct.pack("<I", 3)),
        "size",
    ),
    "lies: longer": (
        lambda p: patched(inspect(p, SAMPLE), SAMPLE[0], 24, struct.pack("<I", 4000)),
        "size",
    ),
    "lies: elsewhere": (
        lambda p: patched(inspect(p, SAMPLE), SAMPLE[0], 42, struct.pack("<I", 7)),
        "where",
    ),
    "another checksum": (lambda p: patched(inspect(p, SAMPLE), SAMPLE[0], 16, b"abcd"), "checksum"),
    "cut off": (lambda p: p.write_bytes(inspect(p, SAMPLE).read_bytes()[:100]) and p, "no zip"),
    "no object": (lambda p: inspect(p, ("samples/a.json", "[]")), "no object"),
    "other types": (
        lambda p: inspect(p, ("samples/a.json", '{"scores": [], "epoch": []}')),
        "inspect",
    ),
}


def growing(path: Path, num: int, size: int) -> Path:
    """Members that are to become so large."""
    names = [f"samples/{n}.json" for n in range(num)]
    inspect(path, *[(name, " " * 5000) for name in names])
    for name in names:
        patched(path, name, 24, struct.pack("<I", size))
    return path


def twice(path: Path) -> Path:
    with pytest.warns(UserWarning, match="Duplicate name"):
        return inspect(path, SAMPLE, SAMPLE)


@pytest.mark.parametrize("name", LOGS)
def test_logs_of_inspect(name, tmp_path):
    """No member is unpacked to more than the table of the zip says, nor all to more than bears."""
    make, words = LOGS[name]
    path = make(tmp_path / "a.eval")
    assert path.stat().st_size < 3 << 20
    with pytest.raises(DumpError, match=words) as caught:
        read(str(path), ReadRequest())
    assert "a.eval" in str(caught.value.where)


def test_zstandard_is_bounded(tmp_path):
    """A frame may say that it unpacks to anything; no more is taken than the table says."""
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.ZstdCompressor().compress(b" " * (64 << 20))
    for data in (packed, b"no frame at all"):
        path = inspect(tmp_path / "a.eval", ("samples/a.json", ""))
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("header.json", "{}")
            archive.writestr("samples/a.json", data)
        path.write_bytes(file.getvalue())
        patched(path, "samples/a.json", 24, struct.pack("<I", 100))
        patched(path, "samples/a.json", 10, b"\x5d\x00")
        with pytest.raises(DumpError, match=r"size or checksum|not as inspect"):
            read(str(path), ReadRequest())


NAMES = ["acc" * 400, *[f"m{n}" for n in range(20_001)]]
TEXTS: dict[str, tuple[str, str, str]] = {
    "lists": ("a.jsonl", "[" + "[]," * 11_000_000 + "[]]", "values"),
    "deep": ("a.jsonl", "[" * 200_000, "nested"),
    "utf-16": ("a.jsonl", "\ufeff" + "[" * 200_000, "nested"),
    "no line": ("a.jsonl", '{"id": 1, "score"', "no JSON"),
    "another type": ("a.jsonl", '{"id": 1, "score": 1}\n[1]\n', "no object"),
    "repeat": ("a.jsonl", '{"id": 1, "score": 1, "repeat": [1]}', "repeat"),
    "long name": ("a.jsonl", json.dumps({"id": 1, "score": 1, "metric": "x" * 1001}), "1,000"),
    "names": (
        "reviews/m/a.jsonl",
        review(value={f"m{n}": 1.0 for n in range(20_001)}),
        "more than 20,000 tasks and metrics",
    ),
    "a product": (
        "reviews/m/a.jsonl",
        review(value={f"m{n}": 1.0 for n in range(10_000)}) + review(status="failed") * 101,
        "no score by any",
    ),
    "cells": ("a.csv", "id,score\n1,2,3\n", "as many cells"),
    "a field": ("a.csv", 'id,score\n"' + "x" * 200_000, "no table"),
    "no text": ("a.csv", "id,score\n\udcff,1\n", "no table"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name, tmp_path, capsys):
    """Bounded in values, depth, names and rows; exit code 2 and one error with the file's name."""
    file, text, words = TEXTS[name]
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    encoding = "utf-16-le" if name == "utf-16" else "utf-8"
    path.write_text(text, encoding=encoding, errors="surrogateescape")
    with pytest.raises(DumpError, match=words) as caught:
        read(str(path), ReadRequest(), format="plain" if file[0] == "a" else "evalscope")
    assert path.name in str(caught.value.where)


def test_a_row_over_lines_is_bounded(tmp_path, monkeypatch):
    """However short each of its lines is."""
    monkeypatch.setattr("divergence.outside.MAX_ROW_BYTES", 1 << 16)
    (tmp_path / "a.csv").write_text("id,score\n" + '"\n",' * 20_000)
    with pytest.raises(DumpError, match="a row is longer than 65,536 bytes"):
        read(str(tmp_path / "a.csv"), ReadRequest(), format="plain")


def test_work_grows_with_the_file(lm_eval, monkeypatch):
    """A line's metrics and choices, each many, are not multiplied."""
    num = 3000
    line = LM_EVAL | {
        "metrics": [f"m{n}" for n in range(num)] * 2,
        "arguments": [["q", str(n)] for n in range(num)],
        "resps": [[[str(-n), "False"]] for n in range(num)],
    }
    calls = []
    plain = module.weight
    monkeypatch.setattr(module, "weight", lambda *args: calls.append(1) or plain(*args))
    series = read(str(lm_eval("a", [line])), ReadRequest()).series
    assert len(series) == num and all(len(entry.rows) == 1 for entry in series)
    assert len(calls) == num


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.eval", "reviews/m/a.jsonl"])
def test_pipes(name, tmp_path, capsys):
    """A pipe is refused where it is named, and where it lies in a folder."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(tmp_path / name)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(SystemExit) as caught:
            app(["scores", str(path), str(tmp_path)], prog_name="divergence")
        assert caught.value.code == 2
        assert str(tmp_path) in capsys.readouterr().err


def test_prompts_of_a_file_that_changed(tmp_path, monkeypatch):
    """Prompts are read later than scores; what breaks then is an error as well."""
    file = evalscope(tmp_path, None)
    (series,) = read(str(file), ReadRequest()).series
    file.write_text('{"messages": 3}\n')
    with pytest.raises(DumpError, match="not as evalscope writes it") as caught:
        prompts_of("evalscope", series, {1})
    assert caught.value.where == str(file)


def test_a_file_with_holes(tmp_path):
    """40 GiB that take nothing on disk are not read."""
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(40 << 30)
    assert outside.disk_bytes(path) == 0
    with pytest.raises(DumpError, match="more than is unpacked"):
        scores(path, tmp_path / "b.jsonl", format="plain")
