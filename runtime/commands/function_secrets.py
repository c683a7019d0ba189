"""`stoker secrets`: values that functions get as environment variables, by name."""

import json
import sys
from typing import Annotated

import typer

from stoker.runtime.client.paths import secret_path
from stoker.runtime.commands.terminal import GATEWAY_URL, ApiKey, AsJson, Url, client_of, moment, print_table, show

secrets = typer.Typer(no_args_is_help=True, help="Secrets of functions: stored encrypted, never shown again.")

Name = Annotated[str, typer.Argument(help="Its name: hf-token becomes the variable HF_TOKEN.")]


@secrets.command("set")
def set_secret(name: Name, url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Store a value, asked for or read from standard input. `secrets=["NAME"]` of a function then names it; replicas
    that run keep the value that they started with."""
    value = typer.prompt("value", hide_input=True) if sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    with client_of(url, api_key) as client:
        record = client.request("PUT", secret_path(name), json={"value": value})
    text = f"stored {name}; functions with secrets=[{name!r}] find it as {record['variable']} once they are started: "
    text += "replicas that run keep the value that they have"
    show(record, as_json, text)


@secrets.command("list")
def list_secrets(url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List names, without values."""
    with client_of(url, api_key) as client:
        rows = client.request("GET", "/v1/secrets")["data"]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    cells = [(row["name"], row["variable"], moment(row["set_at"])) for row in rows]
    print_table(("secret", "variable", "set (UTC)"), cells)


@secrets.command("delete")
def delete_secret(name: Name, url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Delete a secret that no deployed function uses."""
    with client_of(url, api_key) as client:
        client.request("DELETE", secret_path(name))
    show({"name": name, "deleted": True}, as_json, f"deleted {name}")
