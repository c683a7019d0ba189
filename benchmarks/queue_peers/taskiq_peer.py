"""taskiq with taskiq-redis: a stream with a consumer group (its broker that acknowledges), asyncio worker."""

import asyncio
import sys
from typing import Any

import uvloop
from peer import CONCURRENCY, FILLER, Ledger, Producer, produce
from taskiq.api import run_receiver_task
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

url = sys.argv[2]
broker = RedisStreamBroker(url).with_result_backend(RedisAsyncResultBackend(url, result_ex_time=3600))
ledgers: list[Ledger] = []


@broker.task(task_name="noop")
async def noop(number: int, sent_ns: int, filler: str) -> int:
    return ledgers[0].ran(number, sent_ns)


class TaskiqProducer(Producer):
    async def open(self, url: str) -> None:
        await broker.startup()

    async def enqueue(self, number: int, sent_ns: int) -> Any:
        return await noop.kiq(number, sent_ns, FILLER)

    async def result(self, handle: Any) -> int | None:
        return (await handle.get_result()).return_value if await handle.is_ready() else None


async def work() -> None:
    ledgers.append(Ledger())
    await run_receiver_task(broker, max_async_tasks=CONCURRENCY, max_prefetch=CONCURRENCY, run_startup=True)


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(produce(TaskiqProducer()) if sys.argv[1] == "produce" else work())
