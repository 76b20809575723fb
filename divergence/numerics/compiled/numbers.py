"""How compiled loops read numbers: bit patterns to float64 and to lattice keys, in registers.

numpy has no bfloat16 and converts float16 slowly, so both come as integers: uint16 holds bfloat16
(the upper half of a float32), int16 holds float16. Each function is a few instructions of LLVM's
own, chosen by type, so that a loop over them becomes vector code; numba's arithmetic on small
integers would widen them to 64 bits, and its float maximum does not vectorise.

float16 by way of float32: exponent and fraction moved to float32's places and multiplied by 2^112
(the difference of the biases) is exact for subnormals too; exponent 31 is inf or nan.

Contracting a * b + c and reordering sums is allowed to the compiler; assuming that there is no
nan or inf is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.types import Type
    from numba.core.typing.templates import Signature

    Typed = tuple[Signature, Callable[..., ir.Value]]
    # what numba asks of an intrinsic: the types it takes and gives, and what writes the code

__all__ = ["add_if", "distance", "in_range", "jit", "key", "larger", "magnitude", "number",
           "or_zero", "sign_of_order"]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., object])

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
}

_I32, _I64 = (ir.IntType(bits) for bits in (32, 64))


def jit(function: Function) -> Function:
    """numba's compiler with this room's options; machine code is kept on disk where it can be."""
    compiled: Function
    try:
        compiled = njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no folder to keep it in: compiled again in each process
        compiled = njit(**_OPTIONS)(function)
    return compiled


def _instructions(typed: Callable[..., Typed]) -> Callable[..., Any]:
    """An intrinsic as loops call it: on the elements alone, of whatever width they are."""
    found: Callable[..., Any] = intrinsic(typed)
    return found


def _widened(
    context: BaseContext,
    builder: ir.IRBuilder,
    signature: Signature,
    arguments: Sequence[ir.Value],
) -> ir.Value:
    (value,), (kind,) = arguments, signature.args
    if kind == types.uint16:  # bfloat16
        bits = builder.shl(builder.zext(value, _I32), _I32(16))
        value = builder.bitcast(bits, ir.FloatType())
    elif kind == types.int16:  # float16
        bits = builder.zext(value, _I32)
        body = builder.shl(builder.and_(bits, _I32(0x7FFF)), _I32(13))
        finite = builder.fmul(builder.bitcast(body, ir.FloatType()), ir.FloatType()(2.0**112))
        special = builder.icmp_unsigned(">=", body, _I32(0x0F800000))
        found = builder.select(
            special, builder.or_(body, _I32(0x7F800000)), builder.bitcast(finite, _I32)
        )
        sign = builder.shl(builder.and_(bits, _I32(0x8000)), _I32(16))
        value = builder.bitcast(builder.or_(found, sign), ir.FloatType())
    if kind != types.float64:
        value = builder.fpext(value, ir.DoubleType())
    return value


@_instructions
def number(typing: BaseContext, stored: Type) -> Typed:
    """The float64 that a stored element stands for."""
    return types.float64(stored), _widened


@_instructions
def magnitude(typing: BaseContext, value: Type) -> Typed:
    """The bits of |value| as int64: in the order of the magnitudes, inf and then nan beyond."""

    def generate(
        context: BaseContext,
        builder: ir.IRBuilder,
        signature: Signature,
        arguments: Sequence[ir.Value],
    ) -> ir.Value:
        bits = builder.bitcast(arguments[0], _I64)
        return builder.and_(bits, _I64(2**63 - 1))

    return types.int64(types.float64), generate


@_instructions
def sign_of_order(typing: BaseContext, value: Type) -> Typed:
    """The bits of ``value`` as an int64 in the order of the values: -nan, -inf, ..., inf, nan."""

    def generate(
        context: BaseContext,
        builder: ir.IRBuilder,
        signature: Signature,
        arguments: Sequence[ir.Value],
    ) -> ir.Value:
        bits = builder.bitcast(arguments[0], _I64)
        flip = builder.lshr(builder.ashr(bits, _I64(63)), _I64(1))
        return builder.xor(bits, flip)

    return types.int64(types.float64), generate


@_instructions
def key(typing: BaseContext, bits: Type) -> Typed:
    """Position on the lattice of a signed bit pattern; see divergence.numerics.pairs.ulp."""

    def generate(
        context: BaseContext,
        builder: ir.IRBuilder,
        signature: Signature,
        arguments: Sequence[ir.Value],
    ) -> ir.Value:
        kind = arguments[0].type
        sign = builder.ashr(arguments[0], kind(kind.width - 1))
        folded = builder.xor(builder.lshr(sign, kind(1)), arguments[0])
        return builder.sub(folded, sign)

    return bits(bits), generate


@_instructions
def distance(typing: BaseContext, one: Any, two: Any) -> Typed:
    """|one - two| as an unsigned integer of the same width, exact where it wraps."""

    def generate(
        context: BaseContext,
        builder: ir.IRBuilder,
        signature: Signature,
        arguments: Sequence[ir.Value],
    ) -> ir.Value:
        higher = builder.icmp_signed(">", *arguments)
        high = builder.select(higher, arguments[0], arguments[1])
        low = builder.select(higher, arguments[1], arguments[0])
        return builder.sub(high, low)

    kinds: dict[int, Type] = {16: types.uint16, 32: types.uint32, 64: types.uint64}
    unsigned = kinds[one.bitwidth]
    return unsigned(one, one), generate


@_instructions
def in_range(typing: BaseContext, value: Type, low: Type, high: Type) -> Typed:
    """low <= |value| <= high."""

    def generate(
        context: BaseContext,
        builder: ir.IRBuilder,
        signature: Signature,
        arguments: Sequence[ir.Value],
    ) -> ir.Value:
        value, low, high = arguments
        negative = builder.icmp_signed("<", value, value.type(0))
        size = builder.select(negative, builder.sub(value.type(0), value), value)
        return builder.and_(
            builder.icmp_signed(">=", size, low), builder.icmp_signed("<=", size, high)
        )

    return types.boolean(value, value, value), generate


@_instructions
def or_zero(typing: BaseContext, keep: Type, value: Type) -> Typed:
    """``value`` where ``keep``, else 0."""

    def generate(
        context: BaseContext,
        builder: ir.IRBuilder,
        signature: Signature,
        arguments: Sequence[ir.Value],
    ) -> ir.Value:
        return builder.select(arguments[0], arguments[1], arguments[1].type(0))

    return value(types.boolean, value), generate


@_instructions
def larger(typing: BaseContext, one: Any, two: Any) -> Typed:
    """The larger of two integers of one type."""
    order = "icmp_signed" if one.signed else "icmp_unsigned"

    def generate(
        context: BaseContext,
        builder: ir.IRBuilder,
        signature: Signature,
        arguments: Sequence[ir.Value],
    ) -> ir.Value:
        return builder.select(getattr(builder, order)(">", *arguments), *arguments)

    return one(one, one), generate


@_instructions
def add_if(typing: BaseContext, count: Type, condition: Type) -> Typed:
    """``count`` + 1 where ``condition``, in the counter's own width."""

    def generate(
        context: BaseContext,
        builder: ir.IRBuilder,
        signature: Signature,
        arguments: Sequence[ir.Value],
    ) -> ir.Value:
        return builder.add(arguments[0], builder.zext(arguments[1], arguments[0].type))

    return count(count, types.boolean), generate
