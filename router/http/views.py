"""How the outputs of a generation are shown, for clients that come back for them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from router.core import RouterCore
from router.generation import Generation
from router.http.answers import AnswerShape
from router.http.events import EventStream, MakeChunks
from router.http.plans import FieldNames, Plan


class Endpoint(Protocol):
    """What tells the endpoints that generate apart."""

    kind: str
    """Name of what they are asked for, see Source."""

    def plan(self, value: Mapping[str, Any], core: RouterCore) -> Plan:
        """Check a body. Raises PdServeError."""

    def shape(self, core: RouterCore, plan: Plan) -> AnswerShape:
        """For an answer in one piece."""

    def chunks(self, core: RouterCore, plan: Plan) -> MakeChunks:
        """For a stream."""


@dataclass(frozen=True, slots=True)
class View:
    """What one body has asked for."""

    plan: Plan
    endpoint: Endpoint


class Views:
    """Those of all generations that are known, as long as they are."""

    def __init__(self, core: RouterCore, default: Endpoint) -> None:
        """`default` shows requests that were not made over HTTP."""
        self._core = core
        self._default = default
        self._views: weakref.WeakKeyDictionary[Generation, View] = weakref.WeakKeyDictionary()

    def note(self, generation: Generation, view: View) -> None:
        """The first one that was asked for counts."""
        self._views.setdefault(generation, view)

    def stream(self, generation: Generation, *, numbered: bool) -> EventStream:
        """A stream of its events from the beginning, see EventStream. Once it has begun."""
        view = self._views.get(generation) or View(_default_plan(generation), self._default)
        core = self._core
        return EventStream(
            generation,
            view.plan,
            core.prompts.tokenizer,
            view.endpoint.chunks(core, view.plan),
            model=core.model.name,
            numbered=numbered,
        )


def _default_plan(generation: Generation) -> Plan:
    """With all that there is to be shown."""
    return Plan(
        request_id=generation.name,
        prompts=generation.ask.prompts,
        num_choices=generation.ask.num_outputs,
        names=FieldNames(prompt="prompt"),
        stream=True,
        include_usage=True,
        continuous_usage=False,
        token_ids=True,
    )
