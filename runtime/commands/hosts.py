"""The command that lists pools and hosts."""

import json
import time
from typing import Any

import typer

from stoker.runtime.commands.terminal import GATEWAY_URL, ApiKey, AsJson, Url, client_of, print_table

POOL_COLUMNS = ("pool", "gpu", "$/h", "hosts", "desired", "min-max", "failed starts", "last error")
HOST_COLUMNS = ("host", "pool", "state", "type", "zone", "devices", "replicas", "notice")


def hosts(url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List pools and hosts, their states, and what functions wait for."""
    with client_of(url, api_key) as client:
        fleet = client.hosts()
    if as_json:
        typer.echo(json.dumps(fleet))
        return
    if fleet["trouble"]:
        typer.echo(fleet["trouble"])
    if fleet["pools"]:
        print_table(POOL_COLUMNS, [pool_cells(pool) for pool in fleet["pools"]], prose=("hosts", "last error"))
    print_table(HOST_COLUMNS, [host_cells(host) for host in fleet["hosts"]], prose=("devices", "notice"))
    for function, reason in fleet["reasons"].items():
        typer.echo(f"{function} waits: {reason['message']}")


def pool_cells(pool: dict[str, Any]) -> tuple[object, ...]:
    states = ", ".join(f"{count} {state}" for state, count in pool["states"].items()) or "none"
    gpu = f"{pool['gpus']} x {pool['gpu']}" if pool["gpu"] else "cpu"
    price = f"{pool['price_per_h']:g}{' spot' if pool['spot'] else ''}"
    bounds = f"{pool['min']}-{pool['max']}"
    return pool["pool"], gpu, price, states, pool["desired"], bounds, pool["failures"], error_of(pool)


def error_of(pool: dict[str, Any]) -> str:
    left = pool["retry_at"] - time.time()
    return f"{pool['error']}; next try in {left:.0f} s" if pool["error"] and left > 0 else pool["error"]


def host_cells(row: dict[str, Any]) -> tuple[object, ...]:
    notice = row["notice"]["reason"] if row["notice"] else ""
    kind = f"{row['kind']}{' spot' if row['spot'] else ''}"
    devices = ", ".join(row["devices"])
    return row["id"], row["pool"], row["state"], kind, row["zone"], devices, row["replicas"], notice
