"""arq: sorted-set queue, polling asyncio worker. Its `poll_delay` of 0.5 s would cap it at 320/s, so it is lowered."""

import asyncio
import sys
from typing import Any

import uvloop
from arq import create_pool
from arq.connections import RedisSettings
from arq.jobs import Job
from arq.worker import Worker, func
from peer import CONCURRENCY, FILLER, Ledger, Producer, produce

POLL_S = 0.01


class ArqProducer(Producer):
    async def open(self, url: str) -> None:
        self._pool = await create_pool(RedisSettings.from_dsn(url))

    async def enqueue(self, number: int, sent_ns: int) -> Any:
        job = await self._pool.enqueue_job("noop", number, sent_ns, FILLER)
        assert job is not None
        return job.job_id

    async def result(self, handle: Any) -> int | None:
        info = await Job(handle, self._pool).result_info()
        return info.result if info and info.success else None


async def work(url: str) -> None:
    ledger = Ledger()

    async def noop(context: Any, number: int, sent_ns: int, filler: str) -> int:
        return ledger.ran(number, sent_ns)

    settings = RedisSettings.from_dsn(url)
    functions = [func(noop, name="noop")]
    await Worker(functions, redis_settings=settings, max_jobs=CONCURRENCY, poll_delay=POLL_S, log_results=False).main()


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(produce(ArqProducer()) if sys.argv[1] == "produce" else work(sys.argv[2]))
