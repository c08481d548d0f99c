"""What need not wait for anything is with a worker before the call that asks for it returns."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pdserve.errors import PromptTooLongError
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.router_rig import CONTEXT, RouterRig, RouterRigs, ask, expected, make_model
from pdserve.testing.waiting import eventually
from router.generation import Ask, Generation
from router.requests import RequestTable
from router.validation import Limits, check_request


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


def begun(rig: RouterRig, request: pb.GenerateRequest, *, digest: bytes = b"") -> tuple[Generation, RequestTable]:
    """Admitted and started; nobody else has had a turn since."""
    table = rig.router._table
    assert table is not None
    limits = Limits(model="tiny", vocab_size=100, max_model_len=CONTEXT)
    checked = check_request(request, limits, rig.router._config.router)
    wanted = Ask(request_id="one", prompts=(checked,), num_outputs=checked.num_outputs, digest=digest)
    now = time.monotonic()
    generation = table.admit(wanted, received_at=now, deadline=now + 20.0)
    generation.start()
    return generation, table


async def tokens_of(generation: Generation) -> list[int]:
    reader = generation.read(whole=True)
    await generation.wait_begun()
    (response,) = await reader.rest()
    reader.close()
    return list(response.delta.token_ids)


async def test_a_short_prompt_is_dispatched_at_once(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        generation, table = begun(rig, ask(6))
        output = table.output("one")
        assert output is not None and output.attempts.current is not None
        assert len(generation.specs) == 1
        assert await tokens_of(generation) == expected(6)
        # Its record is written all the same.
        await rig.wait_state("one", "FINISHED")


@pytest.mark.parametrize(
    ("request_of", "digest"),
    [(ask(6), b"named by its client"), (ask(6, prompt=tuple(range(50, 90)) * 250), b"")],
    ids=["its name may be taken", "its prompt is long"],
)
async def test_what_has_to_wait_is_dispatched_later(
    rigs: RouterRigs, request_of: pb.GenerateRequest, digest: bytes
) -> None:
    async with rigs.start() as rig:
        generation, table = begun(rig, request_of, digest=digest)
        output = table.output("one")
        assert output is not None and output.attempts.current is None
        assert await tokens_of(generation) == expected(6, prompt=request_of.token_ids.ids)


async def test_an_error_at_once_is_told_to_whoever_reads(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        generation, table = begun(rig, ask(CONTEXT))
        assert generation.ended and table.running("one") is None
        reader = generation.read()
        with pytest.raises(PromptTooLongError, match=r"stop\.max_tokens"):
            await generation.wait_begun()
        reader.close()
        # Nothing is left that would keep the name from being used.
        await eventually(lambda: len(table) == 0, "nothing is in progress")
        assert (await rig.client.generate(ask(3, request_id="one"))).token_ids == expected(3)
