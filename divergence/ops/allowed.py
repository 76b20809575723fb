"""Operators by name: which of them are run for a run from elsewhere, and why another is not.

A run names its operators and their arguments itself, and may come from a stranger. Many of torch's
kernels trust their callers: they see memory through raw sizes and strides, skip the checks of their
public wrappers, or give out memory as it lay. So of aten only those are run that compute values
from values: whatever torch tags as pointwise, and the names below, whose kernels check what they
are given or whose operands are checked here (ops.bounds). Operators of other packages are run where
the caller asked for their namespace. All must be registered in this process (nothing is imported by
name but transformers' own), give tensors, and touch no files and no other processes.

The operators of a domain are plain functions that its own table knows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from typing import Any

import torch

from divergence.domain import hook_places, placed
from divergence.run.manifest import NO_TENSOR
from divergence.run.site import did_you_mean


class Refusal(Exception):
    """``str(refusal)`` is the reason under which the call is counted: it names no site, so that
    calls of one reason are counted together. ``detail``: what is particular to this call."""

    def __init__(self, reason: str, *, detail: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class Unsafe(Refusal):
    """Running it could reach beyond what it is given: not here, and in no script."""


_NAME = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*")
_COLLECTIVE = frozenset("c10d _c10d_functional _dtensor symm_mem rpc fsdp".split())
_OUTSIDE = frozenset({"filename", "path", "file"})
"""Names of arguments by which an operator reads or writes files."""
_UNINITIALISED = frozenset(
    f"aten.{name}"
    for name in "empty empty_like empty_permuted empty_strided empty_quantized new_empty "
    "new_empty_strided resize resize_ resize_as_".split()
)


def short_name(operator: str) -> str:
    """``"aten.mm.default"`` → ``"aten.mm"``."""
    return operator.rpartition(".")[0] or operator


def schema_name(operator: torch._ops.OpOverload) -> str:
    """``aten.mm`` by the schema's own name."""
    return operator._schema.name.replace("::", ".")


def find_operator(name: str) -> torch._ops.OpOverload:
    """The operator of that full name, ``aten.mm.default``. Raises Refusal."""
    if _NAME.fullmatch(name) is None:
        raise Refusal(f"{name!r} is no operator's name")
    space, packet, overload = name.split(".")
    if space in _COLLECTIVE:
        raise Refusal(f"{short_name(name)} works on several processes")
    if space == "transformers":
        from divergence.recording.engines.load import register_operators

        register_operators()
    home = torch.ops.__dict__.get(space) or getattr(torch.ops, space)
    resolved: Any = None
    if isinstance(home, torch._ops._OpNamespace):
        resolved = getattr(getattr(home, packet, None), overload, None)
    if not isinstance(resolved, torch._ops.OpOverload):
        raise Refusal(f"this machine has no operator {name}")
    schema = resolved._schema
    if any(argument.name in _OUTSIDE for argument in schema.arguments):
        raise Refusal(f"{short_name(name)} reads or writes files")
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    if not writes and not any("Tensor" in str(result.type) for result in schema.returns):
        raise Refusal(f"{short_name(name)} {NO_TENSOR}")
    return resolved


def is_uninitialised(name: str) -> bool:
    """Does the operator give memory as it was found?"""
    return short_name(name) in _UNINITIALISED


@functools.cache
def _tables() -> dict[str, str]:
    """Operators that are plain functions, by their namespace: where their table stands."""
    return hook_places("operators")


def is_function(operator: str) -> bool:
    """Is it a plain function that a domain knows, and none of torch's operators?"""
    return operator.partition(".")[0] in _tables()


def plain_function(operator: str, *, truth: bool = False) -> Callable[..., Any]:
    """The function that such a name stands for, or its float64 definition. Raises Refusal."""
    table = placed(_tables()[operator.partition(".")[0]])
    definition = table.get(operator)
    if definition is None:
        raise Refusal(
            f"this divergence has no operator {operator}",
            detail=did_you_mean(operator, table) or None,
        )
    function: Callable[..., Any] = definition.truth if truth else definition.run
    return function


_OWN = frozenset({"aten", "transformers"})
_TYPES = re.compile(
    r"(?:Optional\[|List\[)*(?:Tensor|int|float|bool|number|complex|str|Device|Generator)\]*"
)
_NAMES = frozenset(
    # made of sizes and numbers
    """
    arange bartlett_window blackman_window eye full full_like hamming_window hann_window
    kaiser_window lift_fresh_copy linspace logspace new_full new_ones new_zeros ones ones_like
    scalar_tensor tril_indices triu_indices zero zeros zeros_like
    """
    # element by element, though torch does not tag them
    """
    floor_divide hardswish huber_loss mse_loss smooth_l1_loss
    """
    # moved, chosen, put together
    """
    _to_copy _unsafe_view alias_copy block_diag cat clone col2im complex concat constant_pad_nd copy
    detach_copy diag_embed diagonal_copy diagonal_scatter expand_copy fill fill_diagonal flip
    im2col masked_fill masked_scatter masked_select narrow_copy native_channel_shuffle
    channel_shuffle permute_copy pixel_shuffle pixel_unshuffle polar reflection_pad1d
    reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d
    replication_pad3d roll select_copy select_scatter slice_copy slice_scatter split_copy
    split_with_sizes_copy squeeze_copy stack t_copy transpose_copy tril triu unbind_copy unfold_copy
    unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze_copy view_as_complex_copy
    view_as_real_copy view_copy where
    """
    # by index
    """
    _index_put_impl argwhere bincount bucketize embedding gather index index_add index_copy
    index_fill index_put index_reduce index_select isin nonzero put scatter scatter_add
    scatter_reduce searchsorted take
    """
    # reduced, sorted
    """
    _unique _unique2 all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin
    cumprod cumsum dist histc kthvalue linalg__powsum linalg_vector_norm logcumsumexp logsumexp max
    mean median min mode msort nanmedian nansum norm prod renorm sort std std_mean sum topk trace
    unique_consecutive unique_dim var var_mean _logcumsumexp _aminmax
    """
    # products
    """
    _addmm_activation _cdist_forward _conv_depthwise2d _convolution _fft_c2c _fft_c2r _fft_r2c
    _foreach_mm _grouped_mm _int_mm _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex
    _linalg_svd _scaled_grouped_mm _scaled_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu
    _weight_int8pack_mm addbmm addmm addmv addr baddbmm bmm conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d convolution convolution_overrideable dot linalg_cholesky_ex
    linalg_cross linalg_inv_ex linalg_matrix_exp linalg_qr linalg_solve_triangular linear matmul mm
    mv vdot
    """
    # norms, activations, attention
    """
    _efficient_attention_forward _flash_attention_forward _fused_rms_norm _log_softmax
    _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _prelu_kernel _safe_softmax
     _scaled_dot_product_attention_math_for_mps
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable _softmax _weight_norm_interface batch_norm
    cudnn_batch_norm glu group_norm layer_norm log_sigmoid log_sigmoid_forward log_softmax
    native_batch_norm native_dropout native_group_norm native_layer_norm prelu rms_norm
     softmax
    """
    # pictures
    """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d
    adaptive_max_pool3d affine_grid_generator avg_pool1d avg_pool2d avg_pool3d grid_sampler_2d
    grid_sampler_3d max_pool2d_with_indices max_pool3d_with_indices upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d
    """.split()
)
"""Of aten, without the overload and the mark of an operator that writes in place."""


BACKWARD_NAMES = frozenset(
    """
    _fused_rms_norm_backward _log_softmax_backward_data _softmax_backward_data
    _scaled_dot_product_flash_attention_for_cpu_backward embedding_dense_backward
    native_layer_norm_backward nll_loss_backward nll_loss_forward select_backward slice_backward
    """.split()
)
"""Those of a backward that have kernels of their own and are not tagged as pointwise."""


def asked_for(operators: Collection[str], device: str) -> frozenset[str]:
    """The namespaces that a caller asked for, and that of the device (``npu``): its maker's own."""
    return frozenset({*operators, device.partition(":")[0]})


def check_namespace(name: str, namespaces: Collection[str] | None) -> None:
    """Refuse an operator of a package that nobody asked for. ``namespaces``: those asked for,
    beside aten's and the tool's own; None: any."""
    space = name.partition(".")[0]
    own = space in _OWN or is_function(name)
    if namespaces is not None and not own and space not in namespaces:
        raise Unsafe(f"operators of {space} are run only on request (--operators {space})")


def check_operator(operator: torch._ops.OpOverload) -> None:
    """Refuse an operator that could reach beyond the values that it is given."""
    reason = _why_not(operator)
    if reason is not None:
        raise Unsafe(reason)


@functools.cache
def _why_not(operator: torch._ops.OpOverload) -> str | None:
    schema = operator._schema
    short = schema_name(operator)
    names = {argument.name for argument in schema.arguments}
    if "storage_offset" in names or ("size" in names and "stride" in names):
        return f"{short} sees memory through raw sizes and strides"
    for argument in schema.arguments:
        if _TYPES.fullmatch(str(argument.type)) is None:
            return f"{short} takes what no run records"
    aliases = [result.alias_info for result in schema.returns]
    if any(alias is not None and not alias.is_write for alias in aliases):
        return f"{short} computes nothing: it is a view"
    private = operator.namespace == "aten" and schema.name.startswith("aten::_")
    private = private and schema.name.removeprefix("aten::") not in BACKWARD_NAMES
    if torch.Tag.generated in operator.tags or (private and "out" in names):
        return f"{short}.{schema.overload_name} is a variant that no model calls"
    base = schema.name.removeprefix("aten::").removeprefix("_foreach_")
    bases = {base} if base.endswith("__") else {base, base.removesuffix("_")}
    listed = not bases.isdisjoint(_NAMES | BACKWARD_NAMES) or any(map(_is_pointwise, bases))
    if operator.namespace == "aten" and not listed:
        return f"{short} is not among the operators that are run for a recorded run"
    return None


def _is_pointwise(name: str) -> bool:
    """Does torch say so of one of its overloads? (Those that write are not always tagged.) Not
    those whose time and memory grow with a number that they are given."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or "polynomial" in name or name in ("mvlgamma", "polygamma"):
        return False
    tags = (getattr(packet, overload).tags for overload in packet.overloads())
    return any(torch.Tag.pointwise in tag for tag in tags)
