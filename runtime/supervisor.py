"""`stoker up`: everything on one machine. Starts the embedded server, gateway, controller and host agents, restarts
what dies, and takes all of it down with itself."""

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import time
from pathlib import Path

import httpx
from redis.exceptions import RedisError

from stoker.queue.broker import Broker
from stoker.queue.client import ServerUnfit, check_server, connect
from stoker.queue.cluster import Cluster
from stoker.queue.embedded import EmbeddedValkey
from stoker.runtime.client.messages import DEFAULT_URL
from stoker.runtime.processes import start_child, stop_child
from stoker.runtime.reloading import keep_deployed
from stoker.runtime.secret import kept_secret
from stoker.runtime.settings import Settings, from_environment, to_environment
from stoker.runtime.tenancy.api_key import Keyring
from stoker.runtime.worker.workplace import why_users_are_shared

MODULE = "stoker.runtime.cli"
WATCH_S = 0.1
STABLE_S = 10.0
MAX_PAUSE_S = 5.0
READY_S = 60.0
# What runs when `stoker up` is told to stop may finish within.
DRAIN_S = 3.0
COUNT_S = 1.0
# For a worker to end in, beyond that.
WORKER_S = 5.0

log = logging.getLogger("stoker.up")


class PortTaken(Exception):
    """The HTTP port can't be bound."""


def check_port(host: str, port: int) -> int:
    """The port to use (a free one for 0). Raises PortTaken with what to do."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTaken(f"can't listen on {host}:{port} ({error.strerror}); choose another with --port") from error
        return probe.getsockname()[1]


async def check_own_server(url: str) -> None:
    """Raises ServerUnfit, naming the address, for a server that doesn't answer or can't be used."""
    try:
        client = connect(url)
        try:
            await check_server(client)
        finally:
            await client.aclose()
    except (RedisError, OSError, ValueError, TimeoutError) as error:
        raise ServerUnfit(f"the queue's server {url} can't be used: {error}; see --redis") from error


def banner(settings: Settings, url: str, pid: int, shared: str = "") -> str:
    """What to type next, with the data folder and the address where those aren't the ones that are taken anyway.
    `shared`: why root's functions run as root."""
    data = "" if settings.data_dir == from_environment().data_dir else f" --data {shlex.quote(str(settings.data_dir))}"
    lines = [f"stoker is up at {url}  (pid {pid}, data in {settings.data_dir})"]
    lines += address_lines(url)
    if settings.auth == "keys":
        lines.append(f"callers need an API key; yours: stoker tenants root-key{data}, others': stoker tenants create")
    if shared:
        lines.append(f"functions run as root, and can read what root can: {shared}")
    lines.append(f"stop it with: stoker down{data}")
    return "\n".join(lines)


def address_lines(url: str) -> list[str]:
    """How other commands find a gateway that isn't where they look anyway."""
    usual = os.environ.get("STOKER_URL", DEFAULT_URL).rstrip("/")
    return [f"other commands find it with: export STOKER_URL={url}"] if url != usual else []


class Child:
    """One supervised process: started again after it ends, at most every few seconds when it keeps ending."""

    def __init__(self, name: str, arguments: list[str], settings: Settings) -> None:
        self.name = name
        self._arguments = arguments
        self._env = {**os.environ, **to_environment(settings)}
        self._log = settings.data_dir / "logs" / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self, grace_s: float) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process:
            await stop_child(self._process, grace_s)

    async def _run(self) -> None:
        pause = WATCH_S
        while True:
            started = time.monotonic()
            self._process = await start_child(MODULE, *self._arguments, env=self._env, log=self._log)
            code = await self._process.wait()
            pause = WATCH_S if time.monotonic() - started > STABLE_S else min(MAX_PAUSE_S, pause * 2)
            log.warning("%s ended with status %s; starting it again (log: %s)", self.name, code, self._log)
            await asyncio.sleep(pause)


class Supervisor:
    """Owns the children of one `stoker up`."""

    def __init__(self, settings: Settings, host: str, port: int, hosts: int, reload: Path | None = None) -> None:
        """`reload`: an app's file that is deployed whenever it changes."""
        self._reload = reload
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        (settings.data_dir / "logs").mkdir(exist_ok=True)
        self._port = check_port(host, port)
        self.url = f"http://{host}:{self._port}"
        self._server = None if settings.redis_url else EmbeddedValkey(settings.data_dir / "valkey")
        self._settings = settings.with_(
            redis_url=settings.redis_url or self._server.url,  # type: ignore[union-attr]
            secret=settings.secret or kept_secret(settings.data_dir),
            gateway_url=self.url,
            drain_s=DRAIN_S if settings.drain_s is None else settings.drain_s,
        )
        # When it is told to stop, nothing runs any more that it could wait for.
        gateway = self._settings.with_(drain_s=0.0)
        self._gateway = Child("gateway", ["gateway", "--host", host, "--port", str(self._port)], gateway)
        self._controller = Child("controller", ["controller", "--hosts", str(hosts)], self._settings)
        self._hosts: dict[str, Child] = {}
        self._state_file = settings.data_dir / "up.json"

    async def run(self, announce: bool = True) -> None:
        """Until SIGTERM or SIGINT. Raises what the embedded server raises when its folder is in use."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        if self._server:
            self._server.start()
        else:
            await check_own_server(self._settings.redis_url)
        watchers = [asyncio.create_task(self._watch_server()), asyncio.create_task(self._watch_hosts())]
        self._gateway.start()
        self._controller.start()
        try:
            if await self._ready(stop) and announce:
                shared = why_users_are_shared() if os.geteuid() == 0 else ""
                print(banner(self._settings, self.url, os.getpid(), shared), flush=True)
            if self._reload and not stop.is_set():
                watchers.append(asyncio.create_task(keep_deployed(self._reload, self._client_environment())))
            await stop.wait()
        finally:
            await self._shut_down(watchers)

    def _client_environment(self) -> dict[str, str]:
        """For a process that calls the gateway as the operator."""
        key = Keyring(self._settings.secret).root_text() if self._settings.auth == "keys" else ""
        return {**os.environ, "STOKER_URL": self.url, "STOKER_API_KEY": key}

    async def _ready(self, stop: asyncio.Event) -> bool:
        deadline = time.monotonic() + READY_S
        async with httpx.AsyncClient(base_url=self.url) as client:
            while time.monotonic() < deadline and not stop.is_set():
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/readyz")).status_code == 200:
                        self._write_state()
                        return True
                await asyncio.sleep(WATCH_S)
        return False

    def _write_state(self, stopping: str = "") -> None:
        """`stopping`: what its end waits for."""
        facts = {"url": self.url, "pid": os.getpid(), "redis": self._settings.redis_url, "store": self._settings.store}
        facts |= {"stopping": stopping} if stopping else {}
        scratch = self._state_file.with_suffix(".tmp")
        scratch.write_text(json.dumps(facts))
        scratch.replace(self._state_file)

    async def _watch_server(self) -> None:
        while self._server:
            if not self._server.alive():
                log.warning("the queue server died; starting it again on the same data")
                try:
                    self._server.start()
                except Exception as error:
                    log.error("the queue server does not start: %s", error)
            await asyncio.sleep(WATCH_S)

    async def _watch_hosts(self) -> None:
        client = connect(self._settings.redis_url)
        cluster = Cluster(client)
        try:
            while True:
                with contextlib.suppress(RedisError):
                    await self._match_hosts(await cluster.hosts_wanted() or [])
                await asyncio.sleep(WATCH_S)
        finally:
            await client.aclose()

    async def _running(self) -> str:
        """How many jobs; "" for none, or if that can't be told."""
        client = connect(self._settings.redis_url)
        broker = Broker(client)
        try:
            async with asyncio.timeout(COUNT_S):
                backlogs = await broker.backlogs(await broker.functions_with_work())
            return counted(sum(backlog.running for backlog in backlogs.values()))
        except (RedisError, TimeoutError):
            return ""
        finally:
            await client.aclose()

    async def _match_hosts(self, wanted: list[str]) -> None:
        for host in wanted:
            if host not in self._hosts:
                self._hosts[host] = child = Child(host, ["worker", "--host-id", host], self._settings)
                child.start()
        for host in [host for host in self._hosts if host not in wanted]:
            await self._hosts.pop(host).stop(grace_s=35)

    async def _shut_down(self, watchers: list[asyncio.Task[None]]) -> None:
        """Agents first, so that they can hand their work back; then the gateway, whose callers hear that their jobs go
        on; the queue server last."""
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await self._controller.stop(grace_s=5)
        drain_s = self._settings.drain_s or 0.0
        if self._state_file.exists() and (running := await self._running()):
            said = f"{running} running: up to {drain_s:g} s to finish, then back to the queue"
            log.info("stopping; %s", said)
            self._write_state(said)
        await asyncio.gather(*(child.stop(grace_s=drain_s + WORKER_S) for child in self._hosts.values()))
        await self._gateway.stop(grace_s=10)
        if self._server:
            self._server.stop()
        self._state_file.unlink(missing_ok=True)


def counted(jobs: int) -> str:
    return f"{jobs} job{'s' * (jobs > 1)}" if jobs else ""


def read_state(data_dir: Path) -> dict[str, object] | None:
    """What a running `stoker up` on this folder wrote about itself."""
    try:
        return json.loads((data_dir / "up.json").read_text())
    except (OSError, ValueError):
        return None
