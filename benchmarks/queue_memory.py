"""What queued jobs cost the server, and what is left of them: they are queued, done, and their retention passes.

Run: python -m benchmarks.queue_memory [--jobs 100000] [--payload 1024]
"""

import argparse
import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from benchmarks.report import print_table, save
from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import Completion, Limits, NewJob, new_job_id

DATA = Path(".stoker").resolve()
FUNCTION = "memory"
RETENTION_MS = 2_000
ENQUEUERS = 64
CLAIMED = 256
PATIENCE_S = 120.0


async def enqueue_all(broker: Broker, jobs: int, payload: int) -> None:
    waiting = iter(range(jobs))

    async def take() -> None:
        for number in waiting:
            job = NewJob(
                id=new_job_id(FUNCTION),
                function=FUNCTION,
                tenant=f"tenant-{number % 10}",
                payload=os.urandom(payload),
                retention_ms=RETENTION_MS,
            )
            await broker.enqueue(job)

    await asyncio.gather(*(take() for _ in range(ENQUEUERS)))


async def finish_all(broker: Broker) -> int:
    ended = 0
    while claims := await broker.claim(FUNCTION, "worker", CLAIMED):
        await broker.done(FUNCTION, [Completion(claim.job_id, claim.fence, b"result", b"usage") for claim in claims])
        ended += len(claims)
    return ended


async def job_keys(client: Redis) -> list[str]:
    names = [name.decode() async for name in client.scan_iter(count=10_000)]
    return [name for name in names if not keys.is_permanent(name)]


async def until_expired(client: Redis) -> float:
    """Seconds until no key of any job is left."""
    started = time.monotonic()
    while await job_keys(client):
        if time.monotonic() - started > PATIENCE_S:
            raise SystemExit(f"keys that never expire: {(await job_keys(client))[:10]}")
        await asyncio.sleep(0.5)
    return time.monotonic() - started


async def megabytes(client: Redis) -> float:
    return (await client.info("memory"))["used_memory"] / 1e6


async def measure(url: str, jobs: int, payload: int) -> dict[str, Any]:
    client = connect(url)
    broker = Broker(client)
    await broker.set_limits(FUNCTION, Limits(max_queued=0))
    empty = await megabytes(client)
    await enqueue_all(broker, jobs, payload)
    backlog = (await broker.backlogs([FUNCTION]))[FUNCTION]
    queued = await megabytes(client)
    ended = await finish_all(broker)
    kept = await megabytes(client)
    seconds = await until_expired(client)
    expired, of_jobs, left = await megabytes(client), len(await job_keys(client)), await client.dbsize()
    await broker.purge_function(FUNCTION)
    purged = sorted([name.decode() async for name in client.scan_iter()])
    await client.aclose()
    return {
        "valid": backlog.queued == ended == jobs and of_jobs == 0,
        "empty_mb": empty,
        "queued_mb": queued,
        "bytes_per_job": (queued - empty) * 1e6 / jobs,
        "ended_mb": kept,
        "expired_mb": expired,
        "expired_after_s": seconds,
        "job_keys_left": of_jobs,
        "function_keys_left": left,
        "keys_after_purge": purged,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--payload", type=int, default=1024)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    folder = DATA / "bench-memory"
    shutil.rmtree(folder, ignore_errors=True)
    server = EmbeddedValkey(folder)
    server.start()
    try:
        results = asyncio.run(measure(server.url, options.jobs, options.payload))
    finally:
        server.stop()
    print_table(f"{options.jobs} queued jobs of {options.payload} bytes", ("what", "value"), list(results.items()))
    arguments = {name: value for name, value in vars(options).items() if name != "json"}
    print("written to", save("queue_memory", arguments, results, options.json))


if __name__ == "__main__":
    main()
