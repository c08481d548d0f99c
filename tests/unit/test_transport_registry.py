"""Transports by name: one that is unknown, or whose package is missing, is refused with the setting to change."""

from __future__ import annotations

import pytest

from kv_transfer.transports import TRANSPORTS, Registry, select
from pdserve.errors import ConfigError


def test_a_transport_whose_package_is_missing_is_known_but_cannot_be_had() -> None:
    registry = Registry({"far": ("no_such_package_of_transports", "FAR")})
    assert "far" in registry and list(registry) == ["far"]
    with pytest.raises(ConfigError, match="'far' needs a package that is not installed") as caught:
        select(["far"], registry)
    assert caught.value.field == "transfer.transports"


@pytest.mark.parametrize("names", [[], ["pigeon"], ["tcp", "pigeon"]])
def test_names_that_mean_nothing_are_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="expected some of"):
        select(names, TRANSPORTS)


def test_transports_come_in_the_order_asked_for() -> None:
    assert [kind.name for kind in select(["grpc", "tcp"], TRANSPORTS).values()] == ["grpc", "tcp"]
