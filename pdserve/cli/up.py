"""`pdserve up`."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import traceback

import click

from pdserve.cli.options import config_options, json_option, read_config
from pdserve.cli.signals import catch_apply_signal, catch_stop_signals
from pdserve.client import DEFAULT_ADDRESS
from pdserve.client.access import API_KEY, CA_FILE
from pdserve.errors import CancelledError, PdServeError
from pdserve.launch.cluster import LocalCluster, chosen_format
from pdserve.launch.process import LineWriter
from pdserve.store.client import display_url

NO_CHANGE = "nothing to do: everything is as the configuration says"


@click.command()
@config_options
@json_option
@click.option(
    "--demo-controls",
    is_flag=True,
    help="Buttons on the live page that kill workers, as local.demo_controls does.",
)
def up(config_path: str | None, settings: tuple[str, ...], as_json: bool, demo_controls: bool) -> int:
    """Run a cluster on this machine until Ctrl-C.

    Starts a redis server (unless store.url names one), a router, and the workers that `local` asks for; starts again
    what ends by itself. Ctrl-C or SIGTERM lets running requests finish; a second one does not.

    SIGUSR1 has --config read again: processes that read what has changed are drained and replaced, one at a time.
    """
    # Before anything else: until then the signal ends the process.
    wanted = catch_apply_signal()
    forced = {"local__demo_controls": True} if demo_controls else {}
    config = read_config(config_path, settings, **forced)
    requests = catch_stop_signals()
    log_format = chosen_format(config, "text" if sys.stderr.isatty() else "json")
    lines = LineWriter(sys.stderr, as_json=log_format == "json")
    cluster = LocalCluster(config, log_format=log_format, sink=lines, progress=lines.tell)

    def apply_again() -> None:
        if not wanted.is_set():
            return
        wanted.clear()
        try:
            changed = cluster.apply(read_config(config_path, settings, **forced))
        except PdServeError as error:
            lines.tell(f"nothing is changed: {error.message}")
            return
        except Exception as error:
            # A bug of ours, which is no reason to end what serves.
            lines.tell(f"nothing is changed: {error!r}\n{traceback.format_exc()}")
            return
        lines.tell("\n".join(f"{name} differs in {', '.join(keys)}" for name, keys in changed.items()) or NO_CHANGE)

    try:
        cluster.start(requests.stopping)
    except CancelledError:
        return 0
    try:
        click.echo(_describe_json(cluster) if as_json else describe(cluster))
        cluster.supervise(requests.stopping, apply_again)
        lines.tell("stopping: running requests may finish; Ctrl-C again to cut them off")
    finally:
        killed = cluster.stop(hurry=requests.hurry)
    if killed and not requests.hurry.is_set():
        click.echo(f"error: had to kill after the drain time: {', '.join(killed)}", err=True)
        return 1
    return 0


def _describe_json(cluster: LocalCluster) -> str:
    return json.dumps(
        {
            "address": cluster.address,
            "http_address": cluster.http_address,
            "redis_url": display_url(cluster.redis_url),
            "processes": [
                {"name": p.name, "role": p.role, "pid": p.pid, "metrics_address": cluster.metrics_addresses.get(p.name)}
                for p in cluster.processes
            ],
        }
    )


def curl_line(http_address: str, *, tls: bool = False, key: bool = False) -> str:
    """A command that streams an answer. `tls` and `key`: whether the router asks for them."""
    body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64, "stream": true}'
    url = f"{'https' if tls else 'http'}://{http_address}/v1/chat/completions"
    trust = f' --cacert "${CA_FILE}"' if tls else ""
    authorization = f' -H "Authorization: Bearer ${API_KEY}"' if key else ""
    return f"curl -N{trust} {url} -H 'Content-Type: application/json'{authorization} -d {shlex.quote(body)}"


def describe(cluster: LocalCluster) -> str:
    """What is there now, and what can be done with it: for people."""
    # The program under a name that works in another terminal, whether or not the environment is active there.
    program = "pdserve" if shutil.which("pdserve") else f"{shlex.quote(sys.executable)} -m pdserve"
    python = "python" if program == "pdserve" else shlex.quote(sys.executable)
    router = "" if cluster.address == DEFAULT_ADDRESS else f" --router {cluster.address}"
    workers = ", ".join(p.name for p in cluster.processes if p.role != "router")
    call = (
        f"from pdserve.client import Client; "
        f'print(Client("{cluster.address}").generate("The sky is blue because", temperature=0, max_tokens=32).text)'
    )
    if cluster.secured:
        call = (
            "from pdserve.client import Client; from pdserve.client.access import Access; "
            f'a = Access.from_environment(); print(Client("{cluster.address}", tls=a.tls, api_key=a.api_key)'
            '.generate("The sky is blue because", temperature=0, max_tokens=32).text)'
        )
    http = curl = ""
    config = cluster.config
    tls = config.tls.public is not None
    scheme = "https" if tls else "http"
    if cluster.http_address is not None:
        http = f"\n  HTTP   {scheme}://{cluster.http_address}/v1   (OpenAI-compatible; /docs lists everything)"
        http += f"\n  page   {scheme}://{cluster.http_address}/dashboard"
        curl = f"\n  {curl_line(cluster.http_address, tls=tls, key=config.router.keys_file is not None)}"
    metrics = "".join(
        f"\n         {cluster.metrics_scheme(name)}://{address}/metrics   ({name})"
        for name, address in cluster.metrics_addresses.items()
    )
    return f"""
ready: {workers}
  gRPC   {cluster.address}   (pdserve.rpc.v1.Inference; reflection and health are on){http}
  redis  {display_url(cluster.redis_url)}{metrics}

Try, in another terminal:
  {program} generate{router} --temperature 0 --max-tokens 64 "Why is the sky blue?"
  {program} status{router}
  {python} -c {shlex.quote(call)}{curl}

Ctrl-C lets running requests finish and stops everything.
"""
