"""What a thread has fetched into its caches while it multiplies matrices: K and V that attention reads next.

Attention waits for memory, and products of several tokens leave memory idle. So while a matrix meets the second group
of tokens and those after it, a few cache lines are asked for with each block of weights: first the next weights, and
beside them what is listed here. It has no effect on results.

The list is an int64 array for each thread, as numba has no structures: see the places below.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.formats import LINE_NBYTES
from pdserve.engine.cpu.jit import OPTIONS

BASE, LINES, PIECES, NEXT, END, DONE, FIRST = range(7)
"""Places: an address; cache lines of a piece; pieces in the list; where the next of them is, and where the last one
ends, for now; lines of that piece that are done. From FIRST on the pieces, in bytes from the address on."""
MAX_PIECES = 512
AHEAD_LENGTH = FIRST + MAX_PIECES
"""int64 values of a list."""
AHEAD_NBYTES = 6 << 20
"""Of all threads, as a third-level cache must have room for it."""


@njit(**OPTIONS)
def collect(ahead, kv, items, sequence, positions, tables, table_width, block_size, block_stride, layer_stride, thread,
            threads):  # fmt: skip
    """List the blocks that attention reads first, of each sequence every `threads`-th.

    ahead: zeros; items, sequence, positions: see `step`, tables: flat. A piece is K and V of a layer of a block.
    """
    origin = v.address(kv, np.int64(0))
    ahead[LINES] = (v.address(kv, layer_stride) - origin) // LINE_NBYTES
    room = min(np.int64(MAX_PIECES), AHEAD_NBYTES // LINE_NBYTES // ahead[LINES] // threads)
    n = np.int64(0)
    for i in range(len(items)):
        t = items[i, 0]
        # The tiles of a prompt read the same.
        if i > 0 and sequence[items[i - 1, 0]] == sequence[t]:
            continue
        for j in range(thread, np.int64(positions[t]) // block_size + 1, threads):
            if n == room:
                break
            block = np.int64(tables[sequence[t] * table_width + j])
            ahead[FIRST + n] = v.address(kv, block * block_stride) - origin
            n += 1
    ahead[PIECES] = n


@njit(**OPTIONS)
def aim(ahead, kv, layer, layer_end, layer_stride, windows):
    """Begin with the list for a layer; with nothing if there is none or it has a window, which most blocks are outside
    of."""
    ahead[NEXT] = FIRST
    ahead[END] = FIRST
    ahead[DONE] = 0
    if layer < layer_end and windows[layer] == 0:
        ahead[BASE] = v.address(kv, layer * layer_stride)
        ahead[END] += ahead[PIECES]


@njit(**OPTIONS)
def next_ahead(ahead, lines):
    """The address of the next `lines` cache lines; behind the end of a piece others follow, which do no harm. There
    has to be a piece left."""
    address = ahead[BASE] + ahead[ahead[NEXT]] + ahead[DONE] * LINE_NBYTES
    ahead[DONE] += lines
    if ahead[DONE] >= ahead[LINES]:
        ahead[DONE] = 0
        ahead[NEXT] += 1
    return address
