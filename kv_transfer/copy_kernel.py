"""Copies pieces of memory and takes their checksum, in one call that does not need the interpreter.

Through Python each piece would cost two calls, and each of them a turn of the interpreter lock, for which the thread
that moves bytes competes with the event loop. So a whole chunk goes to one function, compiled for this CPU when it is
first asked for (about 40 ms). Each piece is copied by memcpy, then hashed where it went, while it is in the cache.
`copying` is how to use it.

The checksum is XXH3 with 64 bits and equals what `xxhash` gives for the same bytes. As of its specification
(doc/xxhash_spec.md of xxHash), for inputs of more than 240 bytes, on eight lanes of 64 bits:

    stripe of 64 bytes   x = data ^ secret[8 n:], n its number in the block; acc += swapped(data) + low32(x) * high32(x)
    block of 16 stripes  then acc = (acc ^ acc >> 47 ^ secret[128:]) * PRIME32_1
    last 64 bytes        one more stripe, with secret[121:]
    result               pairs of lanes, each multiplied to 128 bits and folded, summed up, mixed with the length
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

logger = logging.getLogger(__name__)

MIN_NBYTES = 241
"""Of prefix and pieces together; XXH3 hashes shorter inputs otherwise."""
MAX_STEP_NBYTES = 256 << 10
"""Longest piece, for the caller to see to: it should be in the cache when it is hashed."""
STRIPE_NBYTES = 64

_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_PRIME_MIX = 0x165667919E3779F9
_START = (_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SCRAMBLE_KEY, _LAST_KEY, _RESULT_KEY = 128, 121, 11
"""Where in the secret they begin."""
_BLOCK_STRIPES = 16

_LANES = ir.VectorType(ir.IntType(64), 8)
_I8, _I64, _I128 = ir.IntType(8), ir.IntType(64), ir.IntType(128)
_BYTES = _I8.as_pointer()


class CopyKernel:
    """The compiled functions. Any thread."""

    def __init__(self) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        module = llvm.parse_assembly(str(_module()))
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
        )
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(module, passes)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        # A CFUNCTYPE lets go of the interpreter lock; a PYFUNCTYPE, for what is over at once, does not.
        self.take = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)(
            self._engine.get_function_address("take")
        )
        """take(state, address of the copies, number of copies): see `_take`."""
        self.result = ctypes.PYFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64)(
            self._engine.get_function_address("result")
        )
        """result(state, last stripe, bytes in all): the checksum."""


class State(ctypes.Structure):
    """What `take` leaves for the next call."""

    _fields_ = (
        ("lanes", ctypes.c_uint64 * 8),
        ("begun", ctypes.c_ubyte * STRIPE_NBYTES),
        ("num_begun", ctypes.c_uint64),
        ("num_done", ctypes.c_uint64),
        ("num_stripes", ctypes.c_uint64),
    )
    """Lanes; a stripe that is not whole, and how much of it is there; stripes that are hashed, and that will be: all
    but the last one."""

    @classmethod
    def start(cls, prefix: bytes, nbytes: int) -> State:
        """Of `nbytes` bytes, `MIN_NBYTES` or more, that begin with `prefix`, which is shorter than a stripe."""
        assert len(prefix) < STRIPE_NBYTES and nbytes >= MIN_NBYTES, "not an input of this kernel"
        begun = (ctypes.c_ubyte * STRIPE_NBYTES)(*prefix)
        return cls((ctypes.c_uint64 * 8)(*_START), begun, len(prefix), 0, (nbytes - 1) // STRIPE_NBYTES)


_BEGUN_AT, _NUM_BEGUN_AT, _NUM_DONE_AT, _NUM_STRIPES_AT = (
    field.offset for field in (State.begun, State.num_begun, State.num_done, State.num_stripes)
)


@functools.cache
def copy_kernel() -> CopyKernel | None:
    """Compiled once in a process. None, and a line in the log, where LLVM cannot compile for this machine."""
    try:
        return CopyKernel()
    except (OSError, RuntimeError) as error:  # all that llvmlite raises
        logger.warning("KV is copied and hashed without machine code of its own, which is slower: %s", error)
        return None


def _module() -> ir.Module:
    module = ir.Module(name="copy_kernel")
    secret = ir.GlobalVariable(module, ir.ArrayType(_I8, len(_SECRET)), "secret")
    secret.initializer = ir.Constant(secret.type.pointee, bytearray(_SECRET))
    secret.global_constant = True
    secret.linkage = "internal"
    absorb = _absorb(module, secret)
    _take(module, absorb)
    _result(module, secret)
    return module


def _splat(value: int) -> ir.Constant:
    return ir.Constant(_LANES, [value] * 8)


def _at(builder: ir.IRBuilder, base: Any, offset: Any) -> Any:
    """Address of a byte."""
    return builder.gep(builder.bitcast(base, _BYTES), [offset if not isinstance(offset, int) else _I64(offset)])


def _load_lanes(builder: ir.IRBuilder, address: Any) -> Any:
    lanes = builder.load(builder.bitcast(address, _LANES.as_pointer()))
    lanes.align = 1
    return lanes


def _store_lanes(builder: ir.IRBuilder, lanes: Any, address: Any) -> None:
    builder.store(lanes, builder.bitcast(address, _LANES.as_pointer())).align = 8


@contextmanager
def _counting(builder: ir.IRBuilder, count: Any) -> Iterator[Any]:
    """A loop over 0 <= i < count; gives i."""
    begin, body, end = (builder.append_basic_block(name) for name in ("loop", "body", "end"))
    slot = builder.alloca(_I64)
    builder.store(_I64(0), slot)
    builder.branch(begin)
    builder.position_at_end(begin)
    i = builder.load(slot)
    builder.cbranch(builder.icmp_unsigned("<", i, count), body, end)
    builder.position_at_end(body)
    yield i
    builder.store(builder.add(i, _I64(1)), slot)
    builder.branch(begin)
    builder.position_at_end(end)


def _accumulate(builder: ir.IRBuilder, lanes: Any, data: Any, key: Any) -> Any:
    """One stripe."""
    mixed = builder.xor(data, key)
    product = builder.mul(builder.and_(mixed, _splat(2**32 - 1)), builder.lshr(mixed, _splat(32)))
    swap = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
    swapped = builder.shuffle_vector(data, ir.Constant(_LANES, ir.Undefined), swap)
    return builder.add(builder.add(lanes, swapped), product)


def _absorb(module: ir.Module, secret: Any) -> ir.Function:
    """absorb(state, data, first, count): `count` whole stripes, of which the first is number `first` of all."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_BYTES, _BYTES, _I64, _I64]), "absorb")
    function.linkage = "internal"
    state, data, first, count = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    slot = builder.alloca(_LANES)
    builder.store(_load_lanes(builder, state), slot)
    scramble_key = _load_lanes(builder, _at(builder, secret, _SCRAMBLE_KEY))
    with _counting(builder, count) as i:
        in_block = builder.and_(builder.add(first, i), _I64(_BLOCK_STRIPES - 1))
        key = _load_lanes(builder, _at(builder, secret, builder.mul(in_block, _I64(8))))
        stripe = _load_lanes(builder, _at(builder, data, builder.mul(i, _I64(STRIPE_NBYTES))))
        builder.store(_accumulate(builder, builder.load(slot), stripe, key), slot)
        with builder.if_then(builder.icmp_unsigned("==", in_block, _I64(_BLOCK_STRIPES - 1))):
            lanes = builder.load(slot)
            lanes = builder.xor(builder.xor(lanes, builder.lshr(lanes, _splat(47))), scramble_key)
            builder.store(builder.mul(lanes, _splat(_PRIME32_1)), slot)
    _store_lanes(builder, builder.load(slot), state)
    builder.ret_void()
    return function


def _take(module: ir.Module, absorb: ir.Function) -> None:
    """take(state, copies, count): copy `count` pieces, and hash what is whole stripes.

    `copies` is the address of source address, destination address and length of each.
    """
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_BYTES, _I64, _I64]), "take")
    state, copies, count = function.args
    memcpy = module.declare_intrinsic("llvm.memcpy", [_BYTES, _BYTES, _I64])
    builder = ir.IRBuilder(function.append_basic_block())
    begun = _at(builder, state, _BEGUN_AT)
    num_begun, num_done, num_stripes = (
        builder.bitcast(_at(builder, state, at), _I64.as_pointer())
        for at in (_NUM_BEGUN_AT, _NUM_DONE_AT, _NUM_STRIPES_AT)
    )
    at, left = builder.alloca(_I64), builder.alloca(_I64)  # what is not hashed of this piece

    def copy(target: Any, source: Any, nbytes: Any) -> None:
        builder.call(memcpy, [target, source, nbytes, ir.IntType(1)(0)])

    def stripes_due() -> Any:
        return builder.sub(builder.load(num_stripes), builder.load(num_done))

    def hash_stripes(data: Any, number: Any) -> None:
        builder.call(absorb, [state, data, builder.load(num_done), number])
        builder.store(builder.add(builder.load(num_done), number), num_done)

    def smaller(a: Any, b: Any) -> Any:
        return builder.select(builder.icmp_unsigned("<", a, b), a, b)

    def is_some(number: Any) -> Any:
        return builder.icmp_unsigned(">", number, _I64(0))

    def advance(nbytes: Any) -> None:
        builder.store(builder.add(builder.load(at), nbytes), at)
        builder.store(builder.sub(builder.load(left), nbytes), left)

    def data() -> Any:
        return builder.inttoptr(builder.load(at), _BYTES)

    table = builder.inttoptr(copies, _I64.as_pointer())
    with _counting(builder, count) as i:
        source, target, nbytes = (
            builder.load(builder.gep(table, [builder.add(builder.mul(i, _I64(3)), _I64(field))])) for field in range(3)
        )
        copy(builder.inttoptr(target, _BYTES), builder.inttoptr(source, _BYTES), nbytes)
        builder.store(target, at)
        builder.store(nbytes, left)
        have = builder.load(num_begun)
        with builder.if_then(is_some(have)):
            part = smaller(builder.sub(_I64(STRIPE_NBYTES), have), builder.load(left))
            copy(_at(builder, begun, have), data(), part)
            builder.store(builder.add(have, part), num_begun)
            advance(part)
            is_whole = builder.icmp_unsigned("==", builder.load(num_begun), _I64(STRIPE_NBYTES))
            with builder.if_then(builder.and_(is_whole, is_some(stripes_due()))):
                hash_stripes(begun, _I64(1))
                builder.store(_I64(0), num_begun)
        # Nothing is begun here, or the piece is used up, or all stripes but the last one are hashed.
        whole = smaller(builder.udiv(builder.load(left), _I64(STRIPE_NBYTES)), stripes_due())
        hash_stripes(data(), whole)
        advance(builder.mul(whole, _I64(STRIPE_NBYTES)))
        rest = builder.load(left)
        with builder.if_then(builder.and_(is_some(rest), is_some(stripes_due()))):
            copy(begun, data(), rest)
            builder.store(rest, num_begun)
    builder.ret_void()


def _result(module: ir.Module, secret: Any) -> None:
    """result(state, tail, total): the checksum of `total` bytes whose last stripe is `tail`."""
    function = ir.Function(module, ir.FunctionType(_I64, [_BYTES, _BYTES, _I64]), "result")
    state, tail, total = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    lanes = _accumulate(
        builder,
        _load_lanes(builder, state),
        _load_lanes(builder, tail),
        _load_lanes(builder, _at(builder, secret, _LAST_KEY)),
    )
    keyed = builder.xor(lanes, _load_lanes(builder, _at(builder, secret, _RESULT_KEY)))
    digest = builder.mul(total, _I64(_PRIME64_1))
    for pair in range(0, 8, 2):
        a, b = (builder.zext(builder.extract_element(keyed, _I64(pair + i)), _I128) for i in range(2))
        product = builder.mul(a, b)
        folded = builder.xor(builder.trunc(product, _I64), builder.trunc(builder.lshr(product, _I128(64)), _I64))
        digest = builder.add(digest, folded)
    digest = builder.mul(builder.xor(digest, builder.lshr(digest, _I64(37))), _I64(_PRIME_MIX))
    builder.ret(builder.xor(digest, builder.lshr(digest, _I64(32))))
