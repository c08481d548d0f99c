"""Ids of server-sent events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequestError
from router.http.event_ids import Place, event_id, parse_event_id

places = st.builds(Place, st.just(True), st.integers(0, 10**8), st.integers(0, 3)) | st.builds(Place)


@given(st.lists(places, min_size=1, max_size=5))
def test_an_id_means_what_it_was_made_of(made_of: list[Place]) -> None:
    assert parse_event_id(event_id(made_of), len(made_of)) == made_of


def test_ids_look_as_documented() -> None:
    assert event_id([Place(True, 12)]) == "12"
    assert event_id([Place(True, 3), Place(), Place(True, 5, 1)]) == "3,,5.1"
    assert parse_event_id("", 3) == [Place(), Place(), Place()]


@pytest.mark.parametrize("text", ["x", "1,2", "-1", "1.", ".1", "1.2.3", "1e3", " 1", "9" * 10, "end", "１"])
def test_what_is_no_id_of_the_stream_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse_event_id(text, 1)
    assert raised.value.field == "Last-Event-ID"
