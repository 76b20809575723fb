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
from llvmlite.ir import IRBuilder, Value
from numba import njit
from numba.core import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.types import Type
    from numba.core.typing.templates import Signature

    Typed = tuple[Signature, Callable[..., Value]]
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
    instruction: Callable[..., Any] = intrinsic(typed)
    return instruction


def _typed(signature: Signature, write: Callable[..., Value]) -> Typed:
    """``write(builder, *arguments)`` makes the code; it needs no more of what numba hands out."""

    def generate(
        context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]
    ) -> Value:
        return write(builder, *arguments)

    return signature, generate


def _widened(
    context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]
) -> Value:
    (value,), (kind,) = arguments, signature.args
    if kind == types.uint16:  # bfloat16
        bits = builder.shl(builder.zext(value, _I32), _I32(16))
        value = builder.bitcast(bits, ir.FloatType())
    elif kind == types.int16:  # float16
        bits = builder.zext(value, _I32)
        body = builder.shl(builder.and_(bits, _I32(0x7FFF)), _I32(13))
        finite = builder.fmul(builder.bitcast(body, ir.FloatType()), ir.FloatType()(2.0**112))
        special = builder.icmp_unsigned(">=", body, _I32(0x0F800000))
        unsigned = builder.select(
            special, builder.or_(body, _I32(0x7F800000)), builder.bitcast(finite, _I32)
        )
        sign = builder.shl(builder.and_(bits, _I32(0x8000)), _I32(16))
        value = builder.bitcast(builder.or_(unsigned, sign), ir.FloatType())
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

    def write(builder: IRBuilder, x: Value) -> Value:
        return builder.and_(builder.bitcast(x, _I64), _I64(2**63 - 1))

    return _typed(types.int64(types.float64), write)


@_instructions
def sign_of_order(typing: BaseContext, value: Type) -> Typed:
    """The bits of ``value`` as an int64 in the order of the values: -nan, -inf, ..., inf, nan."""

    def write(builder: IRBuilder, x: Value) -> Value:
        bits = builder.bitcast(x, _I64)
        return builder.xor(bits, builder.lshr(builder.ashr(bits, _I64(63)), _I64(1)))

    return _typed(types.int64(types.float64), write)


@_instructions
def key(typing: BaseContext, bits: Type) -> Typed:
    """Position on the lattice of a signed bit pattern; see divergence.numerics.pairs.ulp."""

    def write(builder: IRBuilder, x: Value) -> Value:
        sign = builder.ashr(x, x.type(x.type.width - 1))
        return builder.sub(builder.xor(builder.lshr(sign, x.type(1)), x), sign)

    return _typed(bits(bits), write)


@_instructions
def distance(typing: BaseContext, left: Any, right: Any) -> Typed:
    """|left - right| as an unsigned integer of the same width, exact where it wraps."""

    def write(builder: IRBuilder, x: Value, y: Value) -> Value:
        higher = builder.icmp_signed(">", x, y)
        return builder.sub(builder.select(higher, x, y), builder.select(higher, y, x))

    kinds: dict[int, Type] = {16: types.uint16, 32: types.uint32, 64: types.uint64}
    return _typed(kinds[left.bitwidth](left, left), write)


@_instructions
def in_range(typing: BaseContext, value: Type, low: Type, high: Type) -> Typed:
    """low <= |value| <= high."""

    def write(builder: IRBuilder, x: Value, low: Value, high: Value) -> Value:
        negated = builder.sub(x.type(0), x)
        size = builder.select(builder.icmp_signed("<", x, x.type(0)), negated, x)
        return builder.and_(
            builder.icmp_signed(">=", size, low), builder.icmp_signed("<=", size, high)
        )

    return _typed(types.boolean(value, value, value), write)


@_instructions
def or_zero(typing: BaseContext, keep: Type, value: Type) -> Typed:
    """``value`` where ``keep``, else 0."""

    def write(builder: IRBuilder, keep: Value, x: Value) -> Value:
        return builder.select(keep, x, x.type(0))

    return _typed(value(types.boolean, value), write)


@_instructions
def larger(typing: BaseContext, left: Any, right: Any) -> Typed:
    """The larger of two integers of one type."""
    order = "icmp_signed" if left.signed else "icmp_unsigned"

    def write(builder: IRBuilder, x: Value, y: Value) -> Value:
        return builder.select(getattr(builder, order)(">", x, y), x, y)

    return _typed(left(left, left), write)


@_instructions
def add_if(typing: BaseContext, count: Type, condition: Type) -> Typed:
    """``count`` + 1 where ``condition``, in the counter's own width."""

    def write(builder: IRBuilder, count: Value, condition: Value) -> Value:
        return builder.add(count, builder.zext(condition, count.type))

    return _typed(count(count, types.boolean), write)
