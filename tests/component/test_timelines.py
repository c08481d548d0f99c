"""Where the time of requests went, whatever has become of them: phases sum to what their clients have waited."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pdserve.cli.main import cli
from pdserve.cli.trace import chrome_trace, lines
from pdserve.errors import CancelledError
from pdserve.store.client import Store
from pdserve.testing.http_rig import http_client
from pdserve.testing.router_rig import RouterRig, RouterRigs, ask, make_model
from pdserve.testing.waiting import eventually

SLACK_S, SLACK = 2e-3, 0.02
LOOPBACK_S = 1.0
"""What a machine that others use as well may take between a router and its client: the one says when it has ended,
and the other hears of it later."""
MAX_TRIES = 1000


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


async def timeline(rig: RouterRig, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def told() -> bool:
        async with http_client(rig.router.http_address) as client:
            answer = await client.get(f"/v1/requests/{name}/timeline")
        found.update(answer.json())
        return answer.status_code == 200 and found["state"] in ("FINISHED", "CANCELLED", "FAILED")

    await eventually(told, f"{name} has ended")
    return found


def names(output: Mapping[str, Any]) -> list[str]:
    return [moment["name"] for moment in output["moments"]]


def assert_sums(found: Mapping[str, Any], waited_s: float) -> None:
    """By its own account, by that of its moments, and by its client's clock."""
    for times in (found, *found["outputs"]):
        assert all(seconds >= 0.0 for seconds in times["phases"].values())
        total = sum(times["phases"].values())
        assert total == pytest.approx(times["e2e_s"], abs=1e-6)
        assert all(0.0 <= part <= total + 1e-6 for part in times["parts"].values())
    for output in found["outputs"]:
        assert output["moments"][-1]["at_s"] == pytest.approx(output["e2e_s"], abs=SLACK_S, rel=SLACK)
    assert waited_s - LOOPBACK_S <= found["e2e_s"] <= waited_s + SLACK_S


async def test_a_plain_request(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        began = time.monotonic()
        answer = await rig.client.generate(ask(8, request_id="plain"))
        waited_s = time.monotonic() - began
        found = await timeline(rig, "plain")
        assert_sums(found, waited_s)
        (output,) = found["outputs"]
        assert names(output)[:3] == ["received", "tokenized", "dispatched"]
        assert {"prefill_started", "first_token", "handed_off", "finished"} <= set(names(output))
        timings = answer.last.timings
        for phase, seconds in found["phases"].items():
            assert seconds * 1e3 == pytest.approx(getattr(timings, f"{phase}_ms"), abs=2.0)


async def test_a_prompt_that_a_decode_worker_computes(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=0, decode=1, prefill_chunk_tokens=256) as rig:
        began = time.monotonic()
        await rig.client.generate(ask(5, request_id="local"))
        waited_s = time.monotonic() - began
        found = await timeline(rig, "local")
        assert_sums(found, waited_s)
        assert found["outputs"][0]["prefill_worker"] == ""
        assert found["phases"]["transfer"] == 0.0


async def test_a_request_that_is_tried_again_says_what_that_took(rigs: RouterRigs) -> None:
    async with rigs.start(prefill=2) as rig:
        for worker in rig.fleet.prefill.values():
            worker.before_first_token.hold()
        began = time.monotonic()
        answer = asyncio.create_task(rig.client.generate(ask(6, request_id="again")))
        await rig.wait_state("again", "PREFILLING")
        victim = next(name for name, worker in rig.fleet.prefill.items() if worker.num_jobs)
        await rig.fleet.kill(victim)
        for worker in rig.fleet.prefill.values():
            worker.before_first_token.release()
        await answer
        waited_s = time.monotonic() - began
        found = await timeline(rig, "again")
        assert_sums(found, waited_s)
        (output,) = found["outputs"]
        assert output["attempts"] == 2
        retry = next(moment for moment in output["moments"] if moment["name"] == "retry")
        assert (retry["attempt"], retry["cause"]) == (1, "worker_lost")
        assert 0.0 < output["parts"]["recovery"] <= output["e2e_s"] - retry["at_s"]


@pytest.mark.parametrize("state", ["PREFILLING", "DECODING"])
async def test_a_request_that_is_cancelled_is_told_until_then(rigs: RouterRigs, state: str) -> None:
    async with rigs.start() as rig:
        if state == "PREFILLING":
            rig.fleet.prefill["p0"].before_first_token.hold()
        else:
            rig.fleet.decode["d0"].before_step.let_pass(3)
        began = time.monotonic()
        answer = asyncio.create_task(rig.client.error(ask(50, request_id="stopped")))
        await rig.wait_state("stopped", state)
        async with http_client(rig.router.http_address) as client:
            (await client.delete("/v1/requests/stopped")).raise_for_status()
        assert isinstance(await answer, CancelledError)
        waited_s = time.monotonic() - began
        found = await timeline(rig, "stopped")
        assert_sums(found, waited_s)
        assert names(found["outputs"][0])[-1] == "cancel"
        assert found["phases"]["prefill" if state == "PREFILLING" else "decode"] > 0.0


async def test_outputs_of_one_prompt_have_a_timeline_each(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        began = time.monotonic()
        await rig.client.generate(ask(6, request_id="three", n=3))
        waited_s = time.monotonic() - began
        found = await timeline(rig, "three")
        assert_sums(found, waited_s)
        assert [output["id"] for output in found["outputs"]] == ["three-0", "three-1", "three-2"]
        assert found["e2e_s"] >= max(output["e2e_s"] for output in found["outputs"]) - SLACK_S
        assert (await timeline(rig, "three-1"))["outputs"] == [found["outputs"][1]]


async def test_a_stream_that_moves_says_when_and_where_to(rigs: RouterRigs) -> None:
    async with rigs.start(decode=2) as rig:
        for worker in rig.fleet.decode.values():
            worker.before_step.let_pass(3)
        began = time.monotonic()
        answer = asyncio.create_task(rig.client.generate(ask(8, request_id="moved")))
        await rig.wait_tokens("moved", 4)
        source, target = sorted(rig.fleet.decode.values(), key=lambda worker: worker.num_jobs == 0)
        source.want_migration("moved")
        await eventually(lambda: target.num_jobs == 1, "it has moved")
        target.before_step.release()
        await answer
        waited_s = time.monotonic() - began
        found = await timeline(rig, "moved")
        assert_sums(found, waited_s)
        (output,) = found["outputs"]
        moved = next(moment for moment in output["moments"] if moment["name"] == "migrated")
        assert moved["worker"] == output["decode_worker"]
        assert output["migrations"] == 1


async def test_client_and_router_agree_on_the_time_to_the_first_token(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        gap = 1.0
        # Others use this machine too: the quietest try tells what the router leaves out.
        for number in range(MAX_TRIES):
            began, first = time.monotonic(), None
            async for response in rig.client.inference.Generate(ask(4, request_id=f"ttft-{number}")):
                if first is None and response.token_ids:
                    first = time.monotonic() - began
            assert first is not None
            gap = first - (await timeline(rig, f"ttft-{number}"))["ttft_s"]
            assert gap > 0.0
            if gap < SLACK_S:
                break
        assert gap < SLACK_S


async def test_only_the_latest_are_remembered_and_what_is_unknown_is_not_found(rigs: RouterRigs) -> None:
    async with rigs.start() as rig:
        await rig.client.generate(ask(2, request_id="known"))
        await timeline(rig, "known")
        async with http_client(rig.router.http_address) as client:
            assert (await client.get("/v1/requests/unknown/timeline")).status_code == 404
            trace = (await client.get("/debug/flight")).json()
        slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert any(event["name"] == "known" for event in slices)
        assert all(event["dur"] >= 0 and {"ts", "pid", "tid"} <= event.keys() for event in slices)


async def test_the_command_shows_bars_and_writes_a_file_for_perfetto(rigs: RouterRigs, tmp_path: Path) -> None:
    async with rigs.start() as rig:
        await rig.client.generate(ask(4, request_id="shown"))
        found = await timeline(rig, "shown")
        url, file = f"http://{rig.router.http_address}", tmp_path / "trace.json"
        arguments = ["trace", "shown", "--url", url, "--chrome", str(file)]
        result = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
    assert result.exit_code == 0, result.output
    assert "prefill" in result.output and "█" in result.output
    assert json.loads(file.read_text()) == chrome_trace(found)
    assert any("FINISHED" in line.plain for line in lines(found))
