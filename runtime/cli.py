"""The `stoker` command: its parts stand in `commands/`, how it exits in `commands/exits.py`."""

import sys

import typer

from stoker.runtime.commands import apps, calls, logs, services, weights
from stoker.runtime.commands.audit import audit
from stoker.runtime.commands.exits import CODES, run
from stoker.runtime.commands.function_secrets import secrets
from stoker.runtime.commands.hosts import hosts
from stoker.runtime.commands.jobs import jobs
from stoker.runtime.commands.simulate import simulate
from stoker.runtime.commands.tenants import tenants
from stoker.runtime.commands.usage import prices, usage
from stoker.runtime.commands.webhooks import webhooks
from stoker.runtime.processes import die_with_parent

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    help="A self-hosted serverless GPU function runtime.",
    epilog=CODES,
)
COMMANDS = (
    *(services.up, services.down),
    *(apps.deploy, apps.functions, apps.versions, apps.rollback, apps.delete),
    *(calls.invoke, logs.logs, usage, hosts, audit),
    *(weights.push, simulate),
    *(services.gateway, services.controller, services.worker),
)
for command in COMMANDS:
    app.command()(command)
for group, name in (
    (jobs, "jobs"),
    (tenants, "tenants"),
    (webhooks, "webhooks"),
    (secrets, "secrets"),
    (prices, "prices"),
):
    app.add_typer(group, name=name)


def main() -> None:
    die_with_parent()
    sys.exit(run(app))


if __name__ == "__main__":
    main()
