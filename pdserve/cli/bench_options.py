"""Options that the commands of `pdserve bench` share: what is measured, and where the results go."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pdserve.cli.options import config_options, json_option, router_address

if TYPE_CHECKING:
    from pdserve.bench.lengths import Lengths
    from pdserve.bench.targets import Target

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

OPENAI_KEY = "OPENAI_API_KEY"

_seed_option = click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of prompts, lengths and arrivals."
)
_salt_option = click.option(
    "--prompt-salt",
    type=click.IntRange(min=0),
    help="Give that of an earlier report for its very prompts, which the server may still have in its prefix cache. "
    "Default: new prompts each time.",
)
model_option = click.option("--model", help="Name to ask a server of the OpenAI API for. Default: its first.")
_router_option = click.option(
    "--router",
    metavar="HOST:PORT",
    help="pdserve over gRPC. Default: router.listen of the environment, 127.0.0.1:50051. PDSERVE_API_KEY is its key.",
)
_html_option = click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a report with plots there: one file."
)
_out_option = click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON object there as well."
)


def seed_options(command: CommandT) -> CommandT:
    """Add --seed and --prompt-salt."""
    return _seed_option(_salt_option(command))


def chosen_salt(given: int | None) -> int:
    """The salt of this run: what was given, or one that no run before had."""
    return secrets.randbits(32) if given is None else given


def output_options(command: CommandT) -> CommandT:
    """Add --json, --out and --html."""
    return json_option(_out_option(_html_option(command)))


def target_options(command: CommandT) -> CommandT:
    """Add --router, --openai and --model for one server."""
    openai = click.option(
        "--openai",
        metavar="URL",
        help=f"Any server of the OpenAI API instead, pdserve's own HTTP port too. {OPENAI_KEY} is its key.",
    )
    return _router_option(openai(model_option(command)))


def servers_options(command: CommandT) -> CommandT:
    """Add --layout, --openai, --model, --config and --set for several servers."""
    layout = click.option(
        "--layout",
        "layouts",
        metavar="P:D",
        multiple=True,
        help="Start a cluster of so many prefill and decode workers here, measure and stop it; may be repeated. 0:1 is "
        "one server that is not split.",
    )
    openai = click.option(
        "--openai", "urls", metavar="URL", multiple=True, help="A running server of the OpenAI API; may be repeated."
    )
    return layout(openai(model_option(config_options(command))))


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers of a cluster on this machine."""

    prefill: int
    decode: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"pdserve {self.prefill}P+{self.decode}D" if self.prefill else f"pdserve colocated x {self.decode}"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """`P:D`. Raises click.BadParameter."""
        prefill, _, decode = text.partition(":")
        if not (prefill.isdigit() and decode.isdigit() and int(decode) >= 1):
            raise click.BadParameter(f"--layout {text}: must look like 1:1, with at least one decode worker")
        return cls(int(prefill), int(decode))


def make_target(router: str | None, openai: str | None, model: str | None) -> Target:
    """The one server to measure. Raises ConfigError."""
    from pdserve.bench.targets import GrpcTarget, OpenAiTarget

    if openai is not None:
        if router is not None:
            raise click.UsageError("--router and --openai: give one of them")
        return OpenAiTarget(openai, model=model, api_key=os.environ.get(OPENAI_KEY))
    return GrpcTarget(router_address(router))


def numbers(text: str, option: str) -> list[int]:
    """A comma list of numbers of at least 1. Raises click.BadParameter."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) >= 1 for part in parts):
        raise click.BadParameter(f"{option} {text}: must be a comma list of whole numbers of at least 1")
    return [int(part) for part in parts]


def lengths(text: str) -> Lengths:
    """See `Lengths.parse`."""
    from pdserve.bench.lengths import Lengths

    return Lengths.parse(text)


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON can say them."""
    return {name: list(value) if isinstance(value, list | tuple) else value for name, value in settings.items()}
