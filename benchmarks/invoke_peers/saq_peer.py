"""SAQ behind Starlette, told of each end by pub/sub (its `apply` polls). python saq_peer.py web|worker REDIS PORT"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
import uvloop
from redis.asyncio import Redis
from saq import Worker
from saq.queue.redis import RedisQueue
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

CONCURRENCY = 64
LOOK_AGAIN_S = 0.5


def queue() -> RedisQueue:
    return RedisQueue(Redis.from_url(sys.argv[2]), max_concurrent_ops=2 * CONCURRENCY)


async def noop(context: Any, *, x: int) -> dict[str, int]:
    return {"y": x}


def web() -> None:
    jobs = queue()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await jobs.connect()
        yield

    async def invoke(request: Request) -> Response:
        job = await jobs.enqueue("noop", **await request.json())
        assert job is not None
        while not job.completed:
            # It can miss an end that comes between its look and its subscription.
            with suppress(TimeoutError):
                await job.refresh(until_complete=LOOK_AGAIN_S)
        return JSONResponse(job.result)

    app = Starlette(routes=[Route("/", invoke, methods=["POST"])], lifespan=lifespan)
    uvicorn.run(app, port=int(sys.argv[3]), log_level="warning", access_log=False)


async def work() -> None:
    await Worker(queue(), [("noop", noop)], concurrency=CONCURRENCY).start()


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    web() if sys.argv[1] == "web" else asyncio.run(work())
