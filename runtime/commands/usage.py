"""`stoker usage` and `stoker prices`: what was used, and what it costs."""

import csv
import json
import sys
from collections import defaultdict
from typing import Annotated, Any

import typer

from stoker.runtime.client.paths import price_path
from stoker.runtime.commands.terminal import GATEWAY_URL, ApiKey, AsJson, Url, client_of, print_table, show

prices = typer.Typer(no_args_is_help=True, help="What calls cost (needs a key with scope admin).")

SUMS = ("jobs", "failed", "run_seconds", "cold_start_seconds")
TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
NUMBERS = (*SUMS, *TOKENS, "cost_usd")
COLUMNS = ("jobs", "no result", "run s", "cold s", "in", "cached", "out", "USD", "USD/1M")
GROUPS = ("day", "tenant", "function", "adapter")


def usage(
    first: Annotated[
        str, typer.Option("--from", help="First day (UTC), like 2026-01-31; else the month's first.")
    ] = "",
    last: Annotated[str, typer.Option("--to", help="Last day; today if left out.")] = "",
    tenant: Annotated[str, typer.Option(help="Another tenant, or '*' for all (scope admin).")] = "",
    by: Annotated[
        str, typer.Option(help="Rows per day, tenant, function, adapter, or several: function,adapter.")
    ] = "function",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """What was used and what it costs. What ended without a result is free if it failed or was lost; what was cancelled
    or ran out of time costs what it used."""
    keys = [key.strip() for key in by.split(",")]
    if unknown := [key for key in keys if key not in GROUPS]:
        raise typer.BadParameter(f"--by takes {', '.join(GROUPS)}, not '{unknown[0]}'")
    asked = {name: value for name, value in (("from", first), ("to", last), ("tenant", tenant)) if value}
    with client_of(url, api_key) as client:
        rows = grouped(client.request("GET", "/v1/usage", params=asked)["data"], keys)
    if as_json:
        typer.echo(json.dumps(rows))
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, [*keys, *NUMBERS, "usd_per_million_tokens"])
        writer.writeheader()
        writer.writerows(rows)
    else:
        print_table((*keys, *COLUMNS), [cells_of(row, keys) for row in [*rows, *total_of(rows, keys)]])


def grouped(rows: list[dict[str, Any]], keys: list[str]) -> list[dict[str, Any]]:
    """Sums by `keys`, with the cost per million prompt and completion tokens (null where there were none)."""
    sums: defaultdict[tuple[str, ...], dict[str, Any]] = defaultdict(lambda: dict.fromkeys(NUMBERS, 0))
    for row in rows:
        group = sums[tuple(row[key] for key in keys)]
        for name in NUMBERS:
            group[name] += row[name]
    return [
        {**dict(zip(keys, group, strict=True)), **numbers, "usd_per_million_tokens": per_million(numbers)}
        for group, numbers in sorted(sums.items())
    ]


def total_of(rows: list[dict[str, Any]], keys: list[str]) -> list[dict[str, Any]]:
    """A row, where there are several to add up."""
    if len(rows) < 2:
        return []
    numbers = {name: sum(row[name] for row in rows) for name in NUMBERS}
    names = {**dict.fromkeys(keys, ""), keys[0]: "total"}
    return [{**names, **numbers, "usd_per_million_tokens": per_million(numbers)}]


def per_million(numbers: dict[str, Any]) -> float | None:
    tokens = numbers["prompt_tokens"] + numbers["completion_tokens"]
    return numbers["cost_usd"] / tokens * 1e6 if tokens else None


def cells_of(row: dict[str, Any], keys: list[str]) -> list[object]:
    cost = "" if row["usd_per_million_tokens"] is None else f"{row['usd_per_million_tokens']:.4f}"
    seconds = [f"{row[name]:.1f}" for name in ("run_seconds", "cold_start_seconds")]
    counts = [row[name] for name in TOKENS]
    return [*(row[key] for key in keys), row["jobs"], row["failed"], *seconds, *counts, f"{row['cost_usd']:.6f}", cost]


@prices.command("set")
def set_price(
    function: Annotated[str, typer.Argument(help="A function's name, or '*' for all without a price of their own.")],
    request: Annotated[float, typer.Option(min=0, help="US dollars per request.")] = 0,
    second: Annotated[float, typer.Option(min=0, help="US dollars per second that a job runs.")] = 0,
    prompt_tokens: Annotated[float, typer.Option(min=0, help="US dollars per million prompt tokens.")] = 0,
    cached_tokens: Annotated[float, typer.Option(min=0, help="US dollars per million cached prompt tokens.")] = 0,
    completion_tokens: Annotated[float, typer.Option(min=0, help="US dollars per million completion tokens.")] = 0,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Set what calls of a function cost from now on; what isn't named is free."""
    body = {
        "request": request,
        "second": second,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "completion_tokens": completion_tokens,
    }
    with client_of(url, api_key) as client:
        record = client.request("PUT", price_path(function), json=body)
    show(record, as_json, f"{function}: {price_text(record)}")


@prices.command("list")
def list_prices(url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List all prices."""
    with client_of(url, api_key) as client:
        rows = client.request("GET", "/v1/prices")["data"]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    print_table(("function", "US dollars"), [(row["function"], price_text(row)) for row in rows], prose=("US dollars",))


def price_text(record: dict[str, Any]) -> str:
    named = {name: value for name, value in record.items() if isinstance(value, int | float) and value}
    return ", ".join(f"{value:g} per {unit(name)}" for name, value in named.items()) or "free"


def unit(name: str) -> str:
    return f"1M {name.replace('_', ' ')}" if name.endswith("tokens") else name
