"""`pdserve warmup`."""

from __future__ import annotations

import json
import time

import click

from pdserve.cli.options import config_options, json_option, read_config
from pdserve.errors import ConfigError
from pdserve.logs import configure_logging


@click.command()
@config_options
@json_option
def warmup(config_path: str | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Compile the kernels of the CPU engine, so that the next start need not.

    They are kept in $PDSERVE_CACHE_DIR (default ~/.cache/pdserve), one directory per version and processor kind.
    """
    config = read_config(config_path, settings)
    configure_logging(config.log, "warmup")
    from pdserve.engine.select import why_not_cpu
    from pdserve.model.source import open_model

    source = open_model(config.model.path)
    obstacle = why_not_cpu(source.config, device=config.engine.device, block_size=config.kv.block_size)
    if obstacle is not None:
        raise ConfigError(f"there is nothing to compile: the CPU engine cannot be used, {obstacle}")
    from pdserve.engine.cpu.jit import cache_dir
    from pdserve.engine.cpu.loader import load_cpu_engine

    began = time.monotonic()
    load_cpu_engine(source, num_blocks=1, block_size=config.kv.block_size, num_threads=1)
    took_s = time.monotonic() - began
    if as_json:
        click.echo(json.dumps({"directory": str(cache_dir()), "seconds": round(took_s, 3)}))
        return
    click.echo(f"model loaded and kernels ready in {took_s:.1f} s, kept in {cache_dir()}")
