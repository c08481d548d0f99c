"""Copies pieces of memory and takes their checksum, in one call that does not need the interpreter.

Through Python each piece would cost two calls, and each of them a turn of the interpreter lock, for which the thread
that moves bytes competes with the event loop. So a whole chunk goes to one function, compiled for this CPU when it is
first asked for (about 40 ms). `copying` is how to use it.

The checksum is XXH3 with 64 bits and equals what `xxhash` gives for the same bytes; see `xxh3_ir`.

Where payloads are whole lines of 64 bytes, as those of KV pools are, a line is loaded once: the same register is stored
and hashed. Stores go past the cache, which saves the reading of every line that is about to be overwritten, and makes
this about as fast as memcpy alone. Otherwise each piece is copied by memcpy, then hashed where it went, while it is in
the cache.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from kv_transfer.xxh3_ir import (
    BYTES,
    I8,
    I32,
    I64,
    I128,
    LANES,
    LAST_KEY,
    PRIME64_1,
    PRIME_MIX,
    RESULT_KEY,
    SCRAMBLE_KEY,
    SECRET,
    START,
    STRIPE_NBYTES,
    absorb_stripe,
    accumulate,
    at,
    counting,
    load_lanes,
    store_lanes,
)

logger = logging.getLogger(__name__)

MIN_NBYTES = 241
"""Of prefix and pieces together; XXH3 hashes shorter inputs otherwise."""
MAX_STEP_NBYTES = 256 << 10
"""Longest piece, for the caller to see to: it should be in the cache when it is hashed."""
_STREAM_BEGUN = 56
"""Bytes of a stripe that are there before each piece of a frame's payload: those of the header under its checksum."""
_PREFETCH_NBYTES = 2048
"""How far ahead of the line that is copied the next ones are asked for."""


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
        self.take_for_reading = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)(
            self._engine.get_function_address("take_for_reading")
        )
        """As `take`, and leaves the copies in the cache."""
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
        return cls((ctypes.c_uint64 * 8)(*START), begun, len(prefix), 0, (nbytes - 1) // STRIPE_NBYTES)


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
    secret = ir.GlobalVariable(module, ir.ArrayType(I8, len(SECRET)), "secret")
    secret.initializer = ir.Constant(secret.type.pointee, bytearray(SECRET))
    secret.global_constant = True
    secret.linkage = "internal"
    absorb = _absorb(module, secret)
    _take(module, "take", absorb, _stream(module, "stream", secret, past_the_cache=True))
    _take(module, "take_for_reading", absorb, _stream(module, "stream_for_reading", secret, past_the_cache=False))
    _result(module, secret)
    return module


def _absorb(module: ir.Module, secret: Any) -> ir.Function:
    """absorb(state, data, first, count): `count` whole stripes, of which the first is number `first` of all."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [BYTES, BYTES, I64, I64]), "absorb")
    function.linkage = "internal"
    state, data, first, count = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    slot = builder.alloca(LANES)
    builder.store(load_lanes(builder, state), slot)
    scramble_key = load_lanes(builder, at(builder, secret, SCRAMBLE_KEY))
    with counting(builder, count) as i:
        stripe = load_lanes(builder, at(builder, data, builder.mul(i, I64(STRIPE_NBYTES))))
        absorb_stripe(builder, slot, secret, scramble_key, builder.add(first, i), stripe)
    store_lanes(builder, builder.load(slot), state)
    builder.ret_void()
    return function


def _stream(module: ir.Module, name: str, secret: Any, *, past_the_cache: bool) -> ir.Function:
    """name(state, source, target, count): copy and hash `count` lines of 64 bytes; the target begins with one.

    `_STREAM_BEGUN` bytes of a stripe are there, so each stripe is those and the first lane of a line; the other seven
    lanes begin the next one.
    """
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [BYTES, BYTES, BYTES, I64]), name)
    function.linkage = "internal"
    state, source, target, count = function.args
    prefetch_type = ir.FunctionType(ir.VoidType(), [BYTES, I32, I32, I32])
    prefetch = module.declare_intrinsic("llvm.prefetch", [BYTES], prefetch_type)
    indices = ir.VectorType(I32, 8)
    undefined = ir.Constant(LANES, ir.Undefined)
    builder = ir.IRBuilder(function.append_basic_block())
    begun = at(builder, state, _BEGUN_AT)
    num_done = builder.bitcast(at(builder, state, _NUM_DONE_AT), I64.as_pointer())
    first = builder.load(num_done)
    slot, last = builder.alloca(LANES), builder.alloca(LANES)
    builder.store(load_lanes(builder, state), slot)
    # As if it were the end of a line.
    shifted = ir.Constant(indices, [0, 0, 1, 2, 3, 4, 5, 6])
    builder.store(builder.shuffle_vector(load_lanes(builder, begun), undefined, shifted), last)
    scramble_key = load_lanes(builder, at(builder, secret, SCRAMBLE_KEY))
    with counting(builder, count) as i:
        offset = builder.mul(i, I64(STRIPE_NBYTES))
        ahead = at(builder, source, builder.add(offset, I64(_PREFETCH_NBYTES)))  # never a fault, also past the end
        builder.call(prefetch, [ahead, I32(0), I32(3), I32(1)])
        line = load_lanes(builder, at(builder, source, offset))
        store = builder.store(line, builder.bitcast(at(builder, target, offset), LANES.as_pointer()))
        store.align = STRIPE_NBYTES
        if past_the_cache:
            store.set_metadata("nontemporal", module.add_metadata([I32(1)]))
        straddling = ir.Constant(indices, [1, 2, 3, 4, 5, 6, 7, 8])
        stripe = builder.shuffle_vector(builder.load(last), line, straddling)
        builder.store(line, last)
        absorb_stripe(builder, slot, secret, scramble_key, builder.add(first, i), stripe)
    store_lanes(builder, builder.load(slot), state)
    rest = ir.Constant(indices, [1, 2, 3, 4, 5, 6, 7, 7])
    store_lanes(builder, builder.shuffle_vector(builder.load(last), undefined, rest), begun)
    builder.store(builder.add(first, count), num_done)
    builder.ret_void()
    return function


def _take(module: ir.Module, name: str, absorb: ir.Function, stream: ir.Function) -> None:
    """name(state, copies, count): copy `count` pieces, and hash what is whole stripes.

    `copies` is the address of source address, destination address and length of each.
    """
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [BYTES, I64, I64]), name)
    state, copies, count = function.args
    memcpy = module.declare_intrinsic("llvm.memcpy", [BYTES, BYTES, I64])
    builder = ir.IRBuilder(function.append_basic_block())
    begun = at(builder, state, _BEGUN_AT)
    num_begun, num_done, num_stripes = (
        builder.bitcast(at(builder, state, field), I64.as_pointer())
        for field in (_NUM_BEGUN_AT, _NUM_DONE_AT, _NUM_STRIPES_AT)
    )
    here, left = builder.alloca(I64), builder.alloca(I64)  # what is not hashed of this piece

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
        return builder.icmp_unsigned(">", number, I64(0))

    def is_in_lines(number: Any) -> Any:
        return builder.icmp_unsigned("==", builder.and_(number, I64(STRIPE_NBYTES - 1)), I64(0))

    def advance(nbytes: Any) -> None:
        builder.store(builder.add(builder.load(here), nbytes), here)
        builder.store(builder.sub(builder.load(left), nbytes), left)

    def data() -> Any:
        return builder.inttoptr(builder.load(here), BYTES)

    def copy_and_hash(source: Any, target: Any, nbytes: Any) -> None:
        copy(builder.inttoptr(target, BYTES), builder.inttoptr(source, BYTES), nbytes)
        builder.store(target, here)
        builder.store(nbytes, left)
        have = builder.load(num_begun)
        with builder.if_then(is_some(have)):
            part = smaller(builder.sub(I64(STRIPE_NBYTES), have), builder.load(left))
            copy(at(builder, begun, have), data(), part)
            builder.store(builder.add(have, part), num_begun)
            advance(part)
            is_whole = builder.icmp_unsigned("==", builder.load(num_begun), I64(STRIPE_NBYTES))
            with builder.if_then(builder.and_(is_whole, is_some(stripes_due()))):
                hash_stripes(begun, I64(1))
                builder.store(I64(0), num_begun)
        # Nothing is begun here, or the piece is used up, or all stripes but the last one are hashed.
        whole = smaller(builder.udiv(builder.load(left), I64(STRIPE_NBYTES)), stripes_due())
        hash_stripes(data(), whole)
        advance(builder.mul(whole, I64(STRIPE_NBYTES)))
        rest = builder.load(left)
        with builder.if_then(builder.and_(is_some(rest), is_some(stripes_due()))):
            copy(begun, data(), rest)
            builder.store(rest, num_begun)

    table = builder.inttoptr(copies, I64.as_pointer())
    with counting(builder, count) as i:
        source, target, nbytes = (
            builder.load(builder.gep(table, [builder.add(builder.mul(i, I64(3)), I64(field))])) for field in range(3)
        )
        lines = builder.udiv(nbytes, I64(STRIPE_NBYTES))
        has_begun = builder.icmp_unsigned("==", builder.load(num_begun), I64(_STREAM_BEGUN))
        are_due = builder.icmp_unsigned("<=", lines, stripes_due())
        is_lines = builder.and_(is_in_lines(target), is_in_lines(nbytes))
        with builder.if_else(builder.and_(is_lines, builder.and_(has_begun, are_due))) as (by_line, by_piece):
            with by_line:
                addresses = (builder.inttoptr(address, BYTES) for address in (source, target))
                builder.call(stream, [state, *addresses, lines])
            with by_piece:
                copy_and_hash(source, target, nbytes)
    # Stores past the cache are not ordered with those that say that the copy is there.
    builder.fence("seq_cst")
    builder.ret_void()


def _result(module: ir.Module, secret: Any) -> None:
    """result(state, tail, total): the checksum of `total` bytes whose last stripe is `tail`."""
    function = ir.Function(module, ir.FunctionType(I64, [BYTES, BYTES, I64]), "result")
    state, tail, total = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    lanes = accumulate(
        builder,
        load_lanes(builder, state),
        load_lanes(builder, tail),
        load_lanes(builder, at(builder, secret, LAST_KEY)),
    )
    keyed = builder.xor(lanes, load_lanes(builder, at(builder, secret, RESULT_KEY)))
    digest = builder.mul(total, I64(PRIME64_1))
    for pair in range(0, 8, 2):
        a, b = (builder.zext(builder.extract_element(keyed, I64(pair + i)), I128) for i in range(2))
        product = builder.mul(a, b)
        folded = builder.xor(builder.trunc(product, I64), builder.trunc(builder.lshr(product, I128(64)), I64))
        digest = builder.add(digest, folded)
    digest = builder.mul(builder.xor(digest, builder.lshr(digest, I64(37))), I64(PRIME_MIX))
    builder.ret(builder.xor(digest, builder.lshr(digest, I64(32))))
