"""Kernels that draw tokens from logits: greedy, and Gumbel-max with stateless noise under top-k, top-p and min-p.

The rules are those of `pdserve.engine.sampler` (order of the filters, ties, integer masses) and the noise is that of
`pdserve.engine.noise`. Masked tokens are -inf before anything is drawn. What differs is how little is looked at:

- Filters need the most likely tokens in order. The K-th largest of the maxima of small chunks is a bound below which no
  token can be among the K best, so two passes over the logits and a sort of a few hundred replace a full sort.
- Without filters any token can win, but noise is bounded by its hash: -log(-log1p(-v)) < -log(v). Once some token is
  known to score s, only tokens with v < exp(scaled - s) can beat it, about one of them on average. The exact noise, two
  logarithms in float64, is computed for those alone.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pdserve.engine.cpu import vec as v
from pdserve.engine.cpu.jit import OPTIONS
from pdserve.engine.cpu.ops import exp
from pdserve.engine.cpu.rendezvous import enter, leave
from pdserve.engine.noise import MULTIPLIER_1, MULTIPLIER_2

CHUNK = 16
"""Logits whose maximum stands for them in the search for candidates: one vector."""
NUM_CANDIDATES = 256
"""Tokens looked at first. Where they do not do, eight times as many are, then the whole vocabulary."""
_MASS_UNIT = np.float32(2.0**30)
"""Mass of the most likely token in integer units."""
_STRETCH = 1024
"""Logits among which the greatest is looked for one by one."""
_MASK = np.int64(0xFFFFFFFF)
_LOWEST = np.float32(-3.0e38)


@njit(**OPTIONS)
def argmax(logits, at, n):
    """First index of the greatest of n logits from `at` on."""
    best = _LOWEST
    begin = np.int64(0)
    for c in range(0, n, _STRETCH):
        a = v.splat(_LOWEST)
        b = a
        end = min(n, c + _STRETCH)
        i = c
        while i + 32 <= end:
            a = v.maximum(a, v.load(logits, at + i))
            b = v.maximum(b, v.load(logits, at + i + 16))
            i += 32
        while i < end:
            a = v.maximum(a, v.keep_first(v.load(logits, at + i), end - i, v.splat(_LOWEST)))
            i += 16
        top = v.max_lanes(v.maximum(a, b))
        if top > best:
            best = top
            begin = np.int64(c)
    for i in range(begin, min(n, begin + _STRETCH)):
        if logits[at + i] == best:
            return i
    return np.int64(0)  # every logit is NaN or -inf


@njit(**OPTIONS)
def greedy(board, run, goal, yields, thread, threads, counters, logits, stride, n, tokens):
    """The most likely token of each row; arguments as for `draw`."""
    enter(board, run, thread, threads)
    row = v.fetch_add(counters, 0, np.int64(1))
    while row < len(tokens):
        tokens[row] = argmax(logits, row * stride, n)
        row = v.fetch_add(counters, 0, np.int64(1))
    leave(board, run, goal, yields, thread, threads)


@njit(**OPTIONS)
def _mix(word):
    """`noise.mix` of one word held in an int64."""
    word = ((word ^ (word >> 16)) * np.int64(MULTIPLIER_1)) & _MASK
    word = ((word ^ (word >> 15)) * np.int64(MULTIPLIER_2)) & _MASK
    return word ^ (word >> 16)


@njit(**OPTIONS)
def _mix_lanes(word):
    """`noise.mix` of sixteen words."""
    word = v.mul_i32(v.xor_i32(word, v.shift_right(word, 16)), v.splat_i32(np.int64(MULTIPLIER_1)))
    word = v.mul_i32(v.xor_i32(word, v.shift_right(word, 15)), v.splat_i32(np.int64(MULTIPLIER_2)))
    return v.xor_i32(word, v.shift_right(word, 16))


@njit(**OPTIONS)
def gumbel(key0, key1, token):
    """Noise of one token, as `pdserve.engine.noise` defines it."""
    x = _mix(key0 ^ _mix(token))
    y = _mix(key1 ^ x)
    uniform = (np.float64((x << 20) | (y >> 12)) + 0.5) * 2.0**-52
    return -np.log(-np.log1p(-uniform))


@njit(**OPTIONS)
def _scaled(logit, best, inverse_temperature):
    return (logit - best) * inverse_temperature


@njit(**OPTIONS)
def _mass_lanes(logits, best, inverse_temperature):
    """Integer masses of sixteen logits."""
    scaled = v.mul(v.sub(logits, best), inverse_temperature)
    return v.to_int(v.mul(exp(scaled), v.splat(_MASS_UNIT)))


@njit(**OPTIONS)
def _whole_mass(logits, at, n, best, inverse_temperature):
    total = v.zero_i64()
    top = v.splat(best)
    factor = v.splat(inverse_temperature)
    for i in range(0, n, 16):
        row = v.keep_first(v.load(logits, at + i), n - i, v.splat(_LOWEST))
        total = v.add_widened(total, _mass_lanes(row, top, factor))
    return v.sum_lanes_i64(total)


@njit(**OPTIONS)
def _one_mass(logit, best, inverse_temperature):
    """Mass of one logit, by the same operations as in lanes."""
    lanes = _mass_lanes(v.splat(logit), v.splat(best), v.splat(inverse_temperature))
    return v.sum_lanes_i64(v.add_widened(v.zero_i64(), lanes)) // 16


@njit(**OPTIONS)
def kth_largest(values, k):
    """The k-th largest of some float32, which are left in another order. NaN counts as anything.

    Hoare's selection; numba takes five seconds to compile `np.partition`.
    """
    wanted = k - 1
    low = np.int64(0)
    high = len(values) - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i = low
        j = high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if wanted <= j:
            high = j
        elif wanted >= i:
            low = i
        else:
            break
    return values[wanted]


@njit(**OPTIONS)
def candidates(logits, at, n, k, ids):
    """Ids of the k greatest logits, and of all that equal the least of them, in descending order; gives their number.

    Those that are -inf do not count, so fewer than k are all there are.

    ids: int64 scratch and result, room for n. Equal logits come in the order of their ids.
    """
    chunks = (n + CHUNK - 1) // CHUNK
    threshold = _LOWEST
    if k < chunks:
        maxima = np.empty(chunks, np.float32)
        for c in range(chunks):
            i = c * CHUNK
            maxima[c] = v.max_lanes(v.keep_first(v.load(logits, at + i), n - i, v.splat(_LOWEST)))
        # Tokens that may not be drawn are -inf, and no candidates however few others there are.
        threshold = max(kth_largest(maxima, k), _LOWEST)
    found = 0
    for i in range(n):
        if logits[at + i] >= threshold:
            ids[found] = i
            found += 1
    values = np.empty(found, np.float32)
    for i in range(found):
        values[i] = -logits[at + ids[i]]
    order = np.argsort(values, kind="mergesort")
    picked = ids[:found].copy()
    kept = min(k, found)
    for i in range(found):
        if i >= kept and values[order[i]] != values[order[kept - 1]]:
            found = i
            break
        ids[i] = picked[order[i]]
    return found


@njit(**OPTIONS)
def _best_of(logits, at, ids, begin, count, best, inverse_temperature, key0, key1):
    """(id, score) of the winner among ids[begin:count]."""
    winner = ids[begin]  # stays if every score is -inf or NaN
    top = -np.inf
    for i in range(begin, count):
        token = ids[i]
        score = np.float64(_scaled(logits[at + token], best, inverse_temperature)) + gumbel(key0, key1, token)
        if score > top or (score == top and token < winner):
            winner = token
            top = score
    return winner, top


@njit(**OPTIONS)
def draw_filtered(logits, at, n, inverse_temperature, top_k, top_p, log_min_p, key0, key1, k, ids):
    """Draw under filters, looking at the k most likely tokens; -1 if those do not cover what the filters keep.

    With k = n they always do, and where fewer than k are not -inf. A row of nothing but -inf or NaN gives token 0.
    """
    count = candidates(logits, at, n, k, ids)
    if count == 0:
        return np.int64(0) if k == n else np.int64(-1)
    whole = k == n or count < k
    best = logits[at + ids[0]]
    kept = count
    if 0 < top_k < count:
        kept = top_k
        while kept < count and logits[at + ids[kept]] == logits[at + ids[top_k - 1]]:
            kept += 1
    elif top_k > count and not whole:
        return np.int64(-1)
    limit = kept
    if top_p < 1.0:
        if top_k > 0:
            total = np.int64(0)
            for i in range(limit):
                total += _one_mass(logits[at + ids[i]], best, inverse_temperature)
        else:
            total = _whole_mass(logits, at, n, best, inverse_temperature)
        before = np.int64(0)
        group = np.int64(0)
        for i in range(limit):
            value = logits[at + ids[i]]
            if i > 0 and value != logits[at + ids[i - 1]]:
                group = before
            if np.float64(group) >= top_p * np.float64(total) and value != best:
                kept = i
                break
            before += _one_mass(value, best, inverse_temperature)
    for i in range(kept):
        if np.float64(_scaled(logits[at + ids[i]], best, inverse_temperature)) < log_min_p:
            kept = i
            break
    if kept == count and not whole and not 0 < top_k <= count:
        return np.int64(-1)
    winner, _ = _best_of(logits, at, ids, 0, kept, best, inverse_temperature, key0, key1)
    return winner


@njit(**OPTIONS)
def draw_unfiltered(logits, at, n, inverse_temperature, key0, key1, ids):
    """Draw from the whole vocabulary."""
    first = argmax(logits, at, n)
    best = logits[at + first]
    ids[0] = first
    winner, top = _best_of(logits, at, ids, 0, 1, best, inverse_temperature, key0, key1)
    top_lanes = v.splat(best)
    factor = v.splat(inverse_temperature)
    key = v.splat_i32(key0)
    unit = v.splat(np.float32(2.0**-32))
    # Float32 rounding of both sides of the comparison is far below this.
    slack = v.splat(np.float32(1.0001))
    lowest = v.splat(_LOWEST)
    shift = v.splat(np.float32(top))
    for i in range(0, n, 16):
        row = v.keep_first(v.load(logits, at + i), n - i, lowest)
        scaled = v.mul(v.sub(row, top_lanes), factor)
        limit = v.mul(exp(v.sub(scaled, shift)), slack)
        token = v.add_i32(v.splat_i32(np.int64(i)), v.lane_numbers())
        uniform = v.mul(v.unsigned_to_float(_mix_lanes(v.xor_i32(key, _mix_lanes(token)))), unit)
        # `exp` does not go below e**-87, far less than the smallest step of `uniform`: 0 must still count as beaten.
        if v.max_lanes(v.sub(v.add(limit, v.splat(np.float32(2.0**-31))), uniform)) >= np.float32(0.0):
            for j in range(i, min(n, i + 16)):
                score = np.float64(_scaled(logits[at + j], best, inverse_temperature)) + gumbel(key0, key1, j)
                if score > top or (score == top and j < winner):
                    winner = np.int64(j)
                    top = score
            shift = v.splat(np.float32(top))
    return winner


@njit(**OPTIONS)
def mask(board, run, goal, yields, thread, threads, counters, logits, stride, n, rows, masks):
    """Make the logits of tokens that may not be drawn -inf; threads take entries from counters[0].

    rows: int64 [M] rows of `logits`, each once; masks: uint32 [M, ceil(n / 32)], see `SamplingBatch.masks`. The rest is
    as for `draw`.
    """
    enter(board, run, thread, threads)
    entry = v.fetch_add(counters, 0, np.int64(1))
    while entry < len(rows):
        at = rows[entry] * stride
        for w in range(masks.shape[1]):
            word = np.int64(masks[entry, w])
            if word == _MASK:
                continue
            for i in range(w * 32, min(n, w * 32 + 32)):
                if word & 1 == 0:
                    logits[at + i] = -np.inf
                word >>= 1
        entry = v.fetch_add(counters, 0, np.int64(1))
    leave(board, run, goal, yields, thread, threads)


@njit(**OPTIONS)
def draw(board, run, goal, yields, thread, threads, counters, logits, stride, n, inverse_temperature, top_k, top_p,
         log_min_p, keys, ids, tokens):  # fmt: skip
    """Draw a token for each row; threads take rows from counters[0].

    board, run, goal, yields: see `rendezvous.py`; logits: float32, flat [R, stride] with n of each row in use;
    inverse_temperature: float32 [R], 0 is greedy; top_k: int64 [R]; top_p, log_min_p: float64 [R]; keys: int64 [R, 2]
    words of the noise; ids: int64 scratch [threads, n].
    """
    enter(board, run, thread, threads)
    rows = len(tokens)
    row = v.fetch_add(counters, 0, np.int64(1))
    while row < rows:
        at = row * stride
        if inverse_temperature[row] == np.float32(0.0):
            tokens[row] = argmax(logits, at, n)
        elif top_k[row] <= 0 and top_p[row] >= 1.0 and log_min_p[row] == -np.inf:
            tokens[row] = draw_unfiltered(
                logits, at, n, inverse_temperature[row], keys[row, 0], keys[row, 1], ids[thread]
            )
        else:
            winner = np.int64(-1)
            k = min(np.int64(NUM_CANDIDATES), n)
            while winner < 0:
                winner = draw_filtered(
                    logits, at, n, inverse_temperature[row], top_k[row], top_p[row], log_min_p[row], keys[row, 0],
                    keys[row, 1], k, ids[thread],
                )  # fmt: skip
                k = min(k * 8, n) if k == NUM_CANDIDATES else n
            tokens[row] = winner
        row = v.fetch_add(counters, 0, np.int64(1))
    leave(board, run, goal, yields, thread, threads)
