"""Checks the operands of an operator before a kernel sees them.

Sizes: the operator runs on torch's meta device first, which computes shapes alone; a result may
take half of the free memory (``MAX_BYTES`` where that is unknown). Indices must lie within what
they point into: not every kernel checks that, and one on an accelerator that does takes the whole
process with it. The kernels of fused attention, norms and Fourier transforms leave checks of shapes
to their public wrappers, so they are made here.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from divergence.ops.allowed import Unsafe, schema_name
from divergence.recording.dispatch import named_arguments, with_defaults
from divergence.recording.machine import free_bytes

Bound = Mapping[str, Any]
"""All arguments of a call by name, defaults too."""

MAX_BYTES = 1 << 34
"""Of one result, where nobody tells how much memory is free."""
SMALL_BYTES = 1 << 26
"""A result of so many bytes is made without asking."""


class Checking(TorchDispatchMode):
    """Checks every operator that code of ours calls on a run's tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_bounds(func, with_defaults(func, named_arguments(func, args, kwargs)))
        return func(*args, **kwargs)


def check_bounds(operator: torch._ops.OpOverload, bound: Bound) -> None:
    """Refuse operands that lead out of the memory they are given, and results that fit into none.
    ``bound``: all arguments by name, defaults too."""
    name = operator._schema.name.removeprefix("aten::")
    check = _CHECKS.get(name) or _CHECKS.get(name.removesuffix("_"))
    if name.startswith("_foreach_"):
        check = _lists
    try:
        _kinds(operator, bound)
        if check is not None:  # kernels of others check what they are given
            check(bound)
    except (KeyError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise Unsafe(f"{schema_name(operator)} cannot be given this", detail=str(error)) from error
    check_size(operator, bound)


def check_size(operator: torch._ops.OpOverload, bound: Bound) -> None:
    """Refuse a call whose results take more than half of the free memory."""
    if torch.Tag.pointwise in operator.tags:
        shapes = [reversed(tensor.shape) for tensor in _tensors(bound.values())]
        widest = map(max, itertools.zip_longest(*shapes, fillvalue=1))
        if 8 * math.prod(widest) <= SMALL_BYTES:
            return  # as much as its operands broadcast to, and no more
    try:
        with warnings.catch_warnings(), _disable_current_modes(), torch.no_grad():
            warnings.simplefilter("ignore")
            on_meta = {name: _on_meta(value) for name, value in bound.items()}
            if "device" in on_meta:
                on_meta["device"] = torch.device("meta")
            results = operator(**on_meta)
    except Exception:  # nothing was computed: a kernel of its own, or what the kernel refuses too
        return
    needed = sum(tensor.numel() * max(tensor.itemsize, 8) for tensor in _tensors(results))
    if needed > SMALL_BYTES and needed > _most_bytes(bound):
        raise Unsafe(
            f"{schema_name(operator)} would give {needed >> 20:,} MiB: it does not fit here"
        )


def _most_bytes(bound: Bound) -> int:
    device = next((tensor.device for tensor in _tensors(bound.values())), torch.device("cpu"))
    return free_bytes(device) // 2 or MAX_BYTES


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    return [_on_meta(item) for item in value] if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from _tensors(item)


def _kinds(operator: torch._ops.OpOverload, bound: Bound) -> None:
    """Torch takes any number for a dtype, a layout or a memory format."""
    for argument in operator._schema.arguments:
        kind = next((k for k in _KINDS if k in str(getattr(argument, "real_type", ""))), None)
        value = bound.get(argument.name)
        if kind is not None and value is not None:
            fits(isinstance(value, _KINDS[kind]), f"{argument.name} is {value!r}")


_KINDS = {"ScalarType": torch.dtype, "Layout": torch.layout, "MemoryFormat": torch.memory_format}


def _lists(bound: Bound) -> None:
    """Check that each list has as many tensors."""
    lengths = {len(value) for value in bound.values() if isinstance(value, list | tuple)}
    fits(len(lengths) == 1 and lengths != {0}, "lists of several lengths")


# What an operator is given fits together. Each check raises ValueError with what does not.


def fits(what: bool, why: str) -> None:
    if not what:
        raise ValueError(why)


def within(index: torch.Tensor, size: int, *, low: int = 0, masks: bool = True) -> None:
    """Every index from ``low`` to ``size - 1``; booleans are masks, not indices, where an operator
    takes ``masks``."""
    if masks and index.dtype in (torch.bool, torch.uint8):
        return
    fits(not index.is_floating_point() and not index.is_complex(), "an index is no integer")
    if index.numel():
        least, most = (int(extreme) for extreme in torch.aminmax(index.to(torch.int64)))
        fits(low <= least and most < size, f"indices {least} to {most} into {size}")


def weights_fit(bound: Bound, shape: tuple[int, ...]) -> None:
    for name in ("weight", "bias"):
        given = bound.get(name)
        fits(given is None or tuple(given.shape) == shape, f"{name} of another shape")


def normalized_axes(bound: Bound) -> tuple[int, ...]:
    """The last axes are normalized, by weights of their shape."""
    shape, given = tuple(bound["normalized_shape"]), tuple(bound["input"].shape)
    fits(0 < len(shape) <= len(given), f"normalized over {len(shape)} axes")
    fits(given[-len(shape) :] == shape, f"normalized over {shape}")
    weights_fit(bound, shape)
    return shape


def same_sequences(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> None:
    """q (B, H, T, D), k (B, G, S, D), v (B, G, S, E)."""
    fits(len(query) == len(key) == len(value) == 4, "attention takes four axes")
    fits(key[:3] == value[:3], f"keys {tuple(key)} and values {tuple(value)}")
    fits(query[0] == key[0] and query[3] == key[3], f"queries {tuple(query)}, keys {tuple(key)}")


def mask_fits(mask: torch.Tensor | None, wanted: Sequence[int]) -> None:
    """Check that a mask has the shape (B, H, T, S), or one that is broadcast to it."""
    if mask is not None:
        fits(mask.ndim <= 4, f"a mask of {mask.ndim} axes")
        pairs = zip(reversed(mask.shape), reversed(wanted), strict=False)
        fits(all(a in (1, b) for a, b in pairs), f"a mask {tuple(mask.shape)} for {tuple(wanted)}")


def _along(bound: Bound, *, negative: bool = False) -> None:
    """``index`` along ``dim`` of ``self``; counted from the end where it is ``negative``."""
    size = (bound["self"].shape or (1,))[bound["dim"]]
    within(bound["index"], size, low=-size if negative else 0)


def _index(bound: Bound) -> None:
    """``self[indices]``: one entry an axis, None for all of it; a mask for as many as it has."""
    shape, axis = bound["self"].shape, 0
    for index in bound["indices"]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            fits(index.shape == shape[axis : axis + index.ndim], "a mask of another shape")
            axis += index.ndim
            continue
        if index is not None:
            within(index, shape[axis], low=-shape[axis])
        axis += 1


def _ends(bound: Bound) -> None:
    """Ends of the groups of (S, K) × (E, K, N), (E, M, K) × (K, S) or (M, S) × (S, N) ascend, up
    to S; one for each of E."""
    mat1, mat2, offs = bound["self"], bound["mat2"], bound.get("offs")
    if offs is None:
        return
    size = mat2.shape[1] if mat1.ndim == 3 else mat1.shape[0 if mat2.ndim == 3 else 1]
    groups = mat1.shape[0] if mat1.ndim == 3 else mat2.shape[0] if mat2.ndim == 3 else offs.numel()
    fits(tuple(offs.shape) == (groups,), f"{offs.numel()} ends of {groups} groups")
    within(offs, size + 1)
    fits(bool((offs[1:] >= offs[:-1]).all()), "ends of groups do not ascend")


def _repeats(bound: Bound) -> None:
    repeats = bound["repeats"]
    if isinstance(repeats, torch.Tensor) and repeats.numel():
        fits(int(repeats.min()) >= 0, "negative repeats")
        source, dim, given = bound.get("self"), bound.get("dim"), bound.get("output_size")
        rows = repeats.numel()
        if source is not None and rows == 1:
            rows = source.numel() if dim is None else source.shape[dim]
        size = int(repeats.to(torch.float64).sum()) * (rows if repeats.numel() == 1 else 1)
        _counted(8 * size * (1 if source is None else max(source.numel() // max(rows, 1), 1)))
        fits(given is None or given == size, f"output_size {given}, and {size} are repeated")


def _bincount(bound: Bound) -> None:
    values = bound["self"]
    within(values, 1 << 62)
    _counted(8 * max(int(values.max()) if values.numel() else 0, bound.get("minlength") or 0))


def _counted(needed_bytes: int) -> None:
    fits(needed_bytes <= max(SMALL_BYTES, _most_bytes({})), f"{needed_bytes >> 20:,} MiB")


def _searched(bound: Bound) -> None:
    sorter = bound.get("sorter")
    if sorter is not None:
        within(sorter, sorter.shape[-1])
        fits(sorter.shape == bound["sorted_sequence"].shape, "a sorter of another shape")


def _attention(bound: Bound) -> None:
    """q (B, H, T, D), k (B, G, S, D), v (B, G, S, E), H a multiple of G, mask (B, H, T, S)."""
    query, key, value = (bound[name].shape for name in ("query", "key", "value"))
    mask = bound.get("attn_mask", bound.get("attn_bias"))
    same_sequences(query, key, value)
    fits(key[1] > 0 and query[1] % key[1] == 0, f"{query[1]} heads for {key[1]}")
    mask_fits(mask, (query[0], query[1], query[2], key[2]))


def _forward(bound: Bound) -> None:
    """(B, T, H, D) each; of several lengths packed into one none."""
    lengths = ("cum_seq", "cu_seq", "seqused", "block_table", "seqlen_k")
    packed = [
        name for name in bound if bound[name] is not None and any(word in name for word in lengths)
    ]
    fits(not packed, f"{', '.join(packed)} given")
    shapes = [bound[name].transpose(1, 2).shape for name in ("query", "key", "value")]
    same_sequences(*shapes)
    fits(shapes[1][1] > 0 and shapes[0][1] % shapes[1][1] == 0, "heads do not divide")
    bias = bound.get("bias", bound.get("attn_bias"))
    wanted = (*shapes[0][:3], shapes[1][2])
    fits(bias is None or tuple(bias.shape) == wanted, "a bias of another shape")


def _group_norm(bound: Bound) -> None:
    count, channels = bound["N"], bound["C"]
    fits(bound["input"].numel() == count * channels * bound["HxW"], "N, C and HxW are another's")
    fits(bound["group"] > 0 and channels % bound["group"] == 0, f"{bound['group']} groups")
    weights_fit(bound, (channels,))


def _batch_norm(bound: Bound) -> None:
    """Channels are the second axis; statistics are given, or computed."""
    shape = bound["input"].shape
    fits(len(shape) >= 2 and bound["input"].numel() > 0, f"an input {tuple(shape)}")
    statistics = [bound.get("running_mean"), bound.get("running_var")]
    given = all(statistic is not None for statistic in statistics)
    fits(given or bound.get("training", False), "statistics are neither given nor computed")
    for statistic in (*statistics, bound.get("weight"), bound.get("bias")):
        fits(statistic is None or tuple(statistic.shape) == (shape[1],), f"{shape[1]} channels")


def _weight_norm(bound: Bound) -> None:
    """One length for each slice along the first or the last axis."""
    v, g, dim = bound["v"], bound["g"], bound["dim"]
    fits(v.numel() > 0 and v.dtype == g.dtype, "of no elements, or of two dtypes")
    fits(dim in (0, v.ndim - 1) and g.numel() == v.shape[dim], f"lengths {tuple(g.shape)}")


def _fourier(bound: Bound) -> None:
    """Each axis once; a one-sided spectrum holds half the points and one."""
    operand, dims = bound["self"], bound["dim"]
    axes = {dim % operand.ndim for dim in dims if -operand.ndim <= dim < operand.ndim}
    fits(len(axes) == len(dims) > 0, f"axes {dims} of {operand.ndim}")
    last = bound.get("last_dim_size")
    if last is not None:
        fits(last > 0 and operand.shape[dims[-1]] == last // 2 + 1, f"{last} points")
    fits(operand.is_complex() == ("onesided" not in bound), "an input of another kind")


def _gradient(bound: Bound) -> None:
    """A gradient of its result's shape."""
    shapes = [tuple(bound[name].shape) for name in ("grad_output", "output")]
    fits(shapes[0] == shapes[1], f"a gradient {shapes[0]} of {shapes[1]}")
    fits(-len(shapes[0]) <= bound["dim"] < max(len(shapes[0]), 1), f"axis {bound['dim']}")


def _norm_gradient(bound: Bound) -> None:
    """Check a norm's gradient of the last axes, with a mean and a deviation for each of the
    rest."""
    shape, given = normalized_axes(bound), tuple(bound["input"].shape)
    fits(tuple(bound["grad_out"].shape) == given, "a gradient of another shape")
    for name in ("mean", "rstd"):
        term = bound.get(name)
        fits(term is None or term.numel() == math.prod(given[: -len(shape)]), f"{name} of others")


def _embedding_gradient(bound: Bound) -> None:
    """A row of the gradient for each index, which is of one of the rows."""
    gradient, indices, size = bound["grad_output"], bound["indices"], bound["num_weights"]
    fits(gradient.ndim > 0 and gradient.shape[:-1] == indices.shape, "a gradient of other indices")
    within(indices, size, masks=False)


def _loss(bound: Bound) -> None:
    """One class for each row, but where it is to be ignored."""
    given, target = bound["self"], bound["target"]
    fits(given.ndim in (1, 2) and target.shape == given.shape[:-1], "targets of other rows")
    within(target[target != bound["ignore_index"]], given.shape[-1], masks=False)


def _attention_gradient(bound: Bound) -> None:
    """g and out (B, H, T, E), logsumexp (B, H, T); the rest as of the forward, of equal heads."""
    query, key, value = (tuple(bound[name].shape) for name in ("query", "key", "value"))
    same_sequences(query, key, value)
    fits(query[1] == key[1], f"queries {query}, keys {key}")
    for name in ("grad_out", "out"):
        fits(tuple(bound[name].shape) == (*query[:3], value[3]), f"{name} of another shape")
    fits(tuple(bound["logsumexp"].shape) == query[:3], "logsumexp of another shape")
    mask_fits(bound.get("attn_mask"), (*query[:3], key[2]))


FUSED_ATTENTION = tuple(
    f"_scaled_dot_product_{kind}"
    for kind in "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention "
    "fused_attention_overrideable".split()
)
"""torch's operators of fused attention that take a query, a key and a value."""

_CHECKS: dict[str, Callable[[Bound], object]] = {
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _gradient),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _norm_gradient),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward"), _loss),
    "embedding_dense_backward": _embedding_gradient,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_gradient,
    **dict.fromkeys(
        "index_select index_add index_copy index_reduce gather scatter scatter_add "
        "scatter_reduce".split(),
        _along,
    ),
    **dict.fromkeys(("index", "index_put", "_index_put_impl"), _index),
    **dict.fromkeys(
        ("take", "put"),
        lambda bound: within(bound["index"], size := bound["self"].numel(), low=-size),
    ),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _ends),
    **dict.fromkeys((*FUSED_ATTENTION, "_scaled_dot_product_attention_math_for_mps"), _attention),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), normalized_axes),
    **dict.fromkeys(("_fft_c2c", "_fft_c2r", "_fft_r2c"), _fourier),
    **dict.fromkeys(
        "batch_norm native_batch_norm cudnn_batch_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training".split(),
        _batch_norm,
    ),
    "_weight_norm_interface": _weight_norm,
    **dict.fromkeys(("_efficient_attention_forward", "_flash_attention_forward"), _forward),
    "bincount": _bincount,
    "embedding": lambda bound: within(bound["indices"], bound["weight"].shape[0]),
    "index_fill": partial(_along, negative=True),
    "native_group_norm": _group_norm,
    "repeat_interleave": _repeats,
    "searchsorted": _searched,
}
