"""Do two versions of divergence say the same about the same runs?

    python benchmarks/same_answers.py --old REVISION [--work DIR]

For whoever changes the house and not its answers. The old version (a revision of this repository,
in a work tree of its own) makes some forty pairs of runs: three architectures in two dtypes on two
machines (this CPU under two sets of switches), healthy and planted, anchored and free, with a truth
and without, operators, a suite, the probe, ranks, every way to store, and runs that cannot be
compared. Then both versions answer the same questions, and the answers' JSON must be equal, numbers
to 1e-12, but for keys and words that were renamed on purpose: RENAMED_KEYS, RENAMED_WORDS.

Exits with 1 where an answer differs, and prints where.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]

RENAMED_KEYS: dict[str, str] = {
    "strain": "limit_usage", "share": "limit_usage", "largest_share": "largest_limit_usage",
    "camps": "groups",
}  # fmt: skip
"""Old name of a key of the report to the new one."""
ADDED_KEYS = frozenset({"findings", "checks"})
"""Keys that the old version has not, or leaves empty."""
RENAMED_WORDS: tuple[tuple[str, str], ...] = (
    (r"--reference\b", "--truth"),
    (r"\bdivergence reference\b", "divergence truth"),
    (r"\bfloat64 reference\b", "float64 truth"),
)
"""(pattern, replacement) for texts of the old answers: words and options of commands."""
UNORDERED = frozenset({"notes"})
"""Keys of lists whose order says nothing."""
NOT_OF_PROBES = frozenset({"flagged", "usage"})
"""Keys that the old version filled for the sites of probes, which have no limit."""
VOLATILE = frozenset({"tool_version", "seconds", "created", "schema_version"})

ARCHITECTURES = ("llama", "gpt2", "qwen3-moe")
DTYPES = ("float32", "bfloat16")
PROMPTS = ("A bridge is built twice:", "Once on paper, where every beam is exact.")
OLDEST = {
    "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE",
}  # fmt: skip
BLOCKS = {"llama": "model.layers.1", "gpt2": "transformer.h.1", "qwen3-moe": "model.layers.1"}


class Machine:
    """A process of one version that runs command lines; an answer is (exit code, stdout)."""

    def __init__(self, source: Path, folder: Path, switches: dict[str, str]) -> None:
        self.folder = folder
        env = {k: v for k, v in os.environ.items() if not k.startswith("DIVERGENCE_")}
        env |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                "NO_COLOR": "1", "COLUMNS": "200"} | switches  # fmt: skip
        self.env = env
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).resolve(), "--serve"], cwd=folder, env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, *words: object) -> tuple[int, str]:
        self._process.stdin.write(json.dumps([str(word) for word in words]) + "\n")
        self._process.stdin.flush()
        code, out = json.loads(self._process.stdout.readline())
        return code, out

    def must(self, *words: object) -> None:
        code, out = self.run(*words)
        if code:
            raise SystemExit(f"divergence {' '.join(map(str, words))}: exit {code}\n{out}")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def serve() -> None:
    """Command lines in, answers out; ``build ARCHITECTURE FOLDER DTYPE`` makes a model."""
    from divergence.cli.main import app

    for line in sys.stdin:
        words, out, code = json.loads(line), io.StringIO(), 0
        with contextlib.redirect_stdout(out):
            if words[0] == "build":
                _tiny().build(words[1], Path(words[2]), dtype=words[3])
            else:
                try:
                    app(words, prog_name="divergence")
                except SystemExit as ended:
                    code = ended.code or 0
        sys.__stdout__.write(json.dumps([code, out.getvalue()]) + "\n")
        sys.__stdout__.flush()


def _tiny() -> ModuleType:
    """The small models, wherever this version has them."""
    for name in (
        "divergence.recording.engines.tiny", "divergence.capture.engines.tiny", "tests.models.tiny",
    ):  # fmt: skip
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(name)
            if hasattr(module, "ARCHITECTURES"):  # else it has the demo's alone
                return module
    raise SystemExit("this version has no small models where others had them")


def questions(a: Machine, c: Machine, truth: tuple[str, str]) -> Iterator[tuple[str, list]]:
    """Make runs; yield (name, command) of what is to be asked of them. ``truth``: the command that
    makes the float64 run, and the option that takes it."""
    make, option = truth
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    new = [*prompts, "--max-new-tokens", 4, "--no-probe", "-q"]
    again = ["--no-probe", "-q"]
    for architecture in ARCHITECTURES:
        for dtype in DTYPES:
            name = f"{architecture}-{dtype}"
            block = BLOCKS[architecture]
            a.must("build", architecture, f"model-{name}", dtype)
            a.must("capture", f"model-{name}", "-o", f"a-{name}", *new)
            a.must(make, f"a-{name}", "-o", f"t-{name}", "-q")
            c.must("capture", "--like", f"a-{name}", "-o", f"healthy-{name}", *again,
                   "--attn-implementation", "sdpa", "--escalate")  # fmt: skip
            c.must("capture", f"model-{name}", "-o", f"free-{name}", *new)
            yield f"healthy {name}", ["compare", f"a-{name}", f"healthy-{name}"]
            yield f"healthy {name}, truth", [
                "compare", f"a-{name}", f"healthy-{name}", option, f"t-{name}",
            ]  # fmt: skip
            yield f"free {name}", ["compare", f"a-{name}", f"free-{name}"]
            for fault in ("scale:1.2", "noise:0.3@sample=1"):
                plant = f"{block}.mlp:out={fault}" if architecture != "gpt2" else (
                    f"{block}.mlp.c_proj:out={fault}")  # fmt: skip
                run = f"planted-{name}-{fault.partition(':')[0]}"
                c.must("capture", "--like", f"a-{name}", "-o", run, *again, "--plant", plant)
                yield f"{fault} in {name}", ["compare", f"a-{name}", run, option, f"t-{name}"]
                yield f"{fault} in {name}, no truth", ["compare", f"a-{name}", run]
    yield "the same run", ["compare", "a-llama-float32", "a-llama-float32"]
    yield "another model", ["compare", "a-llama-float32", "a-gpt2-float32"]
    yield "a gate", ["check", "a-llama-float32", "planted-llama-float32-scale"]
    yield "a gate that passes", ["check", "a-llama-float32", "healthy-llama-float32"]
    yield "three runs", [
        "compare", "a-llama-float32", "healthy-llama-float32", "planted-llama-float32-scale",
    ]  # fmt: skip
    yield from _units(a, c, make, option, new, again)


def _units(
    a: Machine, c: Machine, make: str, option: str, new: list, again: list
) -> Iterator[tuple[str, list]]:
    """Operators, the suite, the probe, ways to store, batches, whole passes."""
    model = "model-llama-bfloat16"
    a.must("capture", "model-llama-float32", "-o", "ops-a", *new, "--sites", "ops@model.layers.1")
    a.must(make, "ops-a", "-o", "ops-t", "-q")
    for name, more in {
        "ops-b": [], "ops-planted": ["--plant", "model.layers.1.mlp.act_fn:out=scale:1.1"],
    }.items():  # fmt: skip
        c.must("capture", "--like", "ops-a", "-o", name, *again, *more)
        yield name, ["compare", "ops-a", name, option, "ops-t"]
        yield f"{name}, no truth", ["compare", "ops-a", name]
    for mode in ("sketch", "stats", "hash"):
        a.must("capture", model, "-o", f"{mode}-a", *new, "--store", mode)
        c.must("capture", "--like", f"{mode}-a", "-o", f"{mode}-b", *again)
        yield mode, ["compare", f"{mode}-a", f"{mode}-b"]
        c.must("capture", "--like", f"{mode}-a", "-o", f"{mode}-c", *again,
               "--plant", "model.layers.1:out=scale:1.3")  # fmt: skip
        yield f"{mode}, planted", ["compare", f"{mode}-a", f"{mode}-c"]
    a.must("capture", model, "-o", "batch-a", *new, "--batch", "--whole")
    c.must("capture", "--like", "batch-a", "-o", "batch-b", *again)
    yield "a batch", ["compare", "batch-a", "batch-b"]
    yield "a whole pass", ["compare", "batch-a"]
    c.must("capture", "--like", "a-llama-bfloat16", "-o", "nan", *again,
           "--plant", "model.layers.1.mlp:out=nan:3")  # fmt: skip
    yield "a nan", ["compare", "a-llama-bfloat16", "nan"]
    a.must("capture", "suite:quick", "-o", "suite-a", "-q")
    a.must(make, "suite-a", "-o", "suite-t", "-q")
    c.must("capture", "--like", "suite-a", "-o", "suite-b", "-q")
    yield "a suite", ["compare", "suite-a", "suite-b", option, "suite-t"]
    a.must("probe", "--quick", "-o", "probe-a", "-q")
    c.must("probe", "--quick", "-o", "probe-c", "-q")
    yield "the probe", ["compare", "probe-a", "probe-c"]
    _with_ranks(a)
    yield "ranks", ["compare", "a-llama-float32", "ranks"]


def _with_ranks(a: Machine) -> None:
    """A run of two processes, by tensor parallelism."""
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "divergence", "capture", "--like", "a-llama-float32", "-o", "ranks", "--mesh", "tp",
         "--no-probe", "-q"],
        cwd=a.folder, env=a.env, check=True, capture_output=True,
    )  # fmt: skip


def normal(value: object, *, old: bool) -> object:
    """An answer without what differs from one call to the next; of an old one with new names."""
    if isinstance(value, dict):
        names = RENAMED_KEYS if old else {}
        return {
            names.get(key, key): sorted(normal(one, old=old))
            if key in UNORDERED and isinstance(one, list)
            else normal(one, old=old)
            for key, one in value.items() if key not in VOLATILE
        }  # fmt: skip
    if isinstance(value, list):
        return [normal(one, old=old) for one in value]
    if isinstance(value, str) and old:
        for pattern, new in RENAMED_WORDS:
            value = re.sub(pattern, new, value)
    return value


def differences(one: object, two: object, where: str = "") -> Iterator[str]:
    """One line for each place where two answers differ."""
    if isinstance(one, dict) and isinstance(two, dict):
        for key in dict.fromkeys([*one, *two]):
            if key in ADDED_KEYS and not one.get(key):
                continue
            if key not in one or key not in two:
                yield f"{where}.{key}: in the {'new' if key in two else 'old'} one alone"
            else:
                yield from differences(one[key], two[key], f"{where}.{key}")
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for number, pair in enumerate(zip(one, two, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif not _same(one, two):
        yield f"{where}: {str(one)[:150]!r} / {str(two)[:150]!r}"


def _same(one: object, two: object) -> bool:
    """Numbers to 1e-12, or 1e-18 where a sum cancels; all else as it is."""
    if isinstance(one, float) and isinstance(two, float):
        return one == two or math.isclose(one, two, rel_tol=1e-12, abs_tol=1e-18)
    return one == two


def answer(machine: Machine, command: list, *, old: bool) -> object:
    code, out = machine.run(*command, "--json")
    try:
        return [code, normal(json.loads(out), old=old)]
    except ValueError:
        return [code, out]


def _short(said: object) -> str:
    """The old version's exit code and verdict."""
    code, report = said
    if not isinstance(report, dict):
        return f"exit {code}"
    verdict = report.get("verdict") or report.get("report", {}).get("verdict") or {}
    return f"exit {code}, {verdict.get('kind')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", default="HEAD", help="a revision")
    parser.add_argument("--work", type=Path, help="keep the runs there")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary, "runs")
        folder.mkdir(parents=True, exist_ok=True)
        source = Path(temporary, "old")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", source, options.old], check=True,
                       capture_output=True)  # fmt: skip
        machines = [Machine(source, folder, {}), Machine(source, folder, OLDEST)]
        new = Machine(ROOT, folder, {})
        try:
            asked, different = ask(machines[0], machines[1], new)
        finally:
            for machine in (*machines, new):
                machine.close()
            subprocess.run([*git, "remove", "--force", source], check=False, capture_output=True)
    print(f"{asked} questions, {different} answers differ")
    raise SystemExit(bool(different))


def ask(a: Machine, c: Machine, new: Machine) -> tuple[int, int]:
    """(questions, answers that differ)."""
    asked = different = 0
    truth, now = (
        ("truth", "--truth")
        if machine.run("truth", "--help")[0] == 0
        else ("reference", "--reference")
        for machine in (a, new)
    )
    for name, command in questions(a, c, truth):
        asked += 1
        renewed = [now[truth.index(word)] if word in truth else word for word in command]
        one, two = answer(a, command, old=True), answer(new, renewed, old=False)
        told = list(differences(one, two))
        if name == "the probe":
            told = [
                at for at in told if at.partition(":")[0].rpartition(".")[2] not in NOT_OF_PROBES
            ]
        different += bool(told)
        print(f"{'differs' if told else 'same'}: {name}: {_short(one)}", flush=True)
        for line in told[:10]:
            print(f"    {line}")
    return asked, different


if __name__ == "__main__":
    main()
