"""Damaged and hostile runs and files of other programs, opened by every command that reads one, for
as long as is wanted.

    python benchmarks/fuzz.py [--seconds 60] [--seed 0] [--case N] [--only runs|forms] [--keep DIR]

Each case takes one of some small runs (every form of storage, of several ranks, of earlier format
versions; in a directory, a tar or zip, or behind a web server that may lie), damages it, and runs
one command on it, alone or beside a sound one. Some of the damage is to bytes; most is to what is
said: a number, text, shape or list in the manifest, in a record or in a shard's header becomes
another, a line is lost, repeated or moved. Every other case is of a foreign form (_fuzz_forms.py):
dumps, rollouts, results of evaluations, losses, prompts and labels. Allowed are an answer and the
tool's own error: exit codes 0, 1 and 2, within LIMIT_S and LIMIT_BYTES of memory. Anything else (3,
a traceback, a signal, a hang) is printed with the number of its case, which ``--case`` runs again,
and the exit code is 1. Cases are numbered from the seed on and depend on nothing else.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import http.server
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import xxhash

from benchmarks import _fuzz_forms
from benchmarks._fuzz_damage import (
    TEXTS,
    as_json,
    at,
    damage_header,
    damage_records,
    damaged_bytes,
    damaged_value,
    places_of,
)

LIMIT_S = 20
LIMIT_BYTES = 2 << 30
"""Beyond what the imports take."""
_MOST_WAITS = 6
"""Times the limit, for a case that uses no processor: a hang, or a busy machine."""
_A_BATCH = 200  # cases of one process

# -- runs ----------------------------------------------------------------------------------------


def build_runs(folder: Path) -> dict[str, Path]:
    """Small runs of every kind, by name; ``folder/model`` is theirs."""
    from divergence.ops.replay import replay
    from divergence.recording.api import capture
    from divergence.recording.api import truth as make_truth
    from tests.models import tiny

    model = str(tiny.build("llama", folder / "model"))
    runs: dict[str, Path] = {}

    def make(name: str, **options: Any) -> None:
        runs[name] = folder / name
        capture(**{"out": runs[name], "max_new_tokens": 2, **options})

    sites = ["blocks", "lm_head:out", "ops@model.layers.0.mlp"]
    make("full", model=model, sites=sites, weights=True)
    make("like", like=runs["full"], sites=sites, plants=["model.layers.1:out=scale:1.1"])
    make("batch", model=model, prompts=["one two three four", "five"], batch=True, whole=True)
    for store in ("sketch", "stats", "hash"):
        make(store, model=model, store=store)
    runs["truth"] = folder / "truth"
    make_truth(runs["full"], out=runs["truth"])
    runs["replayed"] = folder / "replayed"
    replay(runs["full"], out=runs["replayed"])
    runs["ranks"] = _of_two_ranks(runs["full"], folder / "ranks")
    return runs | stored_runs()


def stored_runs() -> dict[str, Path]:
    """Those of each format version that lie with the tests."""
    fixtures = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
    return {path.name: path for path in sorted(fixtures.glob("run-v*"))}


def _of_two_ranks(source: Path, target: Path) -> Path:
    """As if each of two ranks had computed all of it."""
    shutil.copytree(source, target)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["mesh"] = {"axes": [{"name": "tp", "size": 2}]}
    manifest["sizes"]["num_records"] *= 2
    (target / "manifest.json").write_text(json.dumps(manifest))
    records = [json.loads(line) for line in (source / "records.jsonl").read_text().splitlines()]
    for rank, name in enumerate(["records.jsonl", "records-r00001.jsonl"]):
        (target / name).write_text(
            "".join(
                json.dumps(one | {"rank": rank, "placement": ["replicate"]}) + "\n"
                for one in records
            )
        )
    seal(target)
    return target


def seal(run: Path) -> None:
    """Gives the run the digests of its files as they are now: whoever means to deceive can."""
    path = run / "manifest.json"
    with contextlib.suppress(ValueError, OSError, RecursionError):
        manifest = json.loads(path.read_bytes())
        if isinstance(manifest, dict) and manifest.get("digest") is not None:
            digests = {
                p.name: xxhash.xxh3_128_hexdigest(p.read_bytes())
                for p in run.glob("records*.jsonl")
            }
            first = {"schema_version": manifest.get("schema_version"), "digest": "0" * 32}
            text = as_json(first | manifest | {"digest": "0" * 32, "record_digests": digests})
            digest = xxhash.xxh3_128_hexdigest(text)
            path.write_bytes(text.replace(b"0" * 32, digest.encode(), 1))


# -- damage --------------------------------------------------------------------------------------


def damage_manifest(path: Path, random_: random.Random) -> None:
    value = json.loads(path.read_bytes())
    for _ in range(random_.choice([1, 1, 1, 2, 5])):
        # each part alike, however many places it has: digests of weights are most of them
        part = random_.choice([value, *(v for v in value.values() if isinstance(v, dict | list))])
        if isinstance(part, dict) and random_.random() < 0.5:
            key = random_.choice(list(part) or [""])
            if isinstance(part.get(key), dict | list) and part[key]:
                part = part[key]
        damaged_value(part, random_)
    path.write_bytes(as_json(value))


def change_softly(run: Path, random_: random.Random) -> None:
    """A number or text here and there becomes another of its kind that the types allow: such runs
    are read, and what they say is what the comparison goes by."""
    path = random_.choice([run / "manifest.json", *run.glob("records*.jsonl")])
    data = path.read_bytes()
    values = list(map(json.loads, data.splitlines() if path.suffix == ".jsonl" else [data]))
    for _ in range(random_.choice([1, 1, 2, 4])):
        value = random_.choice(values)
        places = [
            (holder, key)
            for holder, key in places_of(value)
            if isinstance(holder[key], int | float | str)
            and not (isinstance(key, str) and "digest" in key)
        ]
        by_name: dict[Any, list[tuple[Any, Any]]] = {}
        for holder, key in places:
            by_name.setdefault(key if isinstance(key, str) else "", []).append((holder, key))
        if not by_name:
            continue
        holder, key = random_.choice(random_.choice(list(by_name.values())))
        one = holder[key]
        others = [at(place) for place in places if type(at(place)) is type(one)]
        if isinstance(one, bool):
            fresh: Any = not one
        elif isinstance(one, int):
            fresh = random_.choice([0, 1, one + 1, max(0, one - 1), 2**31, 2**62, *others])
        elif isinstance(one, float):
            fresh = random_.choice([0.0, -one, 1e308, 5e-324, *others])
        else:
            fresh = random_.choice([*TEXTS, *others, *others])
        everywhere = values if random_.random() < 0.3 else [value]
        for each in everywhere:
            for place, name in list(places_of(each)):
                if (each is value and place is holder and name == key) or (
                    len(everywhere) > 1 and name == key and type(place[name]) is type(one)
                ):
                    place[name] = fresh
    path.write_bytes(b"\n".join(map(as_json, values)) + b"\n")


def damage(run: Path, random_: random.Random) -> None:
    """One to three kinds of damage to a run's directory; mostly the digests fit it."""
    _damage(run, random_)
    if random_.random() < 0.8:
        seal(run)


def _damage(run: Path, random_: random.Random) -> None:
    if random_.random() < 0.6:
        with contextlib.suppress(OverflowError):
            change_softly(run, random_)
        return
    for _ in range(random_.choice([1, 1, 1, 2, 3])):
        files = sorted(path for path in run.rglob("*") if path.is_file())
        path = random_.choice([run / "manifest.json", *run.glob("records*.jsonl"), *files])
        kinds: list[Callable[[Path, random.Random], None]] = [_to_bytes]
        if path.name == "manifest.json":
            kinds += [damage_manifest] * 3
        elif path.suffix == ".jsonl":
            kinds += [damage_records] * 4
        else:
            kinds += [damage_header] * 2
        with contextlib.suppress(
            ValueError, struct.error, KeyError, TypeError, FileNotFoundError, RecursionError
        ):  # what is no JSON any more, gone, or too deep to walk through, stays so
            random_.choice(kinds)(path, random_)


def _to_bytes(path: Path, random_: random.Random) -> None:
    if random_.random() < 0.05:
        path.unlink()
    else:
        path.write_bytes(damaged_bytes(path.read_bytes(), random_))


def packed(run: Path, random_: random.Random) -> Path:
    """The run as a tar or zip, sometimes damaged as such."""
    target = run.with_suffix(random_.choice([".tar", ".zip"]))
    prefix = random_.choice(["", "run"])
    if target.suffix == ".tar":
        with tarfile.open(target, "w", format=random_.choice([0, 1, 2])) as tar:
            tar.add(run, prefix or ".")
    else:
        method = random_.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
        with zipfile.ZipFile(target, "w", method) as folder:
            for path in sorted(run.rglob("*")):
                folder.write(path, Path(prefix) / path.relative_to(run))
    if random_.random() < 0.7:
        target.write_bytes(damaged_bytes(target.read_bytes(), random_))
    return target


# -- a web server that may lie -------------------------------------------------------------------


class _Server(http.server.SimpleHTTPRequestHandler):
    """Files with ranges; some answers are cut, long, slow or no answer."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = Path(self.translate_path(self.path))
        lie = random.Random(f"{self.path} {self.headers.get('Range')}").random()
        if not path.is_file() or lie < 0.02:
            self.send_error(404 if lie > 0.01 else 500)
            return
        data, code = path.read_bytes(), 200
        total = len(data)
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes=") and lie > 0.05:
            begin, _, end = wanted[6:].partition("-")
            data, code = data[int(begin or 0) : int(end or total) + 1], 206
        if 0.05 < lie < 0.1:
            data = data[: len(data) // 2]
        self.send_response(code)
        self.send_header("Content-Length", str(2**50 if 0.1 < lie < 0.12 else len(data)))
        self.send_header("Accept-Ranges", "bytes")
        if code == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end}/{total}")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data if body else b"")


def serve(folder: Path) -> str:
    """Serve ``folder`` on this machine; the URL."""
    handler = functools.partial(_Server, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


# -- cases ---------------------------------------------------------------------------------------


def commands(bad: str, random_: random.Random, runs: dict[str, Path], out: Path) -> list[str]:
    """One command on the damaged run."""
    sound = str(random_.choice([path for name, path in runs.items()]))
    pair = random_.choice([[sound, bad], [bad, sound], [str(runs.get("full", sound)), bad]])
    return random_.choice(
        [
            ["inspect", bad],
            ["inspect", bad, "-v"],
            ["inspect", bad, "--verify", "--json"],
            ["inspect", bad, "--site", "*"],
            ["compare", *pair, "--all", "-v"],
            ["compare", *pair, "--force"],
            ["compare", *pair, "--force", "--json"],
            ["compare", *pair],
            ["compare", bad],
            ["compare", bad, bad],
            ["check", *pair],
            ["compare", *pair, sound, "--force"],
            ["compare", sound, sound, "--truth", bad],
            ["compare", *pair, "--floor", bad, "--force"],
            ["pack", bad, "-o", f"{out}/p.tar"],
            ["unpack", bad, "-o", f"{out}/u"],
            ["compare", *pair, "--force", "--csv", "-"],
            ["check", *pair, "--bless"],
            ["replay", bad, "-o", f"{out}/r"],
            ["compare", *pair, "--truth", str(runs.get("truth", sound))],
            ["repro", bad, "--site", "model.layers.0.mlp/aten.mul:out", "-o", f"{out}/x"],
            ["localize", *pair, "-o", f"{out}/l"],
            ["capture", "--like", bad, "--dry-run"],
        ]
    )


@dataclass(frozen=True)
class Sources:
    """What is damaged. ``model``: of the tiny runs."""

    runs: dict[str, Path]
    forms: dict[str, Path] = field(default_factory=dict)
    model: Path | None = None


def run_case(
    number: int, sources: Sources, folder: Path, url: str | None
) -> tuple[int, str | None]:
    """(exit code, what is wrong with it or None) of one case."""
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "out"
    work.mkdir(parents=True)
    if sources.forms and (number % 2 or not sources.runs):
        arguments = _fuzz_forms.form_arguments(number, sources.forms, folder, sources.model)
    else:
        arguments = _run_arguments(number, sources.runs, folder, url)
    code, text = call(arguments)
    silent = "-v" in arguments or "Traceback" not in text  # -v shows where an error was raised
    if code in (0, 1, 2) and silent and _is_harmless(text):
        return code, None
    if code == 3 and "-v" not in arguments:
        text = call([*arguments, "-v"])[1]
    return code, f"exit code {code}: divergence {' '.join(arguments)}\n{text[-3000:]}"


def _run_arguments(number: int, runs: dict[str, Path], folder: Path, url: str | None) -> list[str]:
    """A damaged run in ``folder``, and one command on it."""
    random_ = random.Random(number)
    source = runs[random_.choice(list(runs))]
    place = folder / "bad"
    shutil.copytree(source, place)
    damage(place, random_)
    how = random_.random()
    if how < 0.2:
        place = packed(place, random_)
    bad = str(place)
    if url is not None and 0.15 < how < 0.3:
        bad = f"{url}/{place.name}"
    arguments = commands(bad, random_, runs, folder / "out")
    if "--bless" in arguments:  # it writes to the golden
        arguments[1:3] = [str(shutil.copytree(source, folder / "golden")), bad]
    return arguments


def call(arguments: list[str]) -> tuple[int, str]:
    """(exit code, all it printed) of one command, in this process."""
    from divergence.cli.main import app

    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    streams = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = text = io.StringIO()
    try:
        app(arguments, prog_name="divergence")
        code: Any = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        code = f"an exception: {traceback.format_exc()[-3000:]}"
    finally:
        sys.stdout, sys.stderr = streams
    return code, text.getvalue()


def _is_harmless(text: str) -> bool:
    return all(
        line.isprintable() or line.replace("\u3000", "").isprintable() for line in text.split("\n")
    )


@dataclass
class Results:
    """What became of cases. ``longest`` and ``largest``: seconds, or bytes beyond the imports, and
    the case."""

    codes: collections.Counter[Any] = field(default_factory=collections.Counter)
    wrong: dict[int, str] = field(default_factory=dict)
    longest: tuple[float, int] = (0.0, -1)
    largest: tuple[int, int] = (0, -1)

    def add(self, number: int, code: Any, problem: str | None, seconds: float, size: int) -> None:
        """Counts a case that came to an end."""
        self.codes[code] += 1
        self.longest = max(self.longest, (seconds, number))
        self.largest = max(self.largest, (size, number))
        if problem is not None:
            self.wrong[number] = problem


def run_many(
    first: int, sources: Sources, folder: Path, *, until: float, count: int | None = None
) -> Results:
    """Cases from ``first`` on until that moment, or ``count`` of them. They run in processes of
    their own, which a case may end or hold up."""
    results = Results()
    number = first
    end = sys.maxsize if count is None else first + count
    while number < end and time.monotonic() < until:
        number = _batch(number, min(end, number + _A_BATCH), sources, folder, until, results)
    return results


def _batch(
    number: int, end: int, sources: Sources, folder: Path, until: float, results: Results
) -> int:
    """The number behind the last case that was run."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        _work(number, end, sources, folder, writes, until)
    os.close(writes)
    with open(reads, "rb", buffering=0) as pipe:
        rest, begun, waits = b"", 0.0, 0
        while True:
            ready, _, _ = select.select([pipe], [], [], LIMIT_S)
            if not ready and _seconds_of(child) < begun + LIMIT_S and waits < _MOST_WAITS:
                waits += 1  # the machine is busy with other things
                continue
            if not ready:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                results.add(number, "no", f"no answer within {LIMIT_S} s", LIMIT_S, 0)
                return number + 1
            data = pipe.read(1 << 16)
            if not data:
                break
            begun, waits = _seconds_of(child), 0
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                results.add(*json.loads(line))
                number = json.loads(line)[0] + 1
    _, status = os.waitpid(child, 0)
    if status:
        problem = f"ended with status {status} (signal {status & 127})"
        results.add(number, "no", problem, 0.0, 0)
        return number + 1
    return number


def _seconds_of(child: int) -> float:
    """What a process used of the processors."""
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work(first: int, end: int, sources: Sources, folder: Path, writes: int, until: float) -> None:
    """The child: cases one after the other, each told when it is done."""
    size = _memory("VmRSS")
    address = _memory("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (address + LIMIT_BYTES, resource.RLIM_INFINITY))
    url = serve(folder) if sources.runs else None
    for number in range(first, end):
        if time.monotonic() > until:
            break
        start = time.monotonic()
        try:
            code, problem = run_case(number, sources, folder, url)
        except BaseException:
            code, problem = 3, f"the fuzz itself: {traceback.format_exc()}"
        case = [number, code, problem, time.monotonic() - start, _memory("VmHWM") - size]
        os.write(writes, json.dumps(case).encode() + b"\n")
    os._exit(0)


def _memory(key: str) -> int:
    """A number of bytes of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{key}:")[2].split()[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="this case alone")
    parser.add_argument("--only", choices=["runs", "forms"])
    parser.add_argument("--keep", type=Path, help="where the last case's files stay")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="divergence-fuzz-") as temporary:
        folder = Path(temporary)
        runs = build_runs(folder)
        forms = {} if options.only == "runs" else _fuzz_forms.build_forms(folder / "forms")
        sources = Sources({} if options.only == "forms" else runs, forms, folder / "model")
        first = options.seed if options.case is None else options.case
        start = time.monotonic()
        results = run_many(
            first,
            sources,
            options.keep or folder / "case",
            until=start + options.seconds,
            count=None if options.case is None else 1,
        )
        seconds = time.monotonic() - start
    wrong = results.wrong
    for number, problem in wrong.items():
        print(f"case {number}: {problem}\n")
    kinds = collections.Counter(problem.strip().rpartition("\n")[2] for problem in wrong.values())
    codes = sorted(results.codes.items(), key=str)
    print(
        f"{results.codes.total()} cases from {first} on in {seconds:.0f} s "
        f"({', '.join(f'{count} with {code}' for code, count in codes)}), {len(wrong)} wrong; "
        f"the longest took {results.longest[0]:.1f} s (case {results.longest[1]}), the largest "
        f"{results.largest[0] / 2**20:.0f} MiB (case {results.largest[1]})"
    )
    for text, count in kinds.most_common():
        print(f"{count:6}  {text[:150]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
