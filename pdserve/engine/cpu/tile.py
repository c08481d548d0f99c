"""The inner loop of a quantised matrix product: a tile of a few weight tiles times a few tokens.

numba has no arrays of vectors, so the loop is written as LLVM instructions by Python loops over the tile's rows and
tokens: each accumulator is one register. Everything that is summed per block of 32 inputs is an exact integer,

    sum_i u_i q_i + M sum_i q_i - z (sum_i u_i + 32 M)          w_i = d (u_i + M),  x_i = s (q_i - z)

with u the unsigned code of a weight, M and the sum in the last bracket packed beside it (`weights.py`), and sum(q), -z
beside the activations (`ops.quantize`): the last two terms are one instruction. Blocks are added in order, in float32:
total = fma(float(sum), d * s, total). So a result depends neither on the shape of the tile nor on the instruction set.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.formats import BLOCK, HEAD_NBYTES, LINE_NBYTES, PAIRS_NBYTES, Q4_CODE, Q4_FINENESS, STRIP
from pdserve.engine.cpu.isa import selected_isa

_VNNI = selected_isa() == "avx512vnni"
MAX_TILES = STRIP if _VNNI else 1
"""Weight tiles of sixteen rows that share a vector of activations."""
MAX_TOKENS = 4 if _VNNI else 2
"""Tokens that share decoded weights: with `MAX_TILES`, as many accumulators as fit in the registers."""

TILE_SHAPES = [(MAX_TILES, tokens) for tokens in range(1, MAX_TOKENS + 1)] + [(n, 1) for n in range(1, MAX_TILES)]
"""(tiles, tokens) that there is code for. A single tile at the end of a matrix takes its tokens one by one: compiling
every shape would take half as long again."""
LINES_AT_ONCE = 4
"""Cache lines that are asked for with each block, so that asking takes no longer than computing: memory gives a thread
one in some thirteen cycles, and a block of four tokens takes about a hundred."""
_FINER_BITS = (Q4_FINENESS // Q4_CODE).bit_length() - 1

_i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_f16, _f32 = ir.HalfType(), ir.FloatType()
_i8x64, _i32x16, _f32x16 = ir.VectorType(_i8, 64), ir.VectorType(_i32, 16), ir.VectorType(_f32, 16)


def _constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def place_of(builder: Any, value: Any) -> Any:
    """A local variable that starts as `value`; LLVM keeps it in a register."""
    return cgutils.alloca_once_value(builder, value)  # type: ignore[no-untyped-call]


class _Tile:
    """Emits the products of `tiles` weight tiles with `tokens` tokens."""

    def __init__(self, builder: Any, bits: int, tiles: int, tokens: int) -> None:
        self.b, self.bits, self.tiles, self.tokens = builder, bits, tiles, tokens

    def emit(
        self, w: Any, first: Any, width: Any, near: Any, whole: Any, far: Any, blocks: Any, xq: Any, xs: Any, xpair: Any
    ) -> list[list[Any]]:
        """Totals [tile][token]. w: a strip of `width` tiles; first: of its tiles; xq, xs, xpair: the first token's."""
        b = self.b
        totals = [[place_of(b, _constant(_f32x16, 0.0)) for _ in range(self.tokens)] for _ in range(self.tiles)]
        k = b.mul(blocks, ir.Constant(_i64, BLOCK))
        codes_nbytes = 64 * self.bits
        codes_at = b.add(ir.Constant(_i64, HEAD_NBYTES), b.mul(width, ir.Constant(_i64, PAIRS_NBYTES)))
        block_nbytes = b.add(codes_at, b.mul(width, ir.Constant(_i64, codes_nbytes)))

        def place(begin: Any, nbytes: int) -> list[Any]:
            """Where the parts of the tiles lie in a block, from `begin` on."""
            return [
                b.add(begin, b.mul(b.add(first, ir.Constant(_i64, r)), ir.Constant(_i64, nbytes)))
                for r in range(self.tiles)
            ]

        scales_at, pairs_at, codes_at = (
            place(begin, nbytes)
            for begin, nbytes in (
                (ir.Constant(_i64, 0), HEAD_NBYTES // STRIP),
                (ir.Constant(_i64, HEAD_NBYTES), PAIRS_NBYTES),
                (codes_at, 64),
            )
        )
        with cgutils.for_range(b, blocks) as loop:
            block = b.gep(w, [b.mul(loop.index, block_nbytes)])
            self._fetch(loop.index, near, whole, far)
            places = [b.add(loop.index, b.mul(ir.Constant(_i64, t), blocks)) for t in range(self.tokens)]
            x0 = b.mul(loop.index, ir.Constant(_i64, BLOCK))
            x = [b.gep(xq, [b.add(x0, b.mul(ir.Constant(_i64, t), k))]) for t in range(self.tokens)]
            sums = self._corrections(
                [b.gep(block, [at]) for at in pairs_at], [b.gep(xpair, [place]) for place in places]
            )
            for j in range(self.bits):
                step_at = b.mul(width, ir.Constant(_i64, 64 * j))
                for r in range(self.tiles):
                    packed = self._load(_i8x64, b.gep(block, [b.add(step_at, codes_at[r])]), 0)
                    for step, codes in self._codes(packed, j):
                        for t in range(self.tokens):
                            sums[r][t] = self._dot(sums[r][t], codes, self._broadcast(x[t], 4 * step))
            for t in range(self.tokens):
                scale = self._splat(self._load(_f32, b.gep(xs, [places[t]]), 0), _f32x16)
                for r in range(self.tiles):
                    d = b.fpext(self._load(ir.VectorType(_f16, 16), b.gep(block, [scales_at[r]]), 0), _f32x16)
                    total = b.load(totals[r][t])
                    value = b.sitofp(sums[r][t], _f32x16)
                    total = v._call(b, "llvm.fma.v16f32", _f32x16, [value, b.fmul(d, scale), total])
                    b.store(total, totals[r][t])
        return [[self._unscaled(b.load(total)) for total in row] for row in totals]

    def _fetch(self, index: Any, near: Any, whole: Any, far: Any) -> None:
        """Ask for the lines that belong to block number `index`."""
        b = self.b
        few, most = LINES_AT_ONCE, (HEAD_NBYTES + STRIP * (PAIRS_NBYTES + 64 * self.bits)) // LINE_NBYTES

        def fetch(place: Any, first: int, behind: int) -> None:
            for line in range(first, behind):
                at = b.add(place, ir.Constant(_i64, LINE_NBYTES * line))
                v._prefetch(b, b.inttoptr(at, _i8.as_pointer()))

        with b.if_then(b.icmp_signed("!=", near, ir.Constant(_i64, 0))):
            lines = b.select(whole, ir.Constant(_i64, most), ir.Constant(_i64, few))
            place = b.add(near, b.mul(index, b.mul(lines, ir.Constant(_i64, LINE_NBYTES))))
            fetch(place, 0, few)
            with b.if_then(whole):
                fetch(place, few, most)
        with b.if_then(b.icmp_signed("!=", far, ir.Constant(_i64, 0))):
            fetch(b.add(far, b.mul(index, ir.Constant(_i64, LINE_NBYTES * few))), 0, few)

    def _unscaled(self, total: Any) -> Any:
        # Codes of four bits lie in the upper half of a byte: sixteen times too large.
        return total if self.bits == 8 else self.b.fmul(total, _constant(_f32x16, 1 / Q4_CODE))

    def _corrections(self, pairs: list[Any], xpair: list[Any]) -> list[list[Any]]:
        """M sum(q) - z (sum(u) + 32 M) for each tile and token."""
        activations = [self._splat(self._load(_i32, pointer, 0), _i32x16) for pointer in xpair]
        out = []
        for pointer in pairs:
            pair = self._load(_i32x16, pointer, 0)
            if not _VNNI and self.bits == 8:
                # The products below are of signed weights already, so M is in them.
                pair = self.b.and_(pair, _constant(_i32x16, 0xFFFF0000))
            row = [self._dot_pairs(pair, x) for x in activations]
            if self.bits == 4:
                # Pairs count in finer parts of a step than codes.
                row = [self.b.ashr(value, _constant(_i32x16, _FINER_BITS)) for value in row]
            out.append(row)
        return out

    def _codes(self, packed: Any, j: int) -> list[tuple[int, Any]]:
        """(step, vector): for each row the weights that meet activations 4 step .. 4 step + 3 of the block."""
        b = self.b
        if self.bits == 8:
            return [(j, packed)]
        words = b.bitcast(packed, ir.VectorType(_i16, 32))
        if _VNNI:
            mask = _constant(ir.VectorType(_i16, 32), 0xF0F0)
            low, high = b.and_(b.shl(words, _constant(words.type, 4)), mask), b.and_(words, mask)
        else:
            mask = _constant(ir.VectorType(_i16, 32), 0x0F0F)
            low, high = b.and_(words, mask), b.and_(b.lshr(words, _constant(words.type, 4)), mask)
        return [(j, b.bitcast(low, _i8x64)), (j + 4, b.bitcast(high, _i8x64))]

    def _dot(self, acc: Any, codes: Any, x: Any) -> Any:
        """acc + the products of four codes (unsigned) with four activations in each lane, summed."""
        b = self.b
        if _VNNI:
            words = [b.bitcast(a, _i32x16) for a in (codes, x)]
            return v._call(b, "llvm.x86.avx512.vpdpbusd.512", _i32x16, [acc, *words])
        factor = Q4_CODE
        if self.bits == 8:
            # Two products of unsigned codes overflow the 16 bits that they are summed in: use |w| and sign(w) x.
            factor = 1
            codes = b.xor(codes, _constant(_i8x64, 0x80))
            x = v._join(b, *(self._half_call("psign.b", x, codes, i) for i in (0, 1)))
            nothing = _constant(_i8x64, 0)
            codes = b.select(b.icmp_signed("<", codes, nothing), b.sub(nothing, codes), codes)
        factors = _constant(ir.VectorType(_i16, 16), factor)
        parts = []
        for i in (0, 1):
            pairs = v._call(
                b, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(_i16, 16), [v._half(b, codes, i), v._half(b, x, i)]
            )
            parts.append(v._call(b, "llvm.x86.avx2.pmadd.wd", ir.VectorType(_i32, 8), [pairs, factors]))
        return b.add(acc, v._join(b, *parts))

    def _dot_pairs(self, a: Any, x: Any) -> Any:
        """Products of two int16 with two int16 in each lane, summed."""
        b = self.b
        if _VNNI:
            return v._call(b, "llvm.x86.avx512.vpdpwssd.512", _i32x16, [_constant(_i32x16, 0), a, x])
        kind = ir.VectorType(_i16, 32)
        a, x = b.bitcast(a, kind), b.bitcast(x, kind)
        return v._join(
            b,
            *(
                v._call(b, "llvm.x86.avx2.pmadd.wd", ir.VectorType(_i32, 8), [v._half(b, a, i), v._half(b, x, i)])
                for i in (0, 1)
            ),
        )

    def _half_call(self, name: str, a: Any, x: Any, index: int) -> Any:
        halves = [v._half(self.b, a, index), v._half(self.b, x, index)]
        return v._call(self.b, f"llvm.x86.avx2.{name}", ir.VectorType(_i8, 32), halves)

    def _load(self, kind: Any, pointer: Any, offset: int) -> Any:
        b = self.b
        place = b.gep(b.bitcast(pointer, _i8.as_pointer()), [ir.Constant(_i64, offset)])
        return v._load(b, b.bitcast(place, kind.as_pointer()))

    def _splat(self, scalar: Any, kind: ir.VectorType) -> Any:
        return v._splat(self.b, scalar, kind)

    def _broadcast(self, pointer: Any, offset: int) -> Any:
        return self.b.bitcast(self._splat(self._load(_i32, pointer, offset), _i32x16), _i8x64)


def _product(bits: int) -> Any:
    @intrinsic
    def product(  # type: ignore[no-untyped-def]
        typingctx,
        tiles,
        tokens,
        w,
        at,
        first,
        width,
        near,
        whole,
        far,
        blocks,
        xq,
        xs,
        xpair,
        t,
        y,
        o,
        ldy,
        bias,
        bias_at,
        accumulate,
    ):
        """y[t + j, o + 16 i + lane] (+)= product of weight tile i and token t + j, + bias, for i < tiles, j < tokens.

        tiles, tokens: one of TILE_SHAPES; w: uint8, with a strip of `width` tiles from byte `at` on, `first` being the
        first tile wanted; near, far: addresses of what should be fetched meanwhile, or 0: LINES_AT_ONCE for each block,
        of `near` as many as a block of a whole strip has if `whole`; blocks: of 32 inputs; xq: int8, xs: float32,
        xpair: int32 of all tokens; y: float32 with rows of `ldy`;
        bias: float32, from `bias_at` on, or none if that is negative.
        """

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            b = builder
            (
                number,
                count,
                w,
                at,
                first,
                width,
                near,
                whole,
                far,
                blocks,
                xq,
                xs,
                xpair,
                t,
                y,
                o,
                ldy,
                bias,
                bias_at,
                accumulate,
            ) = args

            def data(index: int, array: Any) -> Any:
                return context.make_array(sig.args[index])(context, b, array).data

            whole = b.trunc(whole, ir.IntType(1))
            w, y, bias = b.gep(data(2, w), [at]), data(14, y), data(17, bias)
            xq = b.gep(data(10, xq), [b.mul(t, b.mul(blocks, ir.Constant(_i64, BLOCK)))])
            xs, xpair = (b.gep(data(i, a), [b.mul(t, blocks)]) for i, a in ((11, xs), (12, xpair)))
            after = b.append_basic_block("after_tile")
            choice = b.add(b.mul(number, ir.Constant(_i64, MAX_TOKENS + 1)), count)
            switch = b.switch(choice, after)
            for tiles, tokens in TILE_SHAPES:
                block = b.append_basic_block(f"tile_{tiles}x{tokens}")
                switch.add_case(ir.Constant(_i64, tiles * (MAX_TOKENS + 1) + tokens), block)
                b.position_at_end(block)
                totals = _Tile(b, bits, tiles, tokens).emit(w, first, width, near, whole, far, blocks, xq, xs, xpair)
                _put(b, totals, t, y, o, ldy, bias, bias_at, accumulate)
                b.branch(after)
            b.position_at_end(after)
            return context.get_dummy_value()

        n = types.intp
        signature = types.void(
            n, n, w, n, n, n, n, types.boolean, n, n, xq, xs, xpair, n, y, n, n, bias, n, types.boolean
        )
        return signature, codegen

    return product


def _put(b: Any, totals: list[list[Any]], t: Any, y: Any, o: Any, ldy: Any, bias: Any, bias_at: Any, add: Any) -> None:
    has_bias = b.icmp_signed(">=", bias_at, ir.Constant(_i64, 0))
    for i, row in enumerate(totals):
        for j, total in enumerate(row):
            place = b.add(b.mul(b.add(t, ir.Constant(_i64, j)), ldy), b.add(o, ir.Constant(_i64, 16 * i)))
            pointer = b.bitcast(b.gep(y, [place]), _f32x16.as_pointer())
            value = place_of(b, total)
            with b.if_then(has_bias):
                at = b.gep(bias, [b.add(bias_at, ir.Constant(_i64, 16 * i))])
                b.store(b.fadd(b.load(value), v._load(b, b.bitcast(at, _f32x16.as_pointer()))), value)
            with b.if_then(b.trunc(add, ir.IntType(1))):
                b.store(b.fadd(b.load(value), v._load(b, pointer)), value)
            v._store(b, b.load(value), pointer)


product_q4 = _product(4)
product_q8 = _product(8)
