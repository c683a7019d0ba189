"""Fetching weights over loopback HTTP: stoker's fetcher, every chunk checked, beside the best raw socket client, which
checks nothing. Both read 16 MiB ranges into the same ring; the server is `benchmarks.range_server` (sendfile).

Also from the chunk cache (in memory), from a peer beside the store, and from a file.

Run: python -m benchmarks.fetch [--gib 2] [--runs 5]
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.report import print_table, save
from stoker.coldstart.chunk_cache import ChunkCache
from stoker.coldstart.fetch import Fetcher
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import CHUNK_BYTES, Chunk, FileEntry, Manifest
from stoker.coldstart.peer_server import PeerServer
from stoker.coldstart.peers import PeerSource
from stoker.coldstart.ring import Ring
from stoker.coldstart.s3_store import S3Store
from stoker.coldstart.store import ObjectStore

SLOTS = 16
RAW_CONNECTIONS = (2, 4, 8, 16)
KEY = b"benchmark" * 4
NAME = "weights"


def write_weights(folder: Path, gib: float) -> Manifest:
    """One file of random bytes, and a manifest of its chunks."""
    (folder / "bucket").mkdir()
    chunks, size = [], int(gib * (1 << 30)) // CHUNK_BYTES * CHUNK_BYTES
    with open(folder / "bucket" / NAME, "wb") as file:
        for offset in range(0, size, CHUNK_BYTES):
            data = os.urandom(CHUNK_BYTES)
            file.write(data)
            chunks.append(Chunk(0, offset, CHUNK_BYTES, xxhash.xxh3_64_intdigest(data)))
    entry = FileEntry(NAME, size, f'"{size:x}"', "")
    return Manifest(revision="benchmark", files=[entry], chunks=chunks, tensors=[], documents={})


@contextmanager
def range_server(folder: Path) -> Iterator[int]:
    command = [sys.executable, "-m", "benchmarks.range_server", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin and server.stdout
        yield int(server.stdout.readline())
        server.stdin.close()


def fetch(store: ObjectStore, manifest: Manifest, ring: Ring, **options: Any) -> dict[str, Any]:
    """A whole load; slots are given back at once."""
    fetcher = Fetcher(store, manifest, ring, **options)
    fetcher.start()
    while ready := fetcher.next(60):
        fetcher.release(ready.slot)
    summary = fetcher.summary()
    fetcher.cancel()
    return summary


def raw_fetch(port: int, size: int, ring: Ring, connections: int) -> None:
    """What sockets can do: keep-alive connections, one request after the other, MSG_WAITALL, no checks."""
    offsets, lock = iter(range(0, size, CHUNK_BYTES)), threading.Lock()

    def work(slot: memoryview) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while True:
                with lock:
                    start = next(offsets, None)
                if start is None:
                    return
                end = min(start + CHUNK_BYTES, size)
                head = f"GET /bucket/{NAME} HTTP/1.1\r\nHost: x\r\nRange: bytes={start}-{end - 1}\r\n\r\n"
                connection.sendall(head.encode())
                receive_body(connection, slot[: end - start])

    threads = [threading.Thread(target=work, args=(ring.slot(number),)) for number in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def receive_body(connection: socket.socket, into: memoryview) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(512)
    rest = head.partition(b"\r\n\r\n")[2]
    into[: len(rest)] = rest
    connection.recv_into(into[len(rest) :], len(into) - len(rest), socket.MSG_WAITALL)


def timed(action: Callable[[], object]) -> float:
    start = time.monotonic()
    action()
    return time.monotonic() - start


def measure(folder: Path, manifest: Manifest, runs: int) -> dict[str, list[float]]:
    """Seconds of each run of each case; cases take turns, so that a busy moment hits all of them."""
    size, ring = manifest.total_bytes, Ring.create(SLOTS)
    with range_server(folder) as port:
        os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "x"}
        os.environ |= {"AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
        store, local = S3Store("bucket"), FileStore(folder / "bucket")
        local_manifest = Manifest(**{**fields(manifest), "files": [local_entry(local)]})
        cache = ChunkCache(folder / "cache", 2 * size, store.url)
        fetch(store, manifest, ring, cache=cache)
        peer = PeerServer(folder / "cache", KEY, host="127.0.0.1")
        peer.start()
        cases: dict[str, Callable[[], object]] = {
            f"raw sockets, {number}": lambda number=number: raw_fetch(port, size, ring, number)
            for number in RAW_CONNECTIONS
        }
        cases |= {
            "stoker, store": lambda: fetch(store, manifest, ring),
            "stoker, store, sums left to a GPU": lambda: fetch(store, manifest, ring, verify=False),
            "stoker, cache": lambda: fetch(store, manifest, ring, cache=cache),
            "stoker, peer and store": lambda: fetch(store, manifest, ring, peers=peers_of(peer, store)),
            "stoker, file": lambda: fetch(local, local_manifest, ring),
        }
        found: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(runs):
            for name, action in cases.items():
                found[name].append(timed(action))
        peer.close()
    ring.close()
    return found


def fields(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in manifest.__slots__}


def local_entry(store: FileStore) -> FileEntry:
    found = store.stat(NAME)
    return FileEntry(NAME, found.size, found.etag, "")


def peers_of(server: PeerServer, store: ObjectStore) -> PeerSource:
    return PeerSource([f"127.0.0.1:{server.port}"], KEY, store.url)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the weights lie")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        manifest = write_weights(Path(scratch), args.gib)
        found = measure(Path(scratch), manifest, args.runs)
    rates = {name: sorted(manifest.total_bytes / 1e9 / s for s in seconds) for name, seconds in found.items()}
    best_raw = max(statistics.median(values) for name, values in rates.items() if name.startswith("raw"))
    rows = [
        (name, *(f"{value:.2f}" for value in (values[0], statistics.median(values), values[-1])))
        + (f"{statistics.median(values) / best_raw:.0%}",)
        for name, values in rates.items()
    ]
    print_table(f"fetching {manifest.total_bytes / 1e9:.2f} GB", ("client", "min GB/s", "p50", "max", "of raw"), rows)
    share = statistics.median(rates["stoker, store, sums left to a GPU"]) / best_raw
    arguments = {"bytes": manifest.total_bytes, "runs": args.runs, "folder": str(args.folder)}
    save("fetch", arguments, {"gb_s": rates, "share_of_best_raw": share})


if __name__ == "__main__":
    main()
