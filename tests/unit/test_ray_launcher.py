"""What `pdserve launch` does, against a fleet that is only a dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdserve.config import load_config
from pdserve.config.deployment import Deployment, with_replicas
from pdserve.errors import ConfigError, NotFoundError
from pdserve.launch.process import StartError
from pdserve.ray.launcher import Launcher, Options
from pdserve.ray.plan import Existing
from pdserve.ray.spec import ProcessSpec


@dataclass
class FakeFleet:
    """Processes are ready at once, unless they are told to stay `stuck`."""

    record: dict[str, Any] | None = None
    processes: dict[str, ProcessSpec] = field(default_factory=dict)
    phases: dict[str, str] = field(default_factory=dict)
    options: dict[str, Options] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)
    events: list[str] = field(default_factory=list)

    def lock(self) -> None:
        self.events.append("lock")

    def head_host(self) -> str:
        return "10.0.0.1"

    def load(self) -> dict[str, Any] | None:
        return self.record

    def save(self, record: dict[str, Any] | None) -> None:
        self.record = record

    def existing(self) -> list[Existing]:
        return [Existing(name=n, pool=s.pool, role=s.role, digest=s.digest) for n, s in self.processes.items()]

    def specs(self, names: Sequence[str]) -> dict[str, ProcessSpec]:
        return {name: self.processes[name] for name in names}

    def reports(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        return {
            name: {"phase": self.phases[name], "last_error": "no luck", "host": "h", "killed": False} for name in names
        }

    def create(self, name: str, spec: ProcessSpec, options: Options) -> None:
        assert name not in self.processes
        self.events.append(f"+{name}")
        self.processes[name] = spec
        self.options[name] = options
        self.phases[name] = "backoff" if name in self.stuck else "ready"

    def drain(self, name: str, timeout_s: float | None) -> bool:
        self.phases[name] = "stopped"
        return True

    def destroy(self, name: str) -> None:
        assert self.phases[name] == "stopped", "not drained"
        self.events.append(f"-{name}")
        del self.processes[name]


def deployment(**overrides: Any) -> Deployment:
    settings = {"local__start_timeout_s": 0.1, **overrides}
    return load_config(environ={}, overrides={name.replace("__", "."): value for name, value in settings.items()})


def launch(fleet: FakeFleet, config: Deployment) -> list[str]:
    """What was done."""
    fleet.events.clear()
    Launcher(fleet, lambda message: None).launch(config)
    assert fleet.events.pop(0) == "lock"
    return list(fleet.events)


def test_a_second_launch_does_nothing() -> None:
    fleet = FakeFleet()
    assert launch(fleet, deployment()) == ["+redis-0", "+prefill-0", "+decode-0", "+router-0"]
    assert launch(fleet, deployment()) == []
    assert all(process.current for process in Launcher(fleet, print).status())


def test_everybody_finds_the_embedded_redis_and_its_password_is_kept() -> None:
    fleet = FakeFleet()
    launch(fleet, deployment())
    launch(fleet, deployment(local__decode_workers=2))
    assert {options.store_url for options in fleet.options.values()} == {fleet.options["decode-0"].store_url}
    assert fleet.options["decode-1"].store_url.endswith("@10.0.0.1:6380/0")
    assert len(fleet.options["decode-1"].password) >= 32


def test_a_named_redis_is_used_and_none_is_started() -> None:
    fleet = FakeFleet()
    assert "+redis-0" not in launch(fleet, deployment(store__url="redis://r:1/0"))
    assert fleet.options["decode-0"].store_url == "redis://r:1/0"


def test_what_needs_most_of_a_machine_chooses_first() -> None:
    fleet = FakeFleet()
    pools = {
        "small": {"role": "prefill", "replicas": 2, "resources": {"gpus": 1}},
        "large": {"role": "decode", "resources": {"gpus": 4}},
        "none": {"role": "decode", "resources": {"cpus": 9}},
    }
    done = launch(fleet, deployment(deployment__pools=pools, store__url="redis://r:1/0"))
    assert done == ["+large-0", "+small-0", "+small-1", "+none-0", "+router-0"]


def test_a_pool_of_one_is_replaced_before_it_goes_and_others_are_left_alone() -> None:
    fleet = FakeFleet()
    launch(fleet, deployment())
    assert launch(fleet, deployment(decode__max_batch_size=9)) == ["+decode-1", "-decode-0"]


def test_a_pool_of_several_is_replaced_one_by_one_without_more_room() -> None:
    fleet = FakeFleet()
    launch(fleet, deployment(local__decode_workers=2))
    assert launch(fleet, deployment(local__decode_workers=2, decode__max_batch_size=9)) == [
        "-decode-0", "+decode-0", "-decode-1", "+decode-1",
    ]  # fmt: skip


def test_a_router_on_a_fixed_port_makes_room_for_its_successor() -> None:
    fleet = FakeFleet()
    launch(fleet, deployment())
    assert launch(fleet, deployment(router__max_attempts=9)) == ["-router-0", "+router-0"]


def test_a_launch_that_fails_says_who_is_not_ready_and_why_and_goes_no_further() -> None:
    fleet = FakeFleet()
    launch(fleet, deployment(local__decode_workers=2))
    fleet.stuck = {"decode-0"}
    with pytest.raises(StartError, match=r"decode-0: backoff: no luck"):
        launch(fleet, deployment(local__decode_workers=2, decode__max_batch_size=9))
    assert "-decode-1" not in fleet.events


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ({"model__path": "other"}, "model"),
        ({"store__url": "redis://r:1/0"}, "store.url"),
        ({"engine__dtype": "bfloat16"}, "engine.dtype"),
        ({"deployment__redis": {"port": 7}}, "deployment.redis"),
    ],
)
def test_what_cannot_change_under_way_is_refused_before_anything_is_done(overrides: dict[str, Any], path: str) -> None:
    fleet = FakeFleet()
    launch(fleet, deployment())
    with pytest.raises(ConfigError, match=path):
        launch(fleet, deployment(**overrides))
    assert fleet.events == ["lock"]


def test_down_goes_from_the_routers_to_redis_and_forgets_the_deployment() -> None:
    fleet = FakeFleet()
    launch(fleet, deployment())
    fleet.events.clear()
    assert Launcher(fleet, print).down() == []
    assert fleet.events == ["lock", "-router-0", "-prefill-0", "-decode-0", "-redis-0"]
    with pytest.raises(NotFoundError):
        Launcher(fleet, print).status()


def test_scaled_numbers_hold_until_the_file_is_launched_again() -> None:
    fleet = FakeFleet()
    launch(fleet, deployment())
    scaled = with_replicas(Launcher(fleet, print).deployed(), {"prefill": 3})
    assert launch(fleet, scaled) == ["+prefill-1", "+prefill-2"]
    assert launch(fleet, deployment()) == ["-prefill-2", "-prefill-1"]


def test_what_differs_is_named_without_its_value() -> None:
    fleet = FakeFleet()
    launch(fleet, deployment())
    changed = deployment(kv__num_blocks=77)
    launcher = Launcher(fleet, print)
    reasons = launcher.reasons(changed, launcher.plan(changed))
    assert reasons == {"prefill-0": "kv.num_blocks", "decode-0": "kv.num_blocks"}


def test_a_process_that_is_missing_is_shown() -> None:
    fleet = FakeFleet()
    launch(fleet, deployment())
    fleet.processes.pop("decode-0")
    (missing,) = (p for p in Launcher(fleet, print).status() if p.phase == "missing")
    assert (missing.name, missing.current) == ("decode-0", False)
