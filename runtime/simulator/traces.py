"""Arrivals: recorded ones from a CSV or JSON Lines file, synthetic ones of the usual shapes, reproducible by seed.

A file has one request a line, in any order, with these columns (CSV: a header line) or keys (JSON Lines):
`time` (seconds from the start), `function` (optional, "f"), and either `service_s` (seconds that the job runs) or
`prompt_tokens` and `output_tokens` (a language model serves it in a batch).
"""

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DAY_S = 86_400.0


class BadTrace(ValueError):
    """A trace file that can't be read; the message names the line and what it should have."""


@dataclass(frozen=True, slots=True)
class Request:
    """One arrival, `time` seconds after the start. `service_s` 0: the tokens say how long it takes."""

    time: float
    function: str = "f"
    service_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Log-normal sizes of the requests of one function: medians and the standard deviations of the logarithms."""

    service_s: float = 0.0
    service_spread: float = 0.3
    prompt_tokens: float = 0.0
    prompt_spread: float = 0.5
    output_tokens: float = 0.0
    output_spread: float = 1.0

    def request(self, time: float, function: str, chance: random.Random) -> Request:
        if self.service_s:
            return Request(time, function, self.service_s * math.exp(chance.gauss(0, self.service_spread)))
        prompt = self.prompt_tokens * math.exp(chance.gauss(0, self.prompt_spread))
        output = self.output_tokens * math.exp(chance.gauss(0, self.output_spread))
        return Request(time, function, 0.0, max(1, round(prompt)), max(1, round(output)))


# Medians and means of the conversations in the Azure LLM inference trace of 2023 (P. Patel et al., Splitwise, ISCA
# 2024: prompts 1020 and 1155 tokens, outputs 129 and 211), outputs eight times as long: answers with reasoning.
CHAT = Sizes(prompt_tokens=1020, prompt_spread=0.5, output_tokens=1032, output_spread=1.0)
IMAGE = Sizes(service_s=4.0, service_spread=0.25)


def arrivals(rate: Callable[[float], float], most: float, duration_s: float, chance: random.Random) -> Iterator[float]:
    """Times of a Poisson process whose rate changes with time, never above `most`, by thinning (P. Lewis and
    G. Shedler, 1979)."""
    time = chance.expovariate(most)
    while time < duration_s:
        if chance.random() * most < rate(time):
            yield time
        time += chance.expovariate(most)


def poisson(rate: float) -> Callable[[float], float]:
    return lambda _: rate


def diurnal(low: float, high: float, period_s: float = DAY_S) -> Callable[[float], float]:
    """From `low` at night to `high` in the evening, a raised cosine."""
    return lambda t: low + (high - low) * (1 - math.cos(2 * math.pi * t / period_s)) / 2


def bursts(low: float, high: float, every_s: float, length_s: float, seed: int) -> Callable[[float], float]:
    """`high` for about `length_s`, then `low` for about `every_s` less that, both exponentially distributed."""
    chance, edges = random.Random(f"bursts {seed}"), [0.0]

    def rate(t: float) -> float:
        while edges[-1] <= t:
            mean = every_s - length_s if len(edges) % 2 else length_s
            edges.append(edges[-1] + chance.expovariate(1 / mean))
        index = next(i for i in range(len(edges) - 1, 0, -1) if edges[i - 1] <= t)
        return low if index % 2 else high

    return rate


def flash_crowd(base: float, peak: float, start_s: float, rise_s: float, hold_s: float) -> Callable[[float], float]:
    """`base`, a straight rise to `peak` within `rise_s`, `hold_s` of it, then an exponential fall as long as that."""

    def rate(t: float) -> float:
        since = t - start_s
        if since < 0:
            return base
        if since < rise_s + hold_s:
            return base + (peak - base) * min(1.0, since / rise_s)
        return base + (peak - base) * math.exp(-(since - rise_s - hold_s) / hold_s)

    return rate


def timetable(every_s: float, size: int, jitter_s: float, duration_s: float, chance: random.Random) -> list[float]:
    """`size` requests at once, every `every_s` give or take `jitter_s`: a cron job."""
    starts = [every_s * (i + 1) + chance.gauss(0, jitter_s) for i in range(int(duration_s / every_s))]
    return sorted(t + chance.uniform(0, 1) for start in starts for t in [start] * size if 0 <= t < duration_s - 1)


def requests(times: Iterable[float], sizes: Sizes, seed: int, function: str = "f") -> list[Request]:
    chance = random.Random(f"sizes {seed}")
    return [sizes.request(time, function, chance) for time in times]


def read(path: Path) -> list[Request]:
    """The requests of a file by time. Raises BadTrace or OSError."""
    with open(path, newline="") as file:
        rows: Iterable[dict[str, Any]]
        rows = csv.DictReader(file) if path.suffix == ".csv" else (json.loads(line) for line in file if line.strip())
        found: list[Request] = []
        try:
            found.extend(parse(row) for row in rows)
        except (KeyError, TypeError, ValueError) as error:
            message = f"{path}, request {len(found) + 1}: {error!r}; it needs time and service_s or tokens"
            raise BadTrace(message) from error
    if not found:
        raise BadTrace(f"{path} has no requests")
    return sorted(found, key=lambda request: request.time)


def parse(row: dict[str, Any]) -> Request:
    numbers = {name: float(row.get(name) or 0) for name in ("service_s", "prompt_tokens", "output_tokens")}
    time = float(row["time"])
    if time < 0 or not (numbers["service_s"] > 0 or numbers["output_tokens"] >= 1):
        raise ValueError("time must be 0 or more, service_s above 0 or output_tokens 1 or more")
    tokens = int(numbers["prompt_tokens"]), int(numbers["output_tokens"])
    return Request(time, str(row.get("function") or "f"), numbers["service_s"], *tokens)


def write(path: Path, found: Iterable[Request]) -> None:
    """As JSON Lines."""
    with open(path, "w") as file:
        for each in found:
            size = (
                {"service_s": round(each.service_s, 4)}
                if each.service_s
                else {"prompt_tokens": each.prompt_tokens, "output_tokens": each.output_tokens}
            )
            file.write(json.dumps({"time": round(each.time, 3), "function": each.function, **size}) + "\n")
