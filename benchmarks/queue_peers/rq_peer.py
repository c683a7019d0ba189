"""RQ: list queue, one job at a time in the worker's own process (SimpleWorker), bulk enqueue through a pipeline."""

import asyncio
import logging
import sys
import time
from typing import Any

from peer import FILLER, Ledger, Producer, produce
from redis import Redis
from rq import Queue, SimpleWorker
from rq.job import Job

BULK = 100
ledger: Ledger


def noop(number: int, sent_ns: int, filler: str) -> int:
    return sys.modules["__main__"].ledger.ran(number, sent_ns)


class RqProducer(Producer):
    async def open(self, url: str) -> None:
        self._redis = Redis.from_url(url)
        self._queue = Queue(connection=self._redis)

    async def enqueue(self, number: int, sent_ns: int) -> Any:
        return self._queue.enqueue("rq_peer.noop", number, sent_ns, FILLER).id

    async def result(self, handle: Any) -> int | None:
        return Job.fetch(handle, connection=self._redis).return_value()

    async def enqueue_all(self, numbers: range) -> list[Any]:
        handles = []
        for first in range(numbers.start, numbers.stop, BULK):
            some = range(first, min(first + BULK, numbers.stop))
            data = [Queue.prepare_data("rq_peer.noop", (n, time.monotonic_ns(), FILLER)) for n in some]
            handles += [(n, job.id) for n, job in zip(some, self._queue.enqueue_many(data), strict=True)]
        return handles


if __name__ == "__main__":
    if sys.argv[1] == "produce":
        asyncio.run(produce(RqProducer()))
    else:
        ledger = Ledger()
        connection = Redis.from_url(sys.argv[2])
        SimpleWorker([Queue(connection=connection)], connection=connection).work(logging_level=logging.WARNING)
