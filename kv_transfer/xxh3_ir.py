"""XXH3 in LLVM's intermediate representation: its constants, and the steps that functions of `copy_kernel` share.

As of its specification (doc/xxhash_spec.md of xxHash), for inputs of more than 240 bytes, on eight lanes of 64 bits:

    stripe of 64 bytes   x = data ^ secret[8 n:], n its number in the block; acc += swapped(data) + low32(x) * high32(x)
    block of 16 stripes  then acc = (acc ^ acc >> 47 ^ secret[128:]) * PRIME32_1
    last 64 bytes        one more stripe, with secret[121:]
    result               pairs of lanes, each multiplied to 128 bits and folded, summed up, mixed with the length
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MIX = 0x165667919E3779F9
START = (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
SCRAMBLE_KEY, LAST_KEY, RESULT_KEY = 128, 121, 11
"""Where in the secret they begin."""
STRIPE_NBYTES = 64
BLOCK_STRIPES = 16


LANES = ir.VectorType(ir.IntType(64), 8)
I8, I32, I64, I128 = (ir.IntType(bits) for bits in (8, 32, 64, 128))
BYTES = I8.as_pointer()


def splat(value: int) -> ir.Constant:
    return ir.Constant(LANES, [value] * 8)


def at(builder: ir.IRBuilder, base: Any, offset: Any) -> Any:
    """Address of a byte."""
    return builder.gep(builder.bitcast(base, BYTES), [offset if not isinstance(offset, int) else I64(offset)])


def load_lanes(builder: ir.IRBuilder, address: Any) -> Any:
    lanes = builder.load(builder.bitcast(address, LANES.as_pointer()))
    lanes.align = 1
    return lanes


def store_lanes(builder: ir.IRBuilder, lanes: Any, address: Any) -> None:
    builder.store(lanes, builder.bitcast(address, LANES.as_pointer())).align = 8


@contextmanager
def counting(builder: ir.IRBuilder, count: Any) -> Iterator[Any]:
    """A loop over 0 <= i < count; gives i."""
    begin, body, end = (builder.append_basic_block(name) for name in ("loop", "body", "end"))
    slot = builder.alloca(I64)
    builder.store(I64(0), slot)
    builder.branch(begin)
    builder.position_at_end(begin)
    i = builder.load(slot)
    builder.cbranch(builder.icmp_unsigned("<", i, count), body, end)
    builder.position_at_end(body)
    yield i
    builder.store(builder.add(i, I64(1)), slot)
    builder.branch(begin)
    builder.position_at_end(end)


def accumulate(builder: ir.IRBuilder, lanes: Any, data: Any, key: Any) -> Any:
    """One stripe."""
    mixed = builder.xor(data, key)
    product = builder.mul(builder.and_(mixed, splat(2**32 - 1)), builder.lshr(mixed, splat(32)))
    swap = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
    swapped = builder.shuffle_vector(data, ir.Constant(LANES, ir.Undefined), swap)
    return builder.add(builder.add(lanes, swapped), product)


def scramble(builder: ir.IRBuilder, lanes: Any, key: Any) -> Any:
    """The end of a block."""
    mixed = builder.xor(builder.xor(lanes, builder.lshr(lanes, splat(47))), key)
    return builder.mul(mixed, splat(PRIME32_1))


def absorb_stripe(builder: ir.IRBuilder, slot: Any, secret: Any, scramble_key: Any, number: Any, data: Any) -> None:
    """Take stripe `number` of all, whose bytes are `data`, into the lanes in memory at `slot`."""
    in_block = builder.and_(number, I64(BLOCK_STRIPES - 1))
    key = load_lanes(builder, at(builder, secret, builder.mul(in_block, I64(8))))
    builder.store(accumulate(builder, builder.load(slot), data, key), slot)
    with builder.if_then(builder.icmp_unsigned("==", in_block, I64(BLOCK_STRIPES - 1))):
        builder.store(scramble(builder, builder.load(slot), scramble_key), slot)
