"""The examples and the code in docs/client.md run, as a reader would run them, against a scripted router."""

from __future__ import annotations

import re
import runpy
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pdserve.client import Client
from pdserve.rpc.codec import logprobs_to_proto
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.testing.fake_router import FakeRouter, last_response, one_by_one
from pdserve.types import TokenLogprobs

ROOT = Path(__file__).parents[2]
TOKENS = ("It", " was", " a", " dark", " and", " stormy", " night", ".")
ANSWERS = {
    "Review": '{"sentiment": "mixed", "stars": 3, "topics": ["battery", "screen"]}',
    "Person": '{"name": "Ada", "age": 36}',
}

CapturedOutput = pytest.CaptureFixture[str]


async def answering(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """What a model could say: as many outputs as asked for, in the form asked for."""
    texts: tuple[str, ...] = TOKENS
    if request.chat.tools and not request.chat.tool_choice.none:
        response = last_response(request.request_id, 0, token_ids=[0])
        response.tool_calls.add(index=0, id="call-0", name="weather", arguments='{"city": "Bern", "days": 1}')
        yield response
        return
    if request.grammar.json_schema:
        (texts,) = ((text,) for title, text in ANSWERS.items() if f'"title": "{title}"' in request.grammar.json_schema)
    elif request.grammar.choice.texts:
        texts = (request.grammar.choice.texts[0],)
    async for response in one_by_one(*[texts] * max(1, request.n))(request):
        if request.HasField("logprobs"):
            scores = [TokenLogprobs(token_id, -0.25 * (response.index + 1)) for token_id in response.token_ids]
            response.logprobs.CopyFrom(logprobs_to_proto(scores))
        yield response


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with FakeRouter(answering) as router:
        yield router


def run(name: str, router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput) -> str:
    path = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(path), router.address])
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_tested() -> None:
    tested = set(re.findall(r'run\("(\w+)"', Path(__file__).read_text()))
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == tested


def test_chat(router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput) -> None:
    out = run("chat", router, monkeypatch, capsys)
    assert out.count("It was a dark and stormy night.") == 2
    roles = [message.role for message in router.requests[1].chat.messages]
    assert roles == ["system", "user", "assistant", "user"]


def test_structured_output(router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput) -> None:
    out = run("structured_output", router, monkeypatch, capsys)
    assert out == "3 stars, mixed, about battery, screen\nyes\n"


def test_tools(router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput) -> None:
    out = run("tools", router, monkeypatch, capsys)
    assert out == ('weather({"city": "Bern", "days": 1}) -> Bern: rain, for 1 days\nIt was a dark and stormy night.\n')
    roles = [message.role for message in router.requests[1].chat.messages]
    assert roles == ["user", "assistant", "tool"]


def test_best_of_n(router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput) -> None:
    lines = run("best_of_n", router, monkeypatch, capsys).splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["-0.250", "-0.500", "-0.750", "-1.000"]
    assert lines[-1] == "32 tokens from one prompt of 7"


def test_many_at_once(router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput) -> None:
    lines = run("many_at_once", router, monkeypatch, capsys).splitlines()
    assert len(lines) == len(router.requests) == 10
    assert all("stormy" in line for line in lines)


def test_hand_over(router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput) -> None:
    out = run("hand_over", router, monkeypatch, capsys)
    assert out == "first program, 4 tokens: 'It was a dark'\nsecond program: ' and stormy night.'\n"
    assert len(router.requests) == 1


def test_the_code_in_the_document_runs(router: FakeRouter, capsys: CapturedOutput) -> None:
    document = (ROOT / "docs" / "client.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", document, re.DOTALL))
    names: dict[str, object] = {"__name__": "document"}
    exec(compile(code.replace("127.0.0.1:50051", router.address), "docs/client.md", "exec"), names)
    out = capsys.readouterr().out
    assert "Ada 36\nyes\n" in out
    assert out.endswith(" was a dark and stormy night.\n")
    for name in ("client", "several"):
        client = names[name]
        assert isinstance(client, Client)
        client.close()
