"""The documents: their links, file names, commands, settings and tables are those of the tree."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from google.rpc import code_pb2

from kv_transfer.wire import HEADER_NBYTES, ChunkHeader, encode
from pdserve import errors
from pdserve.cli.main import COMMANDS, LazyGroup, cli
from pdserve.config import Config
from pdserve.rpc.errors import status_of
from pdserve.testing.fake_router import FakeRouter

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_PATH = re.compile(
    r"(?<![\w./-])(?:(?:pdserve|kv_transfer|router|prefill_worker|decode_worker|proto|tests|deploy|docs|tools)/[\w./-]+)"
)
_COMMAND = re.compile(r"^pdserve ([a-z][a-z-]*)([^\n#]*)", re.MULTILINE)
_OPTION = re.compile(r"(?<=\s)--[a-z-]+")


def code_in(document: Path) -> Iterator[str]:
    """Inline code and fenced blocks."""
    for match in _CODE.finditer(document.read_text()):
        yield match[0].strip("`")


@cache
def names_of_tests() -> frozenset[str]:
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return frozenset(re.findall(r"def (test_\w+)\(", text))


def anchors_of(document: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def rows_of(document: Path, first_cell: str) -> list[list[str]]:
    """Cells of the table whose header begins with `first_cell`."""
    lines = document.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


@_each_document
def test_links_lead_somewhere(document: Path) -> None:
    for link in _LINK.findall(document.read_text()):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{link} does not exist"
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert not anchor or anchor in anchors_of(target), f"{link}: no such heading"


@_each_document
def test_a_test_that_is_linked_is_in_the_file_that_the_link_names(document: Path) -> None:
    for name, file in re.findall(r"\[`(test_\w+)`\]\(([^)]+\.py)\)", document.read_text()):
        assert f"def {name}(" in (document.parent / file).read_text(), f"{file} has no {name}"


@_each_document
def test_files_and_tests_that_are_named_exist(document: Path) -> None:
    for code in code_in(document):
        for name in _PATH.findall(code):
            assert (ROOT / name).exists(), f"{name} does not exist"
        for name in re.findall(r"(?<![\w/])test_\w+(?![\w./])", code):
            assert name in names_of_tests(), f"there is no {name}"


@_each_document
def test_commands_and_options_that_are_named_exist(document: Path) -> None:
    assert isinstance(cli, LazyGroup)
    for code in code_in(document):
        for name, rest in _COMMAND.findall(code):
            assert name in COMMANDS, f"there is no `pdserve {name}`"
            command = cli.get_command(click.Context(cli), name)
            if isinstance(command, click.Group) and rest.split():
                inner = rest.split()[0]
                assert inner in command.commands, f"there is no `pdserve {name} {inner}`"
                command = command.commands[inner]
            assert command is not None
            known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            assert set(_OPTION.findall(rest)) <= known, f"pdserve {name}{rest}"


@_each_document
def test_make_targets_that_are_named_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for code in code_in(document):
        named = set(re.findall(r"(?:^|\n)make ([a-z-]+)", code))
        assert named <= targets


@_each_document
def test_settings_that_are_named_exist(document: Path) -> None:
    for code in code_in(document):
        for section, key in re.findall(r"^([a-z]+)\.([a-z_]+)$", code, re.MULTILINE):
            field = Config.model_fields.get(section)
            if field is None or key == "py":
                continue
            assert isinstance(field.annotation, type)
            assert key in field.annotation.model_fields, f"there is no setting {section}.{key}"


def test_every_command_is_in_the_readme_or_the_architecture() -> None:
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/architecture.md", "CHANGELOG.md"))
    assert {name for name in COMMANDS if f"`{name}`" not in text and f"pdserve {name}" not in text} == set()


def test_the_python_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    with FakeRouter() as router:
        exec(compile(example.replace("127.0.0.1:50051", router.address), "README.md", "exec"), {})
    assert capsys.readouterr().out == "Hello, wörld\nstop 4 decode-0 33.0\n"
    (request,) = router.requests
    assert request.chat.messages[0].content
    assert request.stop.max_tokens == 24


def all_errors(base: type[errors.PdServeError] = errors.PdServeError) -> Iterator[type[errors.PdServeError]]:
    for kind in base.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield kind
            yield from all_errors(kind)


def test_the_table_of_errors_is_that_of_the_code() -> None:
    documented = {code: (status, again) for code, status, again, _ in rows_of(ROOT / "docs/protocol.md", "code")}
    real = {
        kind.code: (code_pb2.Code.Name(status_of(kind("x")).code), "yes" if kind.retryable else "no")
        for kind in all_errors()
    }
    assert documented == real


def test_the_table_of_the_chunk_frame_is_that_of_the_code() -> None:
    kinds = {"u16": "H", "u32": "I", "u64": "Q", "4 bytes": "4s"}
    header = ChunkHeader(
        nonce=0x0102030405060708, attempt=9, seq=10, dtype="bfloat16", layer_begin=11, layer_end=12, token_begin=13,
        token_end=14, head_begin=15, head_end=16, payload_nbytes=3,
    )  # fmt: skip
    frame = encode(header, [memoryview(b"abc")])
    found: dict[str, list[object]] = {}
    size = 0
    for offsets, types, field in rows_of(ROOT / "docs/protocol.md", "offset"):
        for offset, kind in zip(offsets.split(", "), types.split(", "), strict=True):
            assert int(offset) == size, f"{field} is said to be at {offset}"
            size += struct.calcsize("<" + kinds[kind])
            found.setdefault(field, []).append(struct.unpack_from("<" + kinds[kind], frame.header, int(offset))[0])
    assert size == HEADER_NBYTES == len(frame.header)
    assert found["magic `PDKV"] == [b"PDKV"]
    assert (found["nonce"], found["attempt"], found["seq"]) == ([header.nonce], [9], [10])
    assert found["layers, begin and end"] == [11, 12]
    assert found["tokens, begin and end"] == [13, 14]
    assert found["heads, begin and end"] == [15, 16]
    assert found["payload bytes"] == [3]
    assert found["reserved, 0"] == [0, 0, 0]
