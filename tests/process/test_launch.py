"""`pdserve up` and LocalCluster with real processes: start, failures at start, signals, nothing left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.client import Client, RetryPolicy
from pdserve.config import Config, load_config
from pdserve.errors import PdServeError
from pdserve.launch.cluster import LocalCluster
from pdserve.launch.process import StartError
from pdserve.launch.verify import blocks_in_use, num_keys_without_ttl
from pdserve.testing.tiny_models import make_tiny_kv

READY_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0

pytestmark = pytest.mark.timeout(180)


def wait_for(check: Callable[[], bool], what: str, timeout_s: float = END_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def gone(processes: Sequence[psutil.Process]) -> bool:
    return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("model") / "tiny-kv")


@pytest.fixture
def settings(model: Path) -> dict[str, Any]:
    """A small cluster on free ports."""
    return {"model.path": str(model), "router.listen": "127.0.0.1:0", "kv.num_blocks": 64}


@pytest.fixture
def config(settings: dict[str, Any]) -> Config:
    return load_config(environ={}, overrides=settings)


class Up:
    """A running `pdserve up --json`."""

    def __init__(self, settings: dict[str, Any], *arguments: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
        overrides = (f"--set={k}={v}" for k, v in settings.items())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdserve", "up", "--json", *arguments, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    @property
    def stderr(self) -> str:
        return "".join(self._lines)

    def wait_ready(self) -> dict[str, Any]:
        """The report that it prints when it is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.stderr
        report: dict[str, Any] = json.loads(line)
        return report

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self) -> int:
        code = self.process.wait(READY_TIMEOUT_S)
        self._reader.join(10)
        return code

    def close(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self._reader.join(10)
        self.process.stderr.close()


@contextmanager
def running(settings: dict[str, Any], *arguments: str) -> Iterator[Up]:
    up = Up(settings, *arguments)
    try:
        yield up
    finally:
        up.close()


def failure(settings: dict[str, Any]) -> str:
    """What `pdserve up` says before it ends with exit code 2; checks that it leaves no process."""
    with running(settings) as up:
        assert up.wait() == 2, up.stderr
        lines = up.stderr.splitlines()
        (index,) = (i for i, line in enumerate(lines) if line.startswith("error: "))
        return "\n".join(lines[index:])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_up_serves_until_a_signal_and_leaves_nothing(settings: dict[str, Any], number: signal.Signals) -> None:
    """O-OPS-3"""
    with running(settings) as up:
        report = up.wait_ready()
        assert [p["role"] for p in report["processes"]] == ["router", "prefill", "decode"]
        with Client(report["address"], timeout_s=30) as client:
            result = client.generate("Once upon a time", max_tokens=8, temperature=0, ignore_eos=True)
            assert len(result.token_ids) == 8
            assert result.placement.decode_worker == "decode-0"
        descendants = up.descendants()
        assert len(descendants) == 4
        up.process.send_signal(number)
        assert up.wait() == 0, up.stderr
        assert gone(descendants)
    host, port = report["address"].split(":")
    with socket.socket() as probe:
        # The port is free at once.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, int(port)))


def test_a_signal_while_starting_ends_it_cleanly(settings: dict[str, Any]) -> None:
    with running(settings) as up:
        wait_for(lambda: "starting router-0" in up.stderr, "the processes are started")
        descendants = up.descendants()
        up.process.send_signal(signal.SIGTERM)
        assert up.wait() == 0, up.stderr
        assert gone(descendants)


def test_a_killed_launcher_takes_everything_with_it(settings: dict[str, Any]) -> None:
    with running(settings) as up:
        up.wait_ready()
        descendants = up.descendants()
        up.process.kill()
        wait_for(lambda: gone(descendants), "every descendant has ended")


def test_a_running_stream_ends_before_up_does(settings: dict[str, Any]) -> None:
    """O-OPS-3"""
    with running(settings) as up, Client(up.wait_ready()["address"], timeout_s=60) as client:
        with client.stream("Once", max_tokens=200, temperature=0, ignore_eos=True) as stream:
            next(stream)
            up.process.send_signal(signal.SIGTERM)
            assert len(stream.result().token_ids) == 200
        assert up.wait() == 0, up.stderr


def test_a_second_signal_does_not_wait_for_running_streams(settings: dict[str, Any]) -> None:
    """O-OPS-3: with two workers of each kind."""
    several = {"local.prefill_workers": 2, "local.decode_workers": 2, "kv.num_blocks": 256}
    # No other router could go on with the stream, so the client need not look for one for long.
    policy = RetryPolicy(resume_s=0.5)
    with running(settings | several) as up, Client(up.wait_ready()["address"], timeout_s=60, retry=policy) as client:
        assert len(client.status().workers) == 4
        descendants = up.descendants()
        with client.stream("Once", max_tokens=1900, temperature=0, ignore_eos=True) as stream:
            next(stream)
            up.process.send_signal(signal.SIGINT)
            wait_for(lambda: "stopping: running requests may finish" in up.stderr, "the first signal is noticed")
            up.process.send_signal(signal.SIGINT)
            with pytest.raises(PdServeError):
                stream.result()
        assert up.wait() == 0, up.stderr
        assert gone(descendants)


def test_a_worker_that_is_killed_comes_back(settings: dict[str, Any]) -> None:
    with running(settings) as up, Client(up.wait_ready()["address"], timeout_s=60) as client:
        first = {w.info.worker_id: w.info.incarnation for w in client.status().workers}
        (decode,) = (p for p in up.descendants() if "decode" in p.cmdline())
        decode.kill()

        def back() -> bool:
            return any(
                w.info.worker_id == "decode-0" and w.state == "ready" and w.info.incarnation != first["decode-0"]
                for w in client.status().workers
            )

        wait_for(back, "decode-0 is ready again", READY_TIMEOUT_S)
        assert client.generate("Once", max_tokens=4, ignore_eos=True).placement.decode_worker == "decode-0"
        up.process.send_signal(signal.SIGTERM)
        assert up.wait() == 0, up.stderr
        # Away from a terminal every line is JSON, the launcher's own as well.
        entries = [json.loads(line) for line in up.stderr.splitlines()]
        (told,) = (e["msg"] for e in entries if "decode-0 was killed by SIGKILL" in e["msg"])
        # Of what decode-0 has written, which is there already, only the end is repeated.
        assert len(told.splitlines()) <= 5


def test_a_changed_file_is_applied_one_process_at_a_time_and_a_bad_one_is_taken_back(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Nobody who is served meanwhile notices any of it."""
    file = tmp_path / "deployment.yaml"
    file.write_text("decode: {max_batch_size: 7}")
    failures: list[str] = []
    over = threading.Event()
    with running(settings, f"--config={file}") as up, socket.create_server(("127.0.0.1", 0)) as taken:
        report = up.wait_ready()

        def pids() -> dict[str, int]:
            return {
                role: p.pid for p in up.descendants() for role in ("router", "prefill", "decode") if role in p.cmdline()
            }

        def apply(text: str, until: str) -> str:
            """What was said of it."""
            before = len(up.stderr)
            file.write_text(text)
            up.process.send_signal(signal.SIGUSR1)
            wait_for(lambda: until in up.stderr[before:] or up.process.poll() is not None, until, READY_TIMEOUT_S)
            assert until in up.stderr[before:]
            return up.stderr[before:]

        def load() -> None:
            with Client(report["address"], timeout_s=60) as client:
                while not over.is_set():
                    try:
                        client.generate("Once", max_tokens=4, ignore_eos=True)
                    except PdServeError as error:
                        failures.append(error.message)
                        return

        thread = threading.Thread(target=load)
        thread.start()
        try:
            first = pids()
            assert "nothing to do" in apply("decode: {max_batch_size: 7}", "as the configuration says")
            said = apply("decode: {max_batch_size: 9}", "every process has the new configuration")
            assert "decode-0 differs in decode.max_batch_size" in said
            second = pids()
            assert {role for role in first if first[role] != second[role]} == {"decode"}
            for text, what in (
                ("decode: {max_batch_sise: 9}", "decode.max_batch_sise"),
                ("cluster: other", "cluster"),
                ("local: {decode_workers: 2}", "decode=1 to prefill=1, decode=2"),
                # A worker that is alone has its id as its name, without a number.
                ("decode: {worker_id: decode}", "decode-0 would be called decode"),
            ):
                assert "nothing is changed: " in apply(text, what)
            assert pids() == second
            # Found only by the process itself. It gets back what it had.
            apply(f"decode: {{metrics_listen: '127.0.0.1:{taken.getsockname()[1]}'}}", "gets its old settings back")
            wait_for(lambda: "decode" in pids(), "it is started again", READY_TIMEOUT_S)
            said = apply("decode: {max_batch_size: 9}", "as the configuration says")
            with Client(report["address"], timeout_s=60) as client:
                assert client.generate("Once", max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
        finally:
            over.set()
            thread.join()
        assert failures == []
        up.process.send_signal(signal.SIGTERM)
        assert up.wait() == 0, up.stderr


def test_a_redis_that_is_killed_comes_back_and_serving_goes_on(settings: dict[str, Any]) -> None:
    with running(settings) as up, Client(up.wait_ready()["address"], timeout_s=60) as client:
        (redis,) = (p for p in up.descendants() if "pdserve" not in p.cmdline())
        redis.kill()
        assert client.generate("Once", max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
        wait_for(lambda: "redis server has ended, starting it again" in up.stderr, "redis is started again")
        wait_for(lambda: client.status().store_available, "the router has redis again")
        assert client.generate("Once", max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
        up.process.send_signal(signal.SIGTERM)
        assert up.wait() == 0, up.stderr


def test_a_taken_port_is_named(settings: dict[str, Any]) -> None:
    """O-OPS-4"""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = failure(settings | {"router.listen": f"127.0.0.1:{port}"})
        assert "router.listen" in message
        assert str(port) in message
        message = failure(settings | {"decode.listen": f"127.0.0.1:{port}"})
        assert "decode.listen" in message
        assert str(port) in message


def test_a_model_that_is_not_there_is_named(settings: dict[str, Any]) -> None:
    assert "/nowhere/model.gguf" in failure(settings | {"model.path": "/nowhere/model.gguf"})


def test_a_redis_that_does_not_answer_is_named(settings: dict[str, Any]) -> None:
    message = failure(settings | {"store.url": "redis://:hunter2@127.0.0.1:1/0"})
    assert "127.0.0.1:1" in message
    assert "hunter2" not in message


def test_an_unknown_setting_is_named(settings: dict[str, Any]) -> None:
    assert "router.lissen: unknown key, did you mean 'listen'?" in failure(settings | {"router.lissen": "a:1"})


@pytest.mark.parametrize("command", ["router", "prefill", "decode"])
def test_one_process_alone_fails_with_exit_code_2_without_redis(settings: dict[str, Any], command: str) -> None:
    values = settings | {"store.url": "redis://127.0.0.1:1/0"}
    done = subprocess.run(
        [sys.executable, "-m", "pdserve", command, *(f"--set={k}={v}" for k, v in values.items())],
        capture_output=True,
        text=True,
        timeout=READY_TIMEOUT_S,
    )
    assert done.returncode == 2, done.stderr
    assert "error: " in done.stderr
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cluster_in_python_starts_stops_and_holds_nothing(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """O-OPS-1: the environment is one that Kubernetes has filled, with a setting that must not reach the processes."""
    monkeypatch.setenv("PDSERVE__MODEL__PATH", "/nowhere/model.gguf")
    for name in ("REDIS_PORT", "ROUTER_PORT", "PREFILL_PORT", "DECODE_PORT", "GRPC_PORT", "PDSERVE_PORT"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:6379")
    others = set(psutil.Process().children(recursive=True))
    with LocalCluster(config) as cluster:
        descendants = [p for p in psutil.Process().children(recursive=True) if p not in others]
        with Client(cluster.address, timeout_s=30) as client:
            result = client.generate("Once upon a time", max_tokens=8, temperature=0, ignore_eos=True)
            assert result.usage.completion_tokens == 8
            assert sum(result.timings.phases_ms.values()) == pytest.approx(result.timings.e2e_ms, abs=0.01)
            assert blocks_in_use(client, num_generated_tokens=8, timeout_s=10) == 0
        assert cluster.stop_processes() == []
        assert num_keys_without_ttl(cluster.redis_url, config.cluster, timeout_s=5) == 0
    assert gone(descendants)


def test_a_cluster_in_python_can_lose_a_process(config: Config) -> None:
    with LocalCluster(config) as cluster, Client(cluster.address, timeout_s=30) as client:
        cluster.kill("decode-0")
        assert cluster.process("decode-0").exit_code == -signal.SIGKILL
        wait_for(
            lambda: all(w.state != "ready" for w in client.status().workers if w.info.worker_id == "decode-0"),
            "the router has noticed",
        )


def test_a_cluster_that_cannot_start_leaves_nothing(config: Config) -> None:
    wrong = config.model_copy(update={"model": config.model.model_copy(update={"path": "/nowhere/model.gguf"})})
    others = set(psutil.Process().children(recursive=True))
    with pytest.raises(StartError, match=r"ended with exit code 2: .*/nowhere/model\.gguf"):
        LocalCluster(wrong).start()
    assert gone([p for p in psutil.Process().children(recursive=True) if p not in others])
