"""Processes that get other settings one at a time, and back where that fails."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from pdserve.config import Config, load_config
from pdserve.errors import ConfigError
from pdserve.launch.cluster import LocalCluster
from pdserve.launch.plan import ProcessPlan
from pdserve.launch.rollout import Rollout, require_possible

NAMES = ("prefill-0", "decode-0", "router-0")


@dataclass
class Cluster:
    """Processes are ready when the test says so."""

    ready: set[str] = field(default_factory=set)
    done: list[tuple[str, ProcessPlan]] = field(default_factory=list)

    def replace(self, name: str, plan: ProcessPlan) -> None:
        self.done.append((name, plan))

    def replaced(self, name: str) -> bool:
        return name in self.ready


def config_of(**settings: object) -> Config:
    return load_config(environ={}, overrides={name.replace("__", "."): value for name, value in settings.items()})


def plans(**settings: object) -> dict[str, ProcessPlan]:
    config = config_of(**settings)
    return {name: ProcessPlan(name=name, command=name[:-2], config=config) for name in NAMES}


def rollout(cluster: Cluster, said: list[str]) -> tuple[Rollout, dict[str, tuple[ProcessPlan, ProcessPlan]]]:
    before, after = plans(), plans(kv__block_size=32)
    changed = {name: (before[name], after[name]) for name in NAMES}
    return Rollout(changed, cluster, timeout_s=10.0, progress=said.append), changed


def test_the_next_one_waits_until_the_last_one_is_ready() -> None:
    cluster, said = Cluster(), list[str]()
    over, changed = rollout(cluster, said)
    for number, name in enumerate(NAMES, start=1):
        for _ in range(5):
            over.advance(100.0 * number)
        assert [done for done, _ in cluster.done] == list(NAMES[:number])
        cluster.ready.add(name)
        over.advance(100.0 * number + 1.0)
    assert over.over
    assert cluster.done == [(name, changed[name][1]) for name in NAMES]
    assert said[-1] == "every process has the new configuration"


def test_one_that_is_not_ready_in_its_drain_time_and_the_time_for_a_start_goes_back_and_the_rest_is_left() -> None:
    cluster, said = Cluster(), list[str]()
    over, changed = rollout(cluster, said)
    over.advance(0.0)
    limit_s = changed["prefill-0"][0].drain_timeout_s + 10.0
    over.advance(limit_s - 0.5)
    assert len(cluster.done) == 1
    over.advance(limit_s + 0.5)
    assert cluster.done[1:] == [("prefill-0", changed["prefill-0"][0])]
    assert over.over
    assert "prefill-0 gets its old settings back, and decode-0, router-0 keep theirs" in said[-1]


def test_only_the_end_of_the_one_in_question_ends_it() -> None:
    cluster, said = Cluster({"prefill-0"}), list[str]()
    over, changed = rollout(cluster, said)
    over.advance(0.0)
    over.advance(1.0)
    over.advance(2.0)
    assert not over.failed("prefill-0", "killed by somebody")
    assert over.failed("decode-0", "decode-0 ended with exit code 2")
    assert cluster.done[-1] == ("decode-0", changed["decode-0"][0])
    assert said[-1].startswith("decode-0 ended with exit code 2\n")
    assert over.over


@pytest.mark.parametrize(
    "settings",
    [
        {"engine__attention_window": 128},
        {"engine__attention_sinks": 8},
        {"kv__dtype": "int8"},
        {"router__listen": "127.0.0.1:7"},
        {"router__http_port": 7},
        {"router__router_id": "r"},
        {"local__demo_controls": True},
    ],
)
def test_what_is_fixed_cannot_change_meanwhile(settings: dict[str, object]) -> None:
    (name,) = (name.replace("__", ".") for name in settings)
    for old, new in ((config_of(), config_of(**settings)), (config_of(**settings), config_of())):
        with pytest.raises(ConfigError, match=f"{name}: cannot change while the cluster runs"):
            require_possible(old, new)


def test_the_codec_changes_in_steps_in_which_old_and_new_workers_understand_each_other() -> None:
    plain = config_of()
    either = config_of(transfer__accept_codecs=["none", "int8"])
    sent = config_of(transfer__accept_codecs=["none", "int8"], transfer__codec="int8")
    coded = config_of(transfer__accept_codecs=["int8"], transfer__codec="int8")
    steps = [plain, either, sent, coded]
    for old, new in [*itertools.pairwise(steps), *itertools.pairwise(reversed(steps))]:
        require_possible(old, new)
    for old, new in ((plain, sent), (sent, plain)):
        with pytest.raises(ConfigError, match=r"transfer\.codec, transfer\.accept_codecs: cannot change"):
            require_possible(old, new)
    for old, new in ((either, coded), (coded, either)):
        with pytest.raises(ConfigError, match=r"transfer\.codec, transfer\.accept_codecs: cannot change"):
            require_possible(old, new)
    # Whatever stands there already is not what a change of something else is refused for.
    apart = {"transfer__codec": "int8"}
    require_possible(config_of(**apart), config_of(**apart, kv__num_blocks=9))


def test_a_change_waits_for_the_end_of_the_last_one() -> None:
    config = config_of()
    cluster = LocalCluster(config)
    cluster._rollout = Rollout({}, cluster, timeout_s=1.0, progress=lambda _: None)
    with pytest.raises(ConfigError, match="still being applied"):
        cluster.apply(config)


def test_a_change_is_possible_if_it_is_for_what_runs_after_another_one_was_taken_back() -> None:
    alone = {"engine__lend_cores": False}
    plain = config_of(**alone)
    either = config_of(**alone, transfer__accept_codecs=["none", "int8"])
    sent = config_of(**alone, transfer__accept_codecs=["none", "int8"], transfer__codec="int8")
    cluster = LocalCluster(plain)
    # What `start` would have reserved.
    cluster.listen, cluster.redis_url = "127.0.0.1:50051", "redis://127.0.0.1:6379"
    cluster._metrics = ["127.0.0.1:9100", "127.0.0.1:9101"]
    cluster._plans = {plan.name: plan for plan in cluster._planned(plain)}
    cluster.apply(either)
    # Every process has got its old settings back.
    cluster._rollout = None
    with pytest.raises(ConfigError, match=r"transfer\.codec, transfer\.accept_codecs: cannot change"):
        cluster.apply(sent)
