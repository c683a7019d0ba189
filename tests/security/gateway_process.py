"""A gateway in a process of its own, for what is measured on it from outside, with raw sockets as its clients."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import httpx
import psutil

from tests.connections import Ends, connected

# The limits of time are shortened, so that a test needn't wait for them.
START = """
import sys
from stoker.runtime.gateway import connection, server
from stoker.runtime.gateway.settings import GatewaySettings
redis, store, port, *limits = sys.argv[1:]
for name, value in zip(limits[::2], limits[1::2], strict=True):
    assert hasattr(connection, name)
    setattr(connection, name, float(value))
server.serve(GatewaySettings(redis, store, body_timeout_s=1.0, keepalive_s=0.5), "127.0.0.1", int(port))
"""
START_S = 20


@dataclass(frozen=True)
class GatewayProcess:
    port: int
    process: psutil.Process
    store_url: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def rss(self) -> int:
        return self.process.memory_info().rss

    def healthy(self) -> bool:
        return httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200

    def connected(self) -> AbstractAsyncContextManager[Ends]:
        return connected("127.0.0.1", self.port, limit=1 << 20)


@contextlib.contextmanager
def gateway_process(redis_url: str, store_url: str, limits: Mapping[str, float]) -> Iterator[GatewayProcess]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [str(word) for pair in limits.items() for word in pair]
    started = subprocess.Popen([sys.executable, "-c", START, redis_url, store_url, str(port), *words])
    gateway = GatewayProcess(port, psutil.Process(started.pid), store_url)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if gateway.healthy():
                    break
            assert started.poll() is None and time.monotonic() < deadline, "the gateway did not start"
            time.sleep(0.05)
        yield gateway
    finally:
        started.kill()
        started.wait()
