"""`pdserve router`, `pdserve prefill` and `pdserve decode`: one process each, as Kubernetes and Ray run them."""

from __future__ import annotations

import click

from pdserve.cli.options import config_options, read_config
from pdserve.garbage import collect_seldom
from pdserve.launch.parent import end_with_launcher


@click.command()
@config_options
def router(config_path: str | None, settings: tuple[str, ...]) -> int:
    """Run a router.

    Serves the public gRPC API on router.listen and the HTTP API on router.http_port until SIGTERM, then lets its
    requests finish.
    """
    end_with_launcher()
    collect_seldom()
    config = read_config(config_path, settings)
    from pdserve.service import EXIT_USAGE, end_process
    from router.service import main

    code = main(config)
    if code != EXIT_USAGE:
        end_process(code)
    return code


@click.command()
@config_options
def prefill(config_path: str | None, settings: tuple[str, ...]) -> int:
    """Run a prefill worker.

    Loads the model, registers in redis, and computes prompts until SIGTERM.
    """
    end_with_launcher()
    collect_seldom()
    config = read_config(config_path, settings)
    from prefill_worker.service import main

    return main(config)


@click.command()
@config_options
def decode(config_path: str | None, settings: tuple[str, ...]) -> int:
    """Run a decode worker.

    Loads the model, registers in redis, and generates tokens until SIGTERM.
    """
    end_with_launcher()
    collect_seldom()
    config = read_config(config_path, settings)
    from decode_worker.service import main

    return main(config)
