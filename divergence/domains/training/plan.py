"""The plan of a training step: what one rank keeps, holds for a while and sends.

From the model's structure and the options alone. What is not known is left out with its reason:
pipeline stages, tensor parallelism of experts, a forward that needs values.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import msgspec
import torch
from msgspec.structs import replace
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from divergence.domains.training.options import PlanOptions, TrainOptions
from divergence.domains.training.recording.step import training_mode
from divergence.errors import DivergenceError, ModelError, UsageError, first_line
from divergence.facts import Fact, Worded, fact, with_sentences
from divergence.options.commands import link_rate
from divergence.options.option import given_fields, group_of
from divergence.recording.engines.load import LoadedModel, tensor_plan
from divergence.recording.forwards import swapped
from divergence.recording.processes import parse_mesh
from divergence.recording.request import Request
from divergence.recording.structure import describe_modules
from divergence.run.site import escape_path


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the memory that stays from step to step."""

    name: Literal["parameters", "gradients", "main weights", "moments"]
    formula: str
    """In Ψ, the number of parameters on a rank before ZeRO divides them, and N, the ranks that
    divide: ``2Ψ``, ``12Ψ/N``. Bytes."""
    bytes: int
    """On the rank that holds most."""


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """Says what one forward and backward hold beyond the parameters and the optimizer's state."""

    checkpointing: bool
    """Is each block's forward run again in the backward, in place of keeping its activations?"""
    saved_bytes: int
    """Held when the forward is done: what the backward needs, and the loss."""
    gathered_bytes: int
    """Parameters of other ranks that are held then too (ZeRO 3)."""
    peak_bytes: int
    """The most at any moment, with the gradients that are there by then."""


class Collective(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """The collectives of one kind, over one step."""

    TEXTS: ClassVar[Mapping[str, str]] = {"of": "sent"}

    operation: Literal["all-reduce", "reduce-scatter", "all-gather"]
    sent: Fact
    """Which tensors, and when."""
    of: str = ""
    """``gradients``, ``parameters, forward``, ``activations, backward``."""
    axis: str
    """Axis of the mesh whose ranks take part."""
    num_ranks: int
    tensor_bytes: int
    """The whole tensors', summed over the step."""
    bytes_per_rank: int
    """That each rank sends, and receives: (n-1)/n of the tensors, of an all-reduce twice that."""
    seconds: float | None
    """``bytes_per_rank`` at the link's rate."""


class TrainingPlan(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """Memory and traffic of one training step, on the rank that holds most."""

    TEXTS: ClassVar[Mapping[str, str]] = {"notes": "remarks"}

    num_parameters: int
    """Of the whole model."""
    num_ranks: int
    axes: dict[str, int]
    """Size of each axis of the mesh."""
    zero: int
    """Stage: 0 divides nothing, 1 the optimizer's state, 2 the gradients too, 3 all."""
    optimizer: str
    weight_dtype: str
    main_weights: bool
    """Does the optimizer keep weights in float32 beside those in 16 bits?"""
    autocast: str | None
    micro_batch: tuple[int, int]
    """Sequences of one forward on a rank, and tokens of each."""
    accumulates: bool
    """Do several micro-batches make a step, so that gradients stay between them?"""
    kept: list[Kept]
    kept_bytes: int
    """Sum of ``kept``."""
    activations: list[Activations]
    """Without and with checkpointing of blocks; empty where they could not be computed."""
    checkpointing: bool
    """Which of the two ``peak_bytes`` is of."""
    peak_bytes: int | None
    """The most at any moment of a step; None where the activations are not known."""
    traffic: list[Collective]
    link_rate: float | None
    """Bytes a second."""
    capture_bytes: int
    """Host memory that a capture of the step takes beside it."""
    dump_bytes: int
    """What it writes, at most."""
    remarks: list[Fact] = []
    """What is not counted, or otherwise elsewhere."""
    notes: list[str] = []
    """The same in words."""


# Bytes of parameters, gradients and optimizer state on one rank, from shapes and dtypes.
#
# docs/training.md has the bytes for each of Ψ parameters (Rajbhandari et al., "ZeRO: Memory
# Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054, section 5). Stages 1
# and 2 divide all elements evenly, as DeepSpeed and Megatron do. Stage 3 divides each parameter
# along its first dimension, as torch's ``fully_shard`` does: the first ranks hold ceil(rows/N) of
# its rows. ``whole_parameters_bytes`` is what torch's ``ZeroRedundancyOptimizer`` does at stage 1.
# Moments lie in the dtype of what they update. Not counted: a step counter of 4 bytes for each
# tensor, and what an allocator adds.

MOMENTS = {"adamw": 2, "sgd": 0}
"""Tensors of a parameter's shape that each optimizer keeps."""


class RankParameter(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter on a rank, tensor parallelism done and ZeRO not yet."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    """Bytes of an element."""
    trained: bool = True
    """Has it a gradient?"""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize

    def rows_numel(self, num_ranks: int) -> int:
        """Elements on the first rank where ``num_ranks`` divide the first dimension."""
        if num_ranks == 1 or not self.shape:
            return self.numel
        return -(-self.shape[0] // num_ranks) * math.prod(self.shape[1:])


def kept_parts(
    pieces: Sequence[RankParameter],
    *,
    optimizer: str,
    main_weights: bool,
    zero: int,
    num_ranks: int,
) -> list[Kept]:
    """Return what stays in memory from step to step, on the rank that holds most. ``num_ranks``: N.
    Raises UsageError for an optimizer or a stage that is not known."""
    if optimizer not in MOMENTS:
        raise UsageError(
            f"--optimizer-step {optimizer}: its state is not known", hint=f"{' or '.join(MOMENTS)}"
        )
    if zero not in range(4):
        raise UsageError(f"--zero {zero} is no stage of ZeRO", hint="0, 1, 2 or 3")
    trained = [piece for piece in pieces if piece.trained]

    def part(
        name: str, of: Sequence[RankParameter], factor: int, size: int | None, stage: int
    ) -> Kept:
        """``factor`` tensors of each shape; ``size``: bytes of an element, None for its own."""
        count, total = num_ranks if zero >= stage else 1, 0
        for p in of:  # by rows, or of one flat tensor in equal parts
            numel = p.rows_numel(count) if zero == 3 else -(-p.numel // count)
            total += factor * numel * (size or p.itemsize)
        own = {p.itemsize for p in of}
        each = str(factor * (size or own.pop())) if size or len(own) == 1 else "(2..4)"
        return Kept(name=name, formula=f"{each}Ψ{'/N' if count > 1 else ''}", bytes=total)  # type: ignore[arg-type]

    parts = [part("parameters", pieces, 1, None, 3), part("gradients", trained, 1, None, 2)]
    with_main = main_weights and any(piece.itemsize < 4 for piece in trained)
    if with_main:
        parts.append(part("main weights", trained, 1, 4, 1))
    if MOMENTS[optimizer]:
        parts.append(part("moments", trained, MOMENTS[optimizer], 4 if with_main else None, 1))
    return parts


def whole_parameters_bytes(
    pieces: Sequence[RankParameter], *, optimizer: str, num_ranks: int
) -> int:
    """Moments on the fullest rank where each parameter's lie whole on one: greedily, the largest
    first, each to the rank that has least (``torch.distributed.optim.ZeroRedundancyOptimizer``)."""
    ranks, by_rank = [0] * num_ranks, [0] * num_ranks
    for piece in sorted((p for p in pieces if p.trained), key=lambda p: p.numel, reverse=True):
        rank = ranks.index(min(ranks))
        ranks[rank] += piece.numel
        by_rank[rank] += MOMENTS[optimizer] * piece.bytes
    return max(by_rank)


# A rank's part of a model under tensor parallelism, as shapes, without any other rank.
#
# The model's own plan (``tp_plan`` of transformers) says which matrices are divided by rows and
# which by columns. Weights are made that much smaller and the forward is run as it stands:
# attention and MLP then compute this rank's heads and columns, as they do in a real run. What the
# plan holds beyond that (experts, sequence parallelism) is refused rather than guessed.

_COLUMNS = ("colwise", "packed_colwise")
GATHERED = ("colwise_gather_output", "colwise_rep")
"""Their output is put together from all ranks' parts: an all-gather in the forward."""
_ROWS = ("rowwise", "packed_rowwise")
_WHOLE = ("replicate", "replicated_with_grad_allreduce")

REDUCED = (*_ROWS, "embedding_rowwise")
"""Their outputs are sums over ranks: an all-reduce in the forward."""
SHARED = (*_COLUMNS, *GATHERED)
"""Their input is the same on all ranks: its gradient is a sum, an all-reduce in the backward."""


def shrink(module: torch.nn.Module, styles: Mapping[str, str], num_ranks: int) -> None:
    """Make the weights of ``module`` (on the meta device) the first rank's part. ``styles``: module
    path → style, as ``tensor_plan`` gives it. Raises ModelError where the model has no plan, or one
    with a style that is not known here."""
    if not styles:
        raise ModelError(
            f"{type(module).__name__} has no plan for tensor parallelism",
            hint="plan it without the axis tp",
        )
    method = getattr(module, "get_input_embeddings", None)
    tied = getattr(None if method is None else method(), "weight", None)
    for path, style in styles.items():
        part: Any = module.get_submodule(path)
        if style in _WHOLE:
            continue
        matrix = isinstance(part, torch.nn.Linear | torch.nn.Embedding)
        if not matrix or style not in SHARED + REDUCED:
            raise ModelError(
                f"how {style!r} divides {type(part).__name__} is not known to the plan",
                where=path,
                hint="plan it without the axis tp",
            )
        if part.weight is tied and style != "embedding_rowwise":
            continue
        axis = 1 if style in _ROWS else 0
        whole = part.weight.shape[axis]
        for name in ("weight", "bias") if axis == 0 else ("weight",):
            old = getattr(part, name, None)
            if old is not None:
                new = torch.empty_like(old.narrow(axis, 0, -(-whole // num_ranks)), device="meta")
                parameter = torch.nn.Parameter(new.contiguous(), requires_grad=old.requires_grad)
                setattr(part, name, parameter)
        if style in GATHERED:
            part.register_forward_hook(
                lambda _part, _inputs, output, whole=whole: torch.cat([output] * num_ranks, -1)[
                    ..., :whole
                ]
            )


# Bytes that the collectives of one training step move, and how long a link takes for them.
#
# Of n ranks each sends, and receives, (n-1)/n of a tensor in a reduce-scatter or an all-gather, and
# twice that in an all-reduce, which is one after the other (ring: Patarasuk and Yuan, "Bandwidth
# optimal all-reduce algorithms for clusters of workstations", 2009; in NCCL's words the bus
# bandwidth's factor). docs/training.md says what each stage of ZeRO sends (arXiv 1910.02054,
# section 7), and tensor parallelism (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3).
# Times are bytes over the rate, as if nothing else used the link and nothing overlapped, without
# latency.

_FACTOR = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}


def gradient_traffic(
    pieces: Sequence[RankParameter],
    rest: Sequence[RankParameter],
    *,
    zero: int,
    axes: dict[str, int],
    rate: float | None,
) -> list[Collective]:
    """Return the traffic of the axes dp and fsdp. ``rest``: those of ``pieces`` that stay whole
    between forward and backward (ZeRO 3)."""
    trained = [piece for piece in pieces if piece.trained]
    dp, fsdp = axes.get("dp", 1), axes.get("fsdp", 1)
    if zero == 0:
        name = "dp × fsdp" if min(dp, fsdp) > 1 else "fsdp" if fsdp > 1 else "dp"
        return _some("all-reduce", "gradients", name, dp * fsdp, _bytes(trained, 1), rate)
    name, count = ("fsdp", fsdp) if fsdp > 1 else ("dp", dp)
    rows = count if zero == 3 else 1
    gradients = _bytes(trained, rows)
    calls = []
    if zero == 3:
        own = {piece.name for piece in rest}
        again = [piece for piece in pieces if piece.name not in own]
        calls += _some("all-gather", "parameters_forward", name, count, _bytes(pieces, rows), rate)
        calls += _some("all-gather", "parameters_backward", name, count, _bytes(again, rows), rate)
    calls += _some("reduce-scatter", "gradients", name, count, gradients, rate)
    if zero < 3:
        calls += _some("all-gather", "parameters_updated", name, count, _bytes(trained, 1), rate)
    if name == "fsdp":
        calls += _some("all-reduce", "gradients", "dp", dp, -(-gradients // count), rate)
    return calls


def tensor_traffic(
    forward_bytes: int,
    backward_bytes: int,
    gathered_bytes: int,
    *,
    num_ranks: int,
    rate: float | None,
) -> list[Collective]:
    """Return the traffic of axis tp: sums of outputs and of input gradients, outputs joined."""
    return [
        *_some("all-reduce", "activations_forward", "tp", num_ranks, forward_bytes, rate),
        *_some("all-reduce", "activations_backward", "tp", num_ranks, backward_bytes, rate),
        *_some("all-gather", "activations_forward", "tp", num_ranks, gathered_bytes, rate),
    ]


def _some(
    operation: Literal["all-reduce", "reduce-scatter", "all-gather"],
    sent: str,
    axis: str,
    num_ranks: int,
    tensor_bytes: int,
    rate: float | None,
) -> list[Collective]:
    """``sent``: the code of what is sent, and when."""
    if num_ranks < 2 or tensor_bytes == 0:
        return []
    moved = _FACTOR[operation] * tensor_bytes * (num_ranks - 1) // num_ranks
    return [
        Collective(
            operation=operation,
            sent=fact(f"training.{sent}"),
            axis=axis,
            num_ranks=num_ranks,
            tensor_bytes=tensor_bytes,
            bytes_per_rank=moved,
            seconds=None if rate is None else moved / rate,
        )
    ]


def _bytes(pieces: Sequence[RankParameter], rows: int) -> int:
    """Rows are padded, so that all ranks have equally many."""
    return sum(piece.rows_numel(rows) * rows * piece.itemsize for piece in pieces)


# How many bytes of tensors live at each moment, counted while operators run on fake tensors.
#
# Each operator's results are storages; one is counted when it is first seen, and no more when it is
# freed. Run under torch's FakeTensorMode nothing is allocated, and sizes and lifetimes are those of
# a real step: also of what autograd saves, of gradients of activations, of what is computed again.


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered. ``now`` and ``peak``: bytes of storages made since then, and
    of what ``hold`` adds; ``held``: of these alone, now."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.held = 0
        self._held: dict[object, int] = {}
        self._storages: dict[int, weakref.ref[Any]] = {}

    def hold(self, key: object, num_bytes: int) -> None:
        """Count ``num_bytes`` that no operator made, until ``release``; once for a key."""
        if key not in self._held:
            self._held[key] = num_bytes
            self.held += num_bytes
            self._add(num_bytes)

    def release(self, key: object) -> None:
        num_bytes = self._held.pop(key, 0)
        self.held -= num_bytes
        self.now -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return result

    def see(self, tensor: torch.Tensor, num_bytes: int | None = None) -> None:
        """Count the tensor's memory, or only so many bytes of it, where it is seen first."""
        storage = tensor.untyped_storage()
        key = id(storage)  # of one that lives; forgotten with it
        if key in self._storages:
            return
        num_bytes = storage.nbytes() if num_bytes is None else num_bytes

        def forget(_: Any) -> None:
            self.now -= num_bytes
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, forget)
        self._add(num_bytes)

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


# One forward and backward on fake tensors: what they hold at each moment, and what tensor
# parallelism sends.
#
# The step is run twice, without and with checkpointing of blocks, so that activations are counted
# and not estimated by a formula. Gradients are taken away as they come and counted as they would
# lie: whole, or the rank's piece (ZeRO 2 and 3). Of ZeRO 3 the parameters come and go too, as
# torch's ``fully_shard`` of each block and of the rest has it: a block's are gathered before its
# forward and its backward, and through one buffer that the next block's already fills in the
# backward; the rest's stay from the forward to the end of the backward.


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Says what is asked, in the words of the options."""

    batch: int
    """Sequences of one forward on a rank."""
    tokens: int
    """Of each sequence."""
    mesh: str | None = None
    zero: int | None = None
    optimizer: str | None = None
    main_weights: bool | None = None
    autocast: str | None = None
    gradient_checkpointing: bool = False
    dropout: bool = False
    accumulates: bool = False
    """Do several micro-batches make a step, so that gradients stay between them?"""
    link_rate: str | None = None
    capture_bytes: int = 0
    dump_bytes: int = 0


class StepLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Says how a step is divided."""

    zero: int = 0
    num_ranks: int = 1
    """Those that ZeRO divides over, or that average gradients."""
    blocks: tuple[str, ...] = ()
    styles: Mapping[str, str] = {}
    """Of modules that tensor parallelism divides, by path: how."""
    accumulates: bool = False
    """Are gradients of earlier micro-batches there?"""

    @property
    def stays(self) -> bool:
        """Are the gradients there from the start, in DDP's buckets or from earlier?"""
        return self.accumulates or (self.zero < 2 and self.num_ranks > 1)

    @property
    def divides_parameters(self) -> bool:
        return self.zero == 3 and self.num_ranks > 1


class Sent:
    """Counts the tensors that tensor parallelism adds over ranks, or puts together."""

    def __init__(self) -> None:
        self.forward_bytes = self.gathered_bytes = 0
        """All-reduced in the forward (checkpointing's second one too), and put together."""
        self.backward_bytes = 0
        """All-reduced in the backward: each tensor that several matrices share once."""
        self.num_backward = 0
        """Matrices with such a gradient."""
        self._last: Any = None

    def forward(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        self.forward_bytes += output.nbytes

    def gather(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        self.gathered_bytes += output.nbytes

    def backward(self, _module: Any, inputs: Sequence[Any], _output: Any) -> None:
        given = inputs[0]
        if given.requires_grad:
            self.num_backward += 1
            # matrices with one input come one after the other
            self.backward_bytes += 0 if given is self._last else given.nbytes
            self._last = given


def run_step(
    loaded: LoadedModel, wanted: Wanted, layout: StepLayout, *, checkpointing: bool
) -> tuple[Activations, Sent]:
    """Return what one step was seen to hold and send. The model lies on the meta device and is left
    there. Raises what the model raises where its forward needs values."""
    module: Any = loaded.module
    live, sent = LiveBytes(), Sent()
    low = contextlib.nullcontext()
    if wanted.autocast is not None:
        low = torch.autocast("cpu", getattr(torch, wanted.autocast))  # type: ignore[assignment]
    mode = training_mode(module, dropout=wanted.dropout, checkpointing=checkpointing)
    with FakeTensorMode(), swapped(module, _fake), mode, contextlib.ExitStack() as stack:
        ids = torch.zeros(wanted.batch, wanted.tokens, dtype=torch.long)
        for tensor in (*module.parameters(), *module.buffers(), ids):
            live.see(tensor, num_bytes=0)  # it was there before
        counts = (REDUCED, sent.forward), (GATHERED, sent.gather), (SHARED, sent.backward)
        for path, style in layout.styles.items():
            for count in (count for styles, count in counts if style in styles):
                stack.enter_context(module.get_submodule(path).register_forward_hook(count))
        # Of sequences without pads transformers leaves the mask out, and sdpa knows itself what is
        # causal. Whether there are pads it cannot see on fake tensors, and makes a mask of T × T.
        config, sdpa = getattr(module, "config", None), loaded.task == "causal-lm"
        sdpa = sdpa and getattr(config, "_attn_implementation", None) == "sdpa"
        for path in layout.blocks if sdpa and not getattr(config, "sliding_window", None) else ():
            block = module.get_submodule(path)
            stack.enter_context(block.register_forward_pre_hook(_without_mask, with_kwargs=True))
        ranks = stack.enter_context(_Sharing(module, live, layout).installed())
        with live:
            with low:
                loss = _loss(loaded, ids)
            saved, gathered = live.now - live.held, ranks.gathered_bytes
            ranks.backward = True
            loss.backward()
            del loss
            ranks.finish()
    sizes = {"saved_bytes": saved, "gathered_bytes": gathered, "peak_bytes": live.peak}
    return Activations(checkpointing=checkpointing, **sizes), sent


def _loss(loaded: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the model's own loss where it computes one, else the sum of its first output."""
    module: Any = loaded.module
    parameters = inspect.signature(module.forward).parameters
    inputs: dict[str, Any] = {"input_ids": ids}
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    if "labels" in parameters:
        inputs["labels"] = ids
    elif loaded.task == "encoder-decoder":
        inputs["decoder_input_ids"] = ids
    result = module(**inputs)
    loss = getattr(result, "loss", None)
    if loss is None:
        outputs = result if isinstance(result, torch.Tensor) else result[0]
        loss = outputs.float().sum()
    return loss


class _Sharing:
    """Takes gradients away and lets parameters come and go, as ZeRO does."""

    def __init__(self, module: Any, live: LiveBytes, layout: StepLayout) -> None:
        self._module, self._live, self._layout = module, live, layout
        self.backward = False
        self._blocks = [module.get_submodule(path) for path in layout.blocks]
        taken: set[int] = set()
        self._groups: list[list[torch.nn.Parameter]] = []
        for block in self._blocks:
            own = [parameter for parameter in block.parameters() if id(parameter) not in taken]
            taken |= {id(parameter) for parameter in own}
            self._groups.append(own)
        self._rest = [parameter for parameter in module.parameters() if id(parameter) not in taken]

    @contextlib.contextmanager
    def installed(self) -> Iterator[_Sharing]:
        live, trained = self._live, [p for p in self._module.parameters() if p.requires_grad]
        if self._layout.stays:
            live.hold("gradients", sum(map(self._own_bytes, trained)))
        with contextlib.ExitStack() as stack:
            if self._layout.divides_parameters:
                live.hold("rest", _bytes_of(self._rest))
            else:
                for parameter in trained:
                    stack.enter_context(parameter.register_post_accumulate_grad_hook(self._take))
            for number, block in enumerate(self._blocks if self._layout.divides_parameters else ()):
                before, after = partial(self._gather, number), partial(self._let_go, number)
                stack.enter_context(block.register_forward_pre_hook(before))
                stack.enter_context(block.register_forward_hook(after, with_kwargs=True))
            yield self

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes that are gathered between forward and backward."""
        return _bytes_of(self._rest) if self._layout.divides_parameters else 0

    def finish(self) -> None:
        """The last gradients, behind the backward."""
        if self._layout.divides_parameters:
            for number in range(len(self._groups)):  # whose input has no gradient
                self._scatter(number)
            self._reduce("rest", self._rest)

    def _take(self, parameter: torch.Tensor) -> None:
        parameter.grad = None
        if not self._layout.stays:
            self._live.hold(("gradient", id(parameter)), self._own_bytes(parameter))

    def _own_bytes(self, parameter: torch.Tensor) -> int:
        """Return the bytes of its gradient on this rank."""
        count = self._layout.num_ranks
        if self._layout.divides_parameters:
            rows = parameter.shape[0] if parameter.ndim else 1
            return parameter.nbytes // max(rows, 1) * -(-rows // count)
        return -(-parameter.nbytes // (count if self._layout.zero == 2 else 1))

    def _gather(self, number: int, *_: Any) -> None:
        """Through a flat buffer into the parameters."""
        size = _bytes_of(self._groups[number])
        if not self.backward:
            self._live.hold("buffer", size)
        self._live.hold(("block", number), size)
        self._live.release("buffer")

    def _let_go(self, number: int, _block: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self.backward:
            return  # checkpointing's second forward
        self._live.release(("block", number))
        first = output if isinstance(output, torch.Tensor) else output[0]
        if first.requires_grad:
            first.register_hook(lambda _: self._begin(number))
        given = args[0] if args else kwargs.get("hidden_states")
        if isinstance(given, torch.Tensor) and given.requires_grad:
            given.register_hook(lambda _: self._scatter(number))

    def _begin(self, number: int) -> None:
        self._gather(number)
        if number > 0:
            self._live.hold("buffer", _bytes_of(self._groups[number - 1]))

    def _scatter(self, number: int) -> None:
        self._live.release(("block", number))
        self._reduce(("gradients of", number), self._groups[number])

    def _reduce(self, key: object, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Whole gradients → one flat buffer → this rank's rows. The buffer stays to the next."""
        whole = [parameter for parameter in parameters if parameter.grad is not None]
        if not whole:
            return
        self._live.release("scattered")
        self._live.hold("scattered", _bytes_of(whole))
        for parameter in whole:
            parameter.grad = None
        if not self._layout.stays:
            self._live.hold(key, sum(map(self._own_bytes, whole)))


def _bytes_of(parameters: Sequence[torch.Tensor]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _without_mask(_block: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A pre-hook that takes a mask of T × T away."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.ndim == 4:
        kwargs = {**kwargs, "attention_mask": None}
    return args, kwargs


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """Lay the model on the CPU in place of the meta device: operators then choose what they save as
    on a device (attention without its matrix, for one)."""
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    whole = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(fake, tensor.requires_grad) if whole else fake


# The plan, of all of these.

_AS_ASKED = ("mesh", "zero", "optimizer", "main_weights", "autocast", "link_rate")


def plan(
    loaded: LoadedModel,
    request: Request,
    options: PlanOptions,
    shapes: Sequence[tuple[int, int]],
    *,
    forward_bytes: int,
) -> TrainingPlan | None:
    """Return what ``capture --dry-run`` says of a training step; None where none is asked for."""
    step = group_of(TrainOptions, request)
    if not step.train:
        for field in given_fields(options):
            raise UsageError(
                f"{field.option.names[0]} is for the plan of a training step",
                hint="--dry-run --train",
            )
        return None
    batch, tokens = max(shapes, key=math.prod)
    weights = sum(parameter.nbytes for parameter in loaded.module.parameters())
    copies = 1 if step.optimizer is None else 5  # gradient, the optimizer's, update, moments
    return plan_training(
        loaded,
        Wanted(
            batch=options.micro_batch_size or batch,
            tokens=options.sequence_length or tokens,
            **{name: getattr(request, name) for name in _AS_ASKED},
            gradient_checkpointing=bool(step.gradient_checkpointing),
            dropout=bool(step.dropout),
            accumulates=len(shapes) > 1,
            capture_bytes=request.buffer_bytes,
            dump_bytes=2 * forward_bytes + copies * weights,
        ),
    )


@with_sentences
def plan_training(loaded: LoadedModel, wanted: Wanted) -> TrainingPlan:
    """``loaded``: a model on the meta device, whose weights are made smaller for ``tp``. Raises
    UsageError for options that make no plan, and ModelError for a model that tensor parallelism
    cannot divide."""
    axes = _axes(wanted.mesh)
    rate = None if wanted.link_rate is None else link_rate(wanted.link_rate)
    dp, fsdp, tp = (axes.get(name, 1) for name in ("dp", "fsdp", "tp"))
    zero = wanted.zero if wanted.zero is not None else 3 if fsdp > 1 else 0
    # the ranks that ZeRO divides over; at stage 0 those that average gradients
    count = dp * fsdp if zero == 0 else fsdp if fsdp > 1 else dp
    if zero and count == 1:
        raise UsageError(
            f"--zero {zero} has no ranks to divide over", hint="--mesh dp=8, or --mesh fsdp=8"
        )
    optimizer = wanted.optimizer or "adamw"
    module: Any = loaded.module
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    styles: dict[str, str] = {}
    if tp > 1:
        styles = tensor_plan(module)
        shrink(module, styles, tp)
    pieces = [  # each once
        RankParameter(
            name=name,
            shape=tuple(parameter.shape),
            itemsize=parameter.element_size(),
            trained=parameter.requires_grad,
        )
        for name, parameter in module.named_parameters()
    ]
    main_weights = wanted.main_weights is not False and any(param.itemsize < 4 for param in pieces)
    kept = kept_parts(
        pieces, optimizer=optimizer, main_weights=main_weights, zero=zero, num_ranks=count
    )
    # torch's DTensor holds the gradient of a table whose rows are divided whole
    wide = {f"{path}.weight" for path, style in styles.items() if style == "embedding_rowwise"}
    tables = [piece for piece in pieces if piece.trained and piece.name in wide]
    undivided = sum((tp - 1) * piece.bytes for piece in tables) if zero < 2 else 0
    more = {"gradients": undivided}
    kept = [replace(part, bytes=part.bytes + more.get(part.name, 0)) for part in kept]
    names = {escape_path(name): name for name, _ in module.named_modules()}
    notes = describe_modules(module)
    blocks = [names[path] for path, note in notes.items() if note.role == "block"]
    layout = StepLayout(
        zero=zero,
        num_ranks=count,
        blocks=tuple(blocks),
        styles=styles,
        accumulates=wanted.accumulates,
    )
    steps, remarks = _steps(loaded, wanted, layout)
    outside = [p for p in pieces if not any(p.name.startswith(f"{block}.") for block in blocks)]
    traffic = gradient_traffic(pieces, outside, zero=zero, axes=axes, rate=rate)
    way = wanted.gradient_checkpointing
    used, sent = next((step for step in steps if step[0].checkpointing == way), (None, Sent()))
    traffic += tensor_traffic(
        sent.forward_bytes, sent.backward_bytes, sent.gathered_bytes, num_ranks=tp, rate=rate
    )
    by_name = {part.name: part.bytes for part in kept}
    total, gradients = sum(by_name.values()), by_name["gradients"]
    peak = None
    if used is not None:
        peak = total - gradients + max(gradients, used.peak_bytes + undivided)
    moments = by_name.get("moments", 0)
    if zero == 1 and moments and not main_weights:
        fullest = whole_parameters_bytes(pieces, optimizer=optimizer, num_ranks=count)
        remarks.append(fact("training.zero_optimizer", fullest_bytes=fullest, moment_bytes=moments))
    if zero < 2 and dp * fsdp > 1:
        remarks.append(fact("training.ddp_buckets", gradient_bytes=gradients))
    if sent.num_backward and tp > 1:
        remarks.append(fact("training.shared_input", num_matrices=sent.num_backward))
    for piece in tables:
        size, counted = (tp - 1) * piece.bytes, undivided > 0
        table = fact("training.whole_table", parameter=piece.name, more_bytes=size, counted=counted)
        remarks.append(table)
    return TrainingPlan(
        num_parameters=num_parameters,
        num_ranks=math.prod(axes.values()),
        axes=axes,
        zero=zero,
        optimizer=optimizer,
        weight_dtype=str(next(module.parameters()).dtype).removeprefix("torch."),
        main_weights=main_weights,
        autocast=wanted.autocast,
        micro_batch=(wanted.batch, wanted.tokens),
        kept=kept,
        kept_bytes=total,
        activations=[activations for activations, _ in steps],
        checkpointing=wanted.gradient_checkpointing,
        peak_bytes=peak,
        traffic=traffic,
        link_rate=rate,
        accumulates=wanted.accumulates,
        capture_bytes=wanted.capture_bytes,
        dump_bytes=wanted.dump_bytes,
        remarks=remarks,
    )


def _axes(mesh: str | None) -> dict[str, int]:
    if mesh is None:
        return {}
    count = math.prod(map(int, re.findall(r"=\s*(\d+)", mesh)))
    if any("=" not in word for word in mesh.split(",")):
        parse_mesh(mesh, count)  # its own word for an axis that is none
        raise UsageError(
            f"--mesh {mesh} leaves a size open, and a plan starts no ranks that would tell it",
            hint="each axis with its size: fsdp=8,tp=2",
        )
    axes = {axis.name: axis.size for axis in parse_mesh(mesh, count).axes}
    if axes.get("pp", 1) > 1:
        raise UsageError(
            "a pipeline's activations depend on its schedule, which a plan does not know",
            hint="plan one stage without pp, or leave pp out of --mesh",
        )
    return axes


def _steps(
    loaded: LoadedModel, wanted: Wanted, layout: StepLayout
) -> tuple[list[tuple[Activations, Sent]], list[Fact]]:
    """Run a step without and with checkpointing, as far as the model has it and can be run."""
    module: Any = loaded.module
    remarks: list[Fact] = []
    ways: Sequence[bool] = (False, True)
    if not getattr(module, "supports_gradient_checkpointing", False):
        if wanted.gradient_checkpointing:
            raise UsageError(
                f"{type(module).__name__} has no gradient checkpointing",
                hint="leave out --gradient-checkpointing",
            )
        ways = (False,)
        remarks.append(fact("training.no_checkpointing"))
    steps = []
    for checkpointing in ways:
        try:
            steps.append(run_step(loaded, wanted, layout, checkpointing=checkpointing))
        except DivergenceError:
            raise
        except Exception as error:  # whatever an architecture raises without values
            remarks.append(fact("training.no_activations", error=first_line(error, most=200)))
            break
    return steps, remarks
