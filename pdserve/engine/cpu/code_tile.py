"""The inner loop of attention over a pool in eight bits: codes of queries times codes of keys, for several rows.

As in `attention_tile.py`, whose sum over values serves such pools as well.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.attention_tile import (
    FEW_ROWS,
    QUERY_STRIDE,
    SEGMENT,
    Emitter,
    data_of,
    for_each_row_count,
)
from pdserve.engine.cpu.isa import selected_isa

CODE_BASE = 254
"""A query meets codes as two codes for each of its values, base * high + low, both within [-127, 127]."""

_i32, _i64 = ir.IntType(32), ir.IntType(64)
_f32x16, _i32x16 = ir.VectorType(ir.FloatType(), 16), ir.VectorType(_i32, 16)
_i8x64 = ir.VectorType(ir.IntType(8), 64)

_VNNI = selected_isa() == "avx512vnni"


class _CodeProducts:
    """Sums of products of codes of keys with codes of queries, four of them to a lane. Whole numbers: every way of
    computing them gives the same."""

    def __init__(self, emitter: Emitter) -> None:
        self.b = emitter.b
        self._e = emitter

    def keys(self, pointer: Any, index: Any) -> Any:
        """[16 tokens, 4] codes as `add` wants them: biased by 128 for instructions that take one factor unsigned."""
        codes = v._load(self.b, self.b.bitcast(self.b.gep(pointer, [index]), _i8x64.as_pointer()))
        return self.b.xor(codes, ir.Constant(_i8x64, [-128] * 64)) if _VNNI else codes

    def start(self, pointer: Any, index: Any) -> Any:
        """What a sum begins with: a float32 that makes up for the bias."""
        if not _VNNI:
            return ir.Constant(_i32x16, [0] * 16)
        return self.b.fptosi(self._e.splat(pointer, index), _i32x16)

    def query(self, pointer: Any, index: Any) -> Any:
        """Four codes in every lane, from four bytes of an array of float32."""
        word = v._load(self.b, self.b.bitcast(self.b.gep(pointer, [index]), _i32.as_pointer()))
        return v._splat(self.b, word, _i32x16)

    def add(self, total: Any, keys: Any, query: Any) -> Any:
        """`total` + the four products of each lane. At most 2 * 127 * 127 is summed in 16 bits on the way."""
        b = self.b
        if _VNNI:
            return v._call(b, "llvm.x86.avx512.vpdpbusd.512", _i32x16, [total, b.bitcast(keys, _i32x16), query])
        i8x32, i16x16, i32x8 = (ir.VectorType(ir.IntType(bits), 256 // bits) for bits in (8, 16, 32))
        nothing, query = ir.Constant(i8x32, [0] * 32), b.bitcast(query, _i8x64)
        parts = []
        for i in (0, 1):
            codes = v._half(b, keys, i)
            magnitudes = b.select(b.icmp_signed("<", codes, nothing), b.sub(nothing, codes), codes)
            signed = v._call(b, "llvm.x86.avx2.psign.b", i8x32, [v._half(b, query, i), codes])
            pairs = v._call(b, "llvm.x86.avx2.pmadd.ub.sw", i16x16, [magnitudes, signed])
            parts.append(v._call(b, "llvm.x86.avx2.pmadd.wd", i32x8, [pairs, ir.Constant(i16x16, [1] * 16)]))
        return b.add(total, v._join(b, *parts))


@intrinsic
def score_codes(  # type: ignore[no-untyped-def]
    typingctx, rows, q, q_at, kv, at, second_at, head_dim, block_size, out, out_at
):
    """`score_tile` over codes: out[r, 0:16] = q[r] . codes of K. The scales of K are not in it, and nothing is fetched:
    it is too short for that.

    q: what `coded_kv.encode_query` leaves, QUERY_STRIDE apart; kv: uint8, K as [head_dim / 4, block_size, 4].
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rows, _, q_at, _, at, second_at, head_dim, block_size, _, out_at = args
        b, e = builder, Emitter(builder)
        q, kv, out = (data_of(context, b, sig, args, i) for i in (1, 3, 8))
        products = _CodeProducts(e)
        quarter = b.sdiv(head_dim, ir.Constant(_i64, 4))
        base = ir.Constant(_i32x16, [CODE_BASE] * 16)

        def emit(count: int) -> None:
            places = [at, second_at] if count <= FEW_ROWS else [at]
            queries = [e.add(q_at, r * QUERY_STRIDE) for r in range(count)]
            # Behind the codes of a query: its scale, and what the sums of its high and of its low codes begin with.
            behind = [b.add(query, b.mul(quarter, ir.Constant(_i64, 2))) for query in queries]
            sums = [e.accumulators([products.start(q, e.add(row, 1)) for row in behind]) for _ in places]

            def add_up(first: Any) -> None:
                with cgutils.for_range(b, quarter) as loop:
                    step = b.mul(loop.index, b.mul(block_size, ir.Constant(_i64, 4)))
                    keys = [products.keys(kv, b.add(place, step)) for place in places]
                    for r in range(count):
                        query = products.query(q, b.add(queries[r], b.add(first, loop.index)))
                        for i, codes in enumerate(keys):
                            b.store(products.add(b.load(sums[i][r]), codes, query), sums[i][r])

            add_up(ir.Constant(_i64, 0))
            for of_place in sums:
                for row, place in zip(behind, of_place, strict=True):
                    high = b.mul(b.load(place), base)
                    b.store(b.add(high, products.start(q, e.add(row, 2))), place)
            add_up(quarter)
            for i, of_place in enumerate(sums):
                for r, place in enumerate(of_place):
                    value = b.fmul(b.sitofp(b.load(place), _f32x16), e.splat(q, behind[r]))
                    e.store(out, e.add(out_at, r * SEGMENT + 16 * i), value)

        for_each_row_count(b, rows, emit)
        return context.get_dummy_value()

    n = types.intp
    return types.void(n, q, n, kv, n, n, n, n, out, n), codegen
