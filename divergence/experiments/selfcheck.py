"""selfcheck(): does this machine give the same numbers in every way that it can run one model?

One base run is recorded. Then it is repeated like that run (its tokens forced), with one thing
changed at a time: in a batch, without a cache, with other attention kernels. Each repetition is
compared with the base run by `compare`, with its limits; selfcheck has no rule of its own. Where
the bits of a repetition are not those of the base run it is made once more with an anchored pass,
in which an error is named in the block that makes it. What compare says at less than high
confidence is a doubt, not a divergence.

What it cannot say: which side of a pair is right (``truth`` makes a float64 run that tells), and
whether the model is right at all, where all ways agree.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from divergence._version import __version__
from divergence.comparison.api import compare
from divergence.comparison.result import Report, VerdictKind
from divergence.errors import DivergenceError, ModelError, UsageError, first_line
from divergence.experiments.result import SelfcheckLine, SelfcheckResult, SelfcheckStatus
from divergence.facts import Fact, fact, sentence, worded
from divergence.output import output_folder
from divergence.recording.api import make_run
from divergence.recording.engines.load import load_tokenizer
from divergence.recording.prompts import Prompt, collect_prompts, tokenize
from divergence.run.command import command_line
from divergence.run.reader import Run, own_truth
from divergence.run.site import did_you_mean
from divergence.run.storage import folder_of
from divergence.words import Progress

# The ways of running that a selfcheck tries: each one ordinary capture, like the base run.
#
# A variation changes one thing. It is compared with the base run, or, where it changes one thing
# of another variation (the other prompts of a batch), with that one's run.

BASE = "base"
NAMES = (
    "again",
    "hooks",
    "threads",
    "batch",
    "place",
    "mates",
    "pads-left",
    "pads-right",
    "whole",
    "cache",
    "chunks",
    "attention",
    "compile",
)
"""Every variation, in the order in which they are tried."""
UNASKED = tuple(name for name in NAMES if name != "compile")
"""Those that are tried where none is named: compiling takes longer than all others together."""
_MOST_PADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """One line of the answer, before it is made."""

    name: str
    change: Fact
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of capture, beside ``like``."""
    against: str = BASE
    anchor: bool = False
    """Other kernels run: the anchored pass, which tells where other bits are made, is made at once.
    """
    prefill: bool = False
    """Decode steps are left out."""
    same_bits: bool = False
    """The same kernels get the same operands in the same shapes."""
    obstacle: Fact | None = None
    """Why it cannot be made."""


def variations(base: Run) -> list[Variation]:
    """Say what can be changed of this run, and what cannot, with the reason."""
    manifest = base.manifest
    samples, task = manifest.tokens.samples, manifest.model.task
    lengths = [len(sample.prompt_ids) for sample in samples]
    here = manifest.model.attn_implementation or "eager"
    there = "sdpa" if here == "eager" else "eager"
    num_threads = manifest.environment.num_threads
    other_threads = 1 if num_threads > 1 else len(os.sched_getaffinity(0))
    on_cpu = manifest.environment.device_type == "cpu"
    decodes = task == "causal-lm"
    batches, place, mates = _batches(len(samples))
    padded = len(set(lengths)) > 1
    chunk = max(1, min(lengths) // 3)
    pads = min(_MOST_PADS, max(lengths))
    # why a way cannot be gone
    steps = any(len(sample.generated_ids) > 1 for sample in samples)
    no_steps = _unless(decodes, "stepwise", task=task) or _unless(steps, "decoded")
    no_chunks = _unless(decodes, "in_chunks", task=task) or _unless(min(lengths) > 1, "one_token")
    few = _unless(len(samples) > 1, "one_prompt")
    no_mates = _unless(len(samples) > 3, "too_few_prompts")
    no_threads = _unless(on_cpu, "off_cpu") or _unless(other_threads != num_threads, "one_core")
    compiles = not on_cpu or shutil.which("g++") or shutil.which("clang++")
    no_compiler = _unless(compiles, "no_compiler")
    no_attention = _unless(manifest.model.attn_implementation, "no_attention")
    no_left = _unless(decodes, "padded_right", task=task)

    def way(
        name: str,
        options: Mapping[str, Any],
        obstacle: Fact | None = None,
        changes: Mapping[str, Any] | None = None,
        **rest: Any,
    ) -> Variation:
        change = fact(f"experiments.way_{name.replace('-', '_')}", **(changes or {}))
        return Variation(name=name, change=change, options=options, obstacle=obstacle, **rest)

    size = len(mates[0]) if few is None else 1
    other = {"kernel": there, "other": here}
    return [
        way("again", {}, same_bits=True),
        way("hooks", {"hooks": False}, same_bits=True),
        way(
            "threads",
            {"threads": other_threads},
            no_threads,
            {"num": other_threads, "of": num_threads},
        ),
        way("batch", {"batches": _text(batches)}, few, {"size": size, "padded": padded}),
        way("place", {"batches": _text(place)}, few, against="batch"),
        way("mates", {"batches": _text(mates)}, no_mates, {"padded": padded}, against="batch"),
        way("pads-left", {"pad_left": pads}, no_left, {"num": pads}),
        way(
            "pads-right",
            {"pad_right": pads},
            None,
            {"num": pads, "prefill": decodes},
            prefill=decodes,
        ),
        way("whole", {"whole": True}, no_steps),
        way("cache", {"use_cache": False}, no_steps),
        way("chunks", {"prefill_chunk": chunk}, no_chunks, {"size": chunk}),
        way("attention", {"attn_implementation": there}, no_attention, other, anchor=True),
        way("compile", {"engine": "compile"}, no_compiler, anchor=True),
    ]


def _unless(possible: object, code: str, **values: Any) -> Fact | None:
    """Say why a way of running cannot be tried; None where it is possible."""
    return None if possible else fact(f"experiments.no_way_{code}", **values)


def _batches(num: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Batches of half of the prompts; the same with the prompts of each in other places; and with
    other prompts in each, of which as many as possible keep their place."""
    half = max((num + 1) // 2, min(num, 2))
    plain = [list(range(half)), list(range(half, num))] if num > half else [list(range(num))]
    turned = [group[1:] + group[:1] for group in plain]
    mixed = [list(group) for group in plain]
    if num > 3:
        for place in range(1, len(plain[1])):
            mixed[0][place], mixed[1][place] = plain[1][place], plain[0][place]
    return plain, turned, mixed


def _text(groups: list[list[int]]) -> str:
    return " ".join(",".join(map(str, group)) for group in groups)


_PROMPTS = (
    "A bridge is built twice: once on paper, and once of stone. The first time, each load is a "
    "number, and each number is rounded.",
    "In 1687 it was said that every body attracts every other body; 2 + 2 = 4, and the square of "
    "12 is 144, which is less than 150.",
    "def reverse(items):\n    result = []\n    for item in items:\n        result.insert(0, item)\n"
    "    return result\n",
    "Dear reader, the weather on the coast was fine today, and the boats came back with more fish "
    "than anyone could count.",
)
_PROMPT_TOKENS = 8
"""The built-in prompts are cut to equal lengths, so that a batch of them has no pads; and to few
tokens, since without a matrix unit the forwards are what a selfcheck takes its time for."""
_STATUSES: dict[VerdictKind, SelfcheckStatus] = {
    "identical": "identical",
    "within_floor": "within_floor",
    "systematic": "diverged",
    "localized": "diverged",
    "drift": "diverged",
    "nonfinite": "diverged",
}

_BEYOND = ("diverged", "suspected")


def selfcheck(
    model: str | Path,
    *,
    prompts: str | Sequence[str | Sequence[int] | Prompt] = (),
    prompts_file: str | Path | None = None,
    chat: bool = False,
    dtype: str | None = None,
    device: str = "auto",
    attn_implementation: str | None = None,
    max_new_tokens: int = 3,
    revision: str | None = None,
    trust_remote_code: bool = False,
    only: Sequence[str] = (),
    truth: bool = False,
    keep: str | Path | None = None,
    progress: Progress | None = None,
) -> SelfcheckResult:
    """Run ``model`` in every way that must not matter, and compare each with one base run.

    ``prompts``, ``prompts_file``, ``chat``, ``dtype``, ``device``, ``attn_implementation``: of the
    base run, as in ``capture``; four built-in prompts where none is given. ``only``: these lines
    alone (selfcheck.variations has their names). ``truth``: make the float64 truth too, which
    tells the wrong side. ``keep``: a directory for the runs, which are otherwise removed.

    Raises UsageError for an unknown name in ``only``, and what ``capture`` raises for the base run;
    a variation that fails is a line that says so.
    """
    began = time.perf_counter()
    for name in only:
        if name not in NAMES:
            raise UsageError(
                f"no line {name!r}",
                where="--only",
                hint=did_you_mean(name, NAMES, count=1, then=f"there are {', '.join(NAMES)}"),
            )
    wanted = only or UNASKED
    with runs_folder(keep) as folder:
        given: Any = prompts
        if not prompts and prompts_file is None:
            # as text where the model has no tokenizer, which capture then says
            given = list(_PROMPTS)
            tokenizer = load_tokenizer(
                str(model), revision=revision, trust_remote_code=trust_remote_code
            )
            if tokenizer is not None:
                tokens = [
                    prompt.prompt_ids
                    for prompt in tokenize(collect_prompts(_PROMPTS, None), tokenizer, chat=False)
                ]
                num = min(_PROMPT_TOKENS, *map(len, tokens))
                given = [Prompt(input_ids=tuple(ids[:num])) for ids in tokens]
        bench = _Bench(
            folder,
            keep=keep,
            progress=progress,
            model=str(model),
            device=device,
            trust_remote_code=trust_remote_code,
        )
        base = bench.base(
            prompts=given,
            prompts_file=prompts_file,
            chat=chat,
            dtype=dtype,
            revision=revision,
            attn_implementation=attn_implementation,
            max_new_tokens=max_new_tokens,
            truth="full" if truth else "no",
        )
        chosen = [variation for variation in variations(base) if variation.name in wanted]
        lines = [worded(bench.line(way, n, len(chosen))) for n, way in enumerate(chosen)]
        unlike = [line.name for line in lines if line.next]
        if keep is None and unlike:  # what looks closer needs the runs
            texts = [prompts] if isinstance(prompts, str) else prompts
            again = command_line(
                "selfcheck",
                model,
                prompt=[text for text in texts if isinstance(text, str)],
                prompts=prompts_file,
                chat=chat,
                dtype=dtype,
                attn_implementation=attn_implementation,
                max_new_tokens=max_new_tokens,
                device=None if device == "auto" else device,
                only=",".join(unlike),
                truth=truth,
                trust_remote_code=trust_remote_code,
                keep="RUNS",
            )
            lines = [replace(line, next=[again, *line.next] * bool(line.next)) for line in lines]
        manifest = base.manifest
        return SelfcheckResult(
            tool_version=__version__,
            model=manifest.model.source,
            dtype=manifest.model.dtype,
            device=manifest.settings.device,
            attention=manifest.model.attn_implementation,
            num_threads=manifest.environment.num_threads,
            num_prompts=len(manifest.tokens.samples),
            num_prompt_tokens=sum(len(sample.prompt_ids) for sample in manifest.tokens.samples),
            max_new_tokens=manifest.settings.max_new_tokens,
            truth=own_truth(base) is not None,
            lines=lines,
            kept=None if keep is None else str(folder),
            seconds=round(time.perf_counter() - began, 1),
        )


class _Bench:
    """The runs of one selfcheck, each made when it is first needed."""

    def __init__(
        self, folder: Path, *, keep: str | Path | None, progress: Progress | None, **loading: Any
    ) -> None:
        self._folder, self._keep, self._progress = folder, keep, progress
        self._made: dict[str, Run | DivergenceError] = {}
        self._variations: dict[str, Variation] = {}
        self._truth: Run | None = None
        self._capture = partial(make_run, force=True, probe=False, **loading)

    def base(self, **options: Any) -> Run:
        self._say(0, None, fact("experiments.base_run"))
        run = self._capture(out=self._folder / BASE, **options)
        self._made[BASE], self._truth = run, own_truth(run)
        self._variations = {variation.name: variation for variation in variations(run)}
        return run

    def line(self, way: Variation, number: int, total: int) -> SelfcheckLine:
        """Make it, compare it, say what was seen."""
        self._say(number, total, way.change)
        began = time.perf_counter()
        line = SelfcheckLine(
            name=way.name,
            change=way.change,
            against=way.against,
            same_bits=way.same_bits,
            status="not_applicable",
            because=way.obstacle,
        )
        if way.obstacle is not None:
            return line
        try:
            line = replace(line, **_line_of(self._compared(way), prefill=way.prefill))
        except (UsageError, ModelError) as error:  # the model cannot be run so
            return replace(line, reason=error.message)
        except DivergenceError as error:
            line = replace(line, status="not_run", reason=str(error))
        except Exception as error:  # what a runtime raises is its own
            text = f"{type(error).__name__}: {first_line(error)}"
            line = replace(line, status="not_run", reason=text)
        if line.verdict not in (None, "identical"):
            folder = Path("RUNS" if self._keep is None else str(self._keep))
            others = [] if way.name == "whole" else [folder / way.against]
            line = replace(line, next=[command_line("compare", *others, folder / way.name)])
        return replace(line, seconds=round(time.perf_counter() - began, 1))

    def _compared(self, way: Variation) -> Report:
        """The free pass alone where all of its bits are equal: then nothing is left to tell."""
        made = self._run(way.name)
        if way.name == "whole":
            return compare(made)
        report = compare(self._run(way.against), made, truth=self._truth)
        if report.verdict.kind == "identical" or "hooks" in way.options:
            return report
        free = [
            name
            for name in {way.name, way.against} - {BASE}
            if self._run(name).manifest.plan.anchored_to is None
        ]
        if not free:
            return report
        for name in free:
            self._made[name] = self._repeat(name, anchor=True)
        again = compare(self._run(way.against), self._run(way.name), truth=self._truth)
        return report if again.verdict.kind == "identical" else again

    def _run(self, name: str) -> Run:
        """Made without an anchored pass first, unless other bits are all but sure. Raises again
        what its capture raised."""
        if name not in self._made:
            try:
                self._made[name] = self._repeat(name, anchor=self._variations[name].anchor)
            except DivergenceError as error:
                self._made[name] = error
        made = self._made[name]
        if isinstance(made, DivergenceError):
            raise made
        return made

    def _repeat(self, name: str, *, anchor: bool) -> Run:
        return self._capture(
            like=self._run(BASE),
            out=self._folder / name,
            anchor=anchor,
            **self._variations[name].options,
        )

    def _say(self, done: int, total: int | None, what: Fact) -> None:
        if self._progress is not None:
            self._progress("selfcheck", done, total, sentence(what))


@contextlib.contextmanager
def runs_folder(keep: str | Path | None) -> Iterator[Path]:
    """The folder ``keep`` for runs, or, where it is None, one that is removed behind the work."""
    if keep is not None:
        yield output_folder(folder_of(keep))
        return
    with tempfile.TemporaryDirectory(prefix="divergence-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _line_of(report: Report, *, prefill: bool) -> dict[str, Any]:
    """Return what compare says, as far as a line holds it; ``prefill``: that alone was made."""
    verdict, sites = report.verdict, report.sites
    anchored = [site for site in sites if site.pass_ == "anchored" and site.role == "block"]
    outputs = [site for site in anchored if ":out" in site.site and site.block is not None]
    blocks = list(dict.fromkeys(str(site.block) for site in outputs))
    apart = {str(site.block) for site in outputs if not site.identical}
    different = [block for block in blocks if block in apart]
    onset = verdict.onset
    block = None if onset is None else onset.block or onset.site
    status = _STATUSES.get(verdict.kind, "undetermined")
    if status == "diverged" and verdict.confidence != "high":
        status = "suspected"
    used = [
        site.limit_usage
        for site in sites
        if site.limit_usage is not None
        and (status not in _BEYOND or block is None or block in (site.block, site.site))
    ]
    tokens, made = report.tokens, {site.pass_ for site in sites}
    missing = [
        record
        for record in report.coverage.unmatched
        if record.side != "candidate" and record.pass_ in made and not (prefill and record.step)
    ]
    return {
        "status": status,
        "verdict": verdict.kind,
        "confidence": verdict.confidence,
        "summary": verdict.summary,
        "block": block if status in _BEYOND else None,
        "side": verdict.side,
        "num_blocks": len(blocks),
        "num_blocks_different": len(different),
        "first_different": different[0] if different else None,
        "num_compared": report.coverage.num_compared,
        "num_different": sum(not site.identical for site in sites),
        "num_missing": len(missing),
        "limit_usage": max(used, default=None),
        "num_tokens": 0 if tokens is None else tokens.num_tokens,
        "num_tokens_different": 0 if tokens is None else tokens.num_tokens - tokens.num_equal,
    }
