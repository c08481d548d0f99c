"""Everything at once: drafts, shared beginnings, outputs that give way, workers that die, grammars, several outputs of
a prompt, by a list of seeds. What a seed asks for must come out as it does from workers that have room for all of it
and draft nothing.

`VARIANTS` is what is combined with that: to add a technique, add what its model and its configuration are.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.client import AsyncClient
from pdserve.config import Config
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.tiny_families import make_tiny_family
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv

NUM_ASKS = 8
FEW = dict.fromkeys(range(40, 46), 60.0)
"""Few tokens to choose from, so that a random model repeats itself and looked up drafts are right now and then."""
GRAMMARS = ("([0-9]{3},){10}", "(abc|abd)( (abc|abd)){9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A technique that all the others have to work with."""

    make_model: Callable[[Path], Path]
    sections: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Of the configuration."""
    takes_draft_model: bool = True


def _plain_model(directory: Path) -> Path:
    return make_tiny_kv(directory, shape=TinyShape(num_layers=2))


def _window_model(directory: Path) -> Path:
    return make_tiny_family(directory, "mistral", sliding_window=40, num_hidden_layers=2)


VARIANTS: Mapping[str, Variant] = {
    "plain": Variant(make_model=_plain_model),
    "int8": Variant(make_model=_plain_model, sections={"kv": {"dtype": "int8"}}),
    "window": Variant(make_model=_window_model, takes_draft_model=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one seed does."""

    asks: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...]
    """Prompts and options."""
    method: str
    """Of drafts; `draft` is by the model itself."""
    num_blocks: int
    kill_after: int | None
    """Tokens after which the decode worker that runs most is killed."""
    local: bool
    """Whether prompts are computed by decode workers, in chunks."""


def plan(seed: int, variant: Variant) -> Plan:
    """The same for the same seed."""
    rng = random.Random(seed)
    beginning = [rng.randrange(10, 300) for _ in range(80)]
    asks = []
    for number in range(NUM_ASKS):
        prompt = (
            *beginning[: rng.choice((0, 32, 50, 80))],
            *(rng.randrange(10, 300) for _ in range(rng.randint(1, 30))),
        )
        options: dict[str, Any] = {"temperature": rng.choice((0.0, 0.7)), "seed": number, "max_tokens": 48}
        if rng.random() < 0.3:
            options |= {"regex": rng.choice(GRAMMARS), "max_tokens": 60}
        else:
            options |= {"logit_bias": FEW, "ignore_eos": True}
        if rng.random() < 0.3:
            options["n"] = rng.choice((2, 3))
        if rng.random() < 0.3:
            options |= {"repetition_penalty": 1.02, "frequency_penalty": 0.05}
        if rng.random() < 0.2:
            options["priority"] = rng.choice((-1, 1))
        asks.append((prompt, options))
    methods = ("ngram", "draft", "auto") if variant.takes_draft_model else ("ngram", "auto")
    return Plan(
        asks=tuple(asks),
        method=methods[seed % len(methods)],
        num_blocks=rng.randint(20, 30),
        kill_after=rng.randint(60, 250) if rng.random() < 0.6 else None,
        local=rng.random() < 0.4,
    )


@dataclass(slots=True)
class Outcome:
    """What came of a plan."""

    outputs: list[list[tuple[int, ...]]]
    """Of each ask."""
    num_preemptions: int = 0
    num_accepted: int = 0
    num_attempts: int = 0
    """Of the ask that took most."""


def config_of(
    redis_url: str, name: str, model: Path, variant: Variant, wanted: Plan | None, sections: Mapping[str, Any]
) -> Config:
    """For a plan, or for plain decoding with room for all."""
    speculation: dict[str, Any] = {"method": "off"}
    if wanted is not None:
        speculation = {"method": wanted.method, "min_match_tokens": 1, "max_draft_tokens": 4}
        if wanted.method != "ngram" and variant.takes_draft_model:
            speculation["draft_model"] = str(model)
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "kv": {"num_blocks": 300 if wanted is None else wanted.num_blocks},
        "router": {"listen": "127.0.0.1:0", "max_attempts": 10},
        "decode": {
            "speculation": speculation,
            "reserve_tokens": 64 if wanted is None else 0,
            "local_prefill_tokens_per_step": 32 if wanted is not None and wanted.local else 0,
        },
    }
    for section, values in (*variant.sections.items(), *sections.items()):
        tree.setdefault(section, {}).update(values)
    return test_config(redis_url, name, **tree)


async def plain_outputs(config: Config, asks: Sequence[tuple[tuple[int, ...], Mapping[str, Any]]]) -> Outcome:
    """Without drafts, and with room for all."""
    async with InProcessCluster(config, router=True) as cluster:
        assert cluster.router is not None
        async with AsyncClient(cluster.router.address, timeout_s=120.0) as client:
            found = await asyncio.gather(*(client.generate(token_ids=prompt, **options) for prompt, options in asks))
        await cluster.quiet()
    return Outcome([[output.token_ids for output in generation.outputs] for generation in found])


async def combined_outputs(config: Config, wanted: Plan) -> Outcome:
    """All at the same time. At the end nobody holds a block."""
    num_decode = 1 if wanted.kill_after is None else 2
    num_received = 0
    async with InProcessCluster(config, prefill=0 if wanted.local else 1, decode=num_decode, router=True) as cluster:
        assert cluster.router is not None

        async def ask(client: AsyncClient, prompt: Sequence[int], options: Mapping[str, Any]) -> Any:
            nonlocal num_received
            async with client.stream(token_ids=prompt, **options) as stream:
                async for delta in stream:
                    num_received += len(delta.token_ids)
                    if wanted.kill_after is not None and num_received > wanted.kill_after and len(cluster.decode) == 2:
                        victim = max(cluster.decode, key=lambda worker: worker.stats().num_running)
                        cluster.decode.remove(victim)
                        await cluster.kill(victim)
                return await stream.result()

        async with AsyncClient(cluster.router.address, timeout_s=120.0) as client:
            found = await asyncio.gather(*(ask(client, prompt, options) for prompt, options in wanted.asks))
        await cluster.quiet()
        stats = [worker.stats() for worker in cluster.decode]
    return Outcome(
        [[output.token_ids for output in generation.outputs] for generation in found],
        num_preemptions=sum(s.preemptions_total for s in stats),
        num_accepted=sum(s.accepted_draft_tokens_total for s in stats),
        num_attempts=max(output.placement.attempts for generation in found for output in generation.outputs),
    )


async def check_combination(redis_url: str, name: str, directory: Path, variant: Variant, seed: int) -> Outcome:
    """Assert that a seed's outputs are those of plain decoding. On the CPU engine, whose numbers do not depend on the
    batch: they are compared to the bit."""
    engine = {"engine": {"kind": "cpu", "threads": 1}}
    model, wanted = variant.make_model(directory), plan(seed, variant)
    expected = await plain_outputs(config_of(redis_url, f"{name}-plain", model, variant, None, engine), wanted.asks)
    outcome = await combined_outputs(config_of(redis_url, name, model, variant, wanted, engine), wanted)
    assert outcome.outputs == expected.outputs, wanted
    assert outcome.num_accepted > 0 or wanted.method == "auto", "something was drafted"
    return outcome
