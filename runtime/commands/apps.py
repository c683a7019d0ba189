"""`stoker deploy`, `versions`, `rollback`, `delete` and `functions`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.runtime.client.paths import app_path, function_path
from stoker.runtime.commands.exits import Failed
from stoker.runtime.commands.progress import moving, waiting
from stoker.runtime.commands.rollout import MOST_S, until_served
from stoker.runtime.commands.terminal import (
    GATEWAY_URL,
    ApiKey,
    AsJson,
    Url,
    client_of,
    deployed_names,
    moment,
    print_table,
    shortened,
    show,
)

AppName = Annotated[str, typer.Argument(help="Name of an app, or of a function in it.", autocompletion=deployed_names)]
DeletedName = Annotated[
    str, typer.Argument(help="Name of a deployed function; with --app, of an app.", autocompletion=deployed_names)
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait",
        help=f"Start it for a trial, until it serves or is known not to start; {MOST_S / 60:g} minutes at most.",
    ),
]
VERSION_COLUMNS = ("version", "", "state", "deployed (UTC)", "by", "functions")


def deploy(
    file: Annotated[Path, typer.Argument(help="A Python file with a stoker.App in it.")],
    wait: Wait = False,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Deploy the functions of an app."""
    from stoker.runtime.deployment import deploy as deploy_file

    with client_of(url, api_key) as client:
        with moving(f"deploy {file.name}") as moved:
            apps = deploy_file(file, client, moved)
        states = [wait_for(client, app) for app in apps] if wait else []
    records = [record for app in apps for record in app["functions"]]
    lines = [f"deployed {r['name']} ({r['kind']}, version {r['version']})" for r in records]
    for app in apps:
        lines += [f"deleted {function}: the file no longer has it" for function in app["deleted"]]
        lines += cancelled_line(app)
    show(records, as_json, "\n".join(lines + states))


def wait_for(client: Any, app: dict[str, Any]) -> str:
    with waiting(f"{app['name']}: waits for version {app['version']}", plainly=True) as say:
        state = until_served(client, app["name"], app["version"], say)
    return f"{app['name']}: {state}"


def versions(name: AppName, url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List an app's last versions, the newest first, and what became of them; --json has all of their functions."""
    with client_of(url, api_key) as client:
        rows = client.request("GET", f"{app_path(app_of(client, name))}/versions")["data"]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    print_table(VERSION_COLUMNS, [version_cells(row) for row in rows], prose=("by", "functions"))
    for row in rows:
        for part in row["functions"]:
            if part["error"]:
                typer.echo(f"{part['name']}: version {part['version']} did not start: {part['error']}")


def version_cells(row: dict[str, Any]) -> tuple[object, ...]:
    deployed = moment(row["deployed_at"])
    functions = shortened([f"{part['name']} {part['version']}" for part in row["functions"]])
    return row["version"], "current" if row["current"] else "", row["state"], deployed, row["by"], functions


def rollback(
    name: AppName,
    version: Annotated[str, typer.Argument(help="Its name or its beginning; else what was in force before.")] = "",
    wait: Wait = False,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Deploy an app's older version again. What runs ends on its version; nothing that waits is lost."""
    with client_of(url, api_key) as client:
        path = f"{app_path(app_of(client, name))}/rollback"
        app = client.request("POST", path, json={"version": version} if version else {})
        state = [wait_for(client, app)] if wait else []
    lines = [f"{r['name']} is back at version {r['version']}" for r in app["functions"]]
    lines += [f"deleted {function}: that version didn't have it" for function in app["deleted"]]
    lines += cancelled_line(app)
    show(app, as_json, "\n".join(lines + state))


def app_of(client: Any, name: str) -> str:
    """The app of that name, else the one of the function of that name."""
    from stoker.runtime.client.errors import StokerError

    try:
        client.request("GET", f"{app_path(name)}/versions")
        return name
    except StokerError as no_app:
        if no_app.status != 404:
            raise
        try:
            return client.request("GET", function_path(name))["spec"]["app"] or name
        except StokerError as no_function:
            raise (no_app if no_function.status == 404 else no_function) from None


def delete(
    name: DeletedName,
    whole: Annotated[bool, typer.Option("--app", help="NAME is an app's: remove all of its functions.")] = False,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Remove a deployed function, or a whole app; queued and running jobs are cancelled."""
    with client_of(url, api_key) as client:
        record = client.request("DELETE", app_path(name)) if whole else delete_function(client, name)
    lines = [f"deleted {function}" for function in record.get("functions", [name])]
    show(record, as_json, "\n".join(lines + cancelled_line(record)))


def delete_function(client: Any, name: str) -> dict[str, Any]:
    """Raises Failed for what is no function, but an app."""
    from stoker.runtime.client.errors import StokerError

    try:
        return client.delete(name)
    except StokerError as error:
        if error.status == 404 and any(row["spec"]["app"] == name for row in client.functions()):
            raise Failed(f"{name} is no function, but an app: `stoker delete --app {name}` removes all of it") from None
        raise


def cancelled_line(record: dict[str, Any]) -> list[str]:
    """What functions that are gone took with them."""
    jobs = record["cancelled_jobs"]
    return [f"cancelled {jobs} queued or running job{'s' * (jobs > 1)}"] if jobs else []


def functions(url: Url = GATEWAY_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List deployed functions with their replicas and queues."""
    with client_of(url, api_key) as client:
        rows = client.functions()
    if as_json:
        typer.echo(json.dumps(rows))
        return
    columns = ("function", "kind", "version", "replicas", "queued", "running")
    print_table(columns, [function_cells(row) for row in rows], prose=("replicas",))
    for row in rows:
        if row["rollout"]:
            typer.echo(rollout_line(row["name"], row["rollout"]))


def function_cells(row: dict[str, Any]) -> tuple[object, ...]:
    states = ", ".join(f"{count} {state}" for state, count in row["replicas"].items()) or "asleep"
    return row["name"], row["kind"], row["version"], states, row["queued"], row["running"]


def rollout_line(name: str, rollout: dict[str, Any]) -> str:
    serves = f"version {rollout['serving']} serves" if rollout["serving"] else "no other version serves"
    return f"{name}: version {rollout['version']} does not start: {rollout['error']}; {serves}"
