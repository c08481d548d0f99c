"""The command line: output, exit codes, messages."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import click
import pytest

from pdserve import __version__
from pdserve.cli.main import COMMANDS, LazyGroup, cli, main
from pdserve.cli.timeline import bar_cells
from pdserve.cli.up import describe
from pdserve.client import GenerateOptions
from pdserve.config import Config, load_config
from pdserve.errors import ConfigError, PromptTooLongError
from pdserve.launch.cluster import LocalCluster
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.testing.fake_router import FakeRouter, hello, last_response, one_by_one

CapturedOutput = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("PDSERVE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with FakeRouter() as router:
        yield router


def test_help_names_every_command(capsys: CapturedOutput) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_in_the_table_is_that_of_the_command(name: str) -> None:
    assert isinstance(cli, LazyGroup)
    command = cli.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None
    assert command.help is not None
    assert command.help.splitlines()[0] == COMMANDS[name][1]
    assert command.name == name


def test_help_imports_neither_grpc_nor_pydantic_nor_torch() -> None:
    code = (
        "import sys; from pdserve.cli.main import main; assert main(['--help']) == 0;"
        "print([m for m in ('grpc', 'pydantic', 'torch', 'rich', 'redis', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version(capsys: CapturedOutput) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pdserve {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["statsu"], "error: no such command 'statsu', did you mean 'status'? (see `pdserve --help`)"),
        (["bogus"], "error: no such command 'bogus'; there are up, demo, generate, "),
        (["generate"], "error: Missing argument 'PROMPT'. (see `pdserve generate --help`)"),
        (["generate", "--max-tokens", "many", "Hi"], "'many' is not a valid integer"),
        (["generate", "--raw", "--system", "x", "Hi"], "--system belongs to a chat"),
        (["status", "--router", "nowhere"], "router.listen: must be host:port"),
        (["config", "check", "--set", "router.listen"], "--set router.listen: must look like section.key=value"),
        (["generate", ""], "error: prompt: is empty\n"),
        (["generate", " \n"], "error: prompt: is empty\n"),
        (["generate", "--raw", ""], "error: prompt: is empty\n"),
        (["config", "check", "absent.yaml"], "absent.yaml: cannot be read"),
        (["prefill", "--config", "absent.yaml"], "absent.yaml: cannot be read"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2_and_one_line(
    arguments: list[str], message: str, capsys: CapturedOutput
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_the_setting_that_the_error_suggests_is_accepted(capsys: CapturedOutput) -> None:
    assert main(["config", "show", "--set", "nonsense"]) == 2
    suggested = capsys.readouterr().err.strip().rpartition(" ")[2]
    assert main(["config", "show", "--set", suggested]) == 0


def test_config_check_reports_every_problem_at_once(tmp_path: Path, capsys: CapturedOutput) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("router: {listn: 'a:1'}\nkv: {block_size: 10}\n")
    assert main(["config", "check", str(path), "--set", "engine.dtype=int4"]) == 2
    err = capsys.readouterr().err
    assert "3 problem(s)" in err
    assert "router.listn: unknown key, did you mean 'listen'?" in err
    assert "kv.block_size" in err
    assert "engine.dtype" in err


def test_config_check_says_ok_for_each_file(tmp_path: Path, capsys: CapturedOutput) -> None:
    paths = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for path in paths:
        path.write_text("cluster: x\n")
    assert main(["config", "check", *map(str, paths)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"ok: {path}" for path in paths]


def test_config_show_prints_effective_settings_without_the_password(
    monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput
) -> None:
    monkeypatch.setenv("PDSERVE__ROUTER__MAX_ATTEMPTS", "7")
    assert main(["config", "show", "--json", "--set", "store.url=redis://user:hunter2@host:6379/0"]) == 0
    out = capsys.readouterr().out
    shown = json.loads(out)
    assert shown["router"]["max_attempts"] == 7
    assert shown["store"]["url"] == "redis://host:6379/0"
    assert "hunter2" not in out


def test_config_schema_is_a_json_schema(capsys: CapturedOutput) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["router"]


def test_what_up_suggests_to_try_works_and_is_repeatable(router: FakeRouter, capsys: CapturedOutput) -> None:
    cluster = LocalCluster(load_config(environ={}))
    cluster.listen, cluster.redis_url = router.address, "unix:///redis.sock"
    lines = [shlex.split(line) for line in describe(cluster).splitlines() if line.startswith("  ") and " -c " in line]
    (call,) = lines
    exec(call[-1], {})
    (generate,) = (line for line in describe(cluster).splitlines() if " generate " in line)
    words = shlex.split(generate)
    assert main(words[words.index("generate") :]) == 0
    assert capsys.readouterr().out == "Hello, wörld\n" * 2
    by_library, by_command = router.requests
    assert (by_library.sampling.temperature, by_library.stop.max_tokens) == (0, 32)
    assert by_library.sampling.HasField("temperature")
    assert (by_command.sampling.temperature, by_command.stop.max_tokens) == (0, 64)
    assert by_command.sampling.HasField("temperature")


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_reload_that_comes_before_the_configuration_is_read_does_not_end_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput
) -> None:
    handlers: list[object] = []

    def look(*args: object, **kwargs: object) -> None:
        handlers.append(signal.getsignal(signal.SIGUSR1))
        raise ConfigError("that is all")

    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    monkeypatch.setattr(f"pdserve.cli.{command}.read_config", look)
    try:
        assert main([command]) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "that is all" in capsys.readouterr().err
    (handler,) = handlers
    assert callable(handler) and handler is not signal.SIG_DFL


def test_what_goes_wrong_while_a_file_is_applied_again_is_told_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput
) -> None:
    def apply(cluster: LocalCluster, config: Config) -> dict[str, list[str]]:
        raise ZeroDivisionError("a bug")

    def supervise(cluster: LocalCluster, stopping: threading.Event, meanwhile: Callable[[], None]) -> None:
        signal.raise_signal(signal.SIGUSR1)
        meanwhile()

    for name, function in {"apply": apply, "supervise": supervise, "start": lambda *_: None}.items():
        monkeypatch.setattr(LocalCluster, name, function)
    monkeypatch.setattr("pdserve.cli.up.describe", lambda _: "ready")
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in caught}
    try:
        assert main(["up", "--set", "log.format=text"]) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    said = capsys.readouterr().err
    assert "nothing is changed: ZeroDivisionError('a bug')" in said
    assert "in apply_again" in said


def test_generate_streams_text_and_nothing_else_to_stdout(router: FakeRouter, capsys: CapturedOutput) -> None:
    assert main(["generate", "Hi", "--router", router.address]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello, wörld\n"
    assert captured.err == ""
    assert router.requests[0].chat.messages[0] == pb.ChatMessage(role="user", content="Hi")


def test_generate_passes_its_options_on(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE__ROUTER__LISTEN", router.address)
    assert main(
        ["generate", "--raw", "Once", "--max-tokens", "3", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.5",
         "--min-p", "0.25", "--seed", "9", "--stop", "a", "--stop", "b", "--ignore-eos", "--model", "m",
         "--timeout", "60"]
    ) == 0  # fmt: skip
    (sent,) = router.requests
    assert sent == pb.GenerateRequest(
        text="Once",
        model="m",
        sampling=common_pb2.SamplingParams(temperature=0.5, top_k=4, top_p=0.5, min_p=0.25, seed=9),
        stop=common_pb2.StopParams(max_tokens=3, ignore_eos=True, stop=["a", "b"]),
        request_id=sent.request_id,
        resumable=True,
        heartbeats=True,
    )
    assert router.time_remaining_s[0] == pytest.approx(60, abs=10)


def test_generate_passes_penalties_bias_and_logprobs_on(router: FakeRouter) -> None:
    assert main(
        ["generate", "--raw", "Once", "--presence-penalty", "0.5", "--frequency-penalty", "-0.25",
         "--repetition-penalty", "1.5", "--logit-bias", "42=-100", "--logit-bias", "7=2.5", "--min-tokens", "2",
         "--stop-token-id", "9", "--stop-token-id", "8", "--logprobs", "3", "--prompt-logprobs", "0",
         "--router", router.address]
    ) == 0  # fmt: skip
    (sent,) = router.requests
    assert sent.sampling == common_pb2.SamplingParams(
        presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.5, logit_bias={42: -100.0, 7: 2.5}
    )
    assert sent.stop == common_pb2.StopParams(min_tokens=2, stop_token_ids=[9, 8])
    assert (sent.logprobs, sent.HasField("prompt_logprobs"), sent.prompt_logprobs) == (3, True, 0)


@pytest.mark.parametrize("pair", ["42", "x=1", "42=", "=3", "1.5=2"])
def test_generate_refuses_a_bias_that_is_not_a_pair(pair: str, capsys: CapturedOutput) -> None:
    assert main(["generate", "Hi", "--logit-bias", pair]) == 2
    assert f"--logit-bias {pair}: must look like 42=-100" in capsys.readouterr().err


async def _with_logprobs(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """ "H[" with the two most likely tokens at each place, after a prompt "Hi"."""

    def scores(*token_ids: int) -> common_pb2.Logprobs:
        count = len(token_ids)
        return common_pb2.Logprobs(
            token_ids=token_ids,
            logprobs=[-0.5] * count,
            top_token_ids=[72, 91] * count,
            top_logprobs=[-0.25, -1.5] * count,
        )

    if request.HasField("prompt_logprobs"):
        yield pb.GenerateResponse(request_id="r", seq=0, prompt_logprobs=scores(105))
    yield pb.GenerateResponse(request_id="r", seq=1, text_delta="H", token_ids=[72], logprobs=scores(72))
    last = last_response("r", 2, text="[", token_ids=[91])
    last.logprobs.CopyFrom(scores(91))
    yield last


def test_generate_shows_logprobs_on_stderr_after_the_text(capsys: CapturedOutput) -> None:
    with FakeRouter(_with_logprobs) as router:
        assert main(["generate", "Hi", "--logprobs", "2", "--prompt-logprobs", "2", "--router", router.address]) == 0
    captured = capsys.readouterr()
    assert captured.out == "H[\n"
    lines = [line.split() for line in captured.err.splitlines()]
    assert lines == [
        ["Prompt"],
        ["token", "id", "logprob", "most", "likely"],
        ["'i'", "105", "-0.500", "'H'", "-0.250", "'['", "-1.500"],
        ["Output"],
        ["token", "id", "logprob", "most", "likely"],
        ["'H'", "72", "-0.500", "'H'", "-0.250", "'['", "-1.500"],
        ["'['", "91", "-0.500", "'H'", "-0.250", "'['", "-1.500"],
    ]


def test_generate_json_carries_logprobs_if_asked_for(capsys: CapturedOutput) -> None:
    with FakeRouter(_with_logprobs) as router:
        assert main(["generate", "Hi", "--logprobs", "2", "--json", "--router", router.address]) == 0
    record = json.loads(capsys.readouterr().out)
    top = [{"token_id": 72, "logprob": -0.25}, {"token_id": 91, "logprob": -1.5}]
    assert record["logprobs"] == [
        {"token_id": 72, "logprob": -0.5, "top": top},
        {"token_id": 91, "logprob": -0.5, "top": top},
    ]
    assert "prompt_logprobs" not in record


def test_generate_reads_the_prompt_from_stdin(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße\n".encode()), encoding="utf-8"))
    assert main(["generate", "--raw", "-", "--router", router.address]) == 0
    assert router.requests[0].text == "Grüße\n"


def test_generate_refuses_a_prompt_that_is_not_utf8(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert main(["generate", "-", "--router", router.address]) == 2
    assert "error: prompt: standard input is not UTF-8" in capsys.readouterr().err
    assert not router.requests


def test_generate_json_is_one_object(router: FakeRouter, capsys: CapturedOutput) -> None:
    assert main(["generate", "Hi", "--json", "--router", router.address]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] == "Hello, wörld"
    assert record["token_ids"] == [11, 12, 13, 2]
    assert record["finish_reason"] == "stop"
    assert sum(record["phases_ms"].values()) == pytest.approx(record["e2e_ms"])


def test_generate_timeline_goes_to_stderr(router: FakeRouter, capsys: CapturedOutput) -> None:
    assert main(["generate", "Hi", "--timeline", "--router", router.address]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello, wörld\n"
    bar, phases, figures = captured.err.splitlines()
    assert len(bar.split()[0]) == 60
    assert set(bar.split()[0]) == set("tqPxhd")
    assert phases.endswith("= 102.0 ms")
    assert "TTFT 33.0 ms, TPOT 23.0 ms, 7 prompt + 4 output tokens (stop), KV 3.00 MiB by grpc" in figures


def test_no_router_is_one_line_with_a_remedy(capsys: CapturedOutput) -> None:
    assert main(["generate", "Hi", "--router", "127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: no router answers at 127.0.0.1:1: start one with `pdserve up`")
    assert err.count("\n") == 1


async def _endless(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    yield pb.GenerateResponse(request_id="endless", text_delta="once")
    await asyncio.Event().wait()


def test_a_deadline_is_named_with_a_remedy(router: FakeRouter, capsys: CapturedOutput) -> None:
    router.script = _endless
    assert main(["generate", "Hi", "--timeout", "0.2", "--router", router.address]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: no complete answer from {router.address} within 0.2 s: allow more time (--timeout")
    assert err.count("\n") == 1


def test_space_can_be_continued_but_not_answered(router: FakeRouter) -> None:
    assert main(["generate", "--raw", " ", "--router", router.address]) == 0
    assert router.requests[0].text == " "


def test_ctrl_c_cancels_the_request(router: FakeRouter) -> None:
    router.script = _endless
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve", "generate", "Hi", "--router", router.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"once"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err.strip() == b"interrupted"
    assert router.cancelled.wait(5)


def test_a_reader_that_goes_away_ends_generate_without_a_traceback(router: FakeRouter) -> None:
    going_on = threading.Event()

    async def patient(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text_delta="once")
        await asyncio.to_thread(going_on.wait, 20)
        while True:
            yield pb.GenerateResponse(text_delta="upon a time " * 1000)

    router.script = patient
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve", "generate", "Hi", "--router", router.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.read(4) == b"once"
        process.stdout.close()
        going_on.set()
        assert process.wait(20) == 1
        assert process.stderr.read() == b""
    assert router.cancelled.wait(5)


def test_status_shows_workers_as_a_table_and_as_json(router: FakeRouter, capsys: CapturedOutput) -> None:
    router.status.workers.add(
        state="ready",
        silent_s=0.25,
        info=common_pb2.WorkerInfo(
            worker_id="decode-0",
            role="decode",
            address="10.0.0.1:9",
            kv_layout=common_pb2.KvLayout(
                dtype="float32",
                block_size=16,
                num_layers=1,
                num_kv_heads=1,
                head_dim=8,
                k_order="token,dim",
                v_order="token,dim",
            ),
        ),
        stats=common_pb2.WorkerStats(blocks_in_use=3, blocks_total=900, num_running=2, kv_bytes_total=3 << 20),
    )
    assert main(["status", "--router", router.address]) == 0
    first, header, row = capsys.readouterr().out.splitlines()
    assert first.startswith(f"router fake at {router.address}")
    assert "redis ok" in first
    assert header.split()[:4] == ["worker", "role", "state", "address"]
    assert row.split() == ["decode-0", "decode", "ready", "10.0.0.1:9", "0", "0", "2", "3/900", "0", "0", "3.0", "0.2"]
    assert main(["status", "--json", "--router", router.address]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["workers"][0]["stats"]["blocks_in_use"] == 3
    assert shown["store_available"] is True
    assert shown["local_prefill_up_to"] is None


def test_status_shows_up_to_where_decode_workers_compute_prompts(router: FakeRouter, capsys: CapturedOutput) -> None:
    router.status.local_prefill_up_to = 731
    assert main(["status", "--router", router.address]) == 0
    assert "new prompts of up to 731 tokens are computed by decode workers" in capsys.readouterr().out


def test_drain_of_a_worker_that_is_not_there_names_those_that_are(router: FakeRouter, capsys: CapturedOutput) -> None:
    _add_worker(router, "decode-0", "decode")
    assert main(["drain", "decode-7", "--router", router.address]) == 2
    assert capsys.readouterr().err == "error: no worker 'decode-7'; the router knows: decode-0\n"


def test_restart_leaves_the_only_worker_of_its_kind_alone(router: FakeRouter, capsys: CapturedOutput) -> None:
    _add_worker(router, "decode-0", "decode")
    _add_worker(router, "prefill-0", "prefill")
    _add_worker(router, "decode-1", "decode", state="draining")
    assert main(["restart", "decode-0", "--router", router.address]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: decode-0 is the only decode worker that is ready")
    assert "--force" in captured.err


def _add_worker(router: FakeRouter, worker_id: str, role: str, *, state: str = "ready") -> None:
    router.status.workers.add(
        state=state,
        info=common_pb2.WorkerInfo(
            worker_id=worker_id,
            role=role,
            # Nobody listens there, and nobody may be asked.
            address="127.0.0.1:1",
            kv_layout=common_pb2.KvLayout(
                dtype="float32",
                block_size=16,
                num_layers=1,
                num_kv_heads=1,
                head_dim=8,
                k_order="token,dim",
                v_order="token,dim",
            ),
        ),
    )


def test_status_without_workers_says_so(router: FakeRouter, capsys: CapturedOutput) -> None:
    assert main(["status", "--router", router.address]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "no workers"


def test_models_and_tokenize(router: FakeRouter, capsys: CapturedOutput) -> None:
    assert main(["models", "--router", router.address]) == 0
    assert "fake-model" in capsys.readouterr().out
    assert main(["models", "--json", "--router", router.address]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["max_model_len"] == 2048
    assert main(["tokenize", "AB", "--router", router.address]) == 0
    assert capsys.readouterr().out == "65 66\n"
    assert main(["tokenize", "--json", "--chat", "AB", "--router", router.address]) == 0
    assert json.loads(capsys.readouterr().out) == {"token_ids": [65, 66], "num_tokens": 2}


@pytest.mark.parametrize(
    "values", [(1.0, 2.0, 3.0), (0.001, 100.0, 0.001), (5.0,), (0.0, 0.0, 7.0), (1, 1, 1, 1, 1, 1)]
)
def test_the_cells_of_a_timeline_fill_the_bar_in_proportion(values: tuple[float, ...]) -> None:
    cells = bar_cells(values, 60)
    assert sum(cells) == 60
    for value, count in zip(values, cells, strict=True):
        assert abs(count - value * 60 / sum(values)) < 1


def test_a_timeline_of_nothing_is_empty() -> None:
    assert bar_cells((0.0, 0.0), 60) == [0, 0]


def test_generate_has_an_option_for_all_that_the_client_library_takes() -> None:
    assert isinstance(cli, LazyGroup)
    command = cli.get_command(click.Context(cli), "generate")
    assert command is not None
    offered = {parameter.name for parameter in command.params} | {"messages", "template_kwargs"}
    elsewhere = {
        "token_ids",  # for programs: nobody types them
        "add_generation_prompt",  # of use to who builds prompts
        "resumable",  # a person always wants the rest of the text
    }
    assert set(GenerateOptions.__annotations__) - offered == elsewhere


def test_generate_passes_grammars_and_the_rest_on(router: FakeRouter, tmp_path: Path) -> None:
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "integer"}')
    lark.write_text('start: "ä"')
    for options, grammar in (
        (["--json-schema", str(schema)], common_pb2.Grammar(json_schema='{"type": "integer"}')),
        (["--json-object"], common_pb2.Grammar(json_object=True)),
        (["--regex", "[ab]+"], common_pb2.Grammar(regex="[ab]+")),
        (["--choice", "yes", "--choice", "no"], common_pb2.Grammar(choice=common_pb2.Choices(texts=["yes", "no"]))),
        (["--lark", str(lark)], common_pb2.Grammar(lark='start: "ä"')),
    ):
        assert main(["generate", "Hi", *options, "--router", router.address]) == 0
        assert router.requests[-1].grammar == grammar
    assert main(
        ["generate", "Hi", "--cache-salt", "salt", "--priority", "-5", "--request-id", "mine", "--include-stop-string",
         "--keep-special-tokens", "--template-kwarg", "enable_thinking=false", "--router", router.address]
    ) == 0  # fmt: skip
    sent = router.requests[-1]
    assert (sent.cache_salt, sent.priority, sent.request_id) == ("salt", -5, "mine")
    assert (sent.include_stop_string, sent.HasField("skip_special_tokens"), sent.skip_special_tokens) == (
        True,
        True,
        False,
    )
    assert dict(sent.chat.template_kwargs) == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json-schema", "absent.json"], "--json-schema absent.json: cannot be read: No such file"),
        (["--json-schema", "bad.json"], "--json-schema bad.json: is not JSON"),
        (["--json-schema", "list.json"], "--json-schema list.json: a schema is a JSON object"),
        (["--lark", "latin1.lark"], "--lark latin1.lark: is not UTF-8"),
        (["--template-kwarg", "x=yes"], "--template-kwarg x=yes: must look like enable_thinking=false"),
        (["--regex", "a", "--json-object"], "grammar: give at most one of"),
        (["--attach", "mine"], "--attach shows a request as it is"),
    ],
)
def test_generate_refuses_options_that_make_no_sense(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("{")
    Path("list.json").write_text("[]")
    Path("latin1.lark").write_bytes(b"\xe4")
    assert main(["generate", "Hi", *options]) == 2
    assert message in capsys.readouterr().err


def test_generate_prints_several_outputs_one_after_the_other(capsys: CapturedOutput) -> None:
    with FakeRouter(one_by_one(("Once", " upon"), ("A", " time"))) as router:
        assert main(["generate", "Hi", "--n", "2", "--router", router.address]) == 0
        assert router.requests[0].n == 2
    assert capsys.readouterr().out == "--- 1 of 2 ---\nOnce upon\n--- 2 of 2 ---\nA time\n"


def test_generate_json_lists_several_outputs(capsys: CapturedOutput) -> None:
    with FakeRouter(one_by_one(("Once", " upon"), ("A",))) as router:
        assert main(["generate", "Hi", "--n", "2", "--json", "--router", router.address]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["outputs"] == [
        {"index": 0, "text": "Once upon", "token_ids": [0, 1], "finish_reason": "stop", "matched_stop": 2},
        {"index": 1, "text": "A", "token_ids": [100], "finish_reason": "stop", "matched_stop": 2},
    ]
    assert record["num_output_tokens"] == 3
    assert "text" not in record


def test_generate_attaches_to_a_request_by_its_name(router: FakeRouter, capsys: CapturedOutput) -> None:
    assert main(["generate", "Hi", "--request-id", "mine", "--router", router.address]) == 0
    assert main(["generate", "--attach", "mine", "--router", router.address]) == 0
    assert capsys.readouterr().out == "Hello, wörld\n" * 2
    assert main(["generate", "--attach", "other", "--router", router.address]) == 2
    assert "no request 'other'" in capsys.readouterr().err


def test_generate_goes_on_when_its_connection_breaks(router: FakeRouter, capsys: CapturedOutput) -> None:
    router.breaks.append(1)
    assert main(["generate", "Hi", "--router", router.address]) == 0
    assert capsys.readouterr().out == "Hello, wörld\n"
    assert len(router.attaches) == 1


def test_chat_sends_the_conversation_so_far(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße\n\nAgain".encode())))
    assert main(["chat", "--system", "Be brief.", "--max-tokens", "9", "--router", router.address]) == 0
    assert capsys.readouterr().out == "Hello, wörld\n" * 2
    first, second = router.requests
    said = [(message.role, message.content) for message in second.chat.messages]
    assert said == [
        ("system", "Be brief."),
        ("user", "Grüße"),
        ("assistant", "Hello, wörld"),
        ("user", "Again"),
    ]
    assert list(first.chat.messages) == list(second.chat.messages)[:2]
    assert (first.stop.max_tokens, second.stop.max_tokens) == (9, 9)
    assert first.request_id != second.request_id


def test_chat_ends_with_the_first_error_if_nobody_is_there_to_see_it(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: CapturedOutput
) -> None:
    async def refusing(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        raise PromptTooLongError("chat: too long")
        yield pb.GenerateResponse()

    router.script = refusing
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    assert main(["chat", "--router", router.address]) == 2
    assert capsys.readouterr().err == "error: chat: too long\n"
    assert len(router.requests) == 1


def test_chat_on_a_terminal_outlives_errors_and_interrupted_answers(router: FakeRouter) -> None:
    """Line editing, Ctrl-C and Ctrl-D, through a real terminal."""

    async def script(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        match request.chat.messages[-1].content:
            case "fail":
                raise PromptTooLongError("chat: too long")
            case "endless":
                async for response in _endless(request):
                    yield response
            case _:
                async for response in hello(request):
                    yield response

    router.script = script
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve", "chat", "--router", router.address],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    screen = ""

    def read_until(text: str) -> None:
        nonlocal screen
        while text not in screen:
            assert select.select([ours], [], [], 20)[0], f"{text!r} does not come after {screen!r}"
            screen += os.read(ours, 1024).decode()
        screen = screen[screen.index(text) + len(text) :]

    def say(line: str) -> None:
        read_until("> ")
        os.write(ours, line.encode() + b"\n")

    try:
        say("fail")
        read_until("error: chat: too long")
        say("endless")
        read_until("once")
        process.send_signal(signal.SIGINT)
        read_until("[interrupted]")
        assert router.cancelled.wait(5)
        say("hello")
        read_until("Hello, wörld")
        read_until("> ")
        os.write(ours, b"\x04")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    said = [message.content for message in router.requests[-1].chat.messages]
    assert said == ["endless", "once", "hello"]
