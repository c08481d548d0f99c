"""What all requests of a router share."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config.schema import RouterSection
from pdserve.store.journal import RequestJournal
from pdserve.telemetry.tracing import Tracing
from pdserve.tokenizer import Tokenizer
from router.admission import Admission
from router.history import History
from router.index import PrefixLocations
from router.metrics import RouterMetrics
from router.retry_budget import RetryBudget
from router.worker_pool import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestServices:
    """Made once, by whoever owns the requests."""

    router_id: str
    model: str
    """Name of the model that is served."""
    vocab_size: int
    """Ids of tokens are below it."""
    config: RouterSection
    pool: WorkerPool
    journal: RequestJournal
    tokenizer: Tokenizer
    prefixes: PrefixLocations
    admission: Admission
    metrics: RouterMetrics
    history: History
    retry_budget: RetryBudget
    tracing: Tracing | None = None
    """None: nothing is traced."""
