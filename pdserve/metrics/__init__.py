"""Numbers about a process, for Prometheus: what there is (tables), what it is now (values), and how it is read."""

from pdserve.metrics.exposition import CONTENT_TYPE, Exposition
from pdserve.metrics.values import Distribution, Values

__all__ = ["CONTENT_TYPE", "Distribution", "Exposition", "Values"]
