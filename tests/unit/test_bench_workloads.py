"""Workloads of `pdserve bench`: files and what is wrong with them, made-up prompts, replayed traces."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from pdserve.bench.lengths import Lengths
from pdserve.bench.prompts import STATIC, PromptMaker
from pdserve.bench.recorded import read_requests
from pdserve.bench.replay import trace_prompt
from pdserve.bench.synthetic import random_requests, shared_prefix_requests
from pdserve.errors import InvalidRequestError

MAKER = PromptMaker(range(10, 500), seed=1)

BAD = [
    ("{", "is no JSON"),
    ("[1]", "must be a JSON object"),
    ('{"foo": 1}', "has no prompt"),
    ('{"prompt": ""}', "prompt: must be a text"),
    ('{"prompt": 3}', "prompt: must be a text"),
    ('{"turns": []}', "turns: must be a list"),
    ('{"prompt": "a", "output_tokens": 0}', "output_tokens: must be a whole number"),
    ('{"prompt": "a", "output_tokens": true}', "output_tokens: must be a whole number"),
    ('{"token_ids": [1, -1]}', "token_ids: must be a list"),
    ('{"token_ids": []}', "token_ids: must not be empty"),
    ('{"timestamp": 0, "input_length": 5}', "output_length: must be"),
    ('{"input_length": 5, "output_length": 5}', "timestamp: must be"),
    ('{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [1]}', "hash_ids: must be 2"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_refused_with_its_number_and_field(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "good"}\n\n' + line + "\n")
    with pytest.raises(InvalidRequestError, match=message) as caught:
        read_requests(path)
    assert f"{path}:3: " in caught.value.message


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "no.jsonl.gz").write_text("not gzip")
    for name in ("missing.jsonl", "empty.jsonl", "no.jsonl.gz"):
        with pytest.raises(InvalidRequestError, match=name):
            read_requests(tmp_path / name)


def test_all_kinds_of_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(
            '{"prompt": "a b", "output_tokens": 7}\n{"turns": ["first", "second"]}\n{"token_ids": [1, 2]}\n'
            '{"timestamp": 1500, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}\n'
        )
    text, turns, ids, traced = read_requests(path)
    assert (text.text, text.output_tokens) == ("a b", 7)
    assert turns.text == "first" and ids.token_ids == (1, 2)
    assert (traced.input_tokens, traced.output_tokens, traced.arrival_s, traced.hash_ids) == (600, 4, 1.5, (1, 2))
    assert len(read_requests(path, limit=2)) == 2


def test_azure_traces_are_read_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    path.write_text(head + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    first, second = read_requests(path)
    assert (first.input_tokens, first.output_tokens) == (374, 44)
    assert first.arrival_s is not None and second.arrival_s is not None
    assert second.arrival_s - first.arrival_s == pytest.approx(4.314579, abs=1e-5)
    path.write_text(head + "2023-11-16 18:15:46.68,many,44\n")
    with pytest.raises(InvalidRequestError, match=r"azure.csv:2: ContextTokens"):
        read_requests(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidRequestError, match="the header lacks ContextTokens"):
        read_requests(path)


def test_the_shipped_questions_have_their_licence_beside_them() -> None:
    assert len(read_requests(STATIC / "mt_bench.jsonl")) == 80
    licences = (STATIC / "LICENCES.md").read_text()
    assert {path.name for path in STATIC.iterdir()} - {"LICENCES.md"} == {
        name for name in ("mt_bench.jsonl", "sonnet.txt") if name in licences
    }


def test_equal_numbers_of_a_trace_are_equal_tokens() -> None:
    a, b = trace_prompt(MAKER, 0, 1100, (1, 2, 3)), trace_prompt(MAKER, 1, 1300, (1, 2, 9))
    assert (len(a), len(b)) == (1100, 1300)
    assert a[:1024] == b[:1024] and a[1024:1100] != b[1024:1100]
    small, other = trace_prompt(MAKER, 0, 110, (1, 2, 3), 0.1), trace_prompt(MAKER, 1, 130, (1, 2, 9), 0.1)
    assert (len(small), len(other)) == (110, 130)
    assert small[:102] == other[:102] and small[102:] != other[102:110]


def test_random_prompts_have_the_lengths_asked_for_and_share_nothing() -> None:
    requests = random_requests(MAKER, 50, prompt=Lengths(20, 40), output=Lengths(5, 5), seed=3)
    assert all(20 <= len(r.token_ids) <= 40 and r.output_tokens == 5 for r in requests)
    assert len({r.token_ids[:8] for r in requests}) == 50
    assert requests == random_requests(MAKER, 50, prompt=Lengths(20, 40), output=Lengths(5, 5), seed=3)


def test_shared_prefixes_are_shared() -> None:
    requests = shared_prefix_requests(
        MAKER, 60, prompt=Lengths(10, 10), output=Lengths(1, 1), prefix_tokens=32, groups=3, seed=0
    )  # fmt: skip
    assert len({r.token_ids[:32] for r in requests}) == 3
    assert len({r.token_ids[32:] for r in requests}) == 60


def test_another_salt_gives_prompts_that_no_cache_has() -> None:
    salted = PromptMaker(range(10, 500), seed=1, salt=7)
    assert salted.draw(0, 16) != MAKER.draw(0, 16)
    assert salted.draw(0, 16) == PromptMaker(range(10, 500), seed=1, salt=7).draw(0, 16)


@pytest.mark.parametrize("text", ["", "x", "0", "5:", "9:3", "1:2:3"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        Lengths.parse(text)
