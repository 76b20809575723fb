"""Do two versions of divergence say the same, on every face, about the same runs?

    python benchmarks/same_answers.py --old REVISION [--new REVISION | DIR] [--work DIR]
                                      [--only PATTERN]

For whoever changes the house and not its answers. `_questions.py` has the table: command lines of
every command and calls of the API, with the faces that are asked of each: the text of a terminal,
JSON, the page, Markdown, what CI reads. Both versions answer, and the answers must be equal: exit
code, stdout, stderr and all files that were written; a page by its visible text, a run by its
manifest and records. Numbers of JSON are equal to 1e-12. What differs from one minute to the next
(VOLATILE, SUBSTITUTIONS) is taken out.

The old version makes the runs that are asked about, each when a question first needs it. Runs and
the old version's answers are kept in the work folder by revision: a second question costs the new
side alone, which by default is the work tree. Nothing is imported of either version but
`divergence.cli.main.app` and the public API; models and fixtures are those of the old version.

Each question is answered in a process of its own, forked from a server in which the version is
loaded, so that the order of questions does not matter. Two are asked at a time.

Exits with 1 where an answer differs, and prints the difference.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import difflib
import fcntl
import functools
import hashlib
import importlib
import inspect
import io
import itertools
import json
import math
import os
import queue
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import _questions
from _questions import FACES, INPUTS, QUESTIONS, STUBS

ROOT = Path(__file__).resolve().parents[1]

ADDED_KEYS: frozenset[str] = frozenset()
"""Keys of JSON that the new version may have where the old one has none."""
CHANGED_KEYS: frozenset[str] = frozenset()
"""Keys of JSON whose values are others by intention."""
VOLATILE = re.compile(
    r"\.(tool_version|seconds|created|schema_version)$"
    r"|\.(num_shards|record_digests)$"  # a slow capture begins another shard
    r"|records\.jsonl\[\d+\]\.place$"  # the same; what is stored there has its own digest
    r"|manifest(\.json)?\.digest$"  # over the date and the run's id too
)
"""Places in JSON whose values differ from one call to the next."""
SUBSTITUTIONS: tuple[tuple[str, str], ...] = (
    (r"\bout-\d\b", "out"),
    (r"(run |::stop-commands::|::)[0-9a-f]{32}\b", r"\1ID"),
    (r"[^\s'\"(]*/[0-9a-f]{12}/runs\b", "RUNS"),
    (r"\bin \d+ shards?\b", "in SHARDS"),
    (r"127\.0\.0\.1:\d+", "HOST"),
    (r"\b\d+(\.\d+)?( of at most \d+(\.\d+)?)? ?(s|ms|seconds)\b", "SECONDS"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|\+00:00| UTC)?", "DATE"),
)
"""(pattern, replacement) in all texts."""
PARTS = (
    "divergence",
    "tests/models",
    "tests/fixtures",
    "tests/endpoints",
    "tests/domains",
)
"""What of a revision makes runs and answers: where these are the same, so are the answers. One may
have been moved."""
SWITCHES = {
    "a": {},
    "c": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
    },
}
"""Two machines of this CPU: a is as it is, c has the oldest kernels."""
SHOWN = 24
"""Lines of a difference that are printed."""

Values = list[tuple[str, object]]
"""An answer, flat: (place, value) in the order of the answer."""


# ── the side that answers ───────────────────────────────────────────────────────────────────────


class Server:
    """A process in which one version is loaded; it forks a child for each request."""

    def __init__(self, source: Path, folder: Path, switches: dict[str, str], name: str) -> None:
        self.out = f"out-{name}"
        env = {key: value for key, value in os.environ.items() if not key.startswith("DIVERGENCE_")}
        env |= {
            "PYTHONPATH": str(source),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_COLOR": "1",
            "COLUMNS": "100",
            "PYTHONUTF8": "1",
            "PYTHONHASHSEED": "0",
            "GITHUB_STEP_SUMMARY": f"{self.out}/summary.md",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            cwd=folder,
            env=env | switches,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, kind: str, text: str, printed: Path, folder: Path = Path()) -> int:
        """The exit code; ``printed``.out and .err are what was written. ``folder``: where."""
        self._process.stdin.write(json.dumps([kind, text, str(printed), str(folder)]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the server ended at {text!r}; its last words stand above")
        return int(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def serve() -> None:
    """Requests in, exit codes out."""
    for name in (
        "torch",
        "numpy",
        "safetensors.torch",
        "rich.console",
        "onnxruntime",
        "textual.app",
        "transformers.models.llama.modeling_llama",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    package = Path(importlib.import_module("divergence").__file__).parent
    for path in sorted(package.rglob("*.py")):
        if path.stem != "__main__":
            parts = path.relative_to(package.parent).with_suffix("").parts
            with contextlib.suppress(ImportError):
                importlib.import_module(".".join(parts).removesuffix(".__init__"))
    for line in sys.stdin:
        kind, text, printed, folder = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            os._exit(_answer(kind, text, printed))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


def _answer(kind: str, text: str, printed: str) -> int:
    """The child: answers one question with its outputs in files."""
    streams = (os.devnull, f"{printed}.out", f"{printed}.err")
    for number, path in enumerate(streams):
        mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY
        os.dup2(os.open(path, mode), number)
    try:
        ACTIONS[kind](text)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        if kind == "make":
            traceback.print_exc()
        print(f"raised {type(error).__name__}: {error}", file=sys.stderr)
        for name in ("where", "hint"):
            print(f"{name}: {getattr(error, name, None)}", file=sys.stderr)
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _command(text: str) -> None:
    from divergence.cli.main import app

    app(shlex.split(text), prog_name="divergence")


def _call(text: str) -> None:
    """A call of the API, its answer as JSON."""
    import divergence

    answer = eval(text, {name: getattr(divergence, name) for name in divergence.__all__})
    print(json.dumps(_plain(answer)))


def _plain(value: object) -> object:
    """A typed object as JSON has it."""
    import msgspec

    def unknown(other: object) -> object:
        if isinstance(manifest := getattr(other, "manifest", None), msgspec.Struct):
            return {"manifest": manifest}
        return (
            {name: item for name, item in vars(other).items() if name.isidentifier()}
            if hasattr(other, "__dict__")
            else repr(other)
        )

    return msgspec.to_builtins(value, enc_hook=unknown, str_keys=True)


def _view(text: str) -> None:
    """The browser's screens, without a terminal: the first, and those behind some keys."""
    import asyncio

    from textual.app import App

    async def look(app: App) -> None:
        async with app.run_test(size=(140, 40)) as pilot:
            for keys in (None, "enter", "enter", "escape,escape,p", "s", "r", "question_mark"):
                await pilot.press(*(keys or "").split(",") if keys else ())
                await pilot.pause()
                print(f"── {keys or 'first'}")
                svg = app.export_screenshot()
                rows: dict[str, str] = {}
                for row, words in re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>([^<]*)</text>', svg):
                    rows[row] = rows.get(row, "") + words
                print("\n".join(words.replace("&#160;", " ").rstrip() for words in rows.values()))

    App.run = lambda self, *_, **__: asyncio.run(look(self))
    sys.stdin.isatty = sys.stdout.isatty = lambda: True
    _command(text)


def _make(text: str) -> None:
    """Python that makes an input, with the functions of _questions.py."""
    exec(text, vars(_questions))


ACTIONS: dict[str, Callable[[str], None]] = {
    "command": _command,
    "call": _call,
    "view": _view,
    "make": _make,
}


@contextlib.contextmanager
def stubs(source: Path) -> Iterator[dict[str, str]]:
    """Addresses of the servers of STUBS, which the old version's tests have."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--stubs"],
        env=os.environ | {"PYTHONPATH": str(source)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.communicate(timeout=60)


def serve_stubs() -> None:
    """The servers of STUBS, until stdin ends; their addresses go to stdout."""
    import threading
    from http.server import ThreadingHTTPServer

    from tests.domains.logprobs.endpoints import conftest

    addresses = {}
    for name, behaviour in STUBS.items():
        server = ThreadingHTTPServer(("127.0.0.1", 0), conftest._Handler)
        server.daemon_threads = True
        server.stub = conftest.Stub()
        vars(server.stub).update(behaviour)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        addresses[name] = f"http://127.0.0.1:{server.server_address[1]}"
    print(json.dumps(addresses), flush=True)
    sys.stdin.read()


# ── what a version is asked, and what is kept of it ─────────────────────────────────────────────


class Side:
    """One version's servers: two of each machine, started when they are needed."""

    def __init__(self, source: Path, folder: Path, addresses: dict[str, str]) -> None:
        self.source, self.folder, self.addresses = source, folder, addresses
        self._started: list[Server] = []
        self._idle: dict[str, queue.LifoQueue[Server | str]] = {}
        names = iter("0123")
        for machine in SWITCHES:
            self._idle[machine] = queue.LifoQueue()
            for name in (next(names), next(names)):
                self._idle[machine].put(name)

    @contextlib.contextmanager
    def server(self, machine: str) -> Iterator[Server]:
        """A server that nobody else asks meanwhile."""
        server = self._idle[machine].get()
        if isinstance(server, str):
            server = Server(self.source, self.folder, SWITCHES[machine], server)
            self._started.append(server)
        try:
            yield server
        finally:
            self._idle[machine].put(server)

    def filled(self, text: str) -> str:
        """``text`` with the addresses of servers in the place of their names."""
        for name, address in self.addresses.items():
            text = re.sub(rf"\b{name}\b", address, text)
        return text

    def make(self, name: str) -> str:
        """An input, unless it is there and its recipe is the same; what went wrong."""
        mark = self.folder / ".made" / name
        if mark.exists() and mark.read_text() == key_of(name):
            return ""
        path = self.folder / name
        mark.unlink(missing_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        machine, recipe = INPUTS[name]
        log = self.folder / ".log" / name
        with self.server(machine if machine in SWITCHES else "a") as server:
            kind = "make" if machine == "make" else "command"
            out = "" if kind == "make" or " -o " in recipe else f" -o {name}"
            code = server.ask(kind, self.filled(recipe) + out, log)
        if code or not path.exists():
            return f"{name}: {recipe}: exit {code}\n{Path(f'{log}.err').read_text()}"
        mark.write_text(key_of(name))
        return ""

    def answer(self, question: str, face: str) -> dict:
        """Exit code, what was printed, and the texts of all files that were written."""
        with self.server("a") as server:
            out = self.folder / server.out
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            kind = {"api": "call", "view": "view"}.get(face, "command")
            text = question if kind == "call" else f"{question} {FACES[face]}"
            text = re.sub(r"\bOUT\b", server.out, self.filled(text))
            printed = self.folder / ".log" / server.out
            begun = time.perf_counter()
            code = server.ask(kind, text, printed)
            seconds = time.perf_counter() - begun
            texts = {
                name: Path(f"{printed}.{name[3:]}").read_text(errors="replace")
                for name in ("stdout", "stderr")
            }
            return {"code": code, "seconds": seconds, **texts, "files": dict(texts_of(out))}

    def close(self) -> None:
        for server in self._started:
            server.close()


def texts_of(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of files in a folder; archives are looked into, tensors are named alone."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield from _texts(path.relative_to(folder).as_posix(), path.read_bytes())


def _texts(name: str, data: bytes) -> Iterator[tuple[str, str]]:
    suffix = name.rpartition(".")[2]
    if suffix == "zip":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.namelist():
                yield from _texts(f"{name}/{member}", archive.read(member))
    elif suffix == "tar":
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                if member.isfile():
                    yield from _texts(f"{name}/{member.name}", archive.extractfile(member).read())
    elif suffix in ("safetensors", "png", "onnx"):
        yield name, ""
    else:
        yield name, data.decode(errors="replace")


def needs(name: str, recipe: str) -> list[str]:
    """Inputs that a recipe or a question names."""
    words = dict.fromkeys(re.findall(r"[\w.-]+", recipe))
    return [word for word in words if word in INPUTS and word != name]


@functools.cache
def key_of(name: str) -> str:
    """A digest of an input's recipe and of all that it is made of."""
    machine, recipe = INPUTS[name]
    maker = getattr(_questions, recipe.partition("(")[0]) if machine == "make" else None
    source = "" if maker is None else inspect.getsource(maker)
    return digest(machine, recipe, source, *map(key_of, needs(name, recipe)))


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


def order(names: list[str]) -> list[list[str]]:
    """Inputs and what they are made of, in levels: each needs those of earlier levels alone."""
    level: dict[str, int] = {}

    def visit(name: str) -> int:
        if name not in level:
            level[name] = 1 + max(map(visit, needs(name, INPUTS[name][1])), default=-1)
        return level[name]

    for name in names:
        visit(name)
    return [
        [name for name in level if level[name] == number]
        for number in range(max(level.values(), default=-1) + 1)
    ]


# ── when two answers are the same ───────────────────────────────────────────────────────────────


class _Visible(HTMLParser):
    """The text of a page, a line for each row of a table and each block of text."""

    HIDDEN = ("script", "style")
    INLINE = frozenset(
        {
            "a",
            "abbr",
            "b",
            "br",
            "code",
            "em",
            "i",
            "kbd",
            "small",
            "span",
            "strong",
            "sub",
            "sup",
            "td",
            "th",
            "title",
            "tspan",
            "var",
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = [""]
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in self.HIDDEN
        if tag not in self.INLINE:
            self.lines.append("")
        elif tag in ("td", "th"):
            self.lines[-1] += " | "

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in self.HIDDEN
        if tag not in self.INLINE:
            self.lines.append("")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.lines[-1] += data


def visible(page: str) -> list[str]:
    parser = _Visible()
    parser.feed(page)
    return [line for line in (" ".join(line.split()) for line in parser.lines) if line]


def flat(place: str, value: object) -> Iterator[tuple[str, object]]:
    """The leaves of a JSON value with their places."""
    if isinstance(value, dict) and value:
        for key, item in sorted(value.items()):
            if key not in CHANGED_KEYS and not VOLATILE.search(f"{place}.{key}"):
                yield from flat(f"{place}.{key}", item)
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield from flat(f"{place}[{number}]", item)
    else:
        yield place, normal(value) if isinstance(value, str) else value


def normal(text: str) -> str:
    for pattern, replacement in SUBSTITUTIONS:
        text = re.sub(pattern, replacement, text)
    return text


def values_of(answer: dict) -> Values:
    """An answer as places and values, without what differs from one call to the next."""
    values: Values = [("exit", answer["code"])]
    texts = {"stdout": answer["stdout"], "stderr": answer["stderr"], **answer["files"]}
    ids = re.findall(r'"id": ?"([0-9a-f]{32})"', "\n".join(texts.values()))
    names = {drawn: f"RUN-{number}" for number, drawn in enumerate(dict.fromkeys(ids))}
    for name, text in texts.items():
        for drawn, run in names.items():
            text = text.replace(drawn, run)
        if re.search(r"tensors/[^/]+\.safetensors$", name):
            continue  # how many shards there are depends on the time; records have the digests
        name = normal(name)
        if text.lstrip()[:1] in ("{", "["):
            with contextlib.suppress(ValueError):
                values += flat(name, json.loads(text))
                continue
        if name.endswith(".jsonl"):
            for number, line in enumerate(text.splitlines()):
                values += flat(f"{name}[{number}]", json.loads(line))
        elif name.endswith((".html", ".svg")):
            values += [(name, normal(line)) for line in visible(text)]
        else:
            values += [(name, normal(line.rstrip())) for line in text.splitlines() if line.strip()]
            values += [(name, "")] if not text and name not in ("stdout", "stderr") else []
    return values


def difference(old: Values, new: Values) -> list[str]:
    """Lines of a unified diff; empty where the answers are equal. Numbers of one place are equal
    to 1e-12, or 1e-18 where a sum cancels."""
    numbers = {place: value for place, value in old if isinstance(value, float)}
    places = {place for place, _ in old}
    renewed: Values = []
    for place, value in new:
        if place not in places and ADDED_KEYS.intersection(re.split(r"[.\[\]]+", place)):
            continue
        known = numbers.get(place)
        if (
            known is not None
            and isinstance(value, float)
            and math.isclose(known, value, rel_tol=1e-12, abs_tol=1e-18)
        ):
            value = known
        renewed.append((place, value))
    lines = [
        [
            re.sub(r"\[\d+\]", "[]", place)
            + f": {value if isinstance(value, str) else repr(value)}"
            for place, value in values
        ]
        for values in (old, renewed)
    ]
    if lines[0] == lines[1]:
        return []
    return [
        line[:300]
        for line in difflib.unified_diff(*lines, lineterm="", n=1)
        if not line.startswith(("---", "+++"))
    ]


# ── the comparison ──────────────────────────────────────────────────────────────────────────────


def chosen(pattern: str) -> list[tuple[str, str]]:
    """(question, face), of those that the pattern is in."""
    return [
        (question, face)
        for question, faces in QUESTIONS
        for face in faces.split()
        if re.search(pattern, f"{question} | {face}")
    ]


def unpacked(revision: str, folder: Path) -> Path:
    """The tree of a revision."""
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        packed = subprocess.run(
            ["git", "-C", str(ROOT), "archive", revision], check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(part, filter="data")
        part.rename(folder)
    return folder


def compare(old: str, new: str | None, work: Path, pattern: str) -> int:
    """Ask both versions; print what differs; return how many answers do."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-tree", old, *PARTS],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"--old {old}: {done.stderr.strip().splitlines()[0]}")
    parts = done.stdout
    place = work.resolve() / digest(parts)[:12]
    folder = place / "runs"
    for path in (folder / ".made", folder / ".log", place / "answers"):
        path.mkdir(parents=True, exist_ok=True)
    source = unpacked(old, place / "source")
    if new is None or Path(new).is_dir():
        renewed = Path(new or ROOT).resolve()
    else:
        shutil.rmtree(place / "new", ignore_errors=True)
        renewed = unpacked(new, place / "new")
    asked = chosen(pattern)
    if not asked:
        raise SystemExit(f"--only {pattern}: no question has this in it (--table counts them)")
    with (
        (place / "lock").open("w") as lock,
        stubs(source) as addresses,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # another question in this folder ends first
        started = [time.perf_counter()]
        before, after = (Side(tree, folder, addresses) for tree in (source, renewed))
        try:
            names = list(dict.fromkeys(n for question, _ in asked for n in needs("", question)))
            wrong = [
                text for level in order(names) for text in pool.map(before.make, level) if text
            ]
            if wrong:
                raise SystemExit("\n".join(wrong))
            started.append(time.perf_counter())

            def kept(ask: tuple[str, str]) -> dict:
                """The old version's answer."""
                question, face = ask
                path = (
                    place
                    / "answers"
                    / digest(question, face, FACES[face], *map(key_of, needs("", question)))
                )
                if not path.exists():
                    part = path.with_suffix(".part")
                    part.write_text(json.dumps(before.answer(question, face)))
                    part.rename(path)
                return json.loads(path.read_text())

            answers = list(pool.map(kept, asked))
            started.append(time.perf_counter())
            before.close()
            different = 0
            for ask, one, two in zip(
                asked, answers, pool.map(lambda ask: after.answer(*ask), asked), strict=True
            ):
                lines = difference(values_of(one), values_of(two))
                different += bool(lines)
                if lines:
                    print(f"differs: {ask[0]} | {ask[1]}", flush=True)
                    print(*(f"    {line}" for line in lines[:SHOWN]), sep="\n")
                    if len(lines) > SHOWN:
                        print(f"    … {len(lines) - SHOWN} lines more")
            started.append(time.perf_counter())
        finally:
            before.close()
            after.close()
    spent = [end - begin for begin, end in itertools.pairwise(started)]
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(asked)} answers to {len({question for question, _ in asked})} questions, "
        f"{different} differ; seconds: {spent[0]:.0f} inputs, {spent[1]:.0f} old, "
        f"{spent[2]:.0f} new; {usage.ru_utime + usage.ru_stime:.0f} of the processor"
    )
    return different


def table() -> None:
    """Questions by command and face."""
    counts: dict[str, dict[str, int]] = {}
    for question, face in chosen(""):
        command = question.split()[0] if face != "api" else "(API)"
        row = counts.setdefault(command, {"questions": 0})
        row[face] = row.get(face, 0) + 1
    for question, faces in QUESTIONS:
        command = question.split()[0] if faces != "api" else "(API)"
        counts[command]["questions"] += 1
    titles = ["questions", *FACES]
    lines = [["command", *titles]]
    lines += [
        [name, *(str(row.get(title, "")) for title in titles)] for name, row in counts.items()
    ]
    sums = [sum(row.get(title, 0) for row in counts.values()) for title in titles]
    lines.append(["all", *map(str, sums)])
    for line in lines:
        print(f"{line[0]:<12}" + "".join(f"{count:>10}" for count in line[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", default="HEAD", help="a revision")
    parser.add_argument("--new", help="a revision or a folder; default: this work tree")
    parser.add_argument("--work", type=Path, help="keep runs and old answers there")
    parser.add_argument("--only", default="", help="questions that this expression is in")
    parser.add_argument("--table", action="store_true", help="count the questions, and end")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stubs", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    elif options.stubs:
        serve_stubs()
    elif options.table:
        table()
    else:
        with tempfile.TemporaryDirectory() as temporary:
            work = options.work or Path(temporary)
            raise SystemExit(bool(compare(options.old, options.new, work, options.only)))


if __name__ == "__main__":
    main()
