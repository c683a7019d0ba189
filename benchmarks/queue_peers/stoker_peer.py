"""stoker: the worker claims up to its free slots, as a replica does, and settles through the host agent's outbox."""

import asyncio
import sys
from typing import Any

import uvloop
from peer import CONCURRENCY, FILLER, Ledger, Producer, produce

from stoker.queue.broker import Broker
from stoker.queue.claimer import Claimer
from stoker.queue.client import connect
from stoker.queue.events import Bells
from stoker.queue.records import Claim, Completion, NewJob, new_job_id, pack, unpack
from stoker.runtime.worker.outbox import Outbox

FUNCTION = "noop"
WAIT_S = 0.25
USAGE = pack({"tenant": "bench", "function": FUNCTION, "run_ms": 0.0})


class StokerProducer(Producer):
    async def open(self, url: str) -> None:
        self._broker = Broker(connect(url))

    async def enqueue(self, number: int, sent_ns: int) -> Any:
        payload = pack({"number": number, "sent_ns": sent_ns, "filler": FILLER})
        job = NewJob(id=new_job_id(FUNCTION), function=FUNCTION, tenant="bench", payload=payload)
        return (await self._broker.enqueue(job)).job_id

    async def result(self, handle: Any) -> int | None:
        job = await self._broker.job(handle)
        return unpack(job.result)["value"] if job and job.result else None


async def run(ledger: Ledger, claim: Claim, outbox: Outbox) -> None:
    arguments = unpack(claim.payload)
    result = pack({"value": ledger.ran(arguments["number"], arguments["sent_ns"])})
    outbox.complete(Completion(claim.job_id, claim.fence, result, USAGE))


async def settled(ledger: Ledger, outbox: Outbox) -> None:
    """The clock stops when the queue has confirmed the last completion."""
    await asyncio.sleep(0)
    await outbox.drained()
    ledger.finished()


async def work(url: str) -> None:
    broker = Broker(connect(url))
    bells = Bells(url, "worker", on_cancel=lambda *_: None)
    await bells.start()
    claimer = Claimer(broker, bells, FUNCTION, "worker", WAIT_S)
    outbox = Outbox(broker, FUNCTION, on_stale=lambda job_id: None)
    outbox.start()
    loop = asyncio.get_running_loop()
    ending: set[asyncio.Task[None]] = set()
    ledger = Ledger(on_last=lambda: ending.add(loop.create_task(settled(ledger, outbox))))
    while True:
        claims = await claimer.claim_or_stand(CONCURRENCY) or await claimer.wait()
        await asyncio.gather(*(run(ledger, claim, outbox) for claim in claims))


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(produce(StokerProducer()) if sys.argv[1] == "produce" else work(sys.argv[2]))
