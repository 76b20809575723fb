"""Widening: run a model's own code with every operator computed in a wider dtype.

`model.double()` is not a float64 model. Hugging Face models cast to float32 inside (norms, softmax,
rotary tables, router logits), so the very roundings to be measured are kept. Here the casts are
intercepted at torch's dispatcher: under ``Widening(torch.float64)`` an operator gets its
floating-point operands widened, and a request for a narrower dtype (``.float()``,
``softmax(dtype=torch.float32)``), or for none (``arange(9) / 7``), gives the wide one. Parameters
and buffers stay as loaded, i.e. rounded to the run's dtype, and are widened as they are used:
beside the model that takes one operator's widened weights (large matrices go in slices of
``SLICE_NUMEL``).

Where the model's device has no float64 (MPS, Ascend), ``device`` names another, the CPU: operands
are moved there as they are widened, results stay there, and what the model writes into tensors of
its own is moved back.

Integer and 8-bit arithmetic is left alone. A weight that was dequantised from codes is code × scale
in the wide dtype (``codes``). Constants that the code itself rounds are data like the weights. Code
that leaves torch (a compiled kernel, numpy) is out of reach, and code that asks
``torch.finfo(x.dtype)`` for its formula gets the limits of the wide dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from divergence.errors import UsageError, first_line
from divergence.recording.engines.load import QuantizedCodes

_ORDER = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = {
    torch.float16: torch.complex32,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}
SLICE_NUMEL = 1 << 23
"""A matrix with more elements is widened and multiplied in slices: 64 MiB each in float64."""

aten = torch.ops.aten
_MOVES = {
    # They move values and compute nothing: the (large) source need not be widened.
    aten.embedding.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    # torch.tensor(): new, though its schema says alias.
    aten.lift_fresh.default,
}


def check_device(device: str, dtype: torch.dtype) -> None:
    """Raise UsageError where ``device`` cannot multiply matrices of ``dtype``: without them
    nothing of a model can be computed in it (MPS has no float64, Ascend no products of it)."""
    try:
        ones = torch.ones(1, 2, 2, dtype=dtype, device=device)
        for product in (torch.bmm(ones, ones), ones[0] @ ones[0]):
            if float(product.sum()) != 8.0:
                raise RuntimeError(f"it multiplies matrices of {dtype} wrongly")
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"{device} cannot compute in {str(dtype).removeprefix('torch.')}",
            where=first_line(error, most=300),
            hint="leave out --device: the CPU has it, and the truth is the same from anywhere",
        ) from error


_Place = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


def _place(tensor: torch.Tensor) -> _Place:
    """Return what tells one view of a living storage from another."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@functools.cache
def _is_view(func: Any) -> bool:
    """Does an operator return its argument's own memory without writing to it?"""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """``change`` of each tensor, dtype and device among an operator's arguments, or of its results.
    They nest in lists and tuples alone; torch's tree_map, which is general, is slower."""
    if isinstance(value, torch.Tensor | torch.dtype | torch.device):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)([_mapped(change, item) for item in value])
    return value


def _on(device: torch.device | None, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, moved to ``device`` where there is one and it lies elsewhere."""
    return tensor if device is None or tensor.device == device else tensor.to(device)


class Widening(TorchDispatchMode):
    """``with Widening(torch.float64, weights=model.parameters()): model(...)``.

    ``weights``: tensors whose widened form may be kept, ``keep_bytes`` of them in all, until
    the end of the ``with`` block. ``codes``: what some of them were dequantised from. ``device``:
    where operators run, if not where their operands lie.
    ``num_rounded`` counts in-place writes into a narrow tensor that the model owned before: they
    had to be rounded, so the result is not wide throughout. torch's default dtype is process-wide:
    other threads see the wide one meanwhile.

    The mode works below autograd and composite operators: there is what really computes.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        weights: Iterable[torch.Tensor] = (),
        keep_bytes: int = 0,
        codes: QuantizedCodes | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.num_rounded = 0
        self._device = None if device is None else torch.device(device)
        self._codes = codes
        self._coded = {} if codes is None else codes.by_storage()
        narrow = _ORDER[: _ORDER.index(dtype)]
        self.wider = dict.fromkeys(narrow, dtype)
        self.wider |= {_COMPLEX[real]: _COMPLEX[dtype] for real in narrow if real in _COMPLEX}
        self._functions = _SameDtype(self._wide_result)
        self._dtype, self._weights, self._keep_bytes = dtype, tuple(weights), keep_bytes
        self._own: dict[Any, Callable[..., torch.Tensor]] = {
            aten.mm.default: self._mm,
            aten.addmm.default: self._addmm,
            aten.bmm.default: self._bmm,
        }
        if hasattr(aten, "_grouped_mm") and dtype == torch.float64:
            self._own[aten._grouped_mm.default] = self._grouped_mm
        # what transformers takes where torch has no such kernel
        fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
        if fallback is not None:
            self._own[fallback.default] = self._grouped_mm

    def __enter__(self) -> Widening:
        self._default = torch.get_default_dtype()
        if self._default in self.wider:
            torch.set_default_dtype(self._dtype)
        self._keep(self._weights, self._keep_bytes)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        self._functions.__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *exc: Any) -> None:
        self._functions.__exit__(*exc)  # type: ignore[no-untyped-call]  # as above
        super().__exit__(*exc)  # type: ignore[no-untyped-call]  # as above
        self._keep((), 0)
        torch.set_default_dtype(self._default)

    def _keep(self, weights: Iterable[torch.Tensor], keep_bytes: int) -> None:
        """Forget what was kept; from now on keep ``keep_bytes`` of these weights, widened."""
        self._room_bytes = keep_bytes
        storages = [weight.untyped_storage() for weight in weights] if keep_bytes else []
        # held, so that no other tensor comes to lie where a weight was
        self._sources = {storage.data_ptr(): storage for storage in storages}
        self._kept: dict[_Place, tuple[int, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MOVES:
            if self._device is not None:  # the indices go where the source lies
                args = tree_map_only(torch.Tensor, functools.partial(_on, args[0].device), args)
            return _mapped(self._wide_result, func(*args, **kwargs))
        if _is_view(func):
            return func(*args, **kwargs)  # nothing is computed
        own = self._own.get(func)
        if own is not None:
            return own(*args, **kwargs)
        if func._schema.is_mutable:
            return self._in_place(func, args, kwargs)
        wide_args = [_mapped(self._wide, value) for value in args]
        wide_kwargs = {name: _mapped(self._wide, value) for name, value in kwargs.items()}
        return _mapped(self._wide_result, func(*wide_args, **wide_kwargs))

    def _wide(self, value: torch.Tensor | torch.dtype | torch.device) -> Any:
        if isinstance(value, torch.dtype):
            return self.wider.get(value, value)
        if isinstance(value, torch.device):
            return self._device or value
        wide = self.wider.get(value.dtype)
        if wide is None:
            return _on(self._device, value)
        if not self._may_keep(value):
            return self._widened(value, wide)
        place = _place(value)
        version, kept = self._kept.get(place, (None, None))
        if version != value._version:  # first seen, or written to since
            kept = self._widened(value, wide)
            cost_bytes = kept.nbytes if version is None else 0
            if cost_bytes <= self._room_bytes:
                self._room_bytes -= cost_bytes
                self._kept[place] = value._version, kept
        return kept

    def _widened(self, value: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        """A view of a weight that stands for codes: of code × scale, as it is in this dtype."""
        path = self._coded.get(value.untyped_storage().data_ptr()) if self._coded else None
        if path is None or self._codes is None:
            return _on(self._device, value).to(wide)
        exact = self._codes.exact(path, wide).contiguous()
        return exact.as_strided(value.shape, value.stride(), value.storage_offset())

    def _may_keep(self, value: torch.Tensor) -> bool:
        if not self._sources or value.is_inference():  # that has no version counter
            return False
        return value.untyped_storage().data_ptr() in self._sources

    def _in_slices(self, value: torch.Tensor) -> bool:
        """Is this matrix narrow, large, and neither kept nor to be kept?"""
        if value.dtype not in self.wider or value.numel() <= SLICE_NUMEL:
            return False
        if not self._may_keep(value):
            return True
        needed = value.numel() * self.wider[value.dtype].itemsize
        return _place(value) not in self._kept and needed > self._room_bytes

    def _wide_result(self, value: torch.Tensor) -> torch.Tensor:
        """Gathers, and factories that were asked for no dtype, may give narrow results."""
        wide = self.wider.get(value.dtype)
        value = _on(self._device, value)
        return value if wide is None else value.to(wide)

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator whose argument keeps its identity and place: the result is rounded to it
        if it is narrow, and moved there."""
        arguments = func._schema.arguments
        writes = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        names = [argument.name for argument in arguments]
        rounded: list[tuple[torch.Tensor, torch.Tensor]] = []

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            wide, moved = self.wider.get(tensor.dtype), _on(self._device, tensor)
            if wide is None and moved is tensor:
                return tensor
            rounded.append((tensor, moved if wide is None else moved.to(wide)))
            return rounded[-1][1]

        def prepared(value: Any, written: bool) -> Any:
            if written:
                return tree_map_only(torch.Tensor, stand_in, value)
            return _mapped(self._wide, value)

        def original(tensor: torch.Tensor) -> torch.Tensor:
            return next((narrow for narrow, wide in rounded if wide is tensor), tensor)

        new_args = [prepared(v, w) for v, w in zip(args, writes, strict=False)]
        new_kwargs = {n: prepared(v, writes[names.index(n)]) for n, v in kwargs.items()}
        result = func(*new_args, **new_kwargs)
        for narrow, wide in rounded:
            narrow.copy_(wide.to(narrow.dtype))  # rounded before it is moved
            self.num_rounded += wide.dtype != narrow.dtype
        return tree_map_only(torch.Tensor, original, result) if rounded else result

    def _mm(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """(M, K) × (K, N). A large narrow matrix on the right goes by column slices."""
        if not self._in_slices(right):
            return torch.mm(self._wide(left), self._wide(right))
        left = self._wide(left)
        step = max(1, SLICE_NUMEL // max(1, right.shape[0]))
        parts = [torch.mm(left, self._wide(part)) for part in right.split(step, dim=1)]
        return torch.cat(parts, dim=1)

    def _addmm(
        self,
        bias: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        beta: float = 1,
        alpha: float = 1,
    ) -> torch.Tensor:
        if not self._in_slices(right):
            wide = (self._wide(bias), self._wide(left), self._wide(right))
            return torch.addmm(*wide, beta=beta, alpha=alpha)
        product = alpha * self._mm(left, right)
        if beta == 0:
            return product
        total: torch.Tensor = beta * self._wide(bias) + product
        return total

    def _bmm(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """(B, M, K) × (B, K, N): B experts may be large together. They go one by one."""
        if not self._in_slices(right):
            return torch.bmm(self._wide(left), self._wide(right))
        return torch.stack([self._mm(a, b) for a, b in zip(left, right, strict=True)])

    def _grouped_mm(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """(S, K) rows sorted by expert × (E, K, N): torch's kernel takes no float64. Of a backward
        (K, S) × (S, N), which is (E, K, N). ``offs``: end of each expert's rows. Rows beyond the
        last end give zeros."""
        if offs is not None and left.ndim == 2 and right.ndim == 2:  # (K, S) × (S, N): of weights
            left, right, parts, start = self._wide(left), self._wide(right), [], 0
            for end in offs.tolist():
                parts.append(self._mm(left[:, start:end], right[start:end]))
                start = end
            return torch.stack(parts)
        if offs is None or left.ndim != 2 or right.ndim != 3:
            raise NotImplementedError("grouped matrix product of this layout in float64")
        left = self._wide(left)
        out = left.new_zeros(left.shape[0], right.shape[-1])
        start = 0
        for expert, end in enumerate(offs.tolist()):
            if end > start:
                out[start:end] = self._mm(left[start:end], right[expert])
                start = end
        return out if bias is None else out + self._wide(bias)


class _SameDtype(TorchFunctionMode):
    """Works above composite operators: some compare their operands' dtypes before they dispatch."""

    _CHECKED = frozenset(
        getattr(home, name)
        for home, name in (
            *((torch, f"conv{n}d") for n in (1, 2, 3)),
            *((torch, f"conv_transpose{n}d") for n in (1, 2, 3)),
            (torch.nn.functional, "scaled_dot_product_attention"),
            *((torch, name) for name in ("bilinear", "chain_matmul", "lerp", "prelu", "tensordot")),
            (torch.linalg, "multi_dot"),
        )
    )

    _NORMS = frozenset({torch.nn.functional.rms_norm, torch.rms_norm})

    def __init__(self, wide: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._wide = wide

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._NORMS:
            args, kwargs = self._with_eps(*args, **kwargs)
        if func in self._CHECKED or func in self._NORMS:
            args = tree_map_only(torch.Tensor, self._wide, args)
            kwargs = tree_map_only(torch.Tensor, self._wide, kwargs)
        return func(*args, **kwargs)

    def _with_eps(
        self, input: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Left out, it is that of what torch computes the norm in: float32 for narrower inputs.
        In float64 it would be another formula."""
        if eps is None:
            eps = torch.finfo(torch.float32).eps
        return (input, normalized_shape, weight, eps), {}
