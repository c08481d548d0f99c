"""JSON bodies that nobody would send: good ones that are altered, and text that is nearly JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, Final

from pdserve.testing.fuzz_values import damaged, odd_float, odd_int, odd_text

_VALUES: Final[tuple[Callable[[Random], Any], ...]] = (
    lambda rng: None,
    lambda rng: rng.random() < 0.5,
    lambda rng: odd_int(rng, -(2**70), 2**70),
    odd_float,
    odd_text,
    lambda rng: [odd_text(rng) for _ in range(rng.randrange(4))],
    lambda rng: [odd_int(rng, -5, 2**33) for _ in range(rng.choice((0, 1, 3, 200)))],
    lambda rng: {odd_text(rng): odd_text(rng) for _ in range(rng.randrange(3))},
    lambda rng: _nested(rng.choice((2, 20, 400))),
)


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def altered(value: Any, rng: Random) -> Any:
    """A copy of which one to three parts, at any depth, are others."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        value = _altered_once(value, rng)
    return value


def body(value: Any, rng: Random) -> bytes:
    """`value` altered, as it is sent; now and then damaged on its way."""
    data = json.dumps(altered(value, rng), ensure_ascii=rng.random() < 0.5).encode()
    return damaged(data, rng) if rng.random() < 0.2 else data


def _altered_once(value: Any, rng: Random) -> Any:
    inner = isinstance(value, dict | list) and bool(value)
    if not inner or rng.random() < 0.15:
        return rng.choice(_VALUES)(rng)
    if isinstance(value, dict):
        key = rng.choice(sorted(value))
        match rng.randrange(8):
            case 0:
                del value[key]
            case 1:
                value[odd_text(rng)] = value[key]
            case _:
                value[key] = _altered_once(value[key], rng)
        return value
    place = rng.randrange(len(value))
    match rng.randrange(6):
        case 0:
            del value[place]
        case 1:
            value += [value[place]] * rng.choice((1, 2, 60))
        case _:
            value[place] = _altered_once(value[place], rng)
    return value
