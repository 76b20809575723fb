"""One forward and backward on fake tensors: what they hold at each moment, and what tensor
parallelism sends.

The step is run twice, without and with checkpointing of blocks, so that activations are counted
and not estimated by a formula. Gradients are taken away as they come and counted as they would lie:
whole, or the rank's piece (ZeRO 2 and 3). Of ZeRO 3 the parameters come and go too, as torch's
``fully_shard`` of each block and of the rest has it: a block's are gathered before its forward and
its backward, and through one buffer that the next block's already fills in the backward; the rest's
stay from the forward to the end of the backward.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from divergence.recording.engines.load import LoadedModel
from divergence.recording.hooks import swapped
from divergence.recording.training import training_mode
from divergence.training.plan.live import LiveBytes
from divergence.training.plan.result import Activations

__all__ = ["StepLayout", "Stepped", "Wanted", "run_step"]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, in the words of the options."""

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
    """How a step is divided. ``num_ranks``: those that ZeRO divides over, or that average
    gradients; ``reduced``, ``shared``, ``gathered``: paths of modules with an all-reduce in the
    forward, one in the backward, and an all-gather of the output. ``accumulates``: gradients of
    earlier micro-batches are there."""

    zero: int = 0
    num_ranks: int = 1
    blocks: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    accumulates: bool = False

    @property
    def stays(self) -> bool:
        """Are the gradients there from the start, in DDP's buckets or from earlier?"""
        return self.accumulates or (self.zero < 2 and self.num_ranks > 1)

    @property
    def divides_parameters(self) -> bool:
        return self.zero == 3 and self.num_ranks > 1


class Stepped(msgspec.Struct, frozen=True, kw_only=True):
    activations: Activations
    reduced_bytes: int
    """All-reduced in the forward (checkpointing's second one too), as tensors."""
    shared_bytes: int
    """All-reduced in the backward: each tensor that several matrices share once."""
    num_shared: int
    """Matrices with such a gradient."""
    gathered_bytes: int


def run_step(
    loaded: LoadedModel, wanted: Wanted, layout: StepLayout, *, checkpointing: bool
) -> Stepped:
    """The model lies on the meta device and is left there.

    Raises what the model raises where its forward needs values.
    """
    module: Any = loaded.module
    live = LiveBytes()
    counted = _Reduced()
    low = contextlib.nullcontext()
    if wanted.autocast is not None:
        low = torch.autocast("cpu", getattr(torch, wanted.autocast))  # type: ignore[assignment]
    mode = training_mode(module, dropout=wanted.dropout, checkpointing=checkpointing)
    with FakeTensorMode(), swapped(module, _fake), mode, contextlib.ExitStack() as stack:
        ids = torch.zeros(wanted.batch, wanted.tokens, dtype=torch.long)
        for tensor in (*module.parameters(), *module.buffers(), ids):
            live.leave_out(tensor)
        for paths, count in (
            (layout.reduced, counted.forward),
            (layout.gathered, counted.gather),
            (layout.shared, counted.backward),
        ):
            for path in paths:
                stack.enter_context(module.get_submodule(path).register_forward_hook(count))
        for path in layout.blocks if _drops_mask(loaded) else ():
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
    activations = Activations(
        checkpointing=checkpointing, saved_bytes=saved, gathered_bytes=gathered,
        peak_bytes=live.peak,
    )  # fmt: skip
    return Stepped(
        activations=activations, reduced_bytes=counted.forward_bytes,
        shared_bytes=counted.backward_bytes, num_shared=counted.num_backward,
        gathered_bytes=counted.gathered_bytes,
    )  # fmt: skip


def _loss(loaded: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    """Of the model where it computes one, else the sum of its first output."""
    module: Any = loaded.module
    known = inspect.signature(module.forward).parameters
    inputs: dict[str, Any] = {"input_ids": ids}
    if "use_cache" in known:
        inputs["use_cache"] = False
    if "labels" in known:
        inputs["labels"] = ids
    elif loaded.task == "encoder-decoder":
        inputs["decoder_input_ids"] = ids
    result = module(**inputs)
    loss = getattr(result, "loss", None)
    if loss is None:
        outputs = result if isinstance(result, torch.Tensor) else result[0]
        loss = outputs.float().sum()
    return loss


class _Reduced:
    """Counts the tensors that tensor parallelism adds over ranks."""

    def __init__(self) -> None:
        self.forward_bytes = self.backward_bytes = self.num_backward = 0
        self.gathered_bytes = 0
        self._last: Any = None

    def forward(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        self.forward_bytes += output.nbytes

    def gather(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        self.gathered_bytes += output.nbytes

    def backward(self, _module: Any, inputs: Sequence[Any], _output: Any) -> None:
        given = inputs[0]
        if not given.requires_grad:
            return
        self.num_backward += 1
        if given is not self._last:  # matrices with one input come one after the other
            self.backward_bytes += given.nbytes
        self._last = given


class _Sharing:
    """Takes gradients away and lets parameters come and go, as ZeRO does."""

    def __init__(self, module: Any, live: LiveBytes, layout: StepLayout) -> None:
        self._module, self._live, self._layout = module, live, layout
        self.backward = False
        blocks = [module.get_submodule(path) for path in layout.blocks]
        taken: set[int] = set()
        self._groups: list[list[torch.nn.Parameter]] = []
        for block in blocks:
            own = [parameter for parameter in block.parameters() if id(parameter) not in taken]
            taken |= {id(parameter) for parameter in own}
            self._groups.append(own)
        self._blocks = blocks
        self._rest = [parameter for parameter in module.parameters() if id(parameter) not in taken]

    @contextlib.contextmanager
    def installed(self) -> Iterator[_Sharing]:
        live, trained = self._live, [p for p in self._module.parameters() if p.requires_grad]
        if self._layout.stays:
            live.hold("gradients", sum(map(self._own_bytes, trained)))
        with contextlib.ExitStack() as stack:
            if self._layout.divides_parameters:
                live.hold("rest", _bytes(self._rest))
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
        """Between forward and backward."""
        return _bytes(self._rest) if self._layout.divides_parameters else 0

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
        """Of its gradient, on this rank."""
        count = self._layout.num_ranks
        if self._layout.divides_parameters:
            return _rows_bytes(parameter, count)
        return -(-parameter.nbytes // (count if self._layout.zero == 2 else 1))

    def _gather(self, number: int, *_: Any) -> None:
        """Through a flat buffer into the parameters."""
        size = _bytes(self._groups[number])
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
            self._live.hold("buffer", _bytes(self._groups[number - 1]))

    def _scatter(self, number: int) -> None:
        self._live.release(("block", number))
        self._reduce(("gradients of", number), self._groups[number])

    def _reduce(self, key: object, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Whole gradients → one flat buffer → this rank's rows. The buffer stays to the next."""
        whole = [parameter for parameter in parameters if parameter.grad is not None]
        if not whole:
            return
        self._live.release("scattered")
        self._live.hold("scattered", _bytes(whole))
        for parameter in whole:
            parameter.grad = None
        if not self._layout.stays:
            self._live.hold(key, sum(map(self._own_bytes, whole)))


def _bytes(parameters: Sequence[torch.Tensor]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _rows_bytes(parameter: torch.Tensor, num_ranks: int) -> int:
    rows = parameter.shape[0] if parameter.ndim else 1
    return parameter.nbytes // max(rows, 1) * -(-rows // num_ranks)


def _drops_mask(loaded: LoadedModel) -> bool:
    """Of sequences without pads transformers leaves the mask out, and sdpa knows itself what is
    causal. Whether there are pads it cannot see on fake tensors, and makes a mask of T × T."""
    config = getattr(loaded.module, "config", None)
    return (
        loaded.task == "causal-lm"
        and getattr(config, "_attn_implementation", None) == "sdpa"
        and not getattr(config, "sliding_window", None)
    )


def _without_mask(_block: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A pre-hook that takes a mask of T × T away."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.ndim == 4:
        kwargs = {**kwargs, "attention_mask": None}
    return args, kwargs


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU in place of the meta device: operators then choose what they save as on a device
    (attention without its matrix, for one)."""
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    whole = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(fake, tensor.requires_grad) if whole else fake
