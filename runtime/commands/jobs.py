"""`stoker jobs`: look at jobs, cancel and replay them."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.coldstart.timeline import Row
from stoker.coldstart.waterfall import bottleneck, moved_bytes, trace_events
from stoker.runtime.commands.exits import interruptible
from stoker.runtime.commands.job_view import print_job
from stoker.runtime.commands.progress import waiting, watched
from stoker.runtime.commands.terminal import (
    GATEWAY_URL,
    ApiKey,
    AsJson,
    FunctionName,
    Url,
    client_of,
    json_text,
    moment,
    print_table,
    show,
)

JobId = Annotated[str, typer.Argument(help="The job's id.")]

jobs = typer.Typer(no_args_is_help=True, help="Look at jobs, cancel and replay them.")


@jobs.command("get")
def get_job(
    job_id: JobId,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Print a job's record: how it is, what came of it, and the traceback of its function when that raised."""
    with client_of(url, api_key) as client:
        record = client.job(job_id)
    if as_json:
        typer.echo(json_text(record, ensure_ascii=False))
    else:
        print_job(record)


@jobs.command("wait")
def wait_for_job(
    job_id: JobId,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Wait for a job's end and print its result, which is JSON in any case; a terminal shows what it waits for."""
    with interruptible(), client_of(url, api_key) as client, waiting(job_id) as say:
        result = watched(client.attach(job_id), say)
    typer.echo(json_text(result, ensure_ascii=False))


@jobs.command("timeline")
def show_timeline(
    job_id: JobId,
    trace: Annotated[Path | None, typer.Option(help="Write it as a Chrome trace (for Perfetto) instead.")] = None,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Where a job's time went, from its arrival on, and what held it up."""
    with client_of(url, api_key) as client:
        rows = [Row(**phase) for phase in client.job(job_id)["timeline"]]
    if trace:
        trace.write_text(json.dumps({"traceEvents": trace_events(rows, title=job_id)}))
        show({"trace": str(trace)}, as_json, f"written to {trace}")
        return
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows]))
        return
    print_table(("phase", "from s", "seconds", "GB", "GB/s", "limit"), [phase_cells(row) for row in rows])
    if found := bottleneck(rows):
        typer.echo(f"held up most by: {found[0]}, {found[1]:.3f} s")


def phase_cells(row: Row) -> tuple[str, ...]:
    moved = moved_bytes(row)
    rate = f"{moved / row.seconds / 1e9:.2f}" if moved and row.seconds else ""
    size = f"{moved / 1e9:.2f}" if moved else ""
    return row.name, f"{row.start_s:.3f}", f"{row.seconds:.3f}", size, rate, str(row.facts.get("limit", ""))


@jobs.command("list")
def list_jobs(
    function: Annotated[str, typer.Option(help="Of this function only.")] = "",
    state: Annotated[str, typer.Option(help="In this state only, such as queued, running or failed.")] = "",
    tenant: Annotated[str, typer.Option(help="Of this tenant only (for the operator).")] = "",
    limit: Annotated[int, typer.Option(min=1, max=100, help="At most so many.")] = 20,
    after: Annotated[str, typer.Option(help="Go on behind an earlier page.")] = "",
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """List jobs: those that run, those that wait in their turn, those that have ended, the latest end first."""
    asked = {"function": function, "state": state, "tenant": tenant, "limit": str(limit), "after": after}
    with client_of(url, api_key) as client:
        page = client.request("GET", "/v1/jobs", params={name: text for name, text in asked.items() if text})
    if as_json:
        typer.echo(json.dumps(page))
        return
    columns = ("job", "function", "tenant", "state", "attempt", "queued (UTC)", "ran s")
    print_table(columns, [job_cells(job) for job in page["data"]])
    if page["has_more"]:
        typer.echo(f"more with --after {page['next']}")


def job_cells(job: dict[str, Any]) -> tuple[object, ...]:
    began, ended = job["started_at"], job["finished_at"]
    ran = f"{(ended or time.time()) - began:.3f}" if began else ""
    attempt = f"{job['attempt']} of {job['max_attempts']}"
    return job["id"], job["function"], job["tenant"], job["state"], attempt, moment(job["enqueued_at"]), ran


@jobs.command("cancel")
def cancel_job(job_id: JobId, url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Cancel a queued or running job. One that had ended stays as it was: that is told, and is no failure."""
    with client_of(url, api_key) as client:
        had_ended = client.job(job_id)["finished_at"] is not None
        record = client.cancel(job_id)
    late = had_ended or record["state"] != "cancelled"
    show(record, as_json, f"{job_id}: {'had ended already: ' * late}{record['state']}")


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
    print_table(
        ("job", "attempts", "ended (UTC)", "error"), [dead_cells(job) for job in page["data"]], prose=("error",)
    )
    if page["has_more"]:
        typer.echo(f"more with --after {page['data'][-1]['id']}")


def dead_cells(job: dict[str, Any]) -> tuple[object, ...]:
    return job["id"], job["attempt"], moment(job["finished_at"]), job["error"]["message"]


@jobs.command("replay")
def replay_job(job_id: JobId, url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Queue a dead or failed job again, with all of its attempts. Of other ends the input isn't kept."""
    with client_of(url, api_key) as client:
        record = client.replay(job_id)
    show(record, as_json, f"{job_id}: {record['state']}")
