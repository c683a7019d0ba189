"""Waiting until a version that was deployed serves, and no older one."""

import time
from collections.abc import Callable, Collection
from typing import Any

from stoker.runtime.client.paths import app_path, function_path
from stoker.runtime.commands.exits import Failed
from stoker.runtime.commands.progress import LOOK_S
from stoker.runtime.commands.terminal import shortened

# A failure that is known by then may be from before: what made it fail may be mended without a new version.
SETTLED_S = 2.0
# A trial start that has no place yet, since a host has to boot first, is forgotten unless it is asked for again.
ASK_AGAIN_S = 15.0
MOST_S = 1800.0


def until_served(client: Any, app: str, version: str, say: Callable[[str], None]) -> str:
    """How it is then: what nobody keeps awake is started for a trial. Raises Failed for a version that doesn't start,
    or isn't known to after MOST_S."""
    began, asked = time.monotonic(), float("-inf")
    while True:
        row, now = row_of(client, app, version), time.monotonic()
        unproven = {part["name"]: part for part in row["functions"] if part["state"] != "proven"}
        behind = {part["name"] for part in row["functions"] if part["others"]} | unproven.keys()
        if not behind:
            return f"version {version} serves"
        failed = [part for part in unproven.values() if part["state"] == "failed"]
        if failed and now - began > SETTLED_S:
            raise Failed(failure_text(failed[0]))
        if now - asked > ASK_AGAIN_S:
            asked = now
            for name in unproven:
                client.insist("POST", f"{function_path(name)}/start")
        waits = progress(client.functions(), behind, len(row["functions"]))
        if now - began > MOST_S:
            raise Failed(f"version {version} is deployed, but doesn't serve after {MOST_S / 60:g} minutes: {waits}")
        say(waits)
        time.sleep(LOOK_S)


def row_of(client: Any, app: str, version: str) -> dict[str, Any]:
    rows = client.insist("GET", f"{app_path(app)}/versions")["data"]
    for row in rows:
        if row["version"] == version and row["current"]:
            return row
    raise Failed(f"version {version} of {app} is not the current one any more: something else was deployed meanwhile")


def progress(functions: list[dict[str, Any]], behind: Collection[str], total: int) -> str:
    """Of an app's `total` functions: how many are ready, and what others do."""
    ready = f"{total - len(behind)} of {total} ready; " if total > 1 else ""
    return ready + shortened([activity(each) for each in functions if each["name"] in behind], "; ")


def activity(function: dict[str, Any]) -> str:
    replicas = ", ".join(f"{count} {state}" for state, count in function["replicas"].items())
    return f"{function['name']}: {replicas or function['wait_reason'] or 'waits for a replica'}"


def failure_text(part: dict[str, Any]) -> str:
    return (
        f"{part['name']}: version {part['version']} does not start: {part['error']}\n"
        f"`stoker logs {part['name']}` has its last words; an older version, if there is one, serves meanwhile"
    )
