"""Scaling policies on the simulator's trace shapes: cost against requests served in time, for a range of each policy's
setting.

    python -m benchmarks.scaling SHAPE [--seed 0]

Writes results/scaling-SHAPE-cpu.json and scaling-SHAPE.svg; results/scaling-notes.md says what they mean.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.report import RESULTS, save
from stoker.runtime.simulator import scenarios
from stoker.runtime.simulator.report import Row, plot, table

MOST = {"poisson": 5, "diurnal": 20, "bursts": 20, "flash-crowd": 6, "cron": 8, "sparse": 2}


def best_reference(rows: Sequence[Row], elastic: bool) -> Row:
    """The one that serves most in time, the cheaper of equals; `elastic`: of those that change with the traffic."""
    others = [row for row in rows if not row.policy.startswith("stoker")]
    others = [row for row in others if not (elastic and row.policy.startswith("fixed"))]
    return max(others, key=lambda row: (row.attainment, -row.cost_usd))


def compare(rows: Sequence[Row]) -> dict[str, Any]:
    """For each of stoker's settings: the cheapest reference that serves as many in time, and the ratio of the costs."""
    found: dict[str, Any] = {}
    for mine in rows:
        if mine.policy.startswith("stoker"):
            equals = [r for r in rows if not r.policy.startswith("stoker") and r.attainment >= mine.attainment]
            rival = min(equals, key=lambda row: row.cost_usd, default=None)
            ratio = round(mine.cost_usd / rival.cost_usd, 3) if rival else None
            found[mine.policy] = {"cheapest_equal": rival.policy if rival else None, "cost_ratio": ratio}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=list(scenarios.SHAPES))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shape = scenarios.SHAPES[arguments.shape]
    trace = shape.trace(arguments.seed)
    setup = scenarios.setup_for(trace, seed=arguments.seed, settle_s=shape.settle_s)
    rows, took = [], {}
    for policy in scenarios.frontier(MOST[arguments.shape]):
        began = time.perf_counter()
        rows.append(policy.run(setup, trace))
        took[policy.name] = round(time.perf_counter() - began, 2)
    title = f"{arguments.shape}: {shape.about}; {len(trace)} requests"
    Console(width=140).print(table(rows, title))
    results = {
        "title": title,
        "rows": [row.to_dict() for row in rows],
        "best_reference": best_reference(rows, elastic=False).policy,
        "best_elastic_reference": best_reference(rows, elastic=True).policy,
        "compared": compare(rows),
        "simulated_in_s": took,
    }
    save(f"scaling-{arguments.shape}", {"shape": arguments.shape, "seed": arguments.seed}, results)
    (RESULTS / f"scaling-{arguments.shape}.svg").write_text(plot(rows, title))


if __name__ == "__main__":
    main()
