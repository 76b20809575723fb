"""Quantisers of activations: their codes, recorded and put in place.

A code is a choice that rounding may flip: where x / scale lies next to k + 1/2, two correct
machines take different codes, and a whole step of error appears out of nothing. So codes are
treated as the experts of a token are. They are recorded with the blocks, at ``MODULE:in.codes``,
less their zero point; in an anchored pass the other run's are put in place, and the values behind
them differ by rounding alone; the codes are judged as codes. In float64 x / scale is recorded
before it is rounded: it tells how near a tie lies. Keys and values that a cache holds
as codes are treated alike, at ``ATTENTION:in.k.codes`` and ``in.v.codes``, all heads of a token in
one row.

Known of compressed-tensors, whose modules all quantise through one function, and of simulated
schemes; what other libraries do inside a kernel cannot be seen.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from divergence.recording.forwards import patched
from divergence.run.site import CODES, HEAD_CODES, escape_path

Seen = Callable[[str, str, torch.Tensor, torch.Tensor], torch.Tensor | None]
"""(path, port, codes, what is recorded of them) → the codes to go on with, or None for the own
ones."""

INPUT, CACHE = "_coded_input", "_coded_cache"
"""Where a simulated scheme leaves what makes its codes: an attribute of a module, for its input,
and of the model, for its caches. Each has a ``watch`` that is None, or called with the codes and
what is recorded of them, a cache's with the layer's number and ``k`` or ``v`` before; it may give
other codes to go on with."""

_PORTS = {"input": CODES, **HEAD_CODES}
"""By what compressed-tensors calls the tensor that it quantises. Weights are no activations."""
_USERS = ("quantization.lifecycle.forward", "modeling.kvcache", "modeling.attention")
"""Modules of compressed-tensors that hold the function under its name."""


def quantizes(module: torch.nn.Module) -> bool:
    """Does what enters this module become codes that can be seen?"""
    scheme = getattr(module, "quantization_scheme", None)
    return getattr(scheme, "input_activations", None) is not None


@contextlib.contextmanager
def watched(model: torch.nn.Module, seen: Seen, quiet: Callable[[], Any]) -> Iterator[None]:
    """``seen`` is asked for each tensor of codes. ``quiet``: a context for operators that are not
    the model's."""

    def quietly(path: str, port: str, codes: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        with quiet():
            return _asked(seen, path, port, codes, x)

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            matrix = module.__dict__.get(INPUT)
            if matrix is not None:
                watch = partial(quietly, escape_path(path), CODES)
                stack.enter_context(patched(matrix, "watch", watch))
        cache = model.__dict__.get(CACHE)
        if cache is not None:
            path_of = stack.enter_context(_running_attention(model))

            def watch_layer(
                layer: int, what: str, codes: torch.Tensor, x: torch.Tensor
            ) -> torch.Tensor | None:
                path = path_of(layer)
                if path is None:
                    return None
                return quietly(escape_path(path), HEAD_CODES[what], codes, x)

            stack.enter_context(patched(cache, "watch", watch_layer))
        stack.enter_context(_watched_library(model, seen, quiet))
        yield


@contextlib.contextmanager
def _running_attention(
    model: torch.nn.Module,
) -> Iterator[Callable[[int], str | None]]:
    """Gives what tells, of a layer's number in a cache, the path of the attention that fills it:
    the innermost module of that number that runs. Self- and cross-attention of one layer share a
    number."""
    running: list[tuple[str, int]] = []

    def enters(path: str, number: int) -> Callable[..., None]:
        return lambda *_: running.append((path, number))

    def leaves(*_: Any) -> None:
        running.pop()

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            number = getattr(module, "layer_idx", None)
            if isinstance(number, int):
                hook = module.register_forward_pre_hook(enters(path, number))
                stack.callback(hook.remove)
                hook = module.register_forward_hook(leaves, always_call=True)
                stack.callback(hook.remove)
        yield lambda layer: next((p for p, number in reversed(running) if number == layer), None)


def _by_token(heads: torch.Tensor) -> torch.Tensor:
    """(B, heads, T, D) → (B, T, heads · D): a row a token, as all that is recorded."""
    return heads.transpose(1, 2).flatten(2)


@contextlib.contextmanager
def _watched_library(
    model: torch.nn.Module, seen: Seen, quiet: Callable[[], Any]
) -> Iterator[None]:
    paths = {id(mod): escape_path(path) for path, mod in model.named_modules() if quantizes(mod)}
    if not paths:
        yield
        return
    from compressed_tensors.quantization.lifecycle import forward as library

    def watched_as(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_quantize(module: Any, value: torch.Tensor, base_name: str, args: Any) -> Any:
            result = original(module, value, base_name, args)
            path, port = paths.get(id(module)), _PORTS.get(base_name)
            if path is None or port is None or not value.numel():
                return result
            with quiet():
                scale, zero = _scale(library, module, value, base_name, args)
                if not _are_codes(result, scale, args):
                    return result
                given = _asked(seen, path, port, *_codes(value, result, scale, zero, args))
                if given is None:
                    return result
                codes = given.to(device=value.device, dtype=scale.dtype)
                # the same tensor: where operators are recorded, the next one takes what this gave
                result.copy_(_by_scale(torch.mul, codes, scale, args))
                return result

        return forward_quantize

    with contextlib.ExitStack() as stack:
        for name in _USERS:
            user = sys.modules.get(f"compressed_tensors.{name}")
            if user is not None:
                own = watched_as(user.forward_quantize)
                stack.enter_context(patched(user, "forward_quantize", own))
        yield


def _asked(
    seen: Seen, path: str, port: str, codes: torch.Tensor, x: torch.Tensor
) -> torch.Tensor | None:
    """The codes to go on with. Heads are told with all of a token in one row."""
    if port == CODES:
        return seen(path, port, codes, x)
    given = seen(path, port, _by_token(codes), _by_token(x))
    if given is None:
        return None
    heads: torch.Tensor = given.unflatten(2, (codes.shape[1], codes.shape[3]))
    return heads.transpose(1, 2)


def _scale(
    library: Any, module: Any, value: torch.Tensor, base_name: str, args: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Take scale and zero point as the library does: of these values, or the module's own. The zero
    point is None for symmetric codes."""
    if args.dynamic is False:
        scale, zero = (getattr(module, f"{base_name}_{n}", None) for n in ("scale", "zero_point"))
        assert scale is not None
    else:
        scale, zero = library.compute_dynamic_scales_and_zp(value=value, args=args, module=module)
    return scale, None if args.symmetric else zero


def _codes(
    value: torch.Tensor,
    result: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    args: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes less their zero point, as what came of them tells; and what is recorded of them. A
    zero point is an integer and a choice of its own: with it a tie in one number would move the
    codes of a whole row."""
    codes = _nearest(_in_steps(result, scale, args), args)
    if value.dtype != torch.float64:
        return codes, codes
    steps = _by_scale(torch.div, value, scale, args)
    if zero is not None and args.group_size is None:  # the range ends where it puts it
        half = 2 ** (args.num_bits - 1)
        steps = steps.clamp(-half - zero.to(steps), half - 1 - zero.to(steps))
    return codes, steps


def _are_codes(result: torch.Tensor, scale: torch.Tensor, args: Any) -> bool:
    """Is the result what codes stand for, but for its own rounding? What was not quantised, or by
    another scale, has none: with the other run's codes in its place no one would see it."""
    steps = _in_steps(result, scale, args)
    codes = _nearest(steps, args).to(steps.dtype)
    room = _ROUNDINGS * torch.finfo(result.dtype).eps * (codes.abs() + 1)
    return not bool(((steps - codes).abs() > room).any())


_ROUNDINGS = 4


def _in_steps(result: torch.Tensor, scale: torch.Tensor, args: Any) -> torch.Tensor:
    wide = torch.float64 if result.dtype == torch.float64 else torch.float32
    return _by_scale(torch.div, result.to(wide), scale, args)


def _nearest(steps: torch.Tensor, args: Any) -> torch.Tensor:
    if args.type == "float":
        return steps.to(torch.float8_e4m3fn)
    return steps.round().to(torch.int8 if args.symmetric else torch.int16)


def _by_scale(
    what: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    numbers: torch.Tensor,
    scale: torch.Tensor,
    args: Any,
) -> torch.Tensor:
    """``numbers`` (..., K) multiplied or divided by their scale; groups have one each."""
    if args.group_size is None:
        return what(numbers, scale)
    groups = numbers.unflatten(-1, (-1, args.group_size))
    return what(groups, scale.unsqueeze(-1)).flatten(-2)
