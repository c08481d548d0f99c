"""What clients say and hear of drafts, over both APIs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pdserve.client import AsyncClient
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.http_rig import events_of, http_client
from pdserve.testing.tiny_models import make_tiny_kv

PROMPT = [50, 51, 52, 50, 51, 52, 50, 51]
FEW: dict[str, Any] = {"logit_bias": {str(i): 60.0 for i in range(40, 44)}, "ignore_eos": True}
"""Few tokens to choose from, so that a random model repeats itself."""
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


def details(usage: Mapping[str, Any]) -> tuple[int, int]:
    found = usage["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


async def test_usage_tells_of_drafts_and_requests_bound_them_over_both_apis(
    redis_url: str, cluster_name: str, model: Path
) -> None:
    config = test_config(
        redis_url, cluster_name, model={"path": str(model)}, kv={"num_blocks": 200},
        engine={"kind": "torch", "threads": 1}, router={"listen": "127.0.0.1:0"},
        decode={"speculation": {"method": "ngram", "min_match_tokens": 1, "max_draft_tokens": 5}},
    )  # fmt: skip
    async with InProcessCluster(config, router=True) as cluster:
        assert cluster.router is not None
        async with http_client(cluster.router.http_address) as http, AsyncClient(cluster.router.address) as grpc:

            async def post(**more: Any) -> Any:
                body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0.5, "seed": 3, **FEW, **more}
                return await http.post("/v1/completions", json=body)

            plain = (await post(max_draft_tokens=0, return_token_ids=True)).json()
            assert details(plain["usage"]) == (0, 0)
            wanted = plain["choices"][0]["token_ids"]

            for n in (1, 3):
                whole = (await post(n=n, return_token_ids=True)).json()
                assert whole["choices"][0]["token_ids"] == wanted
                accepted, rejected = details(whole["usage"])
                assert n * 3 < accepted < whole["usage"]["completion_tokens"] == n * NUM_TOKENS
                assert rejected > 0
                response = await post(n=n, stream=True, stream_options={"include_usage": True})
                *_, last, end = events_of(response.text)
                accepted, rejected = details(last["usage"])
                assert end == "[DONE]" and n * 3 < accepted < n * NUM_TOKENS and rejected > 0

                bias = {int(token_id): value for token_id, value in FEW["logit_bias"].items()}
                options: dict[str, Any] = {"logit_bias": bias, "ignore_eos": True, "temperature": 0.5, "seed": 3}
                result = await grpc.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS, n=n, **options)
                assert list(result.outputs[0].token_ids) == wanted
                assert all(output.usage.accepted_draft_tokens > 3 for output in result.outputs)
                assert sum(output.usage.rejected_draft_tokens for output in result.outputs) > 0
                none = await grpc.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS, n=n, max_draft_tokens=0, **options)
                assert [output.token_ids for output in none.outputs] == [o.token_ids for o in result.outputs]
                assert {output.usage.accepted_draft_tokens for output in none.outputs} == {0}

            # One of two tokens at most comes for nothing, and the first two never do.
            bounded = (await post(max_draft_tokens=1)).json()
            assert 3 < details(bounded["usage"])[0] <= NUM_TOKENS // 2 - 1
            for wrong in (-1, 32, 1.5, "all"):
                refused = await post(max_draft_tokens=wrong)
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == "max_draft_tokens"
