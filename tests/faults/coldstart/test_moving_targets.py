"""What the world around a load may do meanwhile: credentials expire, names move to other addresses, peers die."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from stoker.coldstart.chunk_cache import ChunkCache
from stoker.coldstart.failures import StoreUnavailable
from stoker.coldstart.peers import PeerSource
from tests.children import child
from tests.coldstart.fault_server import FaultServer, serving
from tests.coldstart.fetching import expected, fetch_all, fetch_and_report

NAME = "objects.stoker.test"


class Vending(ThreadingHTTPServer):
    """Hands out temporary credentials; only the latest are good."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), VendingHandler)
        self.generation = 1
        self.handed_out: list[int] = []


class VendingHandler(BaseHTTPRequestHandler):
    server: Vending

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.handed_out.append(self.server.generation)
        soon = datetime.now(UTC) + timedelta(seconds=300)
        body = {
            "AccessKeyId": f"key-{self.server.generation}",
            "SecretAccessKey": "secret",
            "Token": f"token-{self.server.generation}",
            "Expiration": soon.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def vending(fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vending]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with Vending() as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{server.server_port}/")
        fault_server.admits = lambda target: f"X-Amz-Security-Token=token-{server.generation}&" in target + "&"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_credentials_that_expire_in_mid_load_are_renewed(
    fault_server: FaultServer, published: Any, vending: Vending
) -> None:
    store = published.serve(fault_server, retry_budget_s=20)

    def expire(count: int) -> None:
        if count in (6, 14):
            vending.generation += 1

    fault_server.on_range = expire
    assert fetch_all(store, published) == expected(published)
    assert set(vending.handed_out) == {1, 2, 3}


def test_credentials_that_stay_expired_are_an_error(
    fault_server: FaultServer, published: Any, vending: Vending
) -> None:
    store = published.serve(fault_server, retry_budget_s=0.4)
    fault_server.admits = lambda target: len(fault_server.ranges) <= 5
    with pytest.raises(StoreUnavailable, match="HTTP 403 ExpiredToken.*credentials: container-role") as caught:
        fetch_all(store, published)
    assert caught.value.range and caught.value.object.startswith("s3://models/model-0")
    assert "token-1" not in str(caught.value)


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What the store's name means to this process."""
    real, address = socket.getaddrinfo, ["127.0.0.1"]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *args, **kw: real(address[0] if host == NAME else host, *args, **kw)
    )
    return lambda to: address.__setitem__(0, to)


def test_a_store_that_moves_to_another_address_in_mid_load(
    published: Any, point_at: Callable[[str], None], resolve: Callable[[str], None]
) -> None:
    with FaultServer() as old, FaultServer("127.0.0.2", old.server_port) as new:
        point_at(f"http://{NAME}:{old.server_port}")
        published.serve(new)
        store = published.serve(old, retry_budget_s=20)

        def move(count: int) -> None:
            if count == 6:
                resolve("127.0.0.2")
                old.socket.close()
                old.always = "reset"

        old.on_range = move
        threads = [serving(server) for server in (old, new)]
        for thread in threads:
            next(thread)
        assert fetch_all(store, published) == expected(published)
        assert len(old.ranges) < len(published.manifest.chunks) and len(new.ranges) >= 10
        for thread in threads:
            next(thread, None)


def test_an_address_that_never_answers_is_left_for_the_next(
    fault_server: FaultServer, published: Any, point_at: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with a dead address before the living one."""
    real = socket.getaddrinfo

    def both(host: Any, *args: Any, **kw: Any) -> Any:
        if host != NAME:
            return real(host, *args, **kw)
        return [*real("127.0.0.3", *args, **kw), *real("127.0.0.1", *args, **kw)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    point_at(f"http://{NAME}:{fault_server.server_port}")
    assert fetch_all(published.serve(fault_server), published) == expected(published)


PEER = """
import sys
from pathlib import Path
from stoker.coldstart.peer_server import PeerServer
server = PeerServer(Path(sys.argv[1]), b"key", host="127.0.0.1")
server.start()
print(server.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_peer_that_dies_in_mid_load(
    fault_server: FaultServer, published: Any, tmp_path: Path, number: signal.Signals
) -> None:
    store = published.serve(fault_server)
    fetch_all(store, published, cache=ChunkCache(tmp_path, 1 << 30, store.url))
    command = [sys.executable, "-c", PEER, str(tmp_path)]
    with child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout

        class Dying(PeerSource):
            reads = 0

            def read(self, *args: Any) -> bool:
                found = super().read(*args)
                self.reads += found
                if self.reads == 5:
                    process.send_signal(number)
                return found

        peers = Dying([f"127.0.0.1:{int(process.stdout.readline())}"], b"key", store.url)
        start = time.monotonic()
        found, summary = fetch_and_report(store, published.manifest, slots=2, connections=2, peers=peers)
        assert time.monotonic() - start < 6
        peers.close()
    assert found == expected(published)
    assert 5 <= summary["sources"]["peer"]["chunks"] < 24 and summary["sources"]["store"]["chunks"] > 0
