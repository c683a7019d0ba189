"""The histogram that is counted by hand says what prometheus_client's own would."""

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from stoker.runtime.gateway.metrics import TOKEN_SECONDS, Metrics


def samples(text: bytes) -> dict[str, float]:
    lines = [line for line in text.decode().splitlines() if line.startswith("stoker_itl_seconds_")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if "_created" not in name}


def test_token_intervals_are_counted_as_prometheus_counts() -> None:
    registry = CollectorRegistry()
    reference = Histogram("stoker_itl_seconds", "x", ["function"], registry=registry, buckets=TOKEN_SECONDS)
    metrics, chance = Metrics(), random.Random(1)
    values = [*TOKEN_SECONDS, 0.0, 99.0, *(chance.expovariate(50) for _ in range(500))]
    for value in values:
        for function in ("f", "g"):
            reference.labels(function).observe(value)
            metrics.intervals(function).observe(value)
    assert samples(metrics.render(None)) == samples(generate_latest(registry))
