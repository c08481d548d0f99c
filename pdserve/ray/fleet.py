"""The processes of a deployment as Ray has them: one placement group and one detached actor each.

Everything that is needed to compare what runs with what is wanted stands in the name of the placement group, which Ray
keeps through the loss of machines and actors: the cluster, the process, its pool, its role and the digest of its
specification.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError
from ray.experimental import internal_kv
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.errors import UnavailableError
from pdserve.ray.actor import LockActor, SupervisorActor
from pdserve.ray.launcher import Options
from pdserve.ray.plan import Existing
from pdserve.ray.spec import HEAD_RESOURCE, ProcessSpec
from pdserve.ray.spread import Machine, choose_machine, place

CALL_S = 5.0
"""For an actor to answer. One that is being moved to another machine does not."""
REMOVE_S = 30.0
"""For Ray to forget a placement group."""
LOCK = "pdserve-launch"
_KV_NAMESPACE = b"pdserve"
_LOGIN_HINT = (
    "If it asks for a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the same as there"
)


class RayFleet:
    """A connection to Ray, for one deployment. Use from one thread, one at a time in a process."""

    def __init__(self, address: str, cluster: str) -> None:
        """Connect. Raises UnavailableError if there is no Ray at `address` (`auto`: on this machine), or it does not
        let us in."""
        self._cluster = cluster
        self.namespace = f"pdserve-{cluster}"
        self._prefix = f"{self.namespace}|"
        # It advises against what is wanted here: an actor that ends with its placement group.
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init(address=address, namespace=self.namespace, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            message = f"--ray-address {address}: no Ray cluster lets us in there: {error}. {_LOGIN_HINT}"
            raise UnavailableError(message) from error
        self._lock: Any = None
        self._hints: dict[str, str] = {}
        """Ids of the machines that were proposed for placement groups, which Ray has perhaps not placed yet."""

    def close(self) -> None:
        """Disconnect. What was started goes on."""
        ray.shutdown()

    def lock(self) -> None:
        """Be the only one that changes this deployment, until `close`. Raises UnavailableError if somebody else is."""
        holder = f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%H:%M:%S %Z')}"
        try:
            self._lock = ray.remote(LockActor).options(name=LOCK, num_cpus=0).remote(holder)
            ray.get(self._lock.holder.remote(), timeout=60.0)
        except ValueError as error:
            try:
                other: Any = ray.get(ray.get_actor(LOCK).holder.remote(), timeout=CALL_S)
            except (ValueError, RayError):
                other = "somebody who has just gone, try again"
            raise UnavailableError(f"another command is changing {self._cluster!r}: {other}") from error
        except RayError as error:
            raise UnavailableError(f"Ray starts no actors: {error}") from error

    def head_host(self) -> str:
        """Address of Ray's head node."""
        for node in _nodes():
            if node["Alive"] and HEAD_RESOURCE in node["Resources"]:
                return str(node["NodeManagerAddress"])
        raise UnavailableError("the Ray cluster has no head node that is alive")

    def load(self) -> dict[str, Any] | None:
        """What `save` was given last; None if nothing is deployed."""
        text = internal_kv._internal_kv_get(self._key, namespace=_KV_NAMESPACE)
        return None if text is None else dict(json.loads(text))

    def save(self, record: dict[str, Any] | None) -> None:
        """Keep what another command needs to know of the deployment, in Ray's own store. None forgets it."""
        if record is None:
            internal_kv._internal_kv_del(self._key, namespace=_KV_NAMESPACE)
        else:
            internal_kv._internal_kv_put(self._key, json.dumps(record).encode(), True, namespace=_KV_NAMESPACE)

    @property
    def _key(self) -> bytes:
        return f"deployment:{self._cluster}".encode()

    def existing(self) -> list[Existing]:
        """Processes that there are, whether or not they run at the moment."""
        actors = set(ray.util.list_named_actors())
        found = []
        for group in self._groups():
            name, pool, role, digest = group["name"].removeprefix(self._prefix).split("|")
            found.append(Existing(name=name, pool=pool, role=role, digest=digest, intact=name in actors))
        grouped = {process.name for process in found}
        # Nothing makes an actor without a group; but a group may have been removed by hand.
        found += [
            Existing(name=name, pool="", role="decode", digest="", intact=False)
            for name in sorted(actors - grouped - {LOCK})
        ]
        return found

    def specs(self, names: Sequence[str]) -> dict[str, ProcessSpec]:
        """Of those that answer."""
        answers = self._ask(names, lambda actor: actor.spec.remote())
        return {name: ProcessSpec.from_json(text) for name, text in answers.items() if isinstance(text, str)}

    def reports(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What each supervisor says (`Report.as_dict`); for one that cannot say it, `phase` is `pending` before its
        first start, `lost` while Ray moves it or starts it again, and `last_error` says more."""
        answers = self._ask(names, lambda actor: actor.report.remote())
        states = {group["name"].removeprefix(self._prefix).split("|")[0]: group for group in self._groups()}
        found: dict[str, dict[str, Any]] = {}
        for name in names:
            answer = answers.get(name)
            if isinstance(answer, dict):
                found[name] = answer
                continue
            group = states.get(name)
            state = "REMOVED" if group is None else group["state"]
            if state in ("PENDING", "RESCHEDULING", "INFEASIBLE"):
                needs = ", ".join(f"{amount:g} {what}" for what, amount in _bundle_of(group).items())
                problem = f"no machine of the Ray cluster has room for it: it needs {needs}"
            else:
                problem = str(answer).splitlines()[0] if answer is not None else "its supervisor is gone"
            found[name] = {"phase": "pending" if state == "PENDING" else "lost", "last_error": problem}
        return found

    def create(self, name: str, spec: ProcessSpec, options: Options) -> None:
        """Ask Ray for room and a supervisor. Returns at once. If it is there already, nothing changes."""
        group_name = f"{self._prefix}{name}|{spec.pool}|{spec.role}|{spec.digest}"
        machine = choose_machine(self._machines(), spec.pool, spec.bundle, spec.labels)
        if machine is not None:
            self._hints[group_name] = machine.node_id
        group = placement_group(
            [spec.bundle],
            strategy="STRICT_PACK",
            name=group_name,
            lifetime="detached",
            bundle_label_selector=[spec.labels] if spec.labels else None,
            _soft_target_node_id=None if machine is None else machine.node_id,
        )
        ray.remote(SupervisorActor).options(
            name=name,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=spec.cpus,
            num_gpus=spec.gpus,
            resources=spec.custom,
            # It comes back wherever there is room. A call is never repeated: each of them is only a question.
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=8,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0),
        ).remote(name, spec.to_json(), store_url=options.store_url, password=options.password, start_s=options.start_s)

    def drain(self, name: str, timeout_s: float | None) -> bool:
        """Begin to end a process. False if its supervisor does not answer, and nothing can be waited for."""
        answers = self._ask([name], lambda actor: actor.drain.remote(timeout_s))
        return answers.get(name, 0) is None

    def destroy(self, name: str) -> None:
        """Take the actor and its placement group away, and with it the process if there still is one."""
        with contextlib.suppress(ValueError):  # there is no such actor
            ray.kill(ray.get_actor(name), no_restart=True)
        for group in self._groups():
            if group["name"].startswith(f"{self._prefix}{name}|"):
                remove_placement_group(get_placement_group(group["name"]))
        deadline = time.monotonic() + REMOVE_S
        while any(g["name"].startswith(f"{self._prefix}{name}|") for g in self._groups()) or name in set(
            ray.util.list_named_actors()
        ):
            if time.monotonic() > deadline:
                raise UnavailableError(f"{name}: Ray has not removed it within {REMOVE_S:g} s")
            time.sleep(0.05)

    def _ask(self, names: Sequence[str], call: Callable[[Any], Any]) -> dict[str, Any]:
        """Answers by name, or the error that came instead. All are asked at the same time."""
        pending: dict[str, Any] = {}
        answers: dict[str, Any] = {}
        for name in names:
            try:
                pending[name] = call(ray.get_actor(name))
            except (ValueError, RayError) as error:
                answers[name] = error
        ready, _ = ray.wait(list(pending.values()), num_returns=len(pending), timeout=CALL_S) if pending else ([], [])
        done = set(ready)
        for name, reference in pending.items():
            if reference not in done:
                answers[name] = GetTimeoutError(f"no answer within {CALL_S:g} s")
                continue
            try:
                answers[name] = ray.get(reference)
            except (ActorDiedError, ActorUnavailableError) as error:
                answers[name] = error
        return answers

    def _groups(self) -> list[dict[str, Any]]:
        table: dict[str, dict[str, Any]] = placement_group_table()
        return [g for g in table.values() if g["name"].startswith(self._prefix) and g["state"] != "REMOVED"]

    def _machines(self) -> list[Machine]:
        machines = {
            node["NodeID"]: Machine(node_id=node["NodeID"], total=node["Resources"], labels=node.get("Labels", {}))
            for node in _nodes()
            if node["Alive"]
        }
        for group in self._groups():
            _, pool, _, _ = group["name"].removeprefix(self._prefix).split("|")
            placed = [node_id for node_id in group.get("bundles_to_node_id", {}).values() if node_id in machines]
            hint = self._hints.get(group["name"], "")
            for node_id in placed or ([hint] if hint in machines else []):
                place(machines[node_id], pool, _bundle_of(group))
        return list(machines.values())


def _nodes() -> list[dict[str, Any]]:
    untyped: Any = ray
    return list(untyped.nodes())


def _bundle_of(group: dict[str, Any] | None) -> dict[str, float]:
    bundles = {} if group is None else group["bundles"]
    return dict(next(iter(bundles.values()), {}))
