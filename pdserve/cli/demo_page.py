"""`pdserve demo --page`: a cluster to look at, with the live page and its buttons, until Ctrl-C."""

from __future__ import annotations

import sys

import click

from pdserve.cli.signals import StopRequests
from pdserve.config import Config
from pdserve.errors import CancelledError
from pdserve.launch.cluster import LocalCluster, chosen_format
from pdserve.launch.process import LineWriter

NUM_WORKERS = 2
"""Of each role, unless the configuration says: enough to see one die and another go on."""


def with_buttons(config: Config) -> Config:
    """The configuration of a demonstration: prompts are handed over, workers can be killed."""
    local = config.local
    wanted = {"prefill_workers": NUM_WORKERS, "decode_workers": NUM_WORKERS, "demo_controls": True}
    update = {name: value for name, value in wanted.items() if name not in local.model_fields_set}
    return config.model_copy(update={"local": local.model_copy(update=update)})


def run_page(config: Config, requests: StopRequests, *, verbose: bool) -> int:
    """Start, say where the page is, and keep everything running until it is stopped. Returns the exit code."""
    log_format = chosen_format(config, "text")
    lines = LineWriter(sys.stderr, as_json=log_format == "json")
    cluster = LocalCluster(
        config, log_format=log_format, sink=lines if verbose else None, progress=lambda text: click.echo(text, err=True)
    )
    try:
        cluster.start(requests.stopping)
    except CancelledError:
        return 0
    try:
        scheme = "http" if config.tls.public is None else "https"
        click.echo(f"\nOpen {scheme}://{cluster.http_address}/dashboard\nCtrl-C stops everything.\n")
        cluster.supervise(requests.stopping)
    finally:
        killed = cluster.stop(hurry=requests.hurry)
    return 1 if killed and not requests.hurry.is_set() else 0
