"""The agent's side of `benchmarks.streaming`: claims language-model jobs and replays tokens at a fixed pace.

Everything between a token and the queue is the host agent's own: claims, leases, outbox. A step emits one token for
every job of an engine; the steps of several engines are spread evenly over the period.
Run by the benchmark: python -m benchmarks.streaming_worker URL FUNCTION JOBS TOKENS RATE ENGINES
"""

import asyncio
import sys
import time

import uvloop

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.events import Bells
from stoker.queue.records import Claim, Completion, pack
from stoker.runtime.worker.outbox import Outbox

WORKER = "replay"
BEAT_S = 3.0


async def claim_all(broker: Broker, bells: Bells, function: str, jobs: int) -> list[Claim]:
    held: list[Claim] = []
    while len(held) < jobs:
        claims = await broker.claim(function, WORKER, jobs - len(held))
        held += claims
        if not claims:
            await bells.wait(function, 0.25)
    return held


async def run_engine(outbox: Outbox, claims: list[Claim], tokens: int, period_s: float, start: float) -> None:
    loop = asyncio.get_running_loop()
    for token in range(1, tokens + 1):
        await asyncio.sleep(max(0.0, start + token * period_s - loop.time()))
        emitted_ns = time.monotonic_ns()
        for claim in claims:
            outbox.emit(claim.job_id, claim.fence, pack({"text": f"{token}:{emitted_ns} ", "ids": [token]}))
    for claim in claims:
        usage = {"prompt_tokens": 2, "completion_tokens": tokens, "cached_tokens": 0}
        result = pack({"text": "", "finish_reason": "length", "usage": usage})
        outbox.complete(Completion(claim.job_id, claim.fence, result, pack(usage)))


async def beat(broker: Broker, function: str, claims: list[Claim]) -> None:
    while True:
        await broker.beat(function, WORKER, {claim.job_id: claim.fence for claim in claims})
        await asyncio.sleep(BEAT_S)


async def main(url: str, function: str, jobs: int, tokens: int, rate: float, engines: int) -> None:
    client = connect(url)
    broker = Broker(client)
    bells = Bells(url, WORKER, on_cancel=lambda job_id: None)
    await bells.start()
    outbox = Outbox(broker, function, on_stale=lambda job_id: print(f"lost {job_id}", file=sys.stderr))
    outbox.start()
    claims = await claim_all(broker, bells, function, jobs)
    beats = asyncio.create_task(beat(broker, function, claims))
    start, period = asyncio.get_running_loop().time(), 1 / rate
    shares = [claims[engine::engines] for engine in range(engines)]
    await asyncio.gather(
        *(run_engine(outbox, share, tokens, period, start + n * period / engines) for n, share in enumerate(shares))
    )
    await outbox.drained()
    beats.cancel()
    await outbox.close()
    await bells.close()
    await client.aclose()


if __name__ == "__main__":
    url, function, jobs, tokens, rate, engines = sys.argv[1:]
    uvloop.run(main(url, function, int(jobs), int(tokens), float(rate), int(engines)))
