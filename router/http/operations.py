"""Every endpoint once, with what the OpenAPI document says of it: routes and document are made from the same list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from router.http import responses
from router.http.fields import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_BODY: Final = (400, 404, 408, 413, 415)
_RESULT: Final = (429, 499, 500, 503, 504)
_WORK: Final = (*_BODY, 409, 421, *_RESULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    name: str
    """Unique: the operation's id."""
    method: str
    path: str
    summary: str
    body: type[Body] | None = None
    answer: type[BaseModel] | None = None
    """None: empty, or not JSON."""
    streams: bool = False
    """Whether the answer may be server-sent events."""
    errors: tuple[int, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    """Names and meanings of headers that a client may send."""
    tag: str = "server"

    @property
    def parameter(self) -> str | None:
        """The part of the path in braces."""
        _, brace, rest = self.path.partition("{")
        return rest.partition("}")[0].partition(":")[0] if brace else None


OPERATIONS: Final = (
    Operation(
        name="chat", method="POST", path="/v1/chat/completions", tag="generate",
        summary="Answer a chat.",
        body=ChatBody, answer=responses.ChatCompletion, streams=True, errors=_WORK,
    ),
    Operation(
        name="completion", method="POST", path="/v1/completions", tag="generate",
        summary="Continue one or several prompts, texts or token ids.",
        body=CompletionBody, answer=responses.Completion, streams=True, errors=_WORK,
    ),
    Operation(
        name="request_info", method="GET", path="/v1/requests/{request_id}", tag="requests",
        summary="State of a request that runs or ended recently.",
        answer=responses.RequestInfo, errors=(400, 404, 503),
    ),
    Operation(
        name="request_events", method="GET", path="/v1/requests/{request_id}/events", tag="requests",
        summary="Events of a request as server-sent events, from the one after the header Last-Event-ID on.",
        streams=True, errors=(*_RESULT, 400, 404, 421),
        headers=(("Last-Event-ID", "The last event that the client has got. Default: none, so all are sent."),),
    ),
    Operation(
        name="request_timeline", method="GET", path="/v1/requests/{request_id}/timeline", tag="requests",
        summary="Where the time of a request went, or goes: phases that sum to the whole, and what happened when.",
        answer=responses.RequestTimeline, errors=(400, 404),
    ),
    Operation(
        name="cancel_request", method="DELETE", path="/v1/requests/{request_id}", tag="requests",
        summary="Cancel a request of this router.",
        answer=responses.Cancelled, errors=(400, 404, 503),
    ),
    Operation(
        name="models", method="GET", path="/v1/models", tag="models",
        summary="The models that are served.", answer=responses.Models,
    ),
    Operation(
        name="model", method="GET", path="/v1/models/{model_id:path}", tag="models",
        summary="One model.", answer=responses.Model, errors=(404,),
    ),
    Operation(
        name="tokenize", method="POST", path="/tokenize", tag="tokenizer",
        summary="Token ids of a text or a chat.", body=TokenizeBody, answer=responses.Tokens, errors=_BODY,
    ),
    Operation(
        name="detokenize", method="POST", path="/detokenize", tag="tokenizer",
        summary="Text of token ids.", body=DetokenizeBody, answer=responses.Detokenized, errors=_BODY,
    ),
    Operation(
        name="tokenizer_info", method="GET", path="/tokenizer_info", tag="tokenizer",
        summary="Special tokens and chat template.", answer=responses.TokenizerInfo,
    ),
    Operation(
        name="health", method="GET", path="/health",
        summary="200 while new requests find workers, 503 otherwise. The body is empty.",
    ),
    Operation(
        name="version", method="GET", path="/version", summary="Version of pdserve.", answer=responses.Version,
    ),
    Operation(
        name="flight", method="GET", path="/debug/flight", answer=responses.ChromeTraceFile,
        summary="The latest outputs of this router as a Chrome trace, for ui.perfetto.dev.",
    ),
    Operation(name="metrics", method="GET", path="/metrics", summary="Metrics in the text format of Prometheus."),
    Operation(name="openapi", method="GET", path="/openapi.json", summary="This document."),
    Operation(name="docs", method="GET", path="/docs", summary="This document for people."),
    Operation(name="dashboard", method="GET", path="/dashboard", tag="dashboard", summary="The live page."),
    Operation(
        name="dashboard_asset", method="GET", path="/dashboard/assets/{asset}", tag="dashboard",
        summary="A file that the page is made of.", errors=(404,),
    ),
    Operation(
        name="dashboard_settings", method="GET", path="/dashboard/settings", tag="dashboard",
        summary="What the page has to know before it is drawn.", answer=responses.PageSettings,
    ),
    Operation(
        name="dashboard_state", method="GET", path="/dashboard/state", tag="dashboard",
        summary="Workers, outputs in progress, and what has happened lately.", answer=responses.ClusterState,
    ),
    Operation(
        name="dashboard_events", method="GET", path="/dashboard/events", tag="dashboard",
        summary="The same as server-sent events, twice a second; only the first one has a history.", streams=True,
    ),
    Operation(
        name="dashboard_request", method="GET", path="/dashboard/requests/{request_id}", tag="dashboard",
        summary="Where a request is, and where its time went; also of one that is not known.",
        answer=responses.PageRequest, errors=(400, 503),
    ),
    Operation(
        name="kill_worker", method="DELETE", path="/dashboard/workers/{worker_id}", tag="dashboard",
        summary="SIGKILL a worker, where local.demo_controls is on.", answer=responses.Killed, errors=(404, 503),
    ),
)  # fmt: skip
