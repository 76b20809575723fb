"""capture(endpoint=...): the log-probabilities of a server's answers, as a run.

Prompts are asked several at a time; each answer is written as it comes, so that an interrupted
capture leaves a run with what it had, and ``--resume`` asks for the rest. A prompt without an
answer is named, and leaves the run incomplete: nothing is left out in silence.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from divergence.domains.logprobs.endpoints.capabilities import Capabilities, find_server, probe
from divergence.domains.logprobs.endpoints.client import Client
from divergence.domains.logprobs.endpoints.scoring import (
    Asked,
    ask,
    asked_of,
    check_options,
    scores_of,
)
from divergence.domains.logprobs.options import ServerOptions
from divergence.errors import DumpError, EndpointError, RunFormatError, UsageError
from divergence.facts import sentence
from divergence.options.commands import CaptureOptions
from divergence.options.option import group_of
from divergence.recording.new_run import check_output
from divergence.run.answers import ServerAnswer, Vocabulary
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import Manifest, SampleTokens
from divergence.run.reader import Run
from divergence.run.scores import DRAWN, ScoreSource, put_scores, scores_manifest
from divergence.run.storage import Location, Url, archive_kind, location_of
from divergence.run.writer import RunWriter
from divergence.words import Progress, silent

_MANIFEST_SECONDS = 2.0
_MOST_FAILED = 8
"""Prompts in a row without an answer, after which the server is taken to be gone."""


def capture_endpoint(
    model: object,
    *,
    options: CaptureOptions,
    like: Run | None,
    out: str | Path,
    force: bool,
    command: str | None,
    progress: Progress | None,
    inputs: object = None,
    prepare: object = None,
) -> Run:
    """Raises EndpointError, UsageError, PromptError, RunExistsError and RunWriteError."""
    if inputs is not None or prepare is not None or not isinstance(model, str | Path | None):
        raise UsageError(
            "a server runs a model of its own: it takes no module and no inputs",
            hint="capture(NAME, server=ServerOptions(endpoint=URL), ...)",
        )
    check_options(options)
    of_server = group_of(ServerOptions, options)
    tell: Progress = progress or silent
    place = location_of(out)
    asked = asked_of(options, like)
    earlier = _held(place, asked) if of_server.resume else None
    if earlier is None:
        check_output(place, force=force, like=like)
    client = Client(str(of_server.endpoint))
    server = find_server(client)
    chat = options.chat or any(prompt.question.messages for prompt in asked)
    name = None if model is None else str(model)
    caps = probe(client, server, name, asked[0].question, chat=chat)
    tell("taken", 0, None, sentence(caps.given))
    for item in caps.lacks:
        tell("note", 0, None, sentence(item))
    if like is not None and not caps.forces:
        asked = [replace(prompt, question=prompt.free, forced=()) for prompt in asked]
    if any(prompt.forced for prompt in asked):
        caps = replace(caps, token_ids=True)  # those of the recorded answers
    manifest = _manifest(caps, asked, options, like, command)
    if like is not None and caps.token_ids:
        manifest.tokens.texts = dict(like.manifest.tokens.texts)
    if earlier is not None:
        _check_same(earlier.manifest, manifest, place)
        manifest.id, manifest.created = earlier.manifest.id, earlier.manifest.created
    job = _Job(client, caps, asked, manifest, tell, max(1, of_server.concurrency))
    if earlier is None:
        return job.finished(job.run(place, force=force))
    assert isinstance(place, Path)
    try:
        job.run(_beside(place), force=True, earlier=earlier).close()
    finally:
        earlier.close()
        _take_over(place)
    return job.finished(Run.open(place))


def _check_same(recorded: Manifest, manifest: Manifest, place: Location) -> None:
    """Raises UsageError where the rest would be asked of another model, or otherwise."""
    before, now = _asked_for(recorded), _asked_for(manifest)
    for name in now:
        if before[name] != now[name]:
            raise UsageError(
                f"{place} was begun otherwise: {name} {before[name]}, now {now[name]}",
                hint="the same command as before with --resume, or another -o",
            )


def _asked_for(manifest: Manifest) -> dict[str, object]:
    """What must be the same for all prompts of a run, by name."""
    engine = manifest.engine
    facts = {} if engine is None else engine.facts
    return {
        "model": manifest.model.source,
        "--max-new-tokens": manifest.settings.max_new_tokens,
        "--seed": manifest.settings.seed,
        "server": engine and engine.version,
        "the server's dtype": manifest.settings.dtype,
        "token ids": facts.get("token ids"),
        "tokens": facts.get("tokens"),
        "answered by": facts.get("answers as", "the model asked for"),
    }


def _take_over(place: Path) -> None:
    """Puts what was gone on with in the place of the run, where it holds at least as much."""
    rest = _beside(place)
    with contextlib.suppress(RunFormatError):
        earlier, more = Run.open(place), Run.open(rest)
        enough = len(more.records) >= len(earlier.records)
        earlier.close()
        more.close()
        if enough:
            shutil.rmtree(place)
            rest.rename(place)


def _beside(place: Path) -> Path:
    return place.with_name(f"{place.name}.resuming")


def _held(place: Location, asked: list[Asked]) -> Run | None:
    """The run to go on with; None where there is none yet. Raises UsageError for one of other
    prompts."""
    if isinstance(place, Url) or archive_kind(place) is not None:
        raise UsageError("--resume goes on with a directory", hint="-o DIRECTORY")
    if not place.exists():
        return None
    assert isinstance(place, Path)
    if _beside(place).exists():  # the last one to go on was killed
        _take_over(place)
    run = Run.open(place)
    samples = run.manifest.tokens.samples
    same = (
        run.manifest.scores_alone
        and len(samples) == len(asked)
        and all(
            sample.text == other.text and (not other.ids or sample.prompt_ids == list(other.ids))
            for sample, other in zip(samples, asked, strict=True)
        )
    )
    if not same:
        raise UsageError(
            f"{place} is a run of other prompts", hint="choose another -o, or leave out --resume"
        )
    return run


def _manifest(
    caps: Capabilities,
    asked: list[Asked],
    options: CaptureOptions,
    like: Run | None,
    command: str | None,
) -> Manifest:
    tokens = "given" if any(prompt.forced for prompt in asked) else "greedy"
    if tokens == "greedy" and asked[0].free.temperature:
        tokens = DRAWN
    source = ScoreSource(
        engine="endpoint",
        version=f"{caps.server.kind} {caps.server.version}",
        model=caps.model,
        dtype=caps.server.dtype,
        facts={**caps.facts, "tokens": tokens},
        seed=options.seed or 0,
        max_new_tokens=asked[0].free.num_tokens,
    )
    samples = [
        SampleTokens(text=prompt.text, prompt_ids=list(prompt.ids or ()) if caps.token_ids else [])
        for prompt in asked
    ]
    forced_by = like.manifest.id if like is not None and tokens == "given" else None
    return scores_manifest(
        source,
        samples,
        label=options.label or f"{caps.server.kind} endpoint",
        command=command,
        forced_by=forced_by,
    )


@dataclass
class _Job:
    """One capture: what is asked, and what came of it."""

    client: Client
    caps: Capabilities
    asked: list[Asked]
    manifest: Manifest
    tell: Progress
    concurrency: int

    def __post_init__(self) -> None:
        texts = dict(self.manifest.tokens.texts)
        self._vocabulary = Vocabulary(self.manifest.tokens.texts, by_text=not self.caps.token_ids)
        self._vocabulary.take(texts)
        self._counts: list[int | None] = [None] * len(self.asked)
        self._failed: dict[int, str] = {}
        self._updated = 0.0

    def run(self, place: Location, *, force: bool, earlier: Run | None = None) -> Run:
        """Asks for all that ``earlier`` lacks. What has no answer is told by ``finished``."""
        with (
            contextlib.suppress(EndpointError),
            RunWriter(place, self.manifest, force=force) as writer,
        ):
            done = set() if earlier is None else self._copy(earlier, writer)
            self._ask(writer, [n for n in range(len(self.asked)) if n not in done])
            self._note_counts()
            if self._failed:
                raise EndpointError(self._told())
        return Run.open(place)

    def finished(self, run: Run) -> Run:
        """The run. Raises EndpointError where prompts have no answer."""
        if not self._failed:
            return run
        run.close()
        raise EndpointError(
            self._told(),
            where=str(run.path),
            hint="the same command with --resume asks for them again; what was answered is kept",
        )

    def _told(self) -> str:
        shown = [f"prompt {n}: {text}" for n, text in sorted(self._failed.items())[:3]]
        more = f"; and {len(self._failed) - 3} more" if len(self._failed) > 3 else ""
        num = len(self._failed)
        return f"{num} of {len(self.asked)} prompts have no answer: {'; '.join(shown)}{more}"

    def _ask(self, writer: RunWriter, numbers: list[int]) -> None:
        """Several at a time. Whatever stops it, what came before is written."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        answered: queue.SimpleQueue[tuple[int, ServerAnswer | Exception]] = queue.SimpleQueue()
        for number in numbers:
            waiting.put(number)
        stopped = threading.Event()

        def work() -> None:
            while not stopped.is_set():
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    answered.put((number, ask(self.client, self.caps, self.asked[number])))
                except Exception as error:
                    answered.put((number, error))

        for _ in range(min(self.concurrency, len(numbers))):  # daemons: no interrupt waits for one
            threading.Thread(target=work, name="divergence-endpoint", daemon=True).start()
        in_a_row, left = 0, set(numbers)
        try:
            while left and in_a_row < _MOST_FAILED:
                number, answer = answered.get()
                left.discard(number)
                in_a_row = 0 if self._take(writer, number, answer) else in_a_row + 1
                done = len(self.asked) - len(left)
                self.tell("endpoint", done, len(self.asked), f"prompt {number}")
        finally:
            stopped.set()
        text = f"not asked, after {in_a_row} others in a row without an answer"
        self._failed |= dict.fromkeys(left, text)

    def _take(self, writer: RunWriter, number: int, answer: ServerAnswer | Exception) -> bool:
        """Writes one answer; False where there is none."""
        asked = self.asked[number]
        where = f"the answer to prompt {number}"
        try:
            if isinstance(answer, Exception):
                raise answer
            scores = scores_of(answer, asked, self.caps, self._vocabulary)
            put_scores(writer, number, scores, where=where)
        except (EndpointError, DumpError) as error:
            self._failed[number] = error.message
            return False
        self._counts[number] = len(scores.prompt_ids) if scores.prompt_ids else answer.num_prompt
        sample = self.manifest.tokens.samples[number] = scores.tokens
        sample.text = asked.text
        # the manifest as it stands, now and then: what a kill leaves is then readable
        if time.monotonic() - self._updated > _MANIFEST_SECONDS:
            self._note_counts()
            writer.update_manifest()
            self._updated = time.monotonic()
        return True

    def _note_counts(self) -> None:
        assert self.manifest.engine is not None
        counts = ("-" if count is None else str(count) for count in self._counts)
        self.manifest.engine.facts["prompt tokens"] = " ".join(counts)

    def _copy(self, earlier: Run, writer: RunWriter) -> set[int]:
        """Return what an earlier capture has already, by prompt."""
        done: set[int] = set()
        tokens, engine = earlier.manifest.tokens, earlier.manifest.engine
        self._vocabulary.take(tokens.texts)
        counts = ("" if engine is None else engine.facts.get("prompt tokens", "")).split()
        for record in earlier.records:
            sample = tokens.samples[record.sample]
            if not sample.generated_ids:
                continue  # the manifest is older than its records: it is asked again
            writer.put(
                CapturedTensor(earlier.read(record).clone()),
                pass_="free",
                sample=record.sample,
                step=record.step,
                site=record.site,
                order=record.order,
                positions=record.positions,
            )
            self.manifest.tokens.samples[record.sample] = sample
            done.add(record.sample)
        for number in done:
            if number < len(counts) and counts[number].isdecimal():
                self._counts[number] = int(counts[number])
        return done
