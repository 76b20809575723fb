"""Widening: run a model's own code with every operator computed in a wider dtype.

`model.double()` is not a float64 model. Hugging Face models cast to float32 inside
(norms, softmax, rotary tables, router logits), so the very roundings that one wants
to measure are kept: the norm's error against such a "truth" is exactly 0. Here the
casts are intercepted below the Python code, at torch's dispatcher: under
``Widening(torch.float64)`` an operator gets its floating-point operands widened, and
a request for a narrower dtype (``.float()``, ``softmax(dtype=torch.float32)``,
``zeros(dtype=torch.bfloat16)``) gives the wide one. Parameters and buffers stay as they
were loaded, i.e. rounded to the run's dtype, and are widened as they are used.

So the memory needed beside the model is one operator's widened weights (large matrices
go in slices of ``SLICE_NUMEL``), whatever the size of the model; ``keep_bytes`` of
widened weights may be kept, which spares small models the repeated widening.

What it refuses to do: integer and 8-bit arithmetic is left alone (weights in 8 bits are
widened where the model's code dequantises them), and constants that the code itself
rounds (``torch.tensor(x, dtype=torch.bfloat16)``) are data like the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["Widening"]

_ORDER = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SLICE_NUMEL = 1 << 26
"""A matrix with more elements is widened and multiplied in slices: 512 MiB each in float64."""

aten = torch.ops.aten
_GATHERS = {
    # They move values and compute nothing: the (large) source need not be widened.
    aten.embedding.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
}


class Widening:
    """``with Widening(torch.float64, weights=model.parameters()): model(...)``.

    ``weights``: tensors whose widened form may be kept, ``keep_bytes`` of them in all.
    ``num_rounded`` counts in-place writes into a narrow tensor that the model owned before:
    they had to be rounded, so the result is not wide throughout.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        weights: Iterable[torch.Tensor] = (),
        keep_bytes: int = 0,
    ) -> None:
        self.num_rounded = 0
        self._dispatch = _WideOperators(self, dtype)
        self._functions = _SameDtype(dtype, self._dispatch.narrow)
        self._dispatch.keep_bytes = keep_bytes
        if keep_bytes:
            self._dispatch.sources = {tensor.untyped_storage().data_ptr() for tensor in weights}

    def __enter__(self) -> Widening:
        self._dispatch.__enter__()
        self._functions.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._functions.__exit__(*exc)
        self._dispatch.__exit__(*exc)
        self._dispatch.kept.clear()


class _WideOperators(TorchDispatchMode):
    """Below autograd and composite operators: what really computes."""

    def __init__(self, owner: Widening, dtype: torch.dtype) -> None:
        super().__init__()
        self.narrow = frozenset(_ORDER[: _ORDER.index(dtype)])
        self._owner, self._dtype = owner, dtype
        self.keep_bytes = 0
        self.sources: set[int] = set()
        self.kept: dict[tuple, torch.Tensor] = {}
        self._own: dict[Any, Callable] = {
            aten.mm.default: self._mm,
            aten.addmm.default: self._addmm,
        }
        if hasattr(aten, "_grouped_mm") and dtype == torch.float64:
            self._own[aten._grouped_mm.default] = self._grouped_mm

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        kwargs = kwargs or {}
        schema = func._schema
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return func(*args, **kwargs)  # a view: nothing is computed
        if func in _GATHERS:
            return self._widen_results(func(*args, **kwargs))
        own = self._own.get(func)
        if own is not None:
            return own(*args, **kwargs)
        if schema.is_mutable:
            return self._in_place(func, args, kwargs)
        wide_args = tree_map_only((torch.Tensor, torch.dtype), self._wide, args)
        wide_kwargs = tree_map_only((torch.Tensor, torch.dtype), self._wide, kwargs)
        return self._widen_results(func(*wide_args, **wide_kwargs))

    def _wide(self, value: torch.Tensor | torch.dtype) -> Any:
        if isinstance(value, torch.dtype):
            return self._dtype if value in self.narrow else value
        if value.dtype not in self.narrow:
            return value
        if not self.sources or value.untyped_storage().data_ptr() not in self.sources:
            return value.to(self._dtype)
        key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        known = self.kept.get(key)
        if known is None:
            known = value.to(self._dtype)
            if known.nbytes <= self.keep_bytes:
                self.keep_bytes -= known.nbytes
                self.kept[key] = known
        return known

    def _widen_results(self, result: Any) -> Any:
        """Factories without a dtype, and gathers, give narrow results."""
        return tree_map_only(torch.Tensor, self._wide_result, result)

    def _wide_result(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self._dtype) if value.dtype in self.narrow else value

    def _in_place(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What is written to keeps its identity; if it is narrow, the result is rounded to it."""
        writes = [
            a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
        ]
        names = [argument.name for argument in func._schema.arguments]
        rounded: list[tuple[torch.Tensor, torch.Tensor]] = []

        def prepared(value: Any, written: bool) -> Any:
            if not written or not isinstance(value, torch.Tensor):
                return tree_map_only((torch.Tensor, torch.dtype), self._wide, value)
            if value.dtype not in self.narrow:
                return value
            rounded.append((value, value.to(self._dtype)))
            return rounded[-1][1]

        new_args = [prepared(v, w) for v, w in zip(args, writes, strict=False)]
        new_kwargs = {n: prepared(v, writes[names.index(n)]) for n, v in kwargs.items()}
        result = func(*new_args, **new_kwargs)
        for narrow, wide in rounded:
            narrow.copy_(wide)
            self._owner.num_rounded += 1
            result = tree_map_only(
                torch.Tensor, lambda t, wide=wide, narrow=narrow: narrow if t is wide else t, result
            )
        return result

    def _mm(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        """A large narrow matrix on the right goes column slice by column slice."""
        one = self._wide(one)
        if two.dtype not in self.narrow or two.numel() <= SLICE_NUMEL:
            return torch.mm(one, self._wide(two))
        step = max(1, SLICE_NUMEL // two.shape[0])
        parts = [torch.mm(one, part.to(self._dtype)) for part in two.split(step, dim=1)]
        return torch.cat(parts, dim=1)

    def _addmm(
        self, bias: torch.Tensor, one: torch.Tensor, two: torch.Tensor, *, beta=1, alpha=1
    ) -> torch.Tensor:
        if two.dtype not in self.narrow or two.numel() <= SLICE_NUMEL:
            wide = (self._wide(bias), self._wide(one), self._wide(two))
            return torch.addmm(*wide, beta=beta, alpha=alpha)
        return beta * self._wide(bias) + alpha * self._mm(one, two)

    def _grouped_mm(
        self, one: torch.Tensor, two: torch.Tensor, offs=None, bias=None, out_dtype=None
    ) -> torch.Tensor:
        """(S, K) rows sorted by expert × (E, K, N): torch's kernel takes no float64.

        ``offs``: end of each expert's rows. Rows beyond the last end give zeros.
        """
        if offs is None or one.ndim != 2 or two.ndim != 3:
            raise NotImplementedError("grouped matrix product of this layout in float64")
        one = self._wide(one)
        out = one.new_zeros(one.shape[0], two.shape[-1])
        start = 0
        for expert, end in enumerate(offs.tolist()):
            if end > start:
                out[start:end] = one[start:end] @ two[expert].to(self._dtype)
            start = end
        return out if bias is None else out + self._wide(bias)


class _SameDtype(TorchFunctionMode):
    """Above composite operators: some compare their operands' dtypes before they dispatch."""

    _CHECKED = frozenset(
        getattr(home, name)
        for home, name in (
            *((torch, f"conv{n}d") for n in (1, 2, 3)),
            *((torch, f"conv_transpose{n}d") for n in (1, 2, 3)),
            (torch.nn.functional, "scaled_dot_product_attention"),
            (torch, "bilinear"),
            (torch, "lerp"),
        )
    )

    def __init__(self, dtype: torch.dtype, narrow: frozenset[torch.dtype]) -> None:
        super().__init__()
        self._dtype, self._narrow = dtype, narrow

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if func in self._CHECKED:
            args = tree_map_only(torch.Tensor, self._wide, args)
            kwargs = tree_map_only(torch.Tensor, self._wide, kwargs)
        return func(*args, **kwargs)

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.dtype in self._narrow else tensor
