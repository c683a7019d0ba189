"""`stoker simulate`: what scaling policies would cost and how many requests would be served in time."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.runtime.commands.terminal import AsJson, screen

Trace = Annotated[Path | None, typer.Option(help="Recorded arrivals, CSV or JSON Lines (see examples/traces).")]
Shape = Annotated[str, typer.Option(help="Synthetic arrivals: poisson, diurnal, bursts, flash-crowd, cron or sparse.")]
Frontier = Annotated[bool, typer.Option("--frontier", help="Each policy over a range of its setting.")]
Plot = Annotated[Path | None, typer.Option(help="Write cost against attainment as an SVG here.")]


def simulate(
    trace: Trace = None,
    shape: Shape = "diurnal",
    frontier: Frontier = False,
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 0,
    scale: Annotated[float, typer.Option(min=0.01, help="Times the arrivals of a synthetic trace.")] = 1.0,
    slo: Annotated[float, typer.Option(min=0.001, help="Seconds to the first output that count as in time.")] = 1.0,
    load: Annotated[float, typer.Option(min=0.0, help="Seconds to load a replica on a new host.")] = 15.63,
    boot: Annotated[float, typer.Option(min=0.0, help="Seconds to boot a host.")] = 90.0,
    price: Annotated[float, typer.Option(min=0.0, help="USD per host-hour.")] = 4.0,
    max_replicas: Annotated[int, typer.Option(min=1, help="Replicas and hosts at most.")] = 32,
    idle_timeout: Annotated[float, typer.Option(min=0.0, help="Seconds of stoker's idle timeout.")] = 300.0,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Compare stoker's scaling policy with others on a trace of arrivals."""
    from stoker.runtime.simulator import report, scenarios

    arrivals, settle_s = arrivals_of(trace, shape, seed, scale)
    starts = replace(scenarios.ASSUMED, cold_s=load, boot_s=boot)
    options: dict[str, Any] = {"seed": seed, "settle_s": settle_s, "ttft_s": slo, "starts": starts}
    options |= {"max_replicas": max_replicas, "idle_timeout_s": idle_timeout, "price_per_h": price}
    setup = scenarios.setup_for(arrivals, **options)
    policies = scenarios.frontier(max_replicas) if frontier else scenarios.defaults()
    rows = [policy.run(setup, arrivals) for policy in policies]
    title = f"{trace.name if trace else shape}: {len(arrivals)} requests"
    if plot:
        plot.write_text(report.plot(rows, title))
    if as_json:
        typer.echo(json.dumps({"trace": title, "seed": seed, "rows": [row.to_dict() for row in rows]}))
    else:
        screen().print(report.table(rows, title))


def arrivals_of(trace: Path | None, shape: str, seed: int, scale: float) -> tuple[list[Any], float]:
    """The requests, and the seconds at their start that don't count."""
    from stoker.runtime.simulator import scenarios, traces

    if trace is None:
        if shape not in scenarios.SHAPES:
            names = ", ".join(scenarios.SHAPES)
            raise typer.BadParameter(f"no shape {shape!r}; there are {names}", param_hint="--shape")
        return scenarios.SHAPES[shape].trace(seed, scale), scenarios.SHAPES[shape].settle_s
    try:
        return traces.read(trace), 0.0
    except (traces.BadTrace, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="--trace") from error
