"""Whatever a program makes of the OpenAPI document is answered as the document says, and never with a 5xx.

schemathesis writes the requests: fields at and beyond every bound, left out, of other types, with other methods and
media types. The plain run is short and the same every time; selected by their mark (`pytest -m chaos`) the tests run
long, and never twice the same.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdserve.store.embedded import EmbeddedRedis
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.http_rig import http_client
from pdserve.testing.tiny_models import TinyOptions, TinyShape, make_tiny_kv
from pdserve.testing.tiny_tokenizers import CHAT_TEMPLATE

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

CONTEXT = 64
DEFAULT_MAX_TOKENS = 3
"""Requests of a program rarely say when they have enough."""

UNCHECKED = "positive_data_acceptance"
"""That whatever the schema allows is accepted: a schema does not know vocabulary and context of the model, nor that two
fields exclude each other."""

SHORT = ("--max-examples", "10", "--seed", "1")
LONG = ("--max-time", "600", "--max-examples", "400")


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest there is, with BOS and a chat template: many thousand requests go through it."""
    shape = TinyShape(num_layers=1, hidden_size=32, intermediate_size=32, max_position_embeddings=CONTEXT)
    options = TinyOptions(add_bos=True, chat_template=CHAT_TEMPLATE)
    return make_tiny_kv(tmp_path_factory.mktemp("model") / "tiny", shape=shape, options=options)


async def fuzz(address: str, directory: Path, *options: str) -> tuple[int | None, str]:
    """Exit code and output of a run of schemathesis. The output has a command for each failure that repeats it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"http://{address}/openapi.json"),
        *("--phases", "coverage,fuzzing,stateful", "--exclude-checks", UNCHECKED),
        *("--request-timeout", "30", "--continue-on-failure", "--no-color", *options),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode()


async def test_no_generated_request_gets_a_5xx_or_an_answer_that_the_document_does_not_have(
    pytestconfig: pytest.Config, redis_url: str, model: Path, tmp_path: Path
) -> None:
    """O-VAL-1, O-VAL-3, O-VAL-4, O-API-3."""
    long = pytestconfig.option.markexpr == "chaos"
    torch.set_num_threads(1)
    config = test_config(
        redis_url,
        "fuzz",
        model={"path": str(model)},
        kv={"num_blocks": 1024},
        router={"listen": "127.0.0.1:0", "default_max_tokens": DEFAULT_MAX_TOKENS},
    )
    async with InProcessCluster(config, router=True) as cluster:
        assert cluster.router is not None
        address = cluster.router.http_address
        code, output = await fuzz(address, tmp_path, *(LONG if long else SHORT))
        assert code == 0, output
        assert "generated" in output, "it has sent requests"
        async with http_client(address) as client:
            answer = await client.post("/v1/completions", json={"prompt": "still here?"})
            assert answer.json()["usage"]["completion_tokens"] == DEFAULT_MAX_TOKENS
