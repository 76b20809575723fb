"""vLLM's modules as transformers' would look to a hook.

Three things differ:

``tokens``    vLLM runs the tokens of a batch as rows (N, H); transformers (B, T, H). ``through``
              shows them so (``batches``).
``stream``    a decoder layer of vLLM takes and gives the residual stream as a sum that is not yet
              made: (hidden, residual). Its norms make it, fused. What transformers' block takes and
              gives is hidden + residual, added in the model's dtype: bit for bit the residual that
              the next norm gives on. (That norm itself goes on from the sum before it is rounded.)
``fused``     q, k and v are one matrix, gate and up another: their rows are the parts.

What a hook puts in the place of a stream goes in as hidden, with a residual of zeros where there
was one, so that the same kernels run; the sum is exact.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from divergence.errors import PlantError
from divergence.recording.engines.vllm.batches import Shown, Through, alone
from divergence.recording.hooks.arguments import argument_names
from divergence.recording.hooks.patch import patched

__all__ = ["head_hooked", "table_viewed", "viewed"]

Before = Callable[..., Any]
After = Callable[..., Any]
_RESIDUAL = "residual"


@contextlib.contextmanager
def viewed(
    module: torch.nn.Module,
    before: Before,
    after: After,
    *,
    is_block: bool = False,
    rows: slice | None = None,
    through: Through = alone,
) -> Iterator[None]:
    """The hooks of a recorder on a module, which show them transformers' form of it.

    ``is_block``: what it gives is (hidden, residual), a stream. ``rows``: the part of the output
    that is meant. ``through``: shows the tokens of a forward as batches.
    """
    names = _names(module)
    if rows is None:
        view = _View(before, after, names, through, is_block=is_block)
        with (
            module.register_forward_pre_hook(view.pre, with_kwargs=True),
            module.register_forward_hook(view.post, with_kwargs=True),
        ):
            yield
        return
    part = _part(before, after, names, rows, through)
    with module.register_forward_hook(part, with_kwargs=True):
        yield


def table_viewed(
    attention: torch.nn.Module, rotary: Any, after: After, *, through: Through = alone
) -> contextlib.AbstractContextManager[Any]:
    """The rows of a rotary table that a forward reads, seen as the output of transformers' module:
    (cos, sin), each (B, T, D) with both halves alike. Told once, by the ``attention`` of one block.
    A table of another form is not shown.
    """
    names = argument_names(attention)

    def pre(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        table, positions = getattr(rotary, "cos_sin_cache", None), given.get("positions")
        if table is None or positions is None or positions.ndim != 1 or not rotary.is_neox_style:
            return
        _, hidden = _hidden(given)
        halves = table[positions].to(hidden.dtype).unflatten(-1, (2, -1))

        def shown(seen: torch.Tensor) -> None:
            pair = tuple(half.repeat(1, 1, 2) for half in seen.unbind(2))
            if after(rotary, (), {}, pair) is not None:
                raise PlantError(
                    "vLLM reads its rotary table inside its kernels",
                    hint="plant at the output of a module, or change the table by prepare",
                )

        through(shown, halves)

    return attention.register_forward_pre_hook(pre, with_kwargs=True)


class _View:
    """Both hooks of one module."""

    def __init__(
        self, before: Before, after: After, names: list[str], through: Through, *, is_block: bool
    ) -> None:
        self._before, self._after, self._names, self._is_block = before, after, names, is_block
        self._through = through
        self._stream: torch.Tensor | None = None
        """What a norm was given, where a hook put something else in its place."""

    def pre(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        name, hidden = _hidden(given)
        residual = given.get(_RESIDUAL)
        seen = hidden if residual is None else hidden + residual
        self._stream = None
        new = self._through(_entering(self._before, module), seen)
        if new is None:
            return None
        given[name] = new.reshape(hidden.shape)
        if residual is not None:
            given[_RESIDUAL] = torch.zeros_like(residual)
            self._stream = seen
        # by position as they came: a forward may take more than it names
        count = len(args)
        return (
            tuple(given.get(n, a) for n, a in zip(self._names, args, strict=False))
            + args[len(self._names) :],
            {key: given[key] for key in given if key not in self._names[:count]},
        )

    def post(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        parts = output if isinstance(output, tuple) else (output,)
        first, residual = parts[0], parts[1] if len(parts) > 1 else None
        stream = residual if self._is_block and isinstance(residual, torch.Tensor) else None
        seen = first if stream is None else first + stream
        new = self._through(_leaving(self._after, module), seen)
        changed = None if new is None else new.reshape(first.shape)
        if stream is not None:
            return None if changed is None else (changed, torch.zeros_like(stream), *parts[2:])
        if self._stream is not None and isinstance(residual, torch.Tensor):
            # what was put in place was the norm's input alone: the stream goes on as it was
            return (first if changed is None else changed, self._stream, *parts[2:])
        if changed is None:
            return None
        return (changed, *parts[1:]) if isinstance(output, tuple) else changed


def _part(
    before: Before, after: After, names: list[str], rows: slice, through: Through
) -> Callable[..., Any]:
    """One hook for a part of a fused module: input and output are told when both are there."""

    def hook(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        _, hidden = _hidden(dict(zip(names, args, strict=False)) | kwargs)
        if through(_entering(before, module), hidden) is not None:
            raise PlantError(
                "vLLM computes this module in one with others, which take the same input",
                hint="plant at its output, or at the input of the module around it",
            )
        whole = output[0] if isinstance(output, tuple) else output
        new = through(_leaving(after, module), whole[..., rows])
        if new is None:
            return None
        whole = whole.clone()
        whole[..., rows] = new
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    return hook


@contextlib.contextmanager
def head_hooked(
    model: Any,
    *,
    head: tuple[Before, After] | None,
    after_root: After,
    choose: Callable[[torch.Tensor], torch.Tensor],
    through: Through = alone,
) -> Iterator[None]:
    """Around ``compute_logits``, which vLLM calls after the forward: the hooks of the output matrix
    (its module is never called), then the root's, then the choice of a token.

    The matrix is asked where vLLM has its product in a method of its own: what scales or caps the
    logits comes after it. ``choose``: logits (requests, V) → what vLLM's sampler gets.
    """
    processor = getattr(model, "logits_processor", None)
    owner, name = (
        (processor, _PRODUCT) if hasattr(processor, _PRODUCT) else (model, "compute_logits")
    )
    module = getattr(model, "lm_head", model)

    def product(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert head is not None
        new = through(_entering(head[0], module), hidden_states)
        logits = own_product(hidden_states if new is None else new, *args, **kwargs)
        changed = through(_leaving(head[1], module), logits)
        return logits if changed is None else changed

    own_product = getattr(owner, name)
    with contextlib.nullcontext() if head is None else patched(owner, name, product):
        own_logits = model.compute_logits

        def whole(*args: Any, **kwargs: Any) -> Any:
            logits = own_logits(*args, **kwargs)
            changed = through(_leaving(after_root, model), logits)
            return choose(logits if changed is None else changed)

        with patched(model, "compute_logits", whole):
            yield


_PRODUCT = "_get_logits"


def _names(module: Any) -> list[str]:
    """Of the positional parameters. vLLM's kernels stand behind a forward that hides them, beside
    one in torch's own operators."""
    names = argument_names(module)
    native = getattr(module, "forward_native", None)
    if names or native is None:
        return names
    return list(inspect.signature(native).parameters)


def _hidden(given: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """What the module computes on, and its name: positions stand before it in some."""
    tensors = [(name, value) for name, value in given.items() if isinstance(value, torch.Tensor)]
    for name, value in tensors:
        if name == "hidden_states":
            return name, value
    return next((item for item in tensors if item[0] not in ("positions", _RESIDUAL)), tensors[0])


def _entering(before: Before, module: torch.nn.Module) -> Shown:
    """A pre-hook, as what it puts in place of what it is shown."""

    def shown(seen: torch.Tensor) -> torch.Tensor | None:
        changed = before(module, (seen,), {})
        return None if changed is None or changed[0][0] is seen else changed[0][0]

    return shown


def _leaving(after: After, module: torch.nn.Module) -> Shown:
    """A hook, likewise."""

    def shown(seen: torch.Tensor) -> torch.Tensor | None:
        new = after(module, (), {}, seen)
        return None if new is seen else new

    return shown
