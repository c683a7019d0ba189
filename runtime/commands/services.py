"""The parts of a deployment as processes: `stoker up` and `down`, `gateway`, `controller` and `worker`."""

import asyncio
import logging
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stoker.runtime.commands.exits import Failed
from stoker.runtime.commands.terminal import (
    AsJson,
    Auth,
    CacheDir,
    CacheSize,
    DataDir,
    DeviceMemory,
    PeerPort,
    Redis,
    RingSize,
    Store,
    show,
)
from stoker.runtime.secret import MIN_CHARACTERS
from stoker.runtime.settings import Settings, from_environment

if TYPE_CHECKING:
    import psutil

LOOK_S = 1.0
LOOK_AGAIN_S = 0.05
DOWN_S = 90.0

Reload = Annotated[
    Path | None,
    typer.Option(
        help="Deploy this app's file, and again whenever it or what it includes changes.", exists=True, dir_okay=False
    ),
]
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
    for chatty in ("httpx", "watchfiles"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return settings


def with_weights(
    settings: Settings,
    cache: Path | None,
    cache_gb: float | None,
    ring_mb: int | None,
    device_memory_gb: float | None,
) -> Settings:
    """What the command line says about keeping and moving weights."""
    if device_memory_gb is not None:
        settings = settings.with_(device_memory_gb=device_memory_gb)
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


def signing_secret(settings: Settings) -> str:
    """ "" for one that could be guessed."""
    return settings.secret if len(settings.secret) >= MIN_CHARACTERS else ""


def webhook_networks(settings: Settings) -> tuple[Any, ...]:
    from stoker.runtime.webhooks.address import networks_of

    try:
        return networks_of(settings.webhook_allow)
    except ValueError as error:
        raise typer.BadParameter(f"STOKER_WEBHOOK_ALLOW lists networks like 10.1.0.0/16,fd12::/32: {error}") from None


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
    device_memory_gb: DeviceMemory = None,
    reload: Reload = None,
) -> None:
    """Run everything on this machine: queue, gateway, controller and host agent, with no worker awake."""
    from stoker.runtime.supervisor import Supervisor

    settings = with_weights(settings_of(data, redis, store), cache, cache_gb, ring_mb, device_memory_gb)
    settings = settings.with_(auth=auth_of(auth or settings.auth, host))
    asyncio.run(Supervisor(settings, host, port, hosts, reload and reload.resolve()).run())


def down(data: DataDir = None, as_json: AsJson = False) -> None:
    """Stop the `stoker up` of a data folder: what runs has seconds to finish, then goes back to the queue, whose
    jobs run after the next `stoker up`."""
    import psutil

    from stoker.runtime.supervisor import read_state

    settings = settings_of(data)
    state = read_state(settings.data_dir)
    if state is None or not psutil.pid_exists(int(str(state["pid"]))):
        raise Failed(f"nothing runs in {settings.data_dir}; name another folder with --data{elsewhere()}")
    process = psutil.Process(int(str(state["pid"])))
    process.terminate()
    tell_until_gone(process, settings.data_dir)
    show({"stopped": True}, as_json, "stopped")


def tell_until_gone(process: "psutil.Process", data_dir: Path) -> None:
    """What `stoker up` says that it waits for."""
    from stoker.runtime.supervisor import read_state

    said, deadline = "", time.monotonic() + DOWN_S
    while process.is_running() and process.status() != "zombie":
        state = read_state(data_dir) or {}
        if (waits := str(state.get("stopping", ""))) not in ("", said):
            said = waits
            typer.echo(said, err=True)
        if time.monotonic() > deadline:
            raise Failed(f"process {process.pid} did not stop within {DOWN_S:g} s; its log is where it was started")
        time.sleep(LOOK_AGAIN_S)


def elsewhere() -> str:
    """Where a stoker answers all the same; "" if none does."""
    from stoker.runtime.client.client import Client

    with suppress(Exception), Client(timeout=LOOK_S) as client:
        if client.request("GET", "/healthz") == {"status": "ok"}:
            return f" (the one that answers at {client.url} runs elsewhere)"
    return ""


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
    keys = keys_secret(settings) if auth_of(auth or settings.auth, host) == "keys" else ""
    facts = GatewaySettings(
        redis_url=settings.redis_url,
        store_url=settings.store,
        keys_secret=keys,
        secret=signing_secret(settings),
        webhook_networks=webhook_networks(settings),
    )
    if settings.drain_s is not None:
        facts = replace(facts, drain_s=settings.drain_s)
    serve(facts, host, port)


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


def worker(
    host_id: Annotated[str, typer.Option(help="Name of this host, unique in the cluster (else its host name).")] = "",
    provider: HostProvider = "local",
    data: DataDir = None,
    redis: Redis = "",
    store: Store = "",
    cache: CacheDir = None,
    cache_gb: CacheSize = None,
    ring_mb: RingSize = None,
    device_memory_gb: DeviceMemory = None,
    peer_port: PeerPort = 0,
) -> None:
    """Run this machine's host agent. An instance of a pool (`--provider aws`) goes by its instance id."""
    import uvloop

    from stoker.runtime.worker.agent import serve, serve_instance

    settings = with_weights(needs_redis(settings_of(data, redis, store)), cache, cache_gb, ring_mb, device_memory_gb)
    settings = settings.with_(peer_port=peer_port or settings.peer_port)
    if settings.peer_port and len(settings.secret) < MIN_CHARACTERS:
        raise typer.BadParameter(
            f"hosts that share weights need the deployment's secret: set STOKER_SECRET to at least {MIN_CHARACTERS} "
            "random characters, the same on every host; or leave --peer-port out"
        )
    uvloop.run(serve_instance(settings) if provider == "aws" else serve(settings, host_id or socket.gethostname()))
