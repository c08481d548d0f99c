"""The actors of a deployment. Each runs one supervisor, which runs one process."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any

import ray
from ray import util as ray_util

from pdserve.config.deployment import REDIS_POOL
from pdserve.launch.process import LineWriter
from pdserve.logs import JsonFormatter
from pdserve.ray.child import ChildMaker, ServiceMaker
from pdserve.ray.redis_child import RedisMaker
from pdserve.ray.spec import ProcessSpec
from pdserve.ray.supervisor import Limits, Supervisor


def this_host() -> str:
    """How other machines of the Ray cluster reach this one."""
    untyped: Any = ray_util
    return str(untyped.get_node_ip_address())


def take_the_priority_of_ray() -> None:
    """Ray runs workers at a niceness of 15, which is for batch work: what serves must not wait for everything else on
    the machine. Needs root (CAP_SYS_NICE); else, and where RAY_worker_niceness says what is wanted, nothing changes."""
    if "RAY_worker_niceness" in os.environ:
        return
    with contextlib.suppress(OSError):
        # Of the raylet, which has started this process.
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))


class SupervisorActor:
    """Supervises one process on the machine where Ray has put it. All arguments and answers are of plain types."""

    def __init__(self, name: str, spec_json: str, *, store_url: str, password: str, start_s: float) -> None:
        """`password` is that of an embedded redis, if this is one; `start_s` is how long a start may take.

        Called again by Ray, with the same arguments, where the actor or its machine was lost.
        """
        # Before anything is started here, which inherits it.
        take_the_priority_of_ray()
        self._spec = ProcessSpec.from_json(spec_json)
        self._node_id = ray.get_runtime_context().get_node_id()
        self._host = this_host()
        if self._spec.gpus == 0:
            # Ray leaves this alone, and the process would see all of the machine's.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(JsonFormatter(f"supervisor of {name}"))
        logger = logging.getLogger("pdserve")
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
        maker: ChildMaker
        if self._spec.role == REDIS_POOL:
            maker = RedisMaker(host=self._host, port=self._spec.config["port"], password=password)
            limits = Limits(start_s=20.0, silent_s=20.0, drain_s=0.0)
        else:
            config = self._spec.process_config()
            sink = LineWriter(sys.stdout, as_json=config.log.format != "text")
            maker = ServiceMaker(config, self._spec.role, name, host=self._host, store_url=store_url, sink=sink)
            limits = Limits(
                start_s=start_s,
                # The process itself fails its liveness when a step hangs; this is for one that cannot even say so.
                silent_s=config.health.step_timeout_s,
                drain_s=self._spec.drain_timeout_s,
            )
        self._supervisor = Supervisor(name, maker, limits)

    def report(self) -> dict[str, Any]:
        """`Report.as_dict`, and where it runs."""
        return self._supervisor.report().as_dict() | {"node_id": self._node_id, "host": self._host}

    def spec(self) -> str:
        """The specification, as JSON."""
        return self._spec.to_json()

    def drain(self, timeout_s: float | None) -> None:
        """See Supervisor."""
        self._supervisor.drain(timeout_s)


class LockActor:
    """Not detached: it ends with the command that made it, however that ends. Its name is the lock."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    def holder(self) -> str:
        """Who has it."""
        return self._holder
