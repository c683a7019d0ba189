"""`stoker webhooks`: the secret that signs them, what became of them, and sending one again."""

import json
from typing import Annotated, Any

import typer

from stoker.runtime.client.paths import job_path
from stoker.runtime.commands.terminal import GATEWAY_URL, ApiKey, AsJson, Url, client_of, moment, print_table, show

JobId = Annotated[str, typer.Argument(help="The job's id.")]

webhooks = typer.Typer(no_args_is_help=True, help="Who is told how jobs ended: secret, deliveries, replay.")


@webhooks.command("secret")
def secret(
    rotate: Annotated[bool, typer.Option("--rotate", help="Make a new one; the old one signs too.")] = False,
    overlap_s: Annotated[float, typer.Option(min=0, help="For how many seconds the old one does.")] = 86_400,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Print the secret with which your webhooks are signed (Standard Webhooks)."""
    with client_of(url, api_key) as client:
        if rotate:
            record = client.request("POST", "/v1/webhooks/secret/rotate", json={"overlap_s": overlap_s})
        else:
            record = client.request("GET", "/v1/webhooks/secret")
    show(record, as_json, record["secret"])


@webhooks.command("deliveries")
def deliveries(job_id: JobId, url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """What became of a job's webhooks, try by try."""
    with client_of(url, api_key) as client:
        show_deliveries(client.request("GET", f"{job_path(job_id)}/webhook-deliveries"), as_json)


@webhooks.command("replay")
def replay(job_id: JobId, url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Send a job's last webhook again, now and with all of its tries."""
    with client_of(url, api_key) as client:
        show_deliveries(client.request("POST", f"{job_path(job_id)}/webhook-deliveries/replay"), as_json)


def show_deliveries(page: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(page))
        return
    for delivery in page["data"]:
        typer.echo(f"{delivery['id']}  {delivery['type']}  {delivery['status']}  {delivery['url']}")
        if delivery["tries"]:
            rows = [try_cells(each) for each in delivery["tries"]]
            print_table(("at (UTC)", "answer", "seconds", "error"), rows, prose=("error",))


def try_cells(each: dict[str, Any]) -> tuple[object, ...]:
    return moment(each["at"]), each["status"] or "none", f"{each['seconds']:.3f}", each["error"] or ""
