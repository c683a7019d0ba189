"""`stoker jobs`: look at jobs, cancel and replay them."""

import json
import time
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from stoker.runtime.commands.terminal import GATEWAY_URL, ApiKey, AsJson, Url, client_of, console

jobs = typer.Typer(no_args_is_help=True, help="Look at jobs, cancel and replay them.")


@jobs.command("get")
def get_job(
    job_id: Annotated[str, typer.Argument(help="The job's id.")],
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
) -> None:
    """Print a job's record as JSON."""
    with client_of(url, api_key) as client:
        typer.echo(json.dumps(client.job(job_id), indent=2, ensure_ascii=False))


@jobs.command("cancel")
def cancel_job(
    job_id: Annotated[str, typer.Argument(help="The job's id.")],
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
) -> None:
    """Cancel a queued or running job."""
    with client_of(url, api_key) as client:
        typer.echo(f"{job_id}: {client.cancel(job_id)['state']}")


@jobs.command("dead")
def dead_jobs(
    function: Annotated[str, typer.Argument(help="Name of a deployed function.")],
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
    table = Table("job", "attempts", "ended", "error")
    for job in page["data"]:
        ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["finished_at"]))
        table.add_row(escape(job["id"]), str(job["attempt"]), ended, escape(job["error"]["message"]))
    console.print(table)
    if page["has_more"]:
        console.print(f"more with --after {page['data'][-1]['id']}")


@jobs.command("replay")
def replay_job(
    job_id: Annotated[str, typer.Argument(help="The job's id.")],
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
) -> None:
    """Queue a dead or failed job again, with all of its attempts."""
    with client_of(url, api_key) as client:
        typer.echo(f"{job_id}: {client.replay(job_id)['state']}")
