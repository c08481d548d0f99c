"""Workers that must not exchange KV are never paired, and say why; a request never gets wrong tokens from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.client import Client, RetryPolicy
from pdserve.errors import UnavailableError
from pdserve.testing.process_cluster import ProcessCluster, wait_until
from pdserve.testing.reference import check_greedy
from pdserve.testing.tiny_models import TinyOptions, make_tiny_kv
from pdserve.testing.tiny_tokenizers import CHAT_TEMPLATE
from pdserve.types import Role

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """A good pair, and two decode workers that differ in dtype and weights alone."""
    other_weights = make_tiny_kv(
        tmp_path_factory.mktemp("model") / "other",
        seed=1,
        options=TinyOptions(add_bos=True, chat_template=CHAT_TEMPLATE),
    )
    with ProcessCluster(tiny_model, model__served_name="tiny", router__worker_wait_s=1.0) as cluster:
        cluster.add_worker(Role.DECODE, "other-dtype", engine__dtype="bfloat16")
        cluster.add_worker(Role.DECODE, "other-weights", model__path=str(other_weights))
        yield cluster


@pytest.fixture
def generate(cluster: ProcessCluster, reference_model: Any) -> Callable[[], str]:
    """Sends a random prompt, checks the tokens, returns the decode worker."""
    rng = np.random.default_rng(13)

    def send() -> str:
        prompt = rng.integers(3, 300, 40).tolist()
        result = cluster.client.generate(token_ids=prompt, max_tokens=6, temperature=0.0, ignore_eos=True)
        (check,) = check_greedy(reference_model, [prompt], [result.token_ids])
        assert check.wrong_step is None
        return result.placement.decode_worker

    return send


def test_only_the_matching_pair_is_used(cluster: ProcessCluster, generate: Callable[[], str]) -> None:
    """O-KVT-4 (b), (c). Blocks of other sizes are no obstacle: see test_unequal_sides.py."""
    assert {generate() for _ in range(12)} == {"decode-0"}
    states = {w.info.worker_id: w.state for w in cluster.client.status().workers}
    assert states["other-weights"] == "incompatible"


@pytest.mark.parametrize(
    ("worker", "difference"),
    [
        ("other-dtype", "dtype"),
        ("other-weights", "model_fingerprint"),
    ],
)
def test_the_difference_is_named(
    cluster: ProcessCluster, generate: Callable[[], str], worker: str, difference: str
) -> None:
    """O-KVT-4: where an operator looks for it."""
    generate()

    def told() -> bool:
        return any(worker in line and difference in line for line in cluster.lines("router-0"))

    wait_until(told, f"the router's log names {difference} of {worker}")


def test_without_the_matching_worker_requests_are_refused(cluster: ProcessCluster, generate: Callable[[], str]) -> None:
    """O-KVT-4: UNAVAILABLE, never tokens. Last in this module: the matching worker is killed."""
    assert cluster.client.models()[0].ready
    cluster.kill_worker("decode-0")
    with Client(cluster.address, retry=RetryPolicy(max_attempts=1)) as client:
        for _ in range(3):
            with pytest.raises(UnavailableError, match="no usable workers"):
                client.generate(token_ids=[3, 4, 5], max_tokens=6)
    assert not cluster.client.models()[0].ready
    assert all(s.generated_tokens_total == 0 for s in cluster.stats_of(Role.DECODE))
    # With a matching one everything is served again.
    cluster.add_worker(Role.DECODE, "decode-1")
    assert generate() == "decode-1"
