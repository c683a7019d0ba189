"""`stoker tenants`: who may call, deploy and administrate, with which keys, and how much of everything."""

import json
from typing import Annotated, Any

import typer

from stoker.runtime.client.paths import key_path, tenant_path
from stoker.runtime.commands.terminal import (
    GATEWAY_URL,
    ApiKey,
    AsJson,
    DataDir,
    Url,
    client_of,
    moment,
    print_table,
    show,
)

tenants = typer.Typer(no_args_is_help=True, help="Tenants, their API keys and limits (needs a key with scope admin).")

Name = Annotated[str, typer.Argument(help="The tenant's name.")]
KeyId = Annotated[str, typer.Argument(help="The key's id (the middle part of its text).")]
Requests = Annotated[float | None, typer.Option(min=0, help="Requests per minute; 0 = no limit.")]
Tokens = Annotated[float | None, typer.Option(min=0, help="Tokens per minute; 0 = no limit.")]
Concurrency = Annotated[int | None, typer.Option(min=0, help="Jobs queued or running at once; 0 = no limit.")]
Budget = Annotated[float | None, typer.Option(min=0, help="US dollars per calendar month (UTC); 0 = no limit.")]
Weight = Annotated[float | None, typer.Option(help="Share of a busy function beside other tenants' weights.")]


@tenants.command("create")
def create(
    name: Name,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    concurrency: Concurrency = None,
    budget_usd: Budget = None,
    weight: Weight = None,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Create a tenant; `stoker tenants key NAME` then makes it a key. One that is there stays as it is."""
    body = changes(requests_per_minute, tokens_per_minute, concurrency, budget_usd, weight)
    with client_of(url, api_key) as client:
        record = client.request("PUT", tenant_path(name), json=body, headers={"if-none-match": "*"})
    show(record, as_json, f"created {name}; make it a key with: stoker tenants key {name}")


@tenants.command("limit")
def limit(
    name: Name,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    concurrency: Concurrency = None,
    budget_usd: Budget = None,
    weight: Weight = None,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Change a tenant's limits; those not named stay."""
    body = changes(requests_per_minute, tokens_per_minute, concurrency, budget_usd, weight)
    with client_of(url, api_key) as client:
        record = client.request("PATCH", tenant_path(name), json=body)
    show(record, as_json, f"{name}: {limits_text(record)}")


@tenants.command("list")
def list_tenants(url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List tenants with their limits."""
    with client_of(url, api_key) as client:
        rows = client.request("GET", "/v1/tenants")["data"]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    cells = [(row["name"], f"{row['weight']:g}", limits_text(row), moment(row["created_at"])) for row in rows]
    print_table(("tenant", "weight", "limits", "created (UTC)"), cells, prose=("limits",))


@tenants.command("delete")
def delete(name: Name, url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Remove a tenant and all of its keys. What it used stays on record."""
    with client_of(url, api_key) as client:
        client.request("DELETE", tenant_path(name))
    show({"name": name, "deleted": True}, as_json, f"deleted {name}")


@tenants.command("key")
def make_key(
    name: Name,
    scope: Annotated[str, typer.Option(help="What it may do, of invoke, deploy and admin.")] = "invoke",
    days: Annotated[float, typer.Option(min=0, help="Days until it expires; 0 = never.")] = 0,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Make an API key and print it: this is the only time that it is shown."""
    body = {"scopes": [part.strip() for part in scope.split(",")], "expires_in_s": days * 86_400}
    with client_of(url, api_key) as client:
        record = client.request("POST", f"{tenant_path(name)}/keys", json=body)
    show(record, as_json, record["key"])


@tenants.command("keys")
def list_keys(name: Name, url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List a tenant's keys, without their secrets."""
    with client_of(url, api_key) as client:
        rows = client.request("GET", f"{tenant_path(name)}/keys")["data"]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    print_table(
        ("key", "scopes", "created (UTC)", "expires (UTC)"), [key_cells(row) for row in rows], prose=("scopes",)
    )


def key_cells(row: dict[str, Any]) -> tuple[str, ...]:
    expires = moment(row["expires_at"]) if row["expires_at"] else "never"
    return row["id"], ", ".join(row["scopes"]), moment(row["created_at"]), expires


@tenants.command("rotate")
def rotate(
    name: Name,
    key: KeyId,
    overlap: Annotated[float, typer.Option(min=0, help="Seconds for which the old key still works.")] = 3600,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Print a new key with the old one's scopes; the old one ends after the overlap."""
    with client_of(url, api_key) as client:
        record = client.request("POST", f"{key_path(name, key)}/rotate", json={"overlap_s": overlap})
    show(record, as_json, record["key"])


@tenants.command("revoke")
def revoke(name: Name, key: KeyId, url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """End a key; every gateway refuses it within a second."""
    with client_of(url, api_key) as client:
        client.request("DELETE", key_path(name, key))
    show({"id": key, "revoked": True}, as_json, f"revoked {key}")


@tenants.command("root-key")
def root_key(data: DataDir = None, as_json: AsJson = False) -> None:
    """Print the operator's own key, worked out from STOKER_SECRET or from the data folder of a `stoker up`."""
    from stoker.runtime.secret import kept_secret
    from stoker.runtime.settings import from_environment
    from stoker.runtime.tenancy.api_key import Keyring

    settings = from_environment()
    folder = data.resolve() if data else settings.data_dir
    if not settings.secret and not (folder / "secret").exists():
        raise typer.BadParameter(
            f"there is no secret in {folder}: name the data folder with --data, or set STOKER_SECRET"
        )
    key = Keyring(settings.secret or kept_secret(folder)).root_text()
    show({"key": key}, as_json, key)


def changes(
    requests: float | None, tokens: float | None, concurrency: int | None, budget: float | None, weight: float | None
) -> dict[str, Any]:
    limits = {
        "requests_per_minute": requests,
        "tokens_per_minute": tokens,
        "concurrency": concurrency,
        "budget_usd": budget,
    }
    body: dict[str, Any] = {"limits": {name: value for name, value in limits.items() if value is not None}}
    return body if weight is None else {**body, "weight": weight}


def limits_text(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in record["limits"].items() if value) or "none"
