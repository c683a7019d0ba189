"""The `stoker` command. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no gateway answers."""

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from stoker.runtime.commands.hosts import hosts as list_hosts
from stoker.runtime.commands.jobs import jobs
from stoker.runtime.commands.simulate import simulate
from stoker.runtime.commands.tenants import tenants
from stoker.runtime.commands.terminal import (
    GATEWAY_URL,
    ApiKey,
    AsJson,
    Auth,
    CacheDir,
    CacheSize,
    DataDir,
    FunctionName,
    PeerPort,
    Redis,
    RingSize,
    Store,
    Url,
    client_of,
    errors,
    print_table,
    show,
)
from stoker.runtime.commands.usage import prices, usage
from stoker.runtime.processes import die_with_parent
from stoker.runtime.secret import MIN_CHARACTERS
from stoker.runtime.settings import Settings, from_environment

app = typer.Typer(no_args_is_help=True, add_completion=True, help="A self-hosted serverless GPU function runtime.")
app.command("hosts")(list_hosts)
app.add_typer(jobs, name="jobs")
app.add_typer(tenants, name="tenants")
app.command()(simulate)
app.add_typer(prices, name="prices")
app.command()(usage)

FAILED, USAGE, UNREACHABLE = 1, 2, 3

HostProvider = Annotated[
    Literal["local", "aws"], typer.Option(help="Where hosts come from: agents that are started here, or EC2 pools.")
]


def settings_of(data: Path | None = None, redis: str = "", store: str = "") -> Settings:
    settings = from_environment()
    if data is not None:
        settings = settings.with_(data_dir=data.resolve())
    if redis:
        settings = settings.with_(redis_url=redis)
    if store:
        settings = settings.with_(store_url=store)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return settings


def with_weights(settings: Settings, cache: Path | None, cache_gb: float | None, ring_mb: int | None) -> Settings:
    """What the command line says about keeping and moving weights."""
    if cache is not None:
        settings = settings.with_(cache_dir=cache.resolve())
    if cache_gb is not None:
        settings = settings.with_(cache_gb=cache_gb)
    return settings if ring_mb is None else settings.with_(ring_mb=ring_mb)


def needs_redis(settings: Settings) -> Settings:
    if not settings.redis_url:
        raise typer.BadParameter("name the queue's server with --redis or STOKER_REDIS (`stoker up` starts one itself)")
    return settings


def auth_of(wanted: str, host: str) -> str:
    """ "keys" or "open": whether callers need an API key. Left out, only a loopback address is open."""
    if wanted not in ("", "keys", "open"):
        raise typer.BadParameter(f"--auth (STOKER_AUTH) is 'keys' or 'open', not '{wanted}'")
    return wanted or ("open" if host == "localhost" or host.startswith("127.") or host == "::1" else "keys")


def keys_secret(settings: Settings) -> str:
    if len(settings.secret) < MIN_CHARACTERS:
        raise typer.BadParameter(
            f"API keys need the deployment's secret: set STOKER_SECRET to at least {MIN_CHARACTERS} random characters, "
            "the same for every gateway; or, on a network that you trust, let everyone in with --auth open"
        )
    return settings.secret


@app.command()
def up(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    hosts: Annotated[int, typer.Option(min=1, help="Host agents to run on this machine.")] = 1,
    auth: Auth = "",
    data: DataDir = None,
    redis: Redis = "",
    store: Store = "",
    cache: CacheDir = None,
    cache_gb: CacheSize = None,
    ring_mb: RingSize = None,
) -> None:
    """Run everything on this machine: queue, gateway, controller and host agent, with no worker awake."""
    from stoker.runtime.supervisor import Supervisor

    settings = with_weights(settings_of(data, redis, store), cache, cache_gb, ring_mb)
    settings = settings.with_(auth=auth_of(auth or settings.auth, host))
    asyncio.run(Supervisor(settings, host, port, hosts).run())


@app.command()
def down(data: DataDir = None) -> None:
    """Stop the `stoker up` of a data folder; running work is finished or handed back first."""
    import psutil

    from stoker.runtime.supervisor import read_state

    settings = settings_of(data)
    state = read_state(settings.data_dir)
    if state is None or not psutil.pid_exists(int(str(state["pid"]))):
        typer.echo(f"nothing runs in {settings.data_dir}")
        return
    process = psutil.Process(int(str(state["pid"])))
    process.terminate()
    process.wait(timeout=90)
    typer.echo("stopped")


@app.command()
def gateway(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    auth: Auth = "",
    redis: Redis = "",
    store: Store = "",
) -> None:
    """Run a gateway: HTTP in, jobs out."""
    from stoker.runtime.gateway.server import serve
    from stoker.runtime.gateway.settings import GatewaySettings

    settings = needs_redis(settings_of(redis=redis, store=store))
    secret = keys_secret(settings) if auth_of(auth or settings.auth, host) == "keys" else ""
    serve(GatewaySettings(redis_url=settings.redis_url, store_url=settings.store, keys_secret=secret), host, port)


@app.command()
def controller(
    hosts: Annotated[int, typer.Option(min=0, help="Host agents that `stoker up` keeps on this machine.")] = 0,
    provider: HostProvider = "local",
    redis: Redis = "",
    store: Store = "",
) -> None:
    """Run a controller: decides how many replicas there are and where, and with `--provider aws` how many hosts."""
    from stoker.runtime.controller.controller import serve
    from stoker.runtime.controller.provider import LocalProvider

    settings = needs_redis(settings_of(redis=redis, store=store))
    if provider == "local":
        asyncio.run(serve(settings, lambda cluster, _: LocalProvider(cluster, hosts)))
        return
    from stoker.runtime.controller.aws_provider import AwsProvider

    if not settings.cluster:
        raise typer.BadParameter("name the cluster whose Auto Scaling groups are scaled: set STOKER_CLUSTER")
    asyncio.run(serve(settings, lambda cluster, leadership: AwsProvider(cluster, leadership, settings.cluster)))


@app.command()
def worker(
    host_id: Annotated[str, typer.Option(help="Name of this host, unique in the cluster (else its host name).")] = "",
    provider: HostProvider = "local",
    data: DataDir = None,
    redis: Redis = "",
    store: Store = "",
    cache: CacheDir = None,
    cache_gb: CacheSize = None,
    ring_mb: RingSize = None,
    peer_port: PeerPort = 0,
) -> None:
    """Run this machine's host agent. An instance of a pool (`--provider aws`) goes by its instance id."""
    import uvloop

    from stoker.runtime.worker.agent import serve, serve_instance

    settings = with_weights(needs_redis(settings_of(data, redis, store)), cache, cache_gb, ring_mb)
    settings = settings.with_(peer_port=peer_port or settings.peer_port)
    if settings.peer_port and len(settings.secret) < MIN_CHARACTERS:
        raise typer.BadParameter(
            f"hosts that share weights need the deployment's secret: set STOKER_SECRET to at least {MIN_CHARACTERS} "
            "random characters, the same on every host; or leave --peer-port out"
        )
    uvloop.run(serve_instance(settings) if provider == "aws" else serve(settings, host_id or socket.gethostname()))


@app.command()
def push(
    source: Annotated[Path, typer.Argument(help="A Hugging Face model folder, or a .gguf file.")],
    destination: Annotated[str, typer.Argument(help="file:///folder or s3://bucket/prefix")],
    as_json: AsJson = False,
) -> None:
    """Publish a model's weights, tokenizer and manifest into an object store."""
    from stoker.runtime.publishing import push_model

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=errors, disable=as_json) as progress:
        task = progress.add_task(f"push {source.name}", total=None)
        facts = push_model(source, destination, lambda done, total: progress.update(task, completed=done, total=total))
    show(facts, as_json, f"pushed {facts['tensors']} tensors, {facts['bytes'] / 1e6:.1f} MB to {facts['url']}")


@app.command()
def deploy(
    file: Annotated[Path, typer.Argument(help="A Python file with a stoker.App in it.")],
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Deploy the functions of an app."""
    from stoker.runtime.deployment import deploy as deploy_file

    with client_of(url, api_key) as client:
        records = deploy_file(file, client)
    show(records, as_json, "\n".join(f"deployed {r['name']} ({r['kind']}, version {r['version']})" for r in records))


@app.command()
def invoke(
    function: FunctionName,
    value: Annotated[str, typer.Argument(help="Its input as JSON; '-' reads standard input.")] = "null",
    detach: Annotated[bool, typer.Option("--detach", help="Queue it as a job and print the job's id.")] = False,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
) -> None:
    """Call a function and print its result as JSON."""
    text = sys.stdin.read() if value == "-" else value
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"the input is not JSON ({error}); quote text like '\"hello\"'") from error
    with client_of(url, api_key) as client:
        if detach:
            typer.echo(client.submit(function, parsed)["id"])
        else:
            typer.echo(json.dumps(client.invoke(function, parsed), ensure_ascii=False))


@app.command()
def delete(
    function: FunctionName,
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
) -> None:
    """Remove a deployed function; its queued and running jobs are cancelled."""
    with client_of(url, api_key) as client:
        client.delete(function)
    typer.echo(f"deleted {function}")


@app.command()
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


def explain(error: Exception) -> tuple[str, int]:
    """What a person should read, and the exit code."""
    from stoker.runtime.sdk import Unreachable

    if isinstance(error, Unreachable):
        return f"{error}; start one with `stoker up` or name it with --url", UNREACHABLE
    job_id = getattr(error, "job_id", "")
    return f"{error}\n(`stoker jobs get {job_id}` has the whole record)" if job_id else str(error), FAILED


def expected_errors() -> tuple[type[Exception], ...]:
    from stoker.coldstart.failures import ColdStartError
    from stoker.queue.client import ServerUnfit
    from stoker.queue.embedded import EmbeddedServerError
    from stoker.runtime.sdk import StokerError
    from stoker.runtime.spec import InvalidSpec
    from stoker.runtime.supervisor import PortTaken

    return (
        InvalidSpec,
        StokerError,
        ColdStartError,
        ServerUnfit,
        EmbeddedServerError,
        PortTaken,
        OSError,
    )


def run(command: Callable[[], Any]) -> int:
    try:
        command()
    except expected_errors() as error:
        message, code = explain(error)
        errors.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
        return code
    return 0


def main() -> None:
    die_with_parent()
    sys.exit(run(app))


if __name__ == "__main__":
    main()
