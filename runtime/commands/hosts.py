"""The command that lists pools and hosts."""

import json
import time
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from stoker.runtime.commands.terminal import GATEWAY_URL, ApiKey, AsJson, Url, client_of, console


def hosts(url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List pools and hosts, their states, and what functions wait for."""
    with client_of(url, api_key) as client:
        fleet = client.hosts()
    if as_json:
        typer.echo(json.dumps(fleet))
        return
    if fleet["trouble"]:
        console.print(escape(fleet["trouble"]))
    if fleet["pools"]:
        console.print(pool_table(fleet["pools"]))
    console.print(host_table(fleet["hosts"]))
    for function, reason in fleet["reasons"].items():
        console.print(escape(f"{function} waits: {reason['message']}"))


def pool_table(pools: list[dict[str, Any]]) -> Table:
    table = Table("pool", "gpu", "$/h", "hosts", "desired", "min-max", "failed starts", "last error")
    for pool in pools:
        states = ", ".join(f"{count} {state}" for state, count in pool["states"].items()) or "none"
        gpu = f"{pool['gpus']} x {pool['gpu']}" if pool["gpu"] else "cpu"
        price = f"{pool['price_per_h']:g}{' spot' if pool['spot'] else ''}"
        bounds = f"{pool['min']}-{pool['max']}"
        cells = (pool["pool"], gpu, price, states, pool["desired"], bounds, pool["failures"], error_of(pool))
        table.add_row(*(escape(str(cell)) for cell in cells))
    return table


def error_of(pool: dict[str, Any]) -> str:
    left = pool["retry_at"] - time.time()
    return f"{pool['error']}; next try in {left:.0f} s" if pool["error"] and left > 0 else pool["error"]


def host_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("host", "pool", "state", "type", "zone", "devices", "replicas", "notice")
    for row in rows:
        notice = row["notice"]["reason"] if row["notice"] else ""
        kind = f"{row['kind']}{' spot' if row['spot'] else ''}"
        cells = (row["id"], row["pool"], row["state"], kind, row["zone"], ", ".join(row["devices"]), row["replicas"])
        table.add_row(*(escape(str(cell)) for cell in (*cells, notice)))
    return table
