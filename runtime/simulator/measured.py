"""Times that the simulation takes from measurements of an 8-billion-parameter Llama on one NVIDIA H200, and those that
it assumes.

Measured: step times and prefill (benchmarks/results/engine-llama3-8b-gpu.json) and a replica's load with and without
the weights on its host (first_token-8b-gpu.json), one machine and few runs each; a test compares them. The load is used
for all functions, also those that stand for something else. Assumed: a host's boot and price, and how much times vary.
"""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Engine:
    """Continuous batching: seconds of a decode step by batch size (between two points: a straight line), and prompt
    tokens prefilled per second, during which nothing is decoded."""

    steps: tuple[tuple[int, float], ...] = ((1, 0.004198), (8, 0.005069), (64, 0.007079), (256, 0.016139))
    prefill_per_s: float = 41_812.0

    def step_s(self, batch: int) -> float:
        sizes = [size for size, _ in self.steps]
        index = min(max(1, bisect_left(sizes, batch)), len(sizes) - 1)
        (left, low), (right, high) = self.steps[index - 1], self.steps[index]
        return low + (high - low) * (max(batch, 1) - left) / (right - left)


@dataclass(frozen=True, slots=True)
class Starts:
    """Seconds: a replica on a host without its weights, and on one that has them; a host; the spread is that of the
    logarithm of each single one."""

    cold_s: float = 15.63
    warm_s: float = 4.10
    boot_s: float = 90.0
    spread: float = 0.1


MEASURED = Engine()
ASSUMED = Starts()
ASSUMED_USD_PER_H = 4.0
