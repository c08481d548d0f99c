"""What the figures mean. Printed with every table and report, because no two tools mean the same by these names."""

from __future__ import annotations

from typing import Final

DEFINITIONS: Final[dict[str, str]] = {
    "clock": "the client's monotonic clock, at its edge: when it asks and when a message has been read",
    "TTFT": "from when the request was due (open loop) or sent (closed loop) until its first token has come",
    "ITL": "time between one output token and the next of the same request; tokens of one message have 0 between them",
    "TPOT": "(last token - first token) / (output tokens - 1), one value a request; none with a single token",
    "e2e": "from when the request was due (open loop) or sent (closed loop) until its answer has ended",
    "late": "how long after it was due the client sent a request; part of TTFT and e2e, so that a slow server does not "
    "hide delays by slowing the client down (coordinated omission)",
    "percentiles": "over all requests (ITL: all gaps of all requests) that succeeded, warm-up left out; interpolated "
    "linearly",
    "throughput": "output tokens that came, by the time from when the first measured request was due to the last's end",
    "goodput": "requests per second that met the TTFT and the TPOT bound both; failed requests met nothing and count",
    "attainment": "share of all measured requests, failed ones included, that met a bound: each by itself, and both",
    "cache hits": "share of prompt tokens that the server says it took from a prefix cache",
    "phases": "durations by the server's clock; `late` before and `outside` (network, client) after make up e2e",
    "error": "a request that was refused, broke, was too short, or had not ended when the drain time was over",
}
