"""The vector vocabulary of the CPU kernels: sixteen lanes of float32 or int32, and the few operations they need.

numba compiles scalar Python; these intrinsics add vector-typed local variables to it. A kernel is written once in
terms of sixteen lanes: LLVM keeps a vector in one register with AVX-512 and in two with AVX2, and only the products of
bytes in `tile.py` name instructions. Offsets count elements of the array passed in; no access is checked.

Lanes are independent everywhere, so that the bits of a result do not depend on the width of the registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

_i1, _i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
_f32, _f16 = ir.FloatType(), ir.HalfType()


class VectorType(types.Type):
    """A numba type held in one LLVM vector value."""

    def __init__(self, name: str, llvm_type: ir.VectorType) -> None:
        self.llvm_type = llvm_type
        super().__init__(name=name)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: VectorType) -> None:
        super().__init__(manager, kind, kind.llvm_type)


f32x16 = VectorType("f32x16", ir.VectorType(_f32, 16))
i32x16 = VectorType("i32x16", ir.VectorType(_i32, 16))


def _address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, pointee: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), pointee.as_pointer())


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(pointer)
    value.align = 1
    return value


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, pointer).align = 1


def _splat(builder: Any, scalar: Any, kind: ir.VectorType) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_i32, 0))
    mask = ir.Constant(ir.VectorType(_i32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), mask)


def _call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def _half(builder: Any, vector: Any, index: int) -> Any:
    """Lower (0) or upper (1) half of a vector."""
    n = vector.type.count // 2
    mask = ir.Constant(ir.VectorType(_i32, n), list(range(index * n, (index + 1) * n)))
    return builder.shuffle_vector(vector, vector, mask)


def _join(builder: Any, low: Any, high: Any) -> Any:
    n = low.type.count * 2
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_i32, n), list(range(n))))


# --- memory ---------------------------------------------------------------------------------------------------------


@intrinsic
def load(typingctx: Any, array: Any, offset: Any) -> Any:
    """Sixteen float32 of a float32 array, from `offset` on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load(builder, _address(context, builder, sig.args[0], args[0], args[1], f32x16.llvm_type))

    return f32x16(array, types.intp), codegen


@intrinsic
def store(typingctx: Any, array: Any, offset: Any, value: Any) -> Any:
    """Write sixteen float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store(builder, args[2], _address(context, builder, sig.args[0], args[0], args[1], f32x16.llvm_type))
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def load_half(typingctx: Any, array: Any, offset: Any) -> Any:
    """Sixteen float16 (of an array of any type; the offset counts its elements), widened to float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.VectorType(_f16, 16)
        return builder.fpext(
            _load(builder, _address(context, builder, sig.args[0], args[0], args[1], kind)), f32x16.llvm_type
        )

    return f32x16(array, types.intp), codegen


@intrinsic
def store_half(typingctx: Any, array: Any, offset: Any, value: Any) -> Any:
    """Write sixteen float32 as float16, rounded to nearest even."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.VectorType(_f16, 16)
        narrow = builder.fptrunc(args[2], kind)
        _store(builder, narrow, _address(context, builder, sig.args[0], args[0], args[1], kind))
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def load_raw_f32(typingctx: Any, array: Any, offset: Any) -> Any:
    """Sixteen float32 from byte `offset` of a uint8 array."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load(builder, _address(context, builder, sig.args[0], args[0], args[1], f32x16.llvm_type))

    return f32x16(array, types.intp), codegen


@intrinsic
def store_i8(typingctx: Any, array: Any, offset: Any, value: Any) -> Any:
    """Write sixteen int32, each in [-128, 127], as int8."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.VectorType(_i8, 16)
        narrow = builder.trunc(args[2], kind)
        _store(builder, narrow, _address(context, builder, sig.args[0], args[0], args[1], kind))
        return context.get_dummy_value()

    return types.void(array, types.intp, i32x16), codegen


def _prefetch(builder: Any, pointer: Any) -> None:
    flags = [ir.Constant(_i32, value) for value in (0, 2, 1)]  # read, keep in the second level, data
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *flags])


@intrinsic
def prefetch(typingctx: Any, array: Any, offset: Any) -> Any:
    """Ask for the cache line of an element into the second-level cache; no effect on results."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _prefetch(builder, _address(context, builder, sig.args[0], args[0], args[1], _i8))
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def address(typingctx: Any, array: Any, offset: Any) -> Any:
    """Where an element of an array lies in memory, as an int64: to be fetched."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(_address(context, builder, sig.args[0], args[0], args[1], _i8), _i64)

    return types.int64(array, types.intp), codegen


@intrinsic
def is_bytes(typingctx: Any, array: Any) -> Any:
    """Whether it is an array of uint8: known when the caller is compiled, for each type of array by itself."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(_i1, int(sig.args[0].dtype == types.uint8))

    return types.boolean(array), codegen


# --- float32 lanes --------------------------------------------------------------------------------------------------


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """The same float32 in all lanes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, args[0], f32x16.llvm_type)

    return f32x16(types.float32), codegen


@intrinsic
def splat_at(typingctx: Any, array: Any, offset: Any) -> Any:
    """One element of a float32 array in all lanes. (Plain indexing would also test for a negative index.)"""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        scalar = _load(builder, _address(context, builder, sig.args[0], args[0], args[1], _f32))
        return _splat(builder, scalar, f32x16.llvm_type)

    return f32x16(array, types.intp), codegen


@intrinsic
def zero(typingctx: Any) -> Any:
    """All lanes 0.0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(f32x16.llvm_type, [0.0] * LANES)

    return f32x16(), codegen


def _binary(emit: Callable[[Any, Any, Any], Any], kind: VectorType, doc: str) -> Any:
    @intrinsic
    def operation(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return emit(builder, args[0], args[1])

        return kind(kind, kind), codegen

    operation.__doc__ = doc
    return operation


add = _binary(lambda builder, a, b: builder.fadd(a, b), f32x16, "a + b")
sub = _binary(lambda builder, a, b: builder.fsub(a, b), f32x16, "a - b")
mul = _binary(lambda builder, a, b: builder.fmul(a, b), f32x16, "a * b")
div = _binary(lambda builder, a, b: builder.fdiv(a, b), f32x16, "a / b")
maximum = _binary(
    lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b), f32x16, "The larger of a and b"
)

minimum = _binary(
    lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b), f32x16, "The smaller of a and b"
)


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call(builder, "llvm.fma.v16f32", f32x16.llvm_type, list(args))

    return f32x16(f32x16, f32x16, f32x16), codegen


def _tree(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    while vector.type.count > 1:
        low, high = _half(builder, vector, 0), _half(builder, vector, 1)
        vector = combine(low, high)
    return builder.extract_element(vector, ir.Constant(_i32, 0))


@intrinsic
def sum_lanes(typingctx: Any, a: Any) -> Any:
    """Sum of the lanes, in the fixed order of a halving tree."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _tree(builder, args[0], builder.fadd)

    return types.float32(f32x16), codegen


@intrinsic
def max_lanes(typingctx: Any, a: Any) -> Any:
    """Largest lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _tree(builder, args[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return types.float32(f32x16), codegen


@intrinsic
def range_of_lanes(typingctx: Any, tops: Any, bottoms: Any) -> Any:
    """(largest lane of `tops`, smallest lane of `bottoms`)."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        # Both in one tree: of the negated values, the smallest is the largest.
        negated = builder.fneg(args[1])
        vector = _join(
            builder,
            larger(_half(builder, args[0], 0), _half(builder, args[0], 1)),
            larger(_half(builder, negated, 0), _half(builder, negated, 1)),
        )
        for distance in (4, 2, 1):
            mask = ir.Constant(ir.VectorType(_i32, 16), [i ^ distance for i in range(16)])
            vector = larger(vector, builder.shuffle_vector(vector, vector, mask))
        top, bottom = (builder.extract_element(vector, ir.Constant(_i32, lane)) for lane in (0, 8))
        return context.make_tuple(builder, sig.return_type, [top, builder.fneg(bottom)])

    return types.UniTuple(types.float32, 2)(f32x16, f32x16), codegen


@intrinsic
def scale_by_low_bits(typingctx: Any, value: Any, shifted: Any) -> Any:
    """value * 2**n in each lane, n being the lowest nine bits of `shifted` as a signed number.

    By adding to the exponent: both `value` and the result must be normal numbers.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits, powers = (builder.bitcast(a, i32x16.llvm_type) for a in args)
        shift = ir.Constant(i32x16.llvm_type, [23] * LANES)
        return builder.bitcast(builder.add(bits, builder.shl(powers, shift)), f32x16.llvm_type)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def mul_unless_zero(typingctx: Any, a: Any, b: Any) -> Any:
    """a * b, and 0 where a is 0, whatever b is: infinite or not a number."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        a, b = args
        nothing = ir.Constant(f32x16.llvm_type, [0.0] * LANES)
        return builder.select(builder.fcmp_ordered("==", a, nothing), nothing, builder.fmul(a, b))

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def walsh_lanes(typingctx: Any, a: Any) -> Any:
    """Walsh-Hadamard transform of the sixteen lanes, not normalised."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        (vector,) = args
        for distance in (1, 2, 4, 8):
            mask = ir.Constant(ir.VectorType(_i32, 16), [i ^ distance for i in range(16)])
            signs = ir.Constant(f32x16.llvm_type, [-1.0 if i & distance else 1.0 for i in range(16)])
            # Exact but for the one rounding of the sum.
            vector = _call(
                builder,
                "llvm.fma.v16f32",
                f32x16.llvm_type,
                [vector, signs, builder.shuffle_vector(vector, vector, mask)],
            )
        return vector

    return f32x16(f32x16), codegen


@intrinsic
def keep_first(typingctx: Any, value: Any, count: Any, other: Any) -> Any:
    """`value` in the first `count` lanes, `other` in the rest."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        index = ir.Constant(i32x16.llvm_type, list(range(LANES)))
        limit = _splat(builder, builder.trunc(args[1], _i32), i32x16.llvm_type)
        return builder.select(builder.icmp_signed("<", index, limit), args[0], args[2])

    return f32x16(f32x16, types.intp, f32x16), codegen


# --- int32 lanes and bytes ------------------------------------------------------------------------------------------


add_i32 = _binary(lambda builder, a, b: builder.add(a, b), i32x16, "a + b")


@intrinsic
def sum_lanes_i32(typingctx: Any, a: Any) -> Any:
    """Sum of the lanes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _tree(builder, args[0], builder.add)

    return types.int32(i32x16), codegen


@intrinsic
def to_int(typingctx: Any, a: Any) -> Any:
    """float32 lanes, already whole numbers within int32, to int32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fptosi(args[0], i32x16.llvm_type)

    return i32x16(f32x16), codegen


# --- integers of the sampler ----------------------------------------------------------------------------------------

i64x16 = VectorType("i64x16", ir.VectorType(_i64, 16))

xor_i32 = _binary(lambda builder, a, b: builder.xor(a, b), i32x16, "a ^ b")
mul_i32 = _binary(lambda builder, a, b: builder.mul(a, b), i32x16, "a * b modulo 2**32")


@intrinsic
def splat_i32(typingctx: Any, value: Any) -> Any:
    """The lower 32 bits of an int64 in all lanes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, builder.trunc(args[0], _i32), i32x16.llvm_type)

    return i32x16(types.int64), codegen


@intrinsic
def lane_numbers(typingctx: Any) -> Any:
    """0, 1, ... 15."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(i32x16.llvm_type, list(range(LANES)))

    return i32x16(), codegen


@intrinsic
def shift_right(typingctx: Any, a: Any, bits: Any) -> Any:
    """Each lane as unsigned, shifted right."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        count = _splat(builder, builder.trunc(args[1], _i32), i32x16.llvm_type)
        return builder.lshr(args[0], count)

    return i32x16(i32x16, types.int64), codegen


@intrinsic
def unsigned_to_float(typingctx: Any, a: Any) -> Any:
    """Lanes as unsigned int32 to float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.uitofp(args[0], f32x16.llvm_type)

    return f32x16(i32x16), codegen


@intrinsic
def zero_i64(typingctx: Any) -> Any:
    """All lanes 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(i64x16.llvm_type, [0] * LANES)

    return i64x16(), codegen


@intrinsic
def add_widened(typingctx: Any, acc: Any, a: Any) -> Any:
    """int64 lanes plus int32 lanes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.add(args[0], builder.sext(args[1], i64x16.llvm_type))

    return i64x16(i64x16, i32x16), codegen


@intrinsic
def sum_lanes_i64(typingctx: Any, a: Any) -> Any:
    """Sum of the lanes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _tree(builder, args[0], builder.add)

    return types.int64(i64x16), codegen


# --- scalars --------------------------------------------------------------------------------------------------------


@intrinsic
def half_value(typingctx: Any, bits: Any) -> Any:
    """The float32 that these bits of a float16, as uint16, stand for."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], _f16), _f32)

    return types.float32(types.uint16), codegen


@intrinsic
def half_bits(typingctx: Any, value: Any) -> Any:
    """The bits of a float32 rounded to float16, as uint16."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], _f16), _i16)

    return types.uint16(types.float32), codegen


# --- threads --------------------------------------------------------------------------------------------------------


@intrinsic
def fetch_add(typingctx: Any, counters: Any, index: Any, amount: Any) -> Any:
    """Atomically add to an int64 array element; gives the value before."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _address(context, builder, sig.args[0], args[0], args[1], _i64)
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(counters, types.intp, types.int64), codegen


@intrinsic
def load_acquire(typingctx: Any, counters: Any, index: Any) -> Any:
    """Read an int64 array element that another thread writes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _address(context, builder, sig.args[0], args[0], args[1], _i64)
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(counters, types.intp), codegen


@intrinsic
def spin_pause(typingctx: Any) -> Any:
    """Tell the core that this is a spin loop."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx: Any) -> Any:
    """Let another thread have the core (sched_yield)."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _call(builder, "sched_yield", _i32, [])
        return context.get_dummy_value()

    return types.void(), codegen
