"""Prometheus metrics of one gateway process."""

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from stoker.runtime.gateway.cluster_view import Snapshot
from stoker.runtime.gateway.waiting import Replica

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
HOST_STATES = ("pending", "ready", "interrupted", "retiring", "failed")
DEVICE_KINDS = ("busy", "charged", "wasted", "swap", "load", "idle", "lost")
REPLICA_STATES = ("starting", "loading", "ready", "draining", "failed")


class Metrics:
    _hosts: Sequence[Mapping[str, Any]] = ()

    def __init__(self) -> None:
        self.registry = made = CollectorRegistry()
        by_function = ["function"]
        self.ttft = Histogram(
            "stoker_ttft_seconds", "Request to first token (streams).", by_function, registry=made, buckets=SECONDS
        )
        self._answers: Tally[tuple[str, str, str]] = Tally()
        self._durations: defaultdict[str, Observed] = defaultdict(Observed)
        self._ends: Tally[tuple[str, str]] = Tally()
        self._queue_times: defaultdict[str, Observed] = defaultdict(Observed)
        self._tokens: Tally[tuple[str, str]] = Tally()
        self._intervals: defaultdict[str, Observed] = defaultdict(lambda: Observed(TOKEN_SECONDS))
        made.register(self)
        self.cold_wait = Histogram(
            "stoker_cold_start_wait_seconds", "Cold start seen by a job.", by_function, registry=made, buckets=SECONDS
        )
        self.webhooks = Counter("stoker_webhook_tries", "Tries to deliver webhooks.", ["status"], registry=made)
        self.depth = Gauge("stoker_queue_depth", "Jobs waiting.", by_function, registry=made)
        self.running = Gauge("stoker_running_jobs", "Jobs claimed.", by_function, registry=made)
        self.replicas = Gauge("stoker_replicas", "Replicas by state.", ["function", "state"], registry=made)
        by_pool = ["pool"]
        self.pool_hosts = Gauge("stoker_pool_hosts", "Hosts of a pool by state.", ["pool", "state"], registry=made)
        self.pool_desired = Gauge("stoker_pool_desired_hosts", "Hosts asked for.", by_pool, registry=made)
        self.pool_failures = Gauge("stoker_pool_failed_starts", "Host starts that failed.", by_pool, registry=made)
        self.cold_starts = Counter("stoker_cold_starts", "Replicas that became ready.", by_function, registry=made)
        self.cold_phases = Histogram(
            "stoker_cold_start_phase_seconds", "Phases of starts", ["function", "phase"], registry=made, buckets=SECONDS
        )
        self.weights = Counter(
            "stoker_weights_bytes", "Weights fetched by source.", ["function", "source"], registry=made
        )
        self.fetch_retries = Counter("stoker_weights_retries", "Repeated reads.", by_function, registry=made)
        self._seen: set[str] = set()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self._answers[method, route, str(status)] += 1
        self._durations[route].observe(seconds)

    def webhook_tried(self, status: str) -> None:
        self.webhooks.labels(status).inc()

    def job_ended(self, function: str, state: str, usage: Mapping[str, Any]) -> None:
        self._ends[function, state] += 1
        if usage.get("queue_ms") is not None:
            self._queue_times[function].observe(usage["queue_ms"] / 1000)
        if usage.get("cold_start_ms"):
            self.cold_wait.labels(function).observe(usage["cold_start_ms"] / 1000)
        for kind in ("prompt", "completion", "cached"):
            if usage.get(f"{kind}_tokens"):
                self._tokens[function, kind] += usage[f"{kind}_tokens"]

    def intervals(self, function: str) -> "Observed":
        return self._intervals[function]

    def collect(self) -> Iterator[Metric]:
        """What every request or token counts, which prometheus_client would make dear."""
        yield counted("stoker_http_requests", "Answers sent.", ("method", "route", "status"), self._answers)
        yield counted("stoker_jobs_ended", "Jobs that ended here.", ("function", "state"), self._ends)
        yield counted("stoker_tokens", "Tokens of finished jobs.", ("function", "kind"), self._tokens)
        yield timed("stoker_http_request_seconds", "Request to end of answer.", "route", self._durations)
        yield timed("stoker_queue_seconds", "Enqueued to claimed.", "function", self._queue_times)
        yield timed("stoker_itl_seconds", "Time between tokens (streams).", "function", self._intervals)
        yield device_seconds(self._hosts)

    def render(self, snapshot: Snapshot | None) -> bytes:
        """The text format; gauges of the cluster only when its state could be read."""
        for gauge in (self.depth, self.running, self.replicas, self.pool_hosts, self.pool_desired, self.pool_failures):
            gauge.clear()
        if snapshot is not None:
            self._observe(snapshot)
        return generate_latest(self.registry)

    def _observe(self, snapshot: Snapshot) -> None:
        self._hosts = snapshot.hosts
        for name, backlog in snapshot.backlogs.items():
            self.depth.labels(name).set(backlog.queued + backlog.delayed)
            self.running.labels(name).set(backlog.running)
        for row in snapshot.fleet.get("pools", ()):
            self._observe_pool(row)
        replicas = {id: replica for host in snapshot.hosts for id, replica in host["replicas"].items()}
        counts = Tally((replica["function"], replica["state"]) for replica in replicas.values())
        for function in snapshot.functions:
            for state in REPLICA_STATES:
                self.replicas.labels(function, state).set(counts[function, state])
        for id, replica in replicas.items():
            self._observe_start(id, replica)
        self._seen &= replicas.keys()

    def _observe_pool(self, row: Mapping[str, Any]) -> None:
        self.pool_desired.labels(row["pool"]).set(row["desired"])
        self.pool_failures.labels(row["pool"]).set(row["failures"])
        for state in HOST_STATES:
            self.pool_hosts.labels(row["pool"], state).set(row["states"].get(state, 0))

    def _observe_start(self, id: str, replica: Replica) -> None:
        """Each replica's start is counted once, however many scrapes see its report."""
        if id in self._seen or not replica.get("cold_start"):
            return
        self._seen.add(id)
        self.cold_starts.labels(replica["function"]).inc()
        for record in replica["cold_start"]["records"]:
            seconds = (record["end_ns"] - record["start_ns"]) / 1e9
            self.cold_phases.labels(replica["function"], record["name"]).observe(seconds)
            self.fetch_retries.labels(replica["function"]).inc(record.get("retries", 0))
            for source, facts in record.get("sources", {}).items():
                self.weights.labels(replica["function"], source).inc(facts["bytes"])


def device_seconds(hosts: Sequence[Mapping[str, Any]]) -> Metric:
    """Of the engine processes; busy + swap + load + idle + lost is the time in which there was one."""
    name, text = "stoker_device_seconds", "What devices of language models did: busy, swap, load, idle, lost."
    found = CounterMetricFamily(name, text, labels=["host", "device", "kind"])
    for host in hosts:
        for device, spent in host.get("device_time", {}).items():
            for kind in DEVICE_KINDS:
                found.add_metric([host["id"], device, kind], spent.get(kind, 0) / 1e6)
    return found


def counted(name: str, text: str, labels: Sequence[str], tally: Mapping[tuple[str, ...], float]) -> Metric:
    found = CounterMetricFamily(name, text, labels=labels)
    for values, count in tally.items():
        found.add_metric(values, count)
    return found


def timed(name: str, text: str, label: str, observed: Mapping[str, "Observed"]) -> Metric:
    found = HistogramMetricFamily(name, text, labels=[label])
    for value, times in observed.items():
        found.add_metric([value], times.cumulative(), times.sum_s)
    return found


class Observed:
    """A histogram that costs an observation next to nothing."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.sum_s = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))


class TokenClock:
    """Times the tokens of one stream as they pass."""

    def __init__(self, metrics: Metrics, function: str, started: float) -> None:
        self._ttft = metrics.ttft.labels(function)
        self._itl = metrics.intervals(function)
        self._last = started
        self._first = True

    def tick(self, tokens: int) -> None:
        """Called when `tokens` have arrived at once."""
        if not tokens:
            return
        now = time.monotonic()
        if self._first:
            self._ttft.observe(now - self._last)
        else:
            self._itl.observe((now - self._last) / tokens)
        self._first, self._last = False, now
