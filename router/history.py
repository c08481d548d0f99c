"""The latest outputs that have ended: where timelines are looked up, and half of what a flight recorder dumps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from pdserve.telemetry.tracing import Tracing
from router.spans import spans_of
from router.story import Story


class History:
    """Bounded, in memory. The newest replaces the oldest."""

    def __init__(self, max_number: int, model: str, tracing: Tracing | None = None) -> None:
        """`model` is the name that clients know. `tracing`: where stories go as spans; None: nowhere."""
        self._max_number = max_number
        self._model = model
        self._tracing = tracing
        self._stories: OrderedDict[str, Story] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stories)

    def __iter__(self) -> Iterator[Story]:
        """The oldest first."""
        return iter(tuple(self._stories.values()))

    def add(self, story: Story) -> None:
        """An output has ended."""
        if self._tracing is not None and story.span is not None:
            for span in spans_of(story, self._model):
                self._tracing.sink.export(span)
        self._stories.pop(story.request_id, None)
        if self._max_number:
            self._stories[story.request_id] = story
        if len(self._stories) > self._max_number:
            self._stories.popitem(last=False)

    def find(self, name: str) -> Story | None:
        """The output of that name, if it is still remembered."""
        return self._stories.get(name)
