"""`stoker jobs`: look at jobs, cancel and replay them."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.coldstart.timeline import Row
from stoker.coldstart.waterfall import bottleneck, moved_bytes, trace_events
from stoker.runtime.commands.terminal import GATEWAY_URL, ApiKey, AsJson, FunctionName, Url, client_of, print_table

JobId = Annotated[str, typer.Argument(help="The job's id.")]

jobs = typer.Typer(no_args_is_help=True, help="Look at jobs, cancel and replay them.")


@jobs.command("get")
def get_job(
    job_id: JobId,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
) -> None:
    """Print a job's record as JSON."""
    with client_of(url, api_key) as client:
        typer.echo(json.dumps(client.job(job_id), indent=2, ensure_ascii=False))


@jobs.command("timeline")
def show_timeline(
    job_id: JobId,
    trace: Annotated[Path | None, typer.Option(help="Write it as a Chrome trace (for Perfetto) instead.")] = None,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
) -> None:
    """Where a job's time went, from its arrival on, and what held it up."""
    with client_of(url, api_key) as client:
        rows = [Row(**phase) for phase in client.job(job_id)["timeline"]]
    if trace:
        trace.write_text(json.dumps({"traceEvents": trace_events(rows, title=job_id)}))
        typer.echo(f"written to {trace}")
        return
    print_table(("phase", "from s", "seconds", "GB", "GB/s", "limit"), [phase_cells(row) for row in rows])
    if found := bottleneck(rows):
        typer.echo(f"held up most by: {found[0]}, {found[1]:.3f} s")


def phase_cells(row: Row) -> tuple[str, ...]:
    moved = moved_bytes(row)
    rate = f"{moved / row.seconds / 1e9:.2f}" if moved and row.seconds else ""
    size = f"{moved / 1e9:.2f}" if moved else ""
    return row.name, f"{row.start_s:.3f}", f"{row.seconds:.3f}", size, rate, str(row.facts.get("limit", ""))


@jobs.command("cancel")
def cancel_job(
    job_id: JobId,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
) -> None:
    """Cancel a queued or running job."""
    with client_of(url, api_key) as client:
        typer.echo(f"{job_id}: {client.cancel(job_id)['state']}")


@jobs.command("dead")
def dead_jobs(
    function: FunctionName,
    limit: Annotated[int, typer.Option(min=1, max=100, help="At most so many.")] = 20,
    after: Annotated[str, typer.Option(help="Go on behind the job of this id.")] = "",
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """List a function's jobs whose attempts are used up, the newest first."""
    with client_of(url, api_key) as client:
        page = client.dead(function, limit=limit, after=after)
    if as_json:
        typer.echo(json.dumps(page))
        return
    print_table(("job", "attempts", "ended", "error"), [dead_cells(job) for job in page["data"]], prose=("error",))
    if page["has_more"]:
        typer.echo(f"more with --after {page['data'][-1]['id']}")


def dead_cells(job: dict[str, Any]) -> tuple[object, ...]:
    ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["finished_at"]))
    return job["id"], job["attempt"], ended, job["error"]["message"]


@jobs.command("replay")
def replay_job(
    job_id: JobId,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
) -> None:
    """Queue a dead or failed job again, with all of its attempts."""
    with client_of(url, api_key) as client:
        typer.echo(f"{job_id}: {client.replay(job_id)['state']}")
