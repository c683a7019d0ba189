"""`stoker audit`: who changed what, and whether the record of it is whole."""

import json
from typing import Annotated

import typer

from stoker.runtime.commands.terminal import GATEWAY_URL, ApiKey, AsJson, Url, client_of, moment, print_table

COLUMNS = ("number", "at (UTC)", "tenant", "key", "action", "of", "status")


def audit(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many entries, the newest first.")] = 100,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Who changed what (needs a key with scope admin). Exits with 1 when an entry was altered, removed or put in."""
    with client_of(url, api_key) as client:
        found = client.request("GET", "/v1/audit", params={"limit": limit})
    if as_json:
        typer.echo(json.dumps(found))
    else:
        print_table(COLUMNS, [cells_of(entry) for entry in found["data"]])
    if broken := found["first_broken"]:
        typer.echo(f"The record is broken from entry {broken} on: it isn't what was written.", err=True)
        raise typer.Exit(1)


def cells_of(entry: dict[str, object]) -> list[object]:
    at = moment(float(str(entry["at"])))
    target = entry["target"]
    named = " ".join(str(value) for value in target.values()) if isinstance(target, dict) else ""
    return [entry["number"], at, entry["tenant"], entry["key_id"], entry["action"], named, entry["status"]]
