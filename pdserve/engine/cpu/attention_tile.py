"""The two inner loops of attention: queries times keys, and weights times values, for several rows at once.

Written as LLVM instructions by Python loops, as in `tile.py`: every row (a query token and head) has its accumulators
in registers, and a vector of keys or values is widened to float32 once for all rows. Each accumulator adds in the order
of dimensions, or of tokens, whatever the number of rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.isa import selected_isa
from pdserve.engine.cpu.shape import MAX_HEAD_DIM
from pdserve.engine.cpu.tile import place_of

SEGMENT = 128
"""Tokens per softmax segment, and the distance between rows of scores; a multiple of every block size."""
QUERY_STRIDE = MAX_HEAD_DIM + 16
"""Distance between rows of queries in the scratch memory: no power of two, so that they spread over the cache."""
ROW_COUNTS = (24, 12, 8, 4, 3, 2, 1) if selected_isa() == "avx512vnni" else (4, 3, 2, 1)
"""Rows that the loops exist for: as many as fit in the registers, and smaller numbers."""
LINE_NBYTES = 64
"""Bytes in a cache line."""
FEW_ROWS = 4
"""Up to so many rows have two vectors of tokens, or four of dimensions, at once: additions take several cycles, and
only independent ones overlap."""

_i32, _i64, _f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_f32x16 = ir.VectorType(_f32, 16)
_f16x16 = ir.VectorType(ir.HalfType(), 16)
_i8x16 = ir.VectorType(ir.IntType(8), 16)


class Emitter:
    """Loads, stores and multiplications on sixteen lanes."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def add(self, value: Any, number: int) -> Any:
        return self.b.add(value, ir.Constant(_i64, number))

    def accumulators(self, values: list[Any]) -> list[Any]:
        return [place_of(self.b, value) for value in values]

    def load(self, pointer: Any, index: Any) -> Any:
        return v._load(self.b, self.b.bitcast(self.b.gep(pointer, [index]), _f32x16.as_pointer()))

    def store(self, pointer: Any, index: Any, value: Any) -> None:
        v._store(self.b, value, self.b.bitcast(self.b.gep(pointer, [index]), _f32x16.as_pointer()))

    def stored(self, pointer: Any, index: Any) -> Any:
        """Sixteen keys or values: float16, or the codes of a pool of bytes."""
        is_coded = self.is_coded(pointer)
        place = self.b.bitcast(self.b.gep(pointer, [index]), (_i8x16 if is_coded else _f16x16).as_pointer())
        vector = v._load(self.b, place)
        return self.b.sitofp(vector, _f32x16) if is_coded else self.b.fpext(vector, _f32x16)

    def is_coded(self, pointer: Any) -> bool:
        """Whether it is a pool of bytes."""
        return int(pointer.type.pointee.width) == 8

    def line(self, pointer: Any) -> int:
        """Elements in a cache line."""
        return 8 * LINE_NBYTES // int(pointer.type.pointee.width)

    def fetch(self, pointer: Any, index: Any) -> None:
        """Ask for a cache line, to be there some hundred instructions later."""
        place = self.b.bitcast(self.b.gep(pointer, [index]), ir.IntType(8).as_pointer())
        v._prefetch(self.b, place)

    def splat(self, pointer: Any, index: Any) -> Any:
        return v._splat(self.b, v._load(self.b, self.b.gep(pointer, [index])), _f32x16)

    def fma(self, scalar: Any, vector: Any, place: Any) -> None:
        total = v._call(self.b, "llvm.fma.v16f32", _f32x16, [scalar, vector, self.b.load(place)])
        self.b.store(total, place)


def for_each_row_count(b: Any, rows: Any, emit: Any) -> None:
    """A switch on `rows` with the code that `emit` makes for each of ROW_COUNTS."""
    after = b.append_basic_block("after_rows")
    switch = b.switch(rows, after)
    for count in ROW_COUNTS:
        block = b.append_basic_block(f"rows_{count}")
        switch.add_case(ir.Constant(_i64, count), block)
        b.position_at_end(block)
        emit(count)
        b.branch(after)
    b.position_at_end(after)


def data_of(context: Any, builder: Any, sig: Any, args: Any, index: int) -> Any:
    """Pointer to the first element of argument `index`, an array."""
    return context.make_array(sig.args[index])(context, builder, args[index]).data


@intrinsic
def score_tile(  # type: ignore[no-untyped-def]
    typingctx, rows, q, q_at, kv, at, second_at, ahead, second_ahead, head_dim, block_size, out, out_at
):
    """out[r, 0:16] = q[r] . K for one of ROW_COUNTS rows and the sixteen tokens at `at`; with FEW_ROWS rows or fewer
    also out[r, 16:32] for the tokens at `second_at`, and meanwhile 16 * head_dim words at `ahead` and at `second_ahead`
    are fetched, line by line: all at once they would keep the thread waiting.

    q: float32 rows, QUERY_STRIDE apart; kv: uint16, K dimension-major with `block_size` tokens to a dimension; out:
    float32 rows, SEGMENT apart.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rows, _, q_at, _, at, second_at, ahead, second_ahead, head_dim, block_size, _, out_at = args
        b, e = builder, Emitter(builder)
        q, kv, out = (data_of(context, b, sig, args, i) for i in (1, 3, 10))
        half = b.sdiv(head_dim, ir.Constant(_i64, 2))

        def emit(count: int) -> None:
            places = [at, second_at] if count <= FEW_ROWS else [at]
            nothing = ir.Constant(_f32x16, [0.0] * 16)
            sums = [e.accumulators([nothing] * count) for _ in places]
            with cgutils.for_range(b, head_dim) as loop:
                step = b.mul(loop.index, block_size)
                if count <= FEW_ROWS:
                    early = b.icmp_signed("<", loop.index, half)
                    line = b.select(early, loop.index, b.sub(loop.index, half))
                    e.fetch(kv, b.add(b.select(early, ahead, second_ahead), b.mul(line, ir.Constant(_i64, e.line(kv)))))
                keys = [e.stored(kv, b.add(place, step)) for place in places]
                for r in range(count):
                    query = e.splat(q, e.add(b.add(q_at, loop.index), r * QUERY_STRIDE))
                    for i, key in enumerate(keys):
                        e.fma(query, key, sums[i][r])
            for i, of_place in enumerate(sums):
                for r, place in enumerate(of_place):
                    e.store(out, e.add(out_at, r * SEGMENT + 16 * i), b.load(place))

        for_each_row_count(b, rows, emit)
        return context.get_dummy_value()

    n = types.intp
    return types.void(n, q, n, kv, n, n, n, n, n, n, out, n), codegen


@intrinsic
def value_tile(  # type: ignore[no-untyped-def]
    typingctx,
    rows,
    vectors,
    s,
    s_at,
    acc_at,
    kv,
    tables,
    table_at,
    count,
    block_size,
    block_stride,
    base,
    head_dim,
    ahead_at,
    ahead_blocks,
    ahead_base,
    second_behind,
):
    """acc[r, 0:16] += sum over tokens j of s[r, j] V[j, 0:16] for one of ROW_COUNTS rows; acc[r, 0:64] if `vectors` is
    4, which needs FEW_ROWS rows or fewer.

    s: float32 with both weights (from s_at, rows SEGMENT apart) and acc (from acc_at, rows head_dim apart); kv: uint16
    or, for codes, uint8, V token-major at `base` inside a block; tables: int32 block ids of the segment from `table_at`
    on; count: tokens.
    With 4 vectors, one line after the other is fetched meanwhile of up to `ahead_blocks` blocks from `ahead_at` on, at
    `ahead_base` inside them; of codes also at `second_behind` behind that.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        (
            rows,
            vectors,
            _,
            s_at,
            acc_at,
            _,
            _,
            table_at,
            count,
            block_size,
            block_stride,
            base,
            head_dim,
            ahead_at,
            ahead_blocks,
            ahead_base,
            second_behind,
        ) = args
        b, e = builder, Emitter(builder)
        s, kv, tables = (data_of(context, b, sig, args, i) for i in (2, 5, 6))
        num_blocks = b.sdiv(b.sub(b.add(count, block_size), ir.Constant(_i64, 1)), block_size)

        def run(number: int, width: int) -> None:
            outs = [
                [b.add(acc_at, e.add(b.mul(head_dim, ir.Constant(_i64, r)), 16 * c)) for c in range(width)]
                for r in range(number)
            ]
            sums = [e.accumulators([e.load(s, out) for out in row]) for row in outs]
            with cgutils.for_range(b, num_blocks) as block:
                first = b.mul(block.index, block_size)
                left = b.sub(count, first)
                tokens = b.select(b.icmp_signed("<", left, block_size), left, block_size)
                number_of_block = b.sext(v._load(b, b.gep(tables, [b.add(table_at, block.index)])), _i64)
                start = b.add(b.mul(number_of_block, block_stride), base)
                if width > 1:
                    # Beyond them, what is here already.
                    wanted = b.icmp_signed("<", block.index, ahead_blocks)
                    entry = b.add(b.select(wanted, ahead_at, table_at), block.index)
                    number_ahead = b.sext(v._load(b, b.gep(tables, [entry])), _i64)
                    ahead = b.add(b.mul(number_ahead, block_stride), b.select(wanted, ahead_base, base))
                with cgutils.for_range(b, tokens) as token:
                    at = b.add(start, b.mul(token.index, head_dim))
                    if width > 1:
                        line = b.add(ahead, b.mul(token.index, head_dim))
                        for element in range(0, 16 * width, e.line(kv)):
                            e.fetch(kv, e.add(line, element))
                            if e.is_coded(kv):
                                e.fetch(kv, e.add(b.add(line, second_behind), element))
                    values = [e.stored(kv, e.add(at, 16 * c)) for c in range(width)]
                    weight_at = b.add(s_at, b.add(first, token.index))
                    for r in range(number):
                        weight = e.splat(s, e.add(weight_at, r * SEGMENT))
                        for c in range(width):
                            e.fma(weight, values[c], sums[r][c])
            for row, places in zip(outs, sums, strict=True):
                for out, place in zip(row, places, strict=True):
                    e.store(s, out, b.load(place))

        def emit(number: int) -> None:
            if number > FEW_ROWS:
                run(number, 1)
                return
            with b.if_else(b.icmp_signed("==", vectors, ir.Constant(_i64, 4))) as (wide, narrow):
                with wide:
                    run(number, 4)
                with narrow:
                    run(number, 1)

        for_each_row_count(b, rows, emit)
        return context.get_dummy_value()

    n = types.intp
    return types.void(n, n, s, n, n, kv, tables, n, n, n, n, n, n, n, n, n, n), codegen
