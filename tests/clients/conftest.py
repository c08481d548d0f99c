"""Third-party clients against a server of our own. Each runs in an environment of its own, as a program of `drivers/`
that gets the server's base URL and prints what it has received as one JSON object."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.testing.client_environments import ClientEnvironments
from pdserve.testing.process_cluster import ProcessCluster
from pdserve.testing.tiny_models import TinyOptions, make_tiny_kv
from pdserve.testing.tiny_tokenizers import CHAT_TEMPLATE

HERE = Path(__file__).parent
TIMEOUT_S = 300.0
"""For a program that imports torch on a machine that does other things as well."""

OFFLINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OMP_NUM_THREADS": "1",
    "OPENAI_API_KEY": "unused",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture(scope="session", autouse=True)
def _selected(pytestconfig: pytest.Config) -> None:
    if pytestconfig.option.markexpr != "clients":
        pytest.skip("needs the environments that `make test-clients` makes")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY-KV, whose directory also has what clients want of a tokenizer."""
    options = TinyOptions(add_bos=True, chat_template=CHAT_TEMPLATE)
    return make_tiny_kv(tmp_path_factory.mktemp("model") / "tiny-kv", options=options)


@dataclass(frozen=True)
class Server:
    """What a client is told."""

    url: str
    """Without a path."""
    model: str
    directory: Path
    cluster: ProcessCluster


@pytest.fixture(scope="session")
def cluster(model: Path) -> Iterator[ProcessCluster]:
    """Router, prefill and decode worker as `pdserve up` starts them; the engine computes in float32."""
    with ProcessCluster(model, kv__num_blocks=1024, router__vllm_grpc=True) as cluster:
        yield cluster


@pytest.fixture
def server(cluster: ProcessCluster, model: Path) -> Iterator[Server]:
    """Quiet after the test, with the processes it was started with."""
    address = cluster.local.http_address
    assert address is not None
    yield Server(f"http://{address}", model.name, model, cluster)
    cluster.assert_quiet()
    cluster.assert_alive()


class Client:
    """Programs in one environment."""

    def __init__(self, python: Path, directory: Path) -> None:
        self._python = python
        self.directory = directory
        """Where they run."""

    def script(self, name: str) -> Path:
        """A command that the environment has."""
        return self._python.parent / name

    @contextlib.contextmanager
    def serve(self, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
        """A program that runs until the context is left. What it says is in `log` in `directory`."""
        with (self.directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [self._python, "-P", *command],
                cwd=self.directory,
                env=os.environ | OFFLINE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def run(self, *command: str | Path, **environment: str) -> str:
        """Standard output of a Python program. Raises AssertionError with all it said if it fails.

        An environment variable that is empty is one that is not set.
        """
        done = subprocess.run(
            # -P: drivers must not be found in place of the packages they are named after.
            [self._python, "-P", *command],
            cwd=self.directory,
            env={name: value for name, value in (os.environ | OFFLINE | environment).items() if value},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-10_000:]}\n{done.stderr[-10_000:]}"
        return done.stdout

    def drive(self, name: str, server: Server, *arguments: str | Path) -> dict[str, Any]:
        """What `drivers/NAME.py` has received: the JSON object on its last line."""
        output = self.run(HERE / "drivers" / f"{name}.py", f"{server.url}/v1", server.model, *arguments)
        result: dict[str, Any] = json.loads(output.strip().rpartition("\n")[2])
        return result


@pytest.fixture
def client_of(tmp_path: Path) -> Callable[[str], Client]:
    """By the name of its file of requirements."""
    environments = ClientEnvironments(HERE / "requirements")

    def client(name: str) -> Client:
        python = environments.python(name)
        assert python is not None, f"there is no environment {environments.directory(name)}; run `make test-clients`"
        return Client(python, tmp_path)

    return client
