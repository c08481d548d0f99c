"""`pdserve status`."""

from __future__ import annotations

import dataclasses
import json

import click

from pdserve.cli.options import connect, json_option, router_address, router_options
from pdserve.cli.tables import print_table
from pdserve.client import WorkerState

_HEADERS = (
    "worker", "role", "state", "address", "waiting", "moving", "running", "blocks", "prefilled", "generated", "KV MiB",
    "silent s",
)  # fmt: skip


@click.command()
@router_options
@json_option
def status(router: str | None, timeout_s: float | None, as_json: bool) -> None:
    """Show workers, load and blocks."""
    address = router_address(router)
    with connect(address, timeout_s=timeout_s or 10.0) as client:
        found = client.status()
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found)))
        return
    redis = "ok" if found.store_available else "away"
    click.echo(
        f"router {found.router_id} at {address}  version {found.version}  "
        f"requests {found.num_active_requests}  redis {redis}"
    )
    if found.queues:
        waiting = ", ".join(f"{queue.num_waiting} {queue.priority_class}" for queue in found.queues)
        num_refused = sum(queue.refused_total for queue in found.queues)
        seconds = sum(queue.drained_in_s for queue in found.queues)
        click.echo(f"waiting {waiting} ({seconds:.1f} s of work)  refused {num_refused}")
    if found.local_prefill_up_to is not None:
        click.echo(f"new prompts of up to {found.local_prefill_up_to} tokens are computed by decode workers")
    if found.workers:
        print_table(_HEADERS, [_row(w) for w in found.workers])
    else:
        click.echo("no workers")


def _row(worker: WorkerState) -> tuple[str, ...]:
    stats = worker.stats
    return (
        worker.info.worker_id,
        str(worker.info.role),
        worker.state,
        worker.info.address,
        str(stats.num_waiting),
        str(stats.num_transferring),
        str(stats.num_running),
        f"{stats.blocks_in_use}/{stats.blocks_total}",
        str(stats.prefill_tokens_total),
        str(stats.generated_tokens_total),
        f"{stats.kv_bytes_total / 2**20:.1f}",
        f"{worker.silent_s:.1f}",
    )
