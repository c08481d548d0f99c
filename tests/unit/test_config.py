"""Configuration: where values come from, and what is said about wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml

from pdserve.config import Config, config_schema, load_config
from pdserve.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[2] / "deploy" / "configs").glob("*.yaml"))


def load(tmp_path: Path, text: str, **arguments: Any) -> Config:
    path = tmp_path / "pdserve.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, environ=arguments.pop("environ", {}), **arguments)


def test_without_a_file_every_setting_has_a_default() -> None:
    config = load_config(environ={})
    assert config.router.listen == "127.0.0.1:50051"
    assert config.store.url == "embedded"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_the_example_configurations_load(path: Path) -> None:
    load_config(path, environ={})


def test_there_is_an_example_for_each_kind_of_process() -> None:
    assert {p.stem for p in EXAMPLES} >= {"local", "router", "prefill", "decode"}


def example(name: str) -> Config:
    (path,) = (p for p in EXAMPLES if p.stem == name)
    return load_config(path, environ={})


@pytest.mark.parametrize("kind", ["", "-cuda"])
def test_the_workers_of_the_examples_could_exchange_kv(kind: str) -> None:
    prefill, decode = example(f"prefill{kind}"), example(f"decode{kind}")
    assert (prefill.engine, prefill.kv.block_size, prefill.model) == (decode.engine, decode.kv.block_size, decode.model)
    assert (prefill.cluster, prefill.store) == (decode.cluster, decode.store)


def test_the_examples_without_a_gpu_make_a_deployment_of_one_machine() -> None:
    router, prefill, decode = (example(name) for name in ("router", "prefill", "decode"))
    assert router.model == prefill.model == decode.model
    assert router.cluster == prefill.cluster == decode.cluster
    assert router.store == prefill.store == decode.store
    assert router.store.url.startswith("redis://127.0.0.1")
    assert (prefill.engine.device, decode.engine.device) == ("cpu", "cpu")
    assert {c.listen.split(":")[0] for c in (router.router, prefill.prefill, decode.decode)} == {"127.0.0.1"}


def test_the_cuda_examples_ask_for_cuda() -> None:
    assert {example(f"{role}-cuda").engine.device for role in ("prefill", "decode")} == {"cuda"}


def test_file_then_environment_then_overrides(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "router: {max_attempts: 5, max_stop_strings: 1}\nprefill: {max_waiting: 9}",
        environ={"PDSERVE__ROUTER__MAX_ATTEMPTS": "6", "PDSERVE__PREFILL__MAX_WAITING": "10"},
        overrides={"prefill.max_waiting": 11},
    )
    assert (config.router.max_stop_strings, config.router.max_attempts, config.prefill.max_waiting) == (1, 6, 11)


def test_environment_values_are_typed(tmp_path: Path) -> None:
    config = load_config(
        environ={
            "PDSERVE__ROUTER__LISTEN": "[::1]:7000",
            "PDSERVE__STORE__LEASE_TTL_S": "2.5",
            "PDSERVE__TRANSFER__TRANSPORTS": "[grpc]",
            "PDSERVE__KV__NUM_BLOCKS": "null",
        }
    )
    assert config.router.listen == "[::1]:7000"
    assert config.store.lease_ttl_s == 2.5
    assert config.transfer.transports == ("grpc",)
    assert config.kv.num_blocks is None


KUBERNETES_SERVICE = {
    f"{prefix}{name}": value
    for prefix in ("PDSERVE_", "PDSERVE_ROUTER_", "ROUTER_", "PREFILL_", "DECODE_", "GRPC_", "REDIS_", "PDSERVE_STORE_")
    for name, value in {
        "PORT": "tcp://10.0.0.1:6379",
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "6379",
        "PORT_6379_TCP": "tcp://10.0.0.1:6379",
        "PORT_6379_TCP_PROTO": "tcp",
    }.items()
}


def test_variables_that_kubernetes_sets_for_services_are_not_settings() -> None:
    """O-OPS-1"""
    assert load_config(environ=KUBERNETES_SERVICE) == load_config(environ={})


def test_a_wrong_variable_is_named(tmp_path: Path) -> None:
    """O-OPS-1"""
    with pytest.raises(ConfigError, match=r"router\.listen: .*PDSERVE__ROUTER__LISTEN"):
        load_config(environ={"PDSERVE__ROUTER__LISTEN": "tcp://10.0.0.1:6379"})


def test_every_problem_is_reported_at_once_with_its_path(tmp_path: Path) -> None:
    text = """
    kv: {blocksize: 16, pool_bytes: 12 apples}
    engine: {dtype: int4}
    health: {heartbeat_s: 3, peer_timeout_s: 4}
    decode: {max_batch_size: 0}
    modle: {}
    """
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = caught.value.message
    assert "pdserve.yaml: 6 problem(s)" in message
    assert "kv.blocksize: unknown key, did you mean 'block_size'?" in message
    assert "modle: unknown key, did you mean 'model'?" in message
    for path in ("kv.pool_bytes", "engine.dtype", "decode.max_batch_size", "health: peer_timeout_s (4)"):
        assert f"\n  {path}" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must hold a mapping of sections, got list"),
        ("router: [1, 2", "is not valid YAML"),
        ("router: 5", "router"),
        ("router: {listen: localhost}", r"router\.listen: must be host:port"),
        ("router: {listen: 'localhost:70000'}", "port must be at most 65535"),
        ("cluster: 'a b'", "cluster"),
        ("store: {timeout_s: .nan}", r"store\.timeout_s"),
        ("store: {timeout_s: 0}", r"store\.timeout_s"),
        ("prefill: {max_waiting: many}", r"prefill\.max_waiting"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        load_config(tmp_path / "absent.yaml", environ={})


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == load_config(environ={})


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("2GB", 2_000_000_000), ("8KiB", 8192), ("7 B", 7)],
)
def test_sizes_may_have_units(tmp_path: Path, text: str, number: int) -> None:
    assert load(tmp_path, f"kv: {{pool_bytes: {text}}}").kv.pool_bytes == number


def test_a_configuration_cannot_be_changed() -> None:
    config = load_config(environ={})
    with pytest.raises(pydantic.ValidationError):
        config.cluster = "other"
    with pytest.raises(pydantic.ValidationError):
        config.router.listen = "other:1"


def test_what_was_loaded_can_be_written_down_and_loaded_again(tmp_path: Path) -> None:
    """The launcher hands each process its configuration in this way."""
    config = load(tmp_path, "kv: {pool_bytes: 1MiB}\nrouter: {listen: '[::1]:7000'}")
    assert load(tmp_path, yaml.safe_dump(config.model_dump(mode="json"))) == config


def described(schema: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    for name, part in {"Config": schema, **schema["$defs"]}.items():
        yield name, part.get("description")
        for key, field in part.get("properties", {}).items():
            target = schema["$defs"].get(field.get("$ref", "").rpartition("/")[2], {})
            yield f"{name}.{key}", field.get("description") or target.get("description")


def test_every_field_is_documented() -> None:
    fields = dict(described(config_schema()))
    assert len(fields) > 40
    assert [name for name, text in fields.items() if not text] == []
