"""Dramatiq: Lua-scripted list queue with read-ahead, a pool of threads in one process, results in Redis."""

import asyncio
import sys
import time
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import ResultMissing, Results
from dramatiq.results.backends import RedisBackend
from peer import FILLER, THREADS, Ledger, Producer, produce

broker = RedisBroker(url=sys.argv[2])
broker.add_middleware(Results(backend=RedisBackend(url=sys.argv[2]), store_results=True))
dramatiq.set_broker(broker)
ledger = Ledger() if sys.argv[1] == "work" else None


@dramatiq.actor(actor_name="noop")
def noop(number: int, sent_ns: int, filler: str) -> int:
    assert ledger is not None
    return ledger.ran(number, sent_ns)


class DramatiqProducer(Producer):
    async def open(self, url: str) -> None:
        pass

    async def enqueue(self, number: int, sent_ns: int) -> Any:
        return noop.send(number, sent_ns, FILLER)

    async def result(self, handle: Any) -> int | None:
        try:
            return handle.get_result()
        except ResultMissing:
            return None


if __name__ == "__main__":
    if ledger is None:
        asyncio.run(produce(DramatiqProducer()))
    else:
        dramatiq.Worker(broker, worker_threads=THREADS).start()
        while True:
            time.sleep(3600)
