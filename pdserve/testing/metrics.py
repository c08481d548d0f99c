"""What a process tells Prometheus, read by Prometheus's own parser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from pdserve.metrics.definitions import Kind, Metric

Series = tuple[str, frozenset[tuple[str, str]]]


class Scrape:
    """All samples of one process at one moment."""

    def __init__(self, text: str) -> None:
        """`text` is in the format of Prometheus. Raises ValueError if it is not."""
        self.text = text
        self.types: dict[str, str] = {}
        """By name of the metric, `_total` included."""
        self._samples: dict[Series, float] = {}
        for family in text_string_to_metric_families(text):
            suffix = "_total" if family.type == "counter" else ""
            self.types[family.name + suffix] = family.type
            for sample in family.samples:
                series = (sample.name, frozenset(sample.labels.items()))
                if series in self._samples:
                    raise ValueError(f"{sample.name} has two samples with labels {sample.labels}")
                self._samples[series] = sample.value

    @classmethod
    async def of(cls, address: str) -> Scrape:
        """GET /metrics at host:port."""
        async with httpx2.AsyncClient(verify=False) as client:
            answer = await client.get(f"http://{address}/metrics", timeout=20.0)
        answer.raise_for_status()
        return cls(answer.text)

    def __len__(self) -> int:
        """Samples."""
        return len(self._samples)

    def value(self, name: str, **labels: str) -> float:
        """Of one sample; 0 if it is not there. Labels that are not given may be anything, and are summed over. Raises
        ValueError if there is no such metric at all."""
        if name not in self.types and name.rpartition("_")[0] not in self.types:
            raise ValueError(f"no metric is called {name}")
        wanted = set(labels.items())
        return sum(value for (sample, having), value in self._samples.items() if sample == name and wanted <= having)

    def of_metric(self, metric: Metric) -> Mapping[Series, float]:
        """All samples of a metric."""
        ends = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        names = {metric.name + end for end in ends}
        return {series: value for series, value in self._samples.items() if series[0] in names}

    def still(self, before: Scrape, metrics: Iterable[Metric]) -> set[str]:
        """Names of those of `metrics` of which nothing has changed since `before`."""
        return {metric.name for metric in metrics if self.of_metric(metric) == before.of_metric(metric)}
