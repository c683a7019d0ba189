"""Loads a published model through a cache and prints what it got as JSON: the process that the tests kill."""

import argparse
import hashlib
import json
import os
import resource
import time
from pathlib import Path

from stoker.coldstart import chunk_cache
from stoker.coldstart.chunk_cache import ChunkCache
from stoker.coldstart.fetch import Fetcher
from stoker.coldstart.manifest import read_manifest
from stoker.coldstart.ring import Ring
from stoker.coldstart.store import open_store


def stop_in_mid_write(number: int) -> None:
    """The cache file number `number` is written half; then nothing happens any more."""
    write_all, count = chunk_cache.write_all, iter(range(1, 10**6))

    def write(fd: int, data: memoryview) -> None:
        if next(count) < number:
            return write_all(fd, data)
        write_all(fd, data[: len(data) // 2])
        print("half written", flush=True)
        time.sleep(600)

    chunk_cache.write_all = write


def stop_before_rename(number: int) -> None:
    rename, count = os.rename, iter(range(1, 10**6))

    def stop(source: Path, target: Path) -> None:
        if next(count) < number:
            return rename(source, target)
        print("not renamed", flush=True)
        time.sleep(600)

    os.rename = stop  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--half-write", type=int, default=0)
    parser.add_argument("--no-rename", type=int, default=0)
    parser.add_argument("--linger", action="store_true")
    parser.add_argument("--max-file-bytes", type=int, default=0)
    args = parser.parse_args()
    if args.half_write:
        stop_in_mid_write(args.half_write)
    if args.no_rename:
        stop_before_rename(args.no_rename)
    store = open_store(args.url)
    manifest = read_manifest(store)
    ring = Ring.create(8, max(chunk.length for chunk in manifest.chunks))
    if args.max_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (args.max_file_bytes, args.max_file_bytes))
    fetcher = Fetcher(store, manifest, ring, connections=4, cache=ChunkCache(args.cache, 1 << 30, store.url))
    fetcher.start()
    digests = {}
    while ready := fetcher.next(60):
        data = ring.slot(ready.slot)[: manifest.chunks[ready.chunk].length]
        digests[ready.chunk] = hashlib.sha256(data).hexdigest()
        fetcher.release(ready.slot)
    print(json.dumps({"digests": [digests[i] for i in sorted(digests)], **fetcher.summary()}), flush=True)
    if args.linger:
        time.sleep(600)
    fetcher.cancel()


if __name__ == "__main__":
    main()
