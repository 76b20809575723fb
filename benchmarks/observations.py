"""Recorded measurements and observations of every benchmark pair, for any change of the judge.

    python benchmarks/observations.py record [--seconds 3600] [--kinds ...] [--cases FOLDER]
                                             [--accelerator cuda] [--only EXPRESSION]
    python benchmarks/observations.py replay [--kinds ...]
    python benchmarks/observations.py judge [--kinds ...]
    python benchmarks/observations.py curve
    python benchmarks/observations.py figures
    python benchmarks/observations.py pack [--out benchmarks/observations] [--megabytes 18]

``record`` plants and captures what the benchmarks plant and capture (health.jsonl,
localization.jsonl, operator_localization.jsonl, trained.jsonl name the pairs; trust.py has its
cases; new are models with massive activations, Mamba with a whole pass and the trained model over
20 prompts), compares, and keeps for each pair, in --store (.cache/observations),

    STORE/answers/KIND.jsonl     what was planted, the benchmark's own row as it is now, and what
                                 was answered: with the truth that the benchmark gives, with the
                                 one that the run carries, and without any
    STORE/recordings/KIND/       what today's judge takes as input (benchmarks/_recorded.py)
    STORE/columns/KIND/          what another judge will want beside it (benchmarks/_observed.py)

With --accelerator, a device of torch repeats what the CPU ran in place of the other CPU: a store of
its own. It goes on where it stopped. Kinds take turns by the time that each has had, and the pairs
of a kind come shuffled, so that a part is a fair sample of all. ``replay`` asks today's judge
again, of what was kept alone, and prints which answers are not equal, and why. ``judge`` prints
what the answers of another judge are worth beside those that were recorded; ``curve`` the share of
faults that it finds by their size. ``figures`` holds the stored rows (of older code) against the
answers of now. ``pack`` writes what fits in git: of every fault and a third of the healthy pairs
the answers and the columns that have a line a pair of tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import lzma
import math
import os
import random
import re
import runpy
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("COLUMNS", "200")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import numpy as np
import torch

from benchmarks._pairs import KINDS, LATER, SHARES, Work, operator_key, stored, trial_key
from benchmarks._recorded import Answer, load
from benchmarks._taken import Line, Store, Taking, install, read_columns, write_columns
from divergence.comparison import api
from divergence.comparison.judge import limit_of
from divergence.comparison.result import Report

QUIET = ("identical", "within_floor")


class _Skipped(set[str]):
    """Keys that are there, and those in which ``only``, a regular expression, finds nothing."""

    def __init__(self, keys: set[str], only: str) -> None:
        super().__init__(keys)
        self._only = re.compile(only)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or not self._only.search(str(key))


def _expression(text: str) -> str:
    """``text``, where it is a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"no regular expression: {error}") from error
    return text


def record(
    store: Store,
    kinds: list[str],
    seconds: float,
    most: int,
    cases: Path | None,
    accelerator: str | None = None,
    only: str = "",
) -> None:
    """Goes on with all kinds, the one next that had the least of its share of the time."""
    start = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that runs are removed
    install()
    with tempfile.TemporaryDirectory() as folder:
        work = Work(store, Path(folder), cases, accelerator)
        pairs, spent, count = {}, Counter[str](), Counter[str]()
        for kind in kinds:
            lines = store.lines(kind)
            pairs[kind] = KINDS[kind](work, _Skipped({line.key for line in lines}, only))
            spent[kind] = sum(line.seconds for line in lines)
        while pairs and time.perf_counter() - start < seconds:
            kind = min(pairs, key=lambda kind: LATER.get(kind, 0.0) + spent[kind] / SHARES[kind])
            began, used = time.perf_counter(), work.processor_seconds()
            try:
                next(pairs[kind])
            except StopIteration:
                del pairs[kind]
                continue
            except Exception as error:  # what pairs of this kind share could not be made
                print(f"{kind}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                del pairs[kind]
                continue
            wall, used = time.perf_counter() - began, work.processor_seconds() - used
            spent[kind] += wall
            count[kind] += 1
            print(
                f"{kind} {count[kind]}: {wall:.1f} s, {used:.1f} s of processor",
                file=sys.stderr,
                flush=True,
            )
            if count[kind] >= most:
                del pairs[kind]
        work.close()


def record_case(store: Store, program: Path) -> None:
    """Runs a program; what it and its children compare is written at once."""
    import divergence
    from benchmarks._trained import checkpoint

    store = Store(store.path.resolve())
    with tempfile.NamedTemporaryFile("a") as counter:  # it counts for all its children

        def compare(*args: Any, **options: Any) -> Report:
            counter.write("x")
            counter.flush()
            key = f"{program.stem} {Path(counter.name).stat().st_size}"
            taking = Taking(store, "cases", key, {"program": program.name})
            try:
                return taking.compare(*args, **options)
            finally:
                taking.finish(None)

        api.compare = divergence.compare = compare
        sys.argv = [str(program), str(checkpoint("bfloat16"))]
        runpy.run_path(str(program), run_name="__main__")


def pack(store: Store, folder: Path, most_bytes: float) -> None:
    """Writes answers and columns of every fault and a third of the healthy pairs, by kinds, beside
    those that ``folder`` has of other pairs; a kind that has no room any more is left as it is, and
    told."""
    total = 0
    for kind in KINDS:
        file = folder / f"{kind}.columns.xz"
        answers = file.with_name(f"{kind}.answers.xz")
        lines = [
            line
            for line in store.lines(kind)
            if line.num_bytes and store.file("columns", kind, line.key).exists()
        ]
        kept = [
            line
            for line in lines
            if kind not in ("health", "trained-prompts") or _is_third(line.key)
        ]
        old_bytes = sum(path.stat().st_size for path in (file, answers) if path.exists())
        total += old_bytes
        if not kept:
            continue
        keys = {line.key for line in kept}
        packed = [
            (line, columns) for line, columns in _unpack(file, answers) if line.key not in keys
        ]
        for line in kept:
            columns = read_columns(store.file("columns", kind, line.key))
            packed.append((line, {name: columns[name] for name in columns if _is_packed(name)}))
        tables: dict[str, list[np.ndarray]] = defaultdict(list)
        for number, (_, columns) in enumerate(packed):
            for name, of in _NUMBERED.items():
                columns[name] = np.full(len(columns.get(of, ())), number, np.int32)
            for name, column in columns.items():
                tables[name].append(column)
        joined = {name: np.concatenate(parts) for name, parts in tables.items()}
        part, preset = file.with_suffix(".part"), 9 | lzma.PRESET_EXTREME
        encoded = lzma.compress(b"\n".join(msgspec.json.encode(line) for line, _ in packed))
        num_bytes = write_columns(part, joined, preset=preset) + len(encoded)
        if total - old_bytes + num_bytes > most_bytes:
            part.unlink()
            print(f"{kind}: {len(packed)} pairs, {num_bytes / 1e6:.1f} MB: left out")
            continue
        part.rename(file)
        answers.write_bytes(encoded)
        total += num_bytes - old_bytes
        print(f"{kind}: {len(packed)} pairs, {len(kept)} of them new, {num_bytes / 1e6:.2f} MB")
    print(f"{total / 1e6:.1f} MB in {folder}")


_NUMBERED = {"recording": "text.site", "logits.recording": "logits.pair"}
"""The line of the answers that a line of a table belongs to, and a column of that table."""


def _is_packed(name: str) -> bool:
    return name.partition(".")[0] in ("pairs", "logits") or name in _TEXTS


def _unpack(file: Path, answers: Path) -> Iterator[tuple[Line, dict[str, np.ndarray]]]:
    """Each packed pair with its own columns."""
    if not file.exists():
        return
    table = read_columns(file)
    rows = {name: table.pop(name) for name in _NUMBERED}
    texts = lzma.decompress(answers.read_bytes()).splitlines()
    for number, text in enumerate(texts):
        columns = {
            name: column[
                rows["logits.recording" if name.startswith("logits.") else "recording"] == number
            ]
            for name, column in table.items()
        }
        yield msgspec.json.decode(text, type=Line), columns


_TEXTS = tuple(f"text.{name}" for name in ("site", "pass", "role", "dtype", "sides"))


def _is_third(key: str) -> bool:
    return random.Random(key).randrange(3) == 0


def replay(store: Store, kinds: list[str]) -> bool:
    """Asks today's judge of what was kept; a table, and every answer that is not equal."""
    if not any(line.num_bytes for kind in kinds for line in store.lines(kind)):
        raise SystemExit(f"{store.path} holds no recordings of {', '.join(kinds)}: record some")
    start = time.perf_counter()
    unequal: list[str] = []
    print("| kind of pair | pairs | answers | equal | not replayed | not equal | s |")
    print("|---|---|---|---|---|---|---|")
    for kind in kinds:
        began, count = time.perf_counter(), Counter[str]()
        for line in store.lines(kind):
            if not line.num_bytes:
                continue
            count["pairs"] += 1
            path = store.file("recordings", kind, line.key)
            try:
                recording = load(path)
            except Exception as error:  # cut short, or not there
                count["answers"] += 1
                count["not replayed"] += 1
                unequal.append(f"{kind}: {line.key}: {path}: {type(error).__name__}: {error}")
                continue
            for asked in recording.asked:
                count["answers"] += 1
                if asked.why_not is not None:
                    count["not replayed"] += 1
                    unequal.append(f"{kind}: {line.key}, {asked.way}: {asked.why_not}")
                    continue
                try:
                    said: tuple[object, ...] = recording.replay(asked).said
                except Exception as error:
                    said = (type(error).__name__, str(error)[:120])
                if said == asked.answer.said:
                    count["equal"] += 1
                else:
                    count["not equal"] += 1
                    unequal.append(
                        f"{kind}: {line.key}, {asked.way}: {asked.answer.said}, replayed {said}"
                    )
        if count["pairs"]:
            cells = [
                count[name] for name in ("pairs", "answers", "equal", "not replayed", "not equal")
            ]
            print(
                f"| {kind} | {' | '.join(map(str, cells))} | {time.perf_counter() - began:.0f} |",
                flush=True,
            )
    print(f"\n{time.perf_counter() - start:.0f} s")
    for text in unequal:
        print(f"- {text}")
    return not unequal


WAYS = ("stored", "given", "carried", "none")
"""The stored row, of older code; now with the truth that the benchmark gives, with the one that the
reference carries, and without any."""


class Outcome(msgspec.Struct, frozen=True):
    """What one answer is worth. ``place``: exact, elsewhere, or None where none is named."""

    alarm: bool
    place: str | None = None
    side: str | None = None
    """right, wrong, or None where none is named."""


def outcomes(line: Line, row: dict[str, Any] | None) -> dict[str, Outcome]:
    """What each way's answer is worth. ``row``: the stored one."""
    planted = line.planted.get("side")
    worth = {}
    for way in WAYS[1:]:
        answer = line.answers.get(way)
        if answer is None or (way == "carried" and "truth" not in line.carries.split()):
            continue
        worth[way] = _outcome(answer.kind, answer.side, _is_exact(line, way), planted)
    if row is not None and planted is None:
        alarm = row["alarm"] if "alarm" in row else row["verdict"] not in QUIET
        worth["stored"] = Outcome(bool(alarm))
    elif row is not None:
        worth["stored"] = _outcome(row["verdict"], row["side_said"], row["exact"], planted)
    return worth


def _outcome(kind: str, side: str | None, exact: bool, planted: str | None) -> Outcome:
    alarm = kind not in QUIET
    if planted is None:
        return Outcome(alarm)
    named = kind in ("localized", "nonfinite")
    told = side if alarm and side in ("reference", "candidate", "both") else None
    return Outcome(
        alarm=alarm,
        place=None if not named else "exact" if exact else "elsewhere",
        side=None if told is None else "right" if told == planted else "wrong",
    )


def _is_exact(line: Line, way: str) -> bool:
    answer, row = line.answers[way], line.row or {}
    if answer.kind not in ("localized", "nonfinite"):
        return False
    if "place" in line.planted:
        return answer.block == line.planted["place"]
    given = line.answers.get("given")
    if given is not None and given.site == answer.site:  # one name for it on both sides
        return bool(row.get("exact"))
    return (answer.site or "").rpartition(":")[0] == row.get("site")


def judge(store: Store, kinds: list[str]) -> None:
    """What was answered when the pairs were recorded beside what today's judge answers of the same
    measurements, by kind and truth; then every pair whose worth is another."""
    columns = ("healthy: alarms", "faults: exact", "elsewhere", "right side", "wrong side")
    print(f"| kind, truth | pairs | {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|")
    changed: list[str] = []
    for kind in kinds:
        counts: dict[str, list[Counter[str]]] = {way: [Counter(), Counter()] for way in WAYS[1:]}
        for line in store.lines(kind):
            if not line.num_bytes:
                continue
            tables = read_columns(store.file("columns", kind, line.key))
            recording = load(store.file("recordings", kind, line.key), tables)
            for asked in recording.asked:
                if asked.why_not is not None:
                    continue
                now = msgspec.structs.replace(line, answers={**line.answers})
                try:
                    now.answers[asked.way] = recording.replay(asked)
                except Exception as error:
                    changed.append(
                        f"{kind}: {line.key}, {asked.way}: {type(error).__name__}: {error}"
                    )
                    continue
                both = [outcomes(each, None).get(asked.way) for each in (line, now)]
                for count, worth in zip(counts[asked.way], both, strict=True):
                    if worth is not None:
                        count["pairs"] += 1
                        count["healthy: alarms"] += worth.alarm and not line.planted.get("side")
                        count["faults: exact"] += worth.place == "exact"
                        count["elsewhere"] += worth.place == "elsewhere"
                        count["right side"] += worth.side == "right"
                        count["wrong side"] += worth.side == "wrong"
                if both[0] != both[1]:
                    answers = [each.answers[asked.way] for each in (line, now)]
                    said = [f"{a.kind} {a.site or ''} {a.side or ''}".strip() for a in answers]
                    changed.append(f"{kind}: {line.key}, {asked.way}: {said[0]} -> {said[1]}")
        for way, (then, today) in counts.items():
            if then["pairs"]:
                cells = [f"{then[name]} -> {today[name]}" for name in columns]
                print(f"| {kind}, {way} | {then['pairs']} | {' | '.join(cells)} |", flush=True)
    for text in changed:
        print(f"- {text}")


BINS = (0.0, 0.3, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, math.inf)
"""Sizes of faults, in floors."""


def curve(store: Store) -> None:
    """Sensitivity: the share of recorded faults that is found at the exact block, by size in
    floors; beside it what the same numbers show a judge that knows the place and asks nothing else,
    so that no chance of an alarm is spent on other places."""
    sizes = {trial_key(row): row["size"] for row in stored("localization.jsonl")}
    hits: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for line in store.lines("localization"):
        if not line.num_bytes:
            continue
        tables = read_columns(store.file("columns", line.kind, line.key))
        recording = load(store.file("recordings", line.kind, line.key), tables)
        place = line.planted["place"]
        size = sum(sizes[line.key] >= edge for edge in BINS) - 1
        count = hits[line.planted["dtype"], size]
        for asked in recording.asked:
            if asked.why_not is not None:
                continue
            onset = recording.report(asked).verdict.onset
            count[f"{asked.way}: asked"] += 1
            count[asked.way] += onset is not None and onset.block == place
            if asked.way == "given":
                with one_question():
                    sites = recording.report(asked).sites
                count["knows"] += any(site.flagged and site.block == place for site in sites)
    for dtype in sorted({dtype for dtype, _ in hits}):
        columns = [size for each, size in sorted(hits) if each == dtype]
        heads = [f"{BINS[size]:g}-{BINS[size + 1]:g}" for size in columns]
        print(f"\n| {dtype}, size in floors | {' | '.join(heads)} |")
        print("|---" * (len(columns) + 1) + "|")
        for name, way in (
            ("exact block: knows the place", "knows"),
            ("with a given truth", "given"),
            ("with the truth that A carries", "carried"),
            ("without a truth", "none"),
        ):
            counts = [hits[dtype, size] for size in columns]
            totals = [n["given: asked" if way == "knows" else f"{way}: asked"] for n in counts]
            cells = [
                f"{100 * count[way] / total:.0f}%" if total else "-"
                for count, total in zip(counts, totals, strict=True)
            ]
            print(f"| {name} | {' | '.join(cells)} |")
        print(f"| faults | {' | '.join(str(hits[dtype, n]['given: asked']) for n in columns)} |")


@contextlib.contextmanager
def one_question() -> Iterator[None]:
    """Within it, whatever is judged is judged as if it were all that is asked."""
    alone = limit_of(1)
    with mock.patch("divergence.analyses.blocks.units.limit_of", lambda num: alone):
        yield


def figures(store: Store) -> None:
    """Older code against now, pair by pair: a table, and the pairs whose worth is another."""
    rows = {
        "localization": {trial_key(row): row for row in stored("localization.jsonl")},
        "health": {row["label"]: row for row in stored("health.jsonl")},
        "operators": {operator_key(row): row for row in stored("operator_localization.jsonl")},
        "trained": {row["key"]: row for row in stored("trained.jsonl")},
    }
    groups: dict[tuple[str, str, str], list[tuple[Line, dict[str, Outcome]]]] = defaultdict(list)
    for line in store.lines():
        if line.kind in ("trust", "cases") or not line.answers:
            continue
        worth = outcomes(line, rows.get(line.kind, {}).get(line.key))
        what = "faults" if line.planted.get("side") else "healthy"
        dtype = str(line.planted.get("dtype"))
        groups[line.kind, what, dtype].append((line, worth))
        groups[line.kind, what, "all"].append((line, worth))

    def counted(group: list[tuple[Line, dict[str, Outcome]]], field: str, value: Any) -> str:
        """For each way the count, "-" where that way was never asked."""
        cells = []
        for way in WAYS:
            asked = [worth[way] for _, worth in group if way in worth]
            number = sum(getattr(outcome, field) == value for outcome in asked)
            cells.append(f"{number}/{len(asked)}" if asked else "-")
        return " ".join(cells)

    print(
        "Each cell: stored row (older code), now with the given truth, with the carried, without\n"
    )
    print(
        "| pairs | dtype | | alarm or found | exact place | elsewhere | right side | wrong side |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (kind, what, dtype), group in sorted(groups.items()):
        cells = [counted(group, "alarm", True)]
        for field, value in (
            ("place", "exact"),
            ("place", "elsewhere"),
            ("side", "right"),
            ("side", "wrong"),
        ):
            cells.append(counted(group, field, value) if what == "faults" else "")
        print(f"| {kind}, {what} | {dtype} | {len(group)} | {' | '.join(cells)} |")
    tally = Counter(line.row["outcome"] for line in store.lines("trust") if line.row)
    print(
        f"\ntrust cases: {', '.join(f'{count} {name}' for name, count in tally.items()) or '-'}\n"
    )
    for (kind, what, dtype), group in sorted(groups.items()):
        for line, worth in group if dtype != "all" else ():
            first = worth.get("stored")
            others = {way: outcome for way, outcome in worth.items() if way != "stored"}
            alarm = what == "healthy" and any(outcome.alarm for outcome in others.values())
            with_truth = [worth[way] for way in ("given", "carried") if way in worth]
            other = first is not None and any(outcome != first for outcome in with_truth)
            if alarm or other:
                said = "; ".join(f"{way} {_told(line.answers[way])}" for way in others)
                before = "" if first is None else f"stored {_worth(first)}; "
                print(f"- {kind} {line.key}: {before}{said}")


def _worth(outcome: Outcome) -> str:
    words = ["found" if outcome.alarm else "quiet", outcome.place, outcome.side]
    return " ".join(
        word if word not in ("right", "wrong") else f"{word} side" for word in words if word
    )


def _told(answer: Answer) -> str:
    place = "" if answer.site is None else f" {answer.site} {answer.sample}/{answer.step}"
    return f"{answer.kind} {answer.confidence}{place} {answer.side or '-'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "replay", "judge", "curve", "figures", "pack", "case"):
        command = commands.add_parser(name)
        command.add_argument("--store", type=Path, default=Path(".cache/observations"))
        if name in ("record", "replay", "judge"):
            command.add_argument("--kinds", default=",".join(KINDS))
        if name == "record":
            command.add_argument("--seconds", type=float, default=math.inf, help="then stop")
            command.add_argument("--most", type=int, default=sys.maxsize, help="pairs of a kind")
            command.add_argument("--cases", type=Path, help="programs that get a wrong answer")
            command.add_argument("--accelerator", help="cuda: it repeats what the first CPU ran")
            command.add_argument(
                "--only",
                type=_expression,
                default="",
                help="keys in which this expression is found",
            )
        elif name == "pack":
            command.add_argument("--out", type=Path, default=Path("benchmarks/observations"))
            command.add_argument("--megabytes", type=float, default=18)
        elif name == "case":
            command.add_argument("program", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store = Store(options.store)
    for kind in getattr(options, "kinds", "").split(","):
        if kind and kind not in KINDS:
            parser.error(f"there is no kind {kind!r}; there are {', '.join(KINDS)}")
    if options.command == "record":
        kinds = options.kinds.split(",")
        record(
            store,
            kinds,
            options.seconds,
            options.most,
            options.cases,
            options.accelerator,
            options.only,
        )
    elif options.command == "replay":
        return 0 if replay(store, options.kinds.split(",")) else 1
    elif options.command == "judge":
        judge(store, options.kinds.split(","))
    elif options.command == "curve":
        curve(store)
    elif options.command == "figures":
        figures(store)
    elif options.command == "pack":
        pack(store, options.out, options.megabytes * 1e6)
    else:
        record_case(store, options.program)
    return 0


if __name__ == "__main__":
    sys.exit(main())
