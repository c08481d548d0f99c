"""`pdserve doctor`."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from pdserve.cli.options import config_options, json_option, read_config

if TYPE_CHECKING:
    from pdserve.doctor import Finding

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command()
@click.option(
    "--role",
    "roles",
    type=click.Choice(["router", "prefill", "decode"]),
    multiple=True,
    help="What this machine is to run; may be repeated. Default: all of them.",
)
@config_options
@json_option
def doctor(roles: tuple[str, ...], config_path: str | None, settings: tuple[str, ...], as_json: bool) -> int:
    """Find what keeps a deployment from working, and say what to do.

    Looks at this machine, the configuration, certificates, ports, redis, and the workers that are registered there.
    Run it before a process is started: the ports of one that runs are taken. Changes nothing.

    Exit code: 0 all is well or could be better, 1 something will not work, 2 the configuration cannot be read.
    """
    from pdserve.doctor import Examination, examine
    from pdserve.doctor.examination import ROLES
    from pdserve.doctor.findings import problem
    from pdserve.errors import ConfigError

    code = 0
    try:
        found = examine(read_config(config_path, settings), roles or ROLES)
    except ConfigError as error:
        remedy = "correct it; `pdserve config schema` describes every setting, and `pdserve config check` checks again"
        found = Examination((problem("configuration", error.message, remedy),))
        code = 2
    code = code or (1 if found.num_problems else 0)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "problems": found.num_problems,
                    "warnings": found.num_warnings,
                    "findings": [dataclasses.asdict(finding) for finding in found.findings],
                }
            )
        )
        return code
    for finding in found.findings:
        _print(finding)
    click.echo(f"{found.num_problems} problems, {found.num_warnings} warnings")
    return code


def _print(finding: Finding) -> None:
    mark = click.style(f"{finding.verdict:<8}", fg=_COLOURS[finding.verdict])
    click.echo(f"{mark} {finding.check:<13} {finding.message}")
    if finding.remedy:
        click.echo(f"{'':<22} -> {finding.remedy}")
