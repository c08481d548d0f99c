"""A program that runs a Ray cluster of several nodes on this machine, for `ray_rig`: Ray reads its environment when it
is imported, and only then, so tests that want one of their own need a process of their own.

Commands come as lines of standard input, answers go as lines of JSON to standard output: `add`, `kill NUMBER`, and
`stop-head` and `start-head` for what makes a node the head, Ray's control store. At the end of standard input it ends
every process of the cluster.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import psutil
from ray.cluster_utils import Cluster

_STORE_BYTES = 80_000_000


def _kill(node: Any) -> int:
    """SIGKILL everything of a node, as when a machine loses its power. Returns how many processes that were."""
    processes = [psutil.Process(info.process.pid) for infos in node.all_processes.values() for info in infos]
    processes += [child for process in list(processes) for child in process.children(recursive=True)]
    for process in processes:
        if process.is_running():
            process.kill()
    return len(processes)


def _reap(cluster: Any, over: threading.Event) -> None:
    """Elsewhere init does it: Ray's workers take a dead raylet for a living one until somebody has."""
    while not over.wait(0.5):
        for node in list(cluster.list_all_nodes()):
            for infos in list(node.all_processes.values()):
                for info in list(infos):
                    info.process.poll()


def main(num_nodes: int, cpus: int, gpus: int) -> None:
    """A head, which has the label `place: head`, and `num_nodes` nodes with `place: worker`, of `cpus` and, as they
    claim, `gpus`."""
    out = sys.stdout
    # Ray prints as well.
    sys.stdout = sys.stderr

    def answer(**fields: object) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    def add() -> Any:
        return cluster.add_node(
            num_cpus=cpus, num_gpus=gpus, object_store_memory=_STORE_BYTES, labels={"place": "worker"}
        )

    cluster: Any = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
            "labels": {"place": "head"},
        },
    )
    over = threading.Event()
    threading.Thread(target=_reap, args=(cluster, over), name="reaper", daemon=True).start()
    try:
        nodes = [add() for _ in range(num_nodes)]
        answer(address=str(cluster.address))
        for line in sys.stdin:
            command, *rest = line.split()
            if command == "add":
                nodes.append(add())
                answer(num_nodes=len(nodes))
            elif command == "kill":
                answer(num_killed=_kill(nodes[int(rest[0])]))
            elif command == "stop-head":
                cluster.head_node.kill_gcs_server()
                answer()
            elif command == "start-head":
                cluster.head_node.start_gcs_server()
                answer()
    finally:
        over.set()
        cluster.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
