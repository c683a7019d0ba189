"""SAQ: list queue with BLMOVE, asyncio worker."""

import asyncio
import sys
from typing import Any

import uvloop
from peer import CONCURRENCY, FILLER, Ledger, Producer, produce
from redis.asyncio import Redis
from saq import Job, Worker
from saq.queue.redis import RedisQueue


def queue(url: str) -> RedisQueue:
    return RedisQueue(Redis.from_url(url), max_concurrent_ops=2 * CONCURRENCY)


class SaqProducer(Producer):
    async def open(self, url: str) -> None:
        self._queue = queue(url)
        await self._queue.connect()

    async def enqueue(self, number: int, sent_ns: int) -> Any:
        job = await self._queue.enqueue("noop", number=number, sent_ns=sent_ns, filler=FILLER)
        assert job is not None
        return job.key

    async def result(self, handle: Any) -> int | None:
        job: Job | None = await self._queue.job(handle)
        return job.result if job and job.status == "complete" else None


async def work(url: str) -> None:
    ledger = Ledger()

    async def noop(context: Any, *, number: int, sent_ns: int, filler: str) -> int:
        return ledger.ran(number, sent_ns)

    await Worker(queue(url), [("noop", noop)], concurrency=CONCURRENCY).start()


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(produce(SaqProducer()) if sys.argv[1] == "produce" else work(sys.argv[2]))
