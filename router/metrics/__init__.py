"""What a router tells Prometheus: events as they happen, and its state when it is asked."""

from router.metrics.events import RouterMetrics, TakeoverOutcome
from router.metrics.state import RouterState, StateReader

__all__ = ["RouterMetrics", "RouterState", "StateReader", "TakeoverOutcome"]
