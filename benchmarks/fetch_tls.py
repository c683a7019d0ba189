"""Does fetching over TLS want more than one process? One process whose threads fetch everything, beside several that
each fetch a share of the chunks (an upper limit of what helper processes on one ring could bring).

The server is several processes on one port, half as many as there are cores, so that it isn't the limit.

Run: python -m benchmarks.fetch_tls [--gib 2] [--runs 3]
"""

import argparse
import mmap
import os
import socket
import ssl
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.fetch import NAME, SLOTS, fetch, write_weights
from benchmarks.range_server import RANGE, head_of
from benchmarks.report import print_table, save
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.ring import Ring
from stoker.coldstart.s3_store import S3Store

PROCESSES = (1, 2, 4)
SPAWN = get_context("spawn")


def write_certificate(path: Path) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", f"{path}.key", "-out", f"{path}.crt"]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    path.write_text(Path(f"{path}.key").read_text() + Path(f"{path}.crt").read_text())


def serve(file: Path, certificate: Path, port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listener = socket.create_server(("127.0.0.1", port), reuse_port=True, backlog=256)
    data = memoryview(mmap.mmap(os.open(file, os.O_RDONLY), 0, prot=mmap.PROT_READ))
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=answer, args=(connection, context, data), daemon=True).start()


def answer(connection: socket.socket, context: ssl.SSLContext, data: memoryview) -> None:
    with suppress(OSError), context.wrap_socket(connection, server_side=True) as tls, tls.makefile("rb") as requests:
        while head := b"".join(iter(requests.readline, b"\r\n")):
            wanted = RANGE.search(b"\r\n" + head)
            assert wanted, head
            start, stop = int(wanted[1]), int(wanted[2]) + 1
            tls.sendall(head_of(len(data), start, stop, True))
            tls.sendall(data[start:stop])


def fetch_share(manifest: Manifest, number: int, processes: int, orders: Connection) -> None:
    """Fetches every chunk whose number is `number` modulo `processes`, each time it is told to."""
    store, ring = S3Store("bucket"), Ring.create(max(1, SLOTS // processes))
    share = replace(manifest, chunks=manifest.chunks[number::processes])
    orders.send("ready")
    while orders.recv():
        fetch(store, share, ring, connections=max(1, SLOTS // processes))
        orders.send("done")


@contextmanager
def fetchers(manifest: Manifest, processes: int) -> Iterator[list[Connection]]:
    pipes = [SPAWN.Pipe() for _ in range(processes)]
    running = [
        SPAWN.Process(target=fetch_share, args=(manifest, number, processes, theirs), daemon=True)
        for number, (_, theirs) in enumerate(pipes)
    ]
    for process in running:
        process.start()
    for ours, _ in pipes:
        ours.recv()
    yield [ours for ours, _ in pipes]
    for ours, _ in pipes:
        ours.send(False)
    for process in running:
        process.join()


def timed(orders: list[Connection]) -> float:
    start = time.monotonic()
    for pipe in orders:
        pipe.send(True)
    for pipe in orders:
        pipe.recv()
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch, socket.socket() as probe:
        folder, certificate = Path(scratch), Path(scratch) / "certificate.pem"
        manifest = write_weights(folder, args.gib)
        write_certificate(certificate)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        os.environ |= {"AWS_ENDPOINT_URL": f"https://localhost:{port}", "AWS_CA_BUNDLE": f"{certificate}.crt"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
        arguments = (folder / "bucket" / NAME, certificate, port)
        servers = [SPAWN.Process(target=serve, args=arguments, daemon=True) for _ in range((os.cpu_count() or 2) // 2)]
        for server in servers:
            server.start()
        rates: dict[str, list[float]] = {}
        for processes in PROCESSES:
            with fetchers(manifest, processes) as orders:
                timed(orders)
                seconds = [timed(orders) for _ in range(args.runs)]
            rates[f"{processes} process(es)"] = sorted(manifest.total_bytes / 1e9 / s for s in seconds)
        for server in servers:
            server.terminate()
            server.join()
    rows = [(name, values[0], statistics.median(values), values[-1]) for name, values in rates.items()]
    print_table(f"fetching {manifest.total_bytes / 1e9:.2f} GB over TLS", ("client", "min GB/s", "p50", "max"), rows)
    save("fetch_tls", {"bytes": manifest.total_bytes, "runs": args.runs}, {"gb_s": rates})


if __name__ == "__main__":
    main()
