"""Chunks from other hosts' caches: the same bytes, or none; strangers get nothing; a bad peer costs little."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.coldstart.chunk_cache import ChunkCache, domain_of
from stoker.coldstart.peer_access import VALID_S, authorization, is_authorized, signed_now
from stoker.coldstart.peer_server import PeerServer
from stoker.coldstart.peers import PeerSource
from tests.coldstart.fetching import expected, fetch_all, fetch_and_report

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
PLENTY = 1 << 30


@pytest.fixture
def store(fault_server: Any, published: Any) -> Any:
    return published.serve(fault_server)


@pytest.fixture
def peer(store: Any, published: Any, tmp_path: Path) -> Iterator[PeerServer]:
    """A host that has loaded the model and serves its cache."""
    folder = tmp_path / "peer"
    fetch_all(store, published, cache=ChunkCache(folder, PLENTY, store.url))
    server = PeerServer(folder, KEY, host="127.0.0.1")
    server.start()
    yield server
    server.close()


def load(store: Any, published: Any, addresses: list[str], key: bytes = KEY, **options: Any) -> dict[str, Any]:
    peers = PeerSource(addresses, key, store.url)
    found, summary = fetch_and_report(store, published.manifest, peers=peers, **options)
    peers.close()
    assert found == expected(published)
    return {name: source["chunks"] for name, source in summary["sources"].items()}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def address(server: PeerServer) -> str:
    return f"127.0.0.1:{server.port}"


def test_a_load_from_a_peer_asks_the_store_for_nothing(store, published, peer, fault_server, tmp_path: Path):
    before = len(fault_server.ranges)
    cache = ChunkCache(tmp_path / "mine", PLENTY, store.url)
    assert load(store, published, [address(peer)], cache=cache, connections=4) == {"peer": 24}
    assert len(fault_server.ranges) == before
    wait_for(lambda: peer.served_bytes == published.manifest.total_bytes)
    assert load(store, published, [], cache=cache) == {"cache": 24}


def test_a_busy_peer_is_not_waited_for(store, published, peer):
    """Eight reads at once, four of them at most from one peer: the others go to the store meanwhile."""
    sources = load(store, published, [address(peer)], connections=8, slots=16)
    assert sources["peer"] >= 4 and sum(sources.values()) == 24


def test_a_peer_that_has_only_a_part(store, published, peer):
    for path in sorted(peer.folder.glob("*/*"))[::2]:
        path.unlink()
    sources = load(store, published, [address(peer)])
    assert sources["store"] >= 12 and sum(sources.values()) == 24


def test_a_peer_without_the_model_is_soon_left_alone(store, published, peer, caplog):
    for path in peer.folder.glob("*/*"):
        path.unlink()
    with caplog.at_level("INFO", "stoker.coldstart"):
        assert load(store, published, [address(peer)]) == {"store": 24}
    assert "too little of this model" in caplog.text


def test_wrong_bytes_are_never_taken_and_asked_for_once(store, published, peer, caplog):
    for path in peer.folder.glob("*/*"):
        data = bytearray(path.read_bytes())
        data[3] ^= 1
        path.write_bytes(data)
    with caplog.at_level("INFO", "stoker.coldstart"):
        assert load(store, published, [address(peer)]) == {"store": 24}
    assert caplog.text.count("another checksum") == 1
    assert peer.served_bytes <= 4 * 4096


@pytest.mark.parametrize("change", [b"", b"more"])
def test_chunks_of_another_length_are_not_taken(store, published, peer, change: bytes):
    for path in peer.folder.glob("*/*"):
        path.write_bytes(path.read_bytes() + change if change else path.read_bytes()[:-1])
    assert load(store, published, [address(peer)]) == {"store": 24}


def test_strangers_get_nothing(store, published, peer):
    assert load(store, published, [address(peer)], OTHER_KEY) == {"store": 24}
    path = next("/" + str(found.relative_to(peer.folder)) for found in peer.folder.glob("*/*"))
    url = f"http://{address(peer)}"
    assert httpx.get(url + path).status_code == 403
    assert httpx.get(url + path, headers={"Authorization": "Bearer x"}).status_code == 403
    assert httpx.get(url + path, headers=signed_now(OTHER_KEY, path)).status_code == 403
    old = {"Authorization": authorization(KEY, path, time.time() - VALID_S - 5)}
    assert httpx.get(url + path, headers=old).status_code == 403
    assert peer.served_bytes == 0
    assert httpx.get(url + path, headers=signed_now(KEY, path)).status_code == 200


@pytest.mark.parametrize("path", ["/", "/../secret", "/a/b", f"/{domain_of('s3://models')}/..", "/" + "0" * 16 + "/x"])
def test_only_chunks_are_served(peer, path: str):
    with socket.create_connection(("127.0.0.1", peer.port)) as raw:
        header = signed_now(KEY, path)["Authorization"]
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {header}\r\n\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize(
    "header",
    ["", "stoker-peer", "stoker-peer :", "stoker-peer x:y", "stoker-peer ²:y", "stoker-peer 1e3:y", "other 1:2", "é"],
)
def test_malformed_authorizations(header: str):
    assert not is_authorized(KEY, "/p", header, 1.0)


def test_an_authorization_is_for_one_path_and_a_while():
    header = authorization(KEY, "/p", 1000.0)
    assert is_authorized(KEY, "/p", header, 1000.0 + VALID_S - 1) and is_authorized(KEY, "/p", header, 901.0)
    assert not is_authorized(KEY, "/q", header, 1000.0)
    assert not is_authorized(KEY, "/p", header, 1001.0 + VALID_S)
    assert not is_authorized(OTHER_KEY, "/p", header, 1000.0)


@pytest.fixture
def odd_server() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """A peer that does whatever it is told with each connection."""
    listener, stop = socket.create_server(("127.0.0.1", 0)), threading.Event()
    threads: list[threading.Thread] = []
    behaviours: list[Callable[[socket.socket], None]] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=handle, args=(connection,)))
            threads[-1].start()

    def handle(connection: socket.socket) -> None:
        with connection:
            try:
                behaviours[0](connection)
            except OSError:
                return

    def start(behaviour: Callable[[socket.socket], None]) -> str:
        behaviours.append(behaviour)
        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    start.stop = stop  # type: ignore[attr-defined]
    yield start
    stop.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("kind", ["silent", "dripping", "resetting", "speaking another protocol", "absent"])
def test_a_peer_that_does_not_answer_costs_little(store, published, odd_server, kind: str):
    def dripping(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\n")
        while not odd_server.stop.wait(0.05):
            connection.sendall(b"x")

    def silent(connection: socket.socket) -> None:
        connection.recv(4096)
        odd_server.stop.wait(30)

    def speaking(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"+OK ready\r\n")

    behaviour = {"dripping": dripping, "silent": silent, "speaking another protocol": speaking}
    where = "127.0.0.1:1" if kind == "absent" else odd_server(behaviour.get(kind, lambda connection: None))
    start = time.monotonic()
    assert load(store, published, [where], slots=8) == {"store": 24}
    assert time.monotonic() - start < 4


def test_a_peer_takes_only_so_many_connections(peer, monkeypatch: pytest.MonkeyPatch):
    held = [socket.create_connection(("127.0.0.1", peer.port)) for _ in range(64)]
    wait_for(lambda: len(peer._open) == 64)
    with socket.create_connection(("127.0.0.1", peer.port), timeout=5) as extra:
        assert extra.recv(1) == b""
    for connection in held:
        connection.close()
