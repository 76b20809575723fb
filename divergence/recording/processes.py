"""The processes of one capture: who is who, what they tell one another, how they stop together.

``torchrun`` starts the processes and names them (RANK, WORLD_SIZE); ``--mesh`` says how the work is
divided among them. Axes, outermost first, as transformers lays out its device mesh:

``pp``    blocks: each rank runs a stretch of them (pipeline)
``dp``    prompts: each rank has the whole model
``fsdp``  prompts, and each weight lies in pieces on all ranks until it is needed (FSDP2)
``tp``    the matrices of each block, by the model's own plan (tensor parallel)

Prompts are dealt over dp × fsdp where there is one batch for each rank at least. Fewer are run by
all ranks, which is a check of its own: the ranks then must agree bit for bit.

Beside the model's own communication the ranks talk through a gloo group of their own, with a
timeout. A rank that fails leaves a note in torchrun's store, so that the others, whose next
collective breaks, can say who stopped and why.

All write one run: the first rank begins it, and it is read when all have closed their part.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist

from divergence.errors import DivergenceError, ModelError, UsageError
from divergence.numerics.sums import set_device
from divergence.run.command import quoted
from divergence.run.manifest import Environment, Manifest, Mesh, MeshAxis
from divergence.run.reader import Run
from divergence.run.record import MANIFEST
from divergence.run.storage import Url, archive_kind, location_of
from divergence.run.writer import RunWriter

AXES = ("pp", "dp", "fsdp", "tp")
DATA_AXES = ("dp", "fsdp")
TIMEOUT = datetime.timedelta(minutes=30)
"""What one rank may be behind the others: loading from a shared disk skews them by minutes."""
_CAPTURES = itertools.count()
"""All ranks make the same captures in the same order, so that they number them alike."""
_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}
_LOST = re.compile(r"gloo|nccl|hccl|connection (closed|reset|refused)|timed out|timeout", re.I)


def parse_mesh(text: str, num_ranks: int) -> Mesh:
    """``"dp=2,tp=4"`` or ``"tp"`` (one axis may leave its size open) → a mesh of ``num_ranks``."""
    sizes: dict[str, int | None] = {}
    for word in text.split(","):
        name, equals, size = (part.strip() for part in word.partition("="))
        if name not in AXES or name in sizes or (equals and not size.isdecimal()):
            raise UsageError(
                f"--mesh {text!r} cannot be understood at {word.strip()!r}",
                hint=f"axes {', '.join(AXES)}, each with its size: tp, or dp=2,tp=4",
            )
        sizes[name] = int(size) if equals else None
    open_axes = [name for name, size in sizes.items() if size is None]
    if open_axes:
        product = math.prod(size or 1 for size in sizes.values())
        sizes[open_axes[0]] = num_ranks // product if num_ranks % product == 0 else 0
    total = math.prod(size or 0 for size in sizes.values())
    if len(open_axes) > 1 or total != num_ranks:
        raise UsageError(
            f"--mesh {text} does not make {num_ranks} rank{'s' if num_ranks != 1 else ''}",
            hint="the sizes must multiply to torchrun's --nproc-per-node (times --nnodes); one "
            "axis may leave its size open: tp, or dp=2,tp",
        )
    return Mesh(
        axes=[
            MeshAxis(name=name, size=length)
            for name in AXES
            if (length := sizes.get(name)) is not None and (length > 1 or total == 1)
        ]
    )


@contextlib.contextmanager
def joined(mesh: str | None, device: str) -> Iterator[Ranks | None]:
    """The other processes joined, and watched over; None where there is one alone. Raises
    UsageError for a mesh without ranks, and for ranks without a mesh."""
    started, count = "RANK" in os.environ, int(os.environ.get("WORLD_SIZE", "1"))
    if mesh is None:
        if count > 1:
            raise UsageError(
                f"this is one of {count} processes, and nothing says how they divide the work",
                hint="--mesh tp, --mesh fsdp, --mesh dp, --mesh pp, or several: --mesh dp=2,tp=4",
            )
        yield None
        return
    if not started:
        parse_mesh(mesh, math.prod(map(int, re.findall(r"=\s*(\d+)", mesh))))
        raise UsageError(
            "--mesh needs one process for each place of the mesh, and this is one alone",
            hint=f"torchrun --nproc-per-node N -m divergence capture ... --mesh {quoted(mesh)}",
        )
    parsed = parse_mesh(mesh, count)
    if count == 1:
        yield None
        return
    ranks = Ranks(parsed, device)
    with ranks.watched():
        yield ranks


class Ranks:
    """This process among its peers. ``places``: its index by axis; ``device``: its own."""

    def __init__(self, mesh: Mesh, device: str, *, backend: str | None = None) -> None:
        """``backend``: of the process group, where it is not the device's usual one."""
        if not dist.is_available():
            raise UsageError("this torch was built without torch.distributed", hint="leave --mesh")
        self.mesh = mesh
        self.device = _own_device(device)
        set_device(torch.device(self.device))  # before anything else makes a context elsewhere
        if not dist.is_initialized():
            # for good: a second one would meet the addresses of the first in torchrun's store
            kind = self.device.partition(":")[0]
            usual = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{_BACKENDS.get(kind)}"
            if backend is None and kind not in ("cpu", *_BACKENDS):
                raise UsageError(
                    f"no way is known for several ranks to communicate on {kind}",
                    hint="--device cpu",
                )
            dist.init_process_group(backend or usual, timeout=TIMEOUT)
            atexit.register(_leave)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        places = mesh.places_of(self.rank)
        self.places = {axis.name: place for axis, place in zip(mesh.axes, places, strict=True)}
        self.sizes = {axis.name: axis.size for axis in mesh.axes}
        self._control = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._note = f"divergence/stopped/{next(_CAPTURES)}"
        self._depth = self._meetings = 0
        self._alike, self._speaker = self._control, 0
        self.dealt = False
        self.idle = False
        """Is this rank's batch done? Forwards that follow only keep the others company."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.mesh}"

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of ranks. A barrier: all ranks must call it."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def mesh_of(self, environment: Environment) -> Mesh:
        """The mesh, with the ranks' machines where they are not all alike."""
        environments: list[Environment] = self.gather(environment)
        differing = any(environment != environments[0] for environment in environments)
        return msgspec.structs.replace(self.mesh, environments=environments if differing else [])

    def meet(self, patience: datetime.timedelta) -> None:
        """A barrier. Raises RuntimeError where the others are not there in that time (a barrier of
        the group's own waits for as long as the group does)."""
        store = dist.distributed_c10d._get_default_store()
        self._meetings += 1
        places = [f"{self._note}/met/{self._meetings}/{rank}" for rank in range(self.size)]
        store.set(places[self.rank], "")
        store.wait(places, patience)

    def deal(self, groups: Sequence[list[int]], *, together: bool) -> list[list[int]]:
        """The batches that this rank runs, all of them where there are fewer than ranks.
        ``together``: ranks must make equally many forwards (FSDP gathers weights from all): who has
        nothing left then runs a batch that ``owns`` is false of. All ranks call this once."""
        count = math.prod(self.sizes.get(name, 1) for name in DATA_AXES)
        self.dealt = 1 < count <= len(groups)
        self._mine = {group[0] for group in groups}
        if not self.dealt:
            return list(groups)
        members: dict[int, list[int]] = {}
        for rank in range(self.size):
            places = dict(zip(self.sizes, self.mesh.places_of(rank), strict=True))
            place = places.get("dp", 0) * self.sizes.get("fsdp", 1) + places.get("fsdp", 0)
            members.setdefault(place, []).append(rank)
        for place, ranks in sorted(members.items()):
            group = dist.new_group(ranks, backend="gloo", timeout=TIMEOUT)
            if self.rank in ranks:
                self._alike, self._speaker, own_place = group, ranks[0], place
        own = [list(group) for group in groups[own_place::count]]
        self._mine = {group[0] for group in own}
        rounds = -(-len(groups) // count)
        if together and len(own) < rounds:
            own.append(list(groups[0]))
        return own

    def owns(self, sample: int) -> bool:
        """Does this rank answer for the batch that begins with ``sample``?"""
        return sample in self._mine

    def agree(self, tokens: list[int]) -> list[int]:
        """The tokens chosen by the first of the ranks with the same prompts: fed to all, so that
        ranks which differ still run the same steps."""
        agreed = torch.tensor(tokens, dtype=torch.int64)
        dist.broadcast(agreed, src=self._speaker, group=self._alike)
        return agreed.tolist()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Leave a note for the others when this rank fails, or say who failed first."""
        before: Any = None
        if threading.current_thread() is threading.main_thread():
            # torchrun's, sent when another rank failed: an error like any other, so that the run on
            # disk is closed
            def stop(*_: object) -> NoReturn:
                raise _ToldToStopError("this rank was told to stop")

            before = signal.signal(signal.SIGTERM, stop)
        self._depth += 1
        try:
            yield
        except BaseException as error:
            if before is not None:  # no more signals: what follows is closing
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._explain(error)
        finally:
            self._depth -= 1
            if before is not None and self._depth == 0:
                signal.signal(signal.SIGTERM, before)

    def _explain(self, error: BaseException) -> NoReturn:
        if isinstance(error, PeerStoppedError):
            raise error
        text = (str(error).splitlines() or [type(error).__name__])[0] or type(error).__name__
        lost = isinstance(error, DivergenceError | RuntimeError) and _LOST.search(str(error))
        stopped = isinstance(error, _ToldToStopError)
        # who only noticed that somebody is gone is not the one to be named
        first = self._first_word(None if lost or stopped else f"rank {self.rank}: {text}")
        if first is not None and not first.startswith(f"rank {self.rank}:"):
            name, _, reason = first.partition(": ")
            if reason == text:
                raise error  # all ranks met the same: each says it itself
            if reason == KeyboardInterrupt.__name__:  # Ctrl-C is for all, whoever meets it first
                raise KeyboardInterrupt from error
            raise PeerStoppedError(
                f"{name} stopped: {reason}",
                where=f"this is {self}",
                hint="what all ranks had written before is readable (divergence inspect)",
            ) from error
        if first is not None or not (lost or stopped):
            raise error
        raise PeerStoppedError(
            "another rank is gone, without a word",
            where=f"this is {self}: {text[:200]}",
            hint="a killed process says nothing: look for the out-of-memory killer in the system's "
            "log; torchrun names the rank",
        ) from error

    def _first_word(self, text: str | None) -> str | None:
        """The note of the rank that failed first; ``text`` where no other has left one."""
        try:
            store = dist.distributed_c10d._get_default_store()
            if text is not None:
                return store.compare_set(self._note, "", text[:500]).decode()
            for _ in range(20):  # a rank's end is noticed sooner than its word
                if store.check([self._note]):
                    return store.get(self._note).decode()
                time.sleep(0.1)
        except Exception:  # the store went with the process that kept it
            return text
        return None


class PeerStoppedError(ModelError):
    """Another rank ended first, so this one could not go on."""


class _ToldToStopError(ModelError):
    """torchrun ends all ranks when one has ended."""


def _leave() -> None:
    """Takes the group down at exit; torch complains otherwise."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _own_device(device: str) -> str:
    """Name the one of several accelerators in a node that is this process's."""
    kind, _, index = device.partition(":")
    if kind == "cpu" or index:
        return device
    place = int(os.environ.get("LOCAL_RANK", "0"))
    count = getattr(torch, kind).device_count()
    if place >= count:
        raise UsageError(
            f"process {place} of this node has no {kind} device of its own: there "
            + (f"are {count}" if count != 1 else "is 1"),
            hint=f"--nproc-per-node {count}, or --device cpu",
        )
    return f"{kind}:{place}"


@contextlib.contextmanager
def started(ranks: Ranks | None, make: Callable[..., RunWriter]) -> Iterator[RunWriter]:
    """What ``make`` makes of this ``rank``. Of several ranks the first starts, the others when the
    directory is there."""
    if ranks is not None and not ranks.is_first:
        ranks.gather(None)
    with make(rank=0 if ranks is None else ranks.rank) as writer:
        if ranks is not None and ranks.is_first:
            ranks.gather(None)
        # inside the writer, so that a run which ends early says which rank ended it
        with contextlib.nullcontext() if ranks is None else ranks.watched():
            yield writer


def on_all(ranks: Ranks | None, *counts: int) -> list[int]:
    """The counts of all ranks, added. A barrier: all ranks must call it."""
    if ranks is None:
        return list(counts)
    return [sum(column) for column in zip(*ranks.gather(counts), strict=True)]


def closed(
    ranks: Ranks, manifest: Manifest, out: str | os.PathLike[str] | Url, note: Callable[[str], None]
) -> Run:
    """The run, once all ranks have closed their part. Nodes without a common disk each hold some
    of its files, and nobody can read it yet: then the manifest alone."""
    ranks.gather(None)
    place = location_of(out)
    end = place if isinstance(place, Url) or archive_kind(place) is not None else place / MANIFEST
    if all(ranks.gather(isinstance(end, Url) or end.exists())):
        return Run.open(place)
    note(
        f"the ranks have no disk in common: {place} can be read when the files of all nodes are "
        "copied into one directory"
    )
    return Run(place, manifest, [])


def own_part(run: Run, rank: int) -> Run:
    """The records that this rank has written so far."""
    if run.manifest.mesh is not None:
        run.records = [record for record in run.records if record.rank == rank]
    return run
