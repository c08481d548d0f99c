"""Options of a generation on the command line: those of the client library, under the same names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from pdserve.client import GenerateOptions, JsonValue

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_FILE = click.Path(dir_okay=False, path_type=Path)

_SHARED = (
    click.option("--max-tokens", type=int, metavar="N", help="Most tokens to generate."),
    click.option("--min-tokens", type=int, metavar="N", help="Do not end before N tokens."),
    click.option("--temperature", type=float, metavar="T", help="0 always takes the most likely token."),
    click.option("--top-k", type=int, metavar="K", help="Draw from the K most likely tokens; 0 from all."),
    click.option("--top-p", type=float, metavar="P", help="Draw from the most likely tokens that make up P."),
    click.option("--min-p", type=float, metavar="P", help="Drop tokens less likely than P times the likeliest."),
    click.option("--seed", type=int, metavar="N", help="The same seed gives the same text."),
    click.option("--presence-penalty", type=float, metavar="X", help="Make tokens that were generated less likely."),
    click.option("--frequency-penalty", type=float, metavar="X", help="The same, for each time they were generated."),
    click.option(
        "--repetition-penalty", type=float, metavar="X", help="Above 1: less of what prompt and output hold."
    ),
    click.option(
        "--logit-bias", multiple=True, metavar="ID=X", help="Add X, -100 to 100, to the logit of ID; may be repeated."
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before TEXT; may be repeated."),
    click.option("--include-stop-string", is_flag=True, default=None, help="End after the text of --stop instead."),
    click.option(
        "--stop-token-id", "stop_token_ids", type=int, multiple=True, metavar="ID",
        help="End with token ID; may be repeated.",
    ),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on after an end-of-sequence token."),
    click.option(
        "--keep-special-tokens", "skip_special_tokens", flag_value=False, type=bool, default=None,
        help="Show special tokens in the text.",
    ),
    click.option("--json-schema", type=_FILE, metavar="FILE", help="Generate JSON of the schema in FILE."),
    click.option("--json-object", is_flag=True, default=None, help="Generate any JSON object."),
    click.option("--regex", metavar="REGEX", help="Generate text that matches REGEX as a whole."),
    click.option("--choice", multiple=True, metavar="TEXT", help="Generate one of these; repeat for each."),
    click.option("--lark", type=_FILE, metavar="FILE", help="Generate text of the Lark grammar in FILE."),
    click.option("--template-kwarg", multiple=True, metavar="NAME=JSON", help="Set a variable of the chat template."),
    click.option("--model", metavar="NAME", help="Default: the one being served."),
    click.option("--cache-salt", metavar="TEXT", help="Share prefix cache only with requests of this salt."),
    click.option("--priority", type=int, metavar="N", help="Smaller is served first; 0 is usual."),
    click.option("--max-draft-tokens", type=int, metavar="N", help="Draft at most N tokens in a step; 0: none."),
)  # fmt: skip
_GENERATE = (
    click.option("--tools", type=_FILE, metavar="FILE", help="Functions that the model may call, in OpenAI's form."),
    click.option("--tool-choice", metavar="CHOICE", help="none, auto, required, or the name of a function to call."),
    click.option(
        "--one-tool-call", "parallel_tool_calls", flag_value=False, type=bool, default=None,
        help="Call one function at most.",
    ),
    click.option("--n", type=int, metavar="N", help="Outputs of the prompt, which is computed once."),
    click.option("--logprobs", type=int, metavar="K", help="Show log-probabilities of each token and the K likeliest."),
    click.option("--prompt-logprobs", type=int, metavar="K", help="The same for the tokens of the prompt."),
    click.option("--request-id", metavar="ID", help="Name the request; --attach finds it by that."),
)  # fmt: skip


def chat_options(command: CommandT) -> CommandT:
    """Add what makes sense for every message of a chat. What is not given arrives as None or empty."""
    return _add(_SHARED, command)


def generation_options(command: CommandT) -> CommandT:
    """Add everything."""
    return _add((*_SHARED, *_GENERATE), command)


def _add(options: Sequence[Callable[[CommandT], CommandT]], command: CommandT) -> CommandT:
    for option in reversed(options):
        command = option(command)
    return command


def options_of(given: dict[str, Any]) -> GenerateOptions:
    """What was given, for the client. Raises click.UsageError."""
    options = {name: value for name, value in given.items() if value is not None and value != ()}
    if "logit_bias" in options:
        options["logit_bias"] = _parse_bias(options["logit_bias"])
    if "template_kwarg" in options:
        options["template_kwargs"] = _parse_variables(options.pop("template_kwarg"))
    if "json_schema" in options:
        schema = _read_json("--json-schema", options["json_schema"])
        if not isinstance(schema, dict):
            raise click.UsageError(f"--json-schema {options['json_schema']}: a schema is a JSON object")
        options["json_schema"] = schema
    if "tools" in options:
        tools = _read_json("--tools", options["tools"])
        if not isinstance(tools, list):
            raise click.UsageError(f"--tools {options['tools']}: must be a JSON list")
        options["tools"] = tools
    if "lark" in options:
        options["lark"] = _read("--lark", options["lark"])
    return cast(GenerateOptions, options)


def _parse_bias(pairs: Sequence[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for pair in pairs:
        token_id, _, value = pair.partition("=")
        try:
            bias[int(token_id)] = float(value)
        except ValueError as error:
            raise click.UsageError(f"--logit-bias {pair}: must look like 42=-100, a token id and a number") from error
    return bias


def _parse_variables(pairs: Sequence[str]) -> dict[str, JsonValue]:
    variables: dict[str, JsonValue] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            variables[name] = json.loads(value)
        except ValueError as error:
            raise click.UsageError(
                f"--template-kwarg {pair}: must look like enable_thinking=false, a name and a JSON value"
            ) from error
    return variables


def _read_json(option: str, path: Path) -> JsonValue:
    try:
        return cast(JsonValue, json.loads(_read(option, path)))
    except ValueError as error:
        raise click.UsageError(f"{option} {path}: is not JSON: {error}") from error


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{option} {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{option} {path}: is not UTF-8") from error
