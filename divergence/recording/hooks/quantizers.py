"""Quantisers of activations: their codes, recorded and put in place.

A code is a choice that rounding may flip: where x / scale lies next to k + 1/2, two correct
machines take different codes, and a whole step of error appears out of nothing (compressed-tensors'
own scale, max|x| / 127.5, puts the largest number of every row onto such a tie). So codes are
treated as the experts of a token are. They are recorded with the blocks, at ``MODULE:in.codes``,
less their zero point; in an anchored pass the other run's are put in place, and the values behind
them differ by rounding alone; the codes are judged as codes (analyses/codes). In float64, which is
what a truth computes in, x / scale is recorded before it is rounded: it tells how near a tie lies.

Known of compressed-tensors, whose modules all quantise through one function, and of simulated
schemes; what other libraries do inside a kernel cannot be seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from divergence.quantization.linear import Watch, watchable
from divergence.recording.hooks.patch import patched
from divergence.run.schema.site import escape_path

__all__ = ["quantizes", "watched"]

Seen = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor | None]
"""(path, codes, what is recorded of them) → the codes to go on with, or None for the own ones."""


def quantizes(module: torch.nn.Module) -> bool:
    """Does what enters this module become codes that can be seen?"""
    scheme = getattr(module, "quantization_scheme", None)
    return getattr(scheme, "input_activations", None) is not None


@contextlib.contextmanager
def watched(model: torch.nn.Module, seen: Seen, quiet: Callable[[], Any]) -> Iterator[None]:
    """``seen`` is asked for each tensor of codes. ``quiet``: a context for operators that are not
    the model's."""
    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            matrix = watchable(module)
            if matrix is not None:
                watch = _told_apart(escape_path(path), seen, quiet)
                stack.enter_context(patched(matrix, "watch", watch))
        stack.enter_context(_watched_library(model, seen, quiet))
        yield


def _told_apart(path: str, seen: Seen, quiet: Callable[[], Any]) -> Watch:
    def watch(codes: torch.Tensor, told: torch.Tensor) -> torch.Tensor | None:
        with quiet():
            return seen(path, codes, told)

    return watch


@contextlib.contextmanager
def _watched_library(
    model: torch.nn.Module, seen: Seen, quiet: Callable[[], Any]
) -> Iterator[None]:
    paths = {id(mod): escape_path(path) for path, mod in model.named_modules() if quantizes(mod)}
    if not paths:
        yield
        return
    from compressed_tensors.quantization.lifecycle import forward as library

    original = library.forward_quantize

    def forward_quantize(module: Any, value: torch.Tensor, base_name: str, args: Any) -> Any:
        result = original(module, value, base_name, args)
        path = paths.get(id(module))
        if path is None or base_name != "input" or not value.numel():
            return result
        with quiet():
            scale = _scale(library, module, value, args)
            given = seen(path, *_codes(value, result, scale, args))
            if given is None:
                return result
            codes = given.to(device=value.device, dtype=scale.dtype)
            # the same tensor: where operators are recorded, the next one takes what this one gave
            return result.copy_(_by_scale(torch.mul, codes, scale, args))

    with patched(library, "forward_quantize", forward_quantize):
        yield


def _scale(library: Any, module: Any, value: torch.Tensor, args: Any) -> torch.Tensor:
    """As the library takes it: of these values, or the module's own."""
    scale: torch.Tensor
    if args.dynamic is False:
        scale = module.input_scale
    else:
        scale, _ = library.compute_dynamic_scales_and_zp(value=value, args=args, module=module)
    return scale


def _codes(
    value: torch.Tensor, result: torch.Tensor, scale: torch.Tensor, args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes less their zero point, as what came of them tells; and what is recorded of them.

    A zero point is an integer and a choice of its own: with it a tie in one number would move the
    codes of a whole row."""
    wide = torch.float64 if result.dtype == torch.float64 else torch.float32
    told = _by_scale(torch.div, result.to(wide), scale, args)
    if args.type == "float":
        codes = told.to(torch.float8_e4m3fn)
    else:
        codes = told.round().to(torch.int8 if args.symmetric else torch.int16)
    exact = value.dtype == torch.float64
    return codes, _by_scale(torch.div, value, scale, args) if exact else codes


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
