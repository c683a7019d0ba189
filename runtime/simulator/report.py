"""What a simulation says: one row of figures per policy, as a record for JSON, a table, and an SVG of cost and
attainment."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape

from rich.table import Table

from stoker.runtime.simulator.cluster import Setup
from stoker.runtime.simulator.simulation import Outcome
from stoker.runtime.simulator.traces import Request

WIDTH, HEIGHT, MARGIN = 760, 440, 60
COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#a16207", "#0f766e", "#be123c", "#475569")


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one trace. `attainment`: the share of requests whose first output came within the SLO; `cold`: the
    share that came while no replica was ready; times in seconds, infinite ones as None."""

    policy: str
    requests: int
    cost_usd: float
    attainment: float
    cold: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    hosts_started: int
    busy_kills: int

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def summarise(policy: str, setup: Setup, trace: Sequence[Request], outcome: Outcome) -> Row:
    """Figures of the requests from `setup.settle_s` on."""
    counted = [index for index, request in enumerate(trace) if request.time >= setup.settle_s]
    times = sorted(outcome.ttft_s[index] for index in counted)
    met = sum(outcome.ttft_s[index] <= goal_s(setup, trace[index].function) for index in counted)
    count = max(1, len(counted))
    return Row(
        policy,
        len(counted),
        round(outcome.cost_usd, 4),
        round(met / count, 5),
        round(sum(outcome.cold[index] for index in counted) / count, 5),
        quantile(times, 0.5),
        quantile(times, 0.95),
        quantile(times, 0.99),
        outcome.launches,
        outcome.busy_kills,
    )


def goal_s(setup: Setup, function: str) -> float:
    goal = setup.specs[function].slo.ttft_ms
    return goal / 1000 if goal is not None else setup.rules.ttft_s


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The nearest rank; None without a value or where it is infinite."""
    value = ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.inf
    return round(value, 4) if math.isfinite(value) else None


def table(rows: Sequence[Row], title: str = "") -> Table:
    found = Table("policy", "cost USD", "SLO met", "cold", "TTFT p50", "p95", "p99", "hosts started", title=title)
    for row in rows:
        cells = [row.policy, f"{row.cost_usd:.2f}", f"{row.attainment:.2%}", f"{row.cold:.2%}"]
        cells += [said(value) for value in (row.ttft_p50_s, row.ttft_p95_s, row.ttft_p99_s)]
        found.add_row(*cells, str(row.hosts_started))
    return found


def said(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def family(policy: str) -> str:
    return policy.partition(" ")[0]


def plot(rows: Sequence[Row], title: str) -> str:
    """An SVG: cost to the right, attainment up; a line joins the settings of one policy."""
    most = max((row.cost_usd for row in rows), default=1.0) * 1.05 or 1.0
    least = min((row.attainment for row in rows), default=0.0)
    low = max(0.0, least - 0.05 * (1 - least) - 0.001)
    families = list(dict.fromkeys(family(row.policy) for row in rows))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        text(WIDTH / 2, 24, title, "middle", 15),
        *axes(most, low),
    ]
    for index, name in enumerate(families):
        colour = COLOURS[index % len(COLOURS)]
        points = [(x_of(r.cost_usd, most), y_of(r.attainment, low), r) for r in rows if family(r.policy) == name]
        points.sort(key=lambda point: point[0])
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-opacity="0.5"/>')
        for x, y, row in points:
            label = escape(f"{row.policy}: {row.cost_usd:.2f} USD, {row.attainment:.2%}")
            circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{label}</title></circle>'
            parts.append(circle)
        parts.append(text(WIDTH - MARGIN + 6 - 110, HEIGHT - MARGIN - 14 * (len(families) - index), name, "start", 12))
        swatch_y = HEIGHT - MARGIN - 14 * (len(families) - index) - 9
        parts.append(f'<rect x="{WIDTH - MARGIN - 118}" y="{swatch_y}" width="9" height="9" fill="{colour}"/>')
    return "\n".join([*parts, "</svg>\n"])


def x_of(cost: float, most: float) -> float:
    return MARGIN + (WIDTH - 2 * MARGIN) * cost / most


def y_of(attainment: float, low: float) -> float:
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (attainment - low) / (1 - low)


def axes(most: float, low: float) -> list[str]:
    left, bottom = MARGIN, HEIGHT - MARGIN
    parts = [f'<path d="M{left} {MARGIN}V{bottom}H{WIDTH - MARGIN}" fill="none" stroke="#334155"/>']
    for step in range(6):
        cost, met = most * step / 5, low + (1 - low) * step / 5
        parts.append(text(x_of(cost, most), bottom + 18, f"{cost:.3g}", "middle", 11))
        parts.append(text(left - 6, y_of(met, low) + 4, f"{met:.1%}", "end", 11))
    parts.append(text(WIDTH / 2, HEIGHT - 14, "cost (USD)", "middle", 12))
    parts.append(text(left - 40, MARGIN - 14, "requests within the SLO", "start", 12))
    return parts


def text(x: float, y: float, words: str, anchor: str, size: int) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'
