"""vLLM's modules as transformers' would look to a hook.

Three things differ:

``tokens``    vLLM runs the tokens of a batch as rows (T, H); transformers (B, T, H). With one
              prompt at a time the first axis is put in front.
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
from divergence.recording.hooks.arguments import argument_names

__all__ = ["head_hooked", "tokens", "viewed"]

Before = Callable[..., Any]
After = Callable[..., Any]
_RESIDUAL = "residual"


def tokens(tensor: torch.Tensor) -> torch.Tensor:
    """(T, ...) → (1, T, ...)"""
    return tensor.unsqueeze(0)


@contextlib.contextmanager
def viewed(
    module: torch.nn.Module,
    before: Before,
    after: After,
    *,
    is_block: bool = False,
    rows: slice | None = None,
) -> Iterator[None]:
    """The hooks of a recorder on a module, which show them transformers' form of it.

    ``is_block``: what it gives is (hidden, residual), a stream. ``rows``: the part of the output
    that is meant.
    """
    names = _names(module)
    if rows is None:
        view = _View(before, after, names, is_block=is_block)
        handles = [
            module.register_forward_pre_hook(view.pre, with_kwargs=True),
            module.register_forward_hook(view.post, with_kwargs=True),
        ]
    else:
        part = _part(before, after, names, rows)
        handles = [module.register_forward_hook(part, with_kwargs=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _View:
    """Both hooks of one module."""

    def __init__(self, before: Before, after: After, names: list[str], *, is_block: bool) -> None:
        self._before, self._after, self._names, self._is_block = before, after, names, is_block
        self._stream: torch.Tensor | None = None
        """What a norm was given, where a hook put something else in its place."""

    def pre(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        name, hidden = _hidden(given)
        residual = given.get(_RESIDUAL)
        seen = tokens(hidden if residual is None else hidden + residual)
        self._stream = None
        new = _given(self._before(module, (seen,), {}), seen)
        if new is None:
            return None
        given[name] = new.reshape(hidden.shape)
        if residual is not None:
            given[_RESIDUAL] = torch.zeros_like(residual)
            self._stream = seen[0]
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
        seen = tokens(first if stream is None else first + stream)
        new = self._after(module, (), {}, seen)
        changed = None if new is None or new is seen else new.reshape(first.shape)
        if stream is not None:
            return None if changed is None else (changed, torch.zeros_like(stream), *parts[2:])
        if self._stream is not None and isinstance(residual, torch.Tensor):
            # what was put in place was the norm's input alone: the stream goes on as it was
            return (first if changed is None else changed, self._stream, *parts[2:])
        if changed is None:
            return None
        return (changed, *parts[1:]) if isinstance(output, tuple) else changed


def _part(before: Before, after: After, names: list[str], rows: slice) -> Callable[..., Any]:
    """One hook for a part of a fused module: input and output are told when both are there."""

    def hook(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        _, hidden = _hidden(dict(zip(names, args, strict=False)) | kwargs)
        shown = tokens(hidden)
        if _given(before(module, (shown,), {}), shown) is not None:
            raise PlantError(
                "vLLM computes this module in one with others, which take the same input",
                hint="plant at its output, or at the input of the module around it",
            )
        whole = output[0] if isinstance(output, tuple) else output
        seen = tokens(whole[..., rows])
        new = after(module, (), {}, seen)
        if new is None or new is seen:
            return None
        whole = whole.clone()
        whole[..., rows] = new[0]
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    return hook


@contextlib.contextmanager
def head_hooked(
    model: Any,
    *,
    head: tuple[Before, After] | None,
    after_root: After,
    choose: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[None]:
    """Around ``compute_logits``, which vLLM calls after the forward: the hooks of the output matrix
    (its module is never called), then the root's, then the choice of a token.

    ``choose``: logits (1, V) → what vLLM's sampler gets.
    """
    inner = model.compute_logits

    def compute_logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        module = getattr(model, "lm_head", model)
        if head is not None:
            seen = tokens(hidden_states)
            new = _given(head[0](module, (seen,), {}), seen)
            hidden_states = hidden_states if new is None else new[0]
        logits = inner(hidden_states, *args, **kwargs)
        for after, owner in ((head and head[1], module), (after_root, model)):
            if after is not None:
                seen = tokens(logits)
                new = after(owner, (), {}, seen)
                logits = logits if new is None or new is seen else new[0]
        return choose(logits)

    model.compute_logits = compute_logits
    try:
        yield
    finally:
        del model.compute_logits


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
    found = [(name, value) for name, value in given.items() if isinstance(value, torch.Tensor)]
    for name, value in found:
        if name == "hidden_states":
            return name, value
    return next((item for item in found if item[0] not in ("positions", _RESIDUAL)), found[0])


def _given(changed: Any, seen: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a pre-hook gives in place of ``seen``; None where it gives none."""
    if changed is None or changed[0][0] is seen:
        return None
    new: torch.Tensor = changed[0][0]
    return new
