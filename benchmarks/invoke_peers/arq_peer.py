"""arq behind Starlette, its polling turned up as far as it helps. python arq_peer.py web|worker REDIS PORT"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
import uvloop
from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

CONCURRENCY = 64
POLL_S = 0.01


async def noop(context: Any, x: int) -> dict[str, int]:
    return {"y": x}


def web() -> None:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.pool = await create_pool(RedisSettings.from_dsn(sys.argv[2]))
        yield

    async def invoke(request: Request) -> Response:
        job = await request.app.state.pool.enqueue_job("noop", (await request.json())["x"])
        return JSONResponse(await job.result(timeout=30, poll_delay=POLL_S))

    app = Starlette(routes=[Route("/", invoke, methods=["POST"])], lifespan=lifespan)
    uvicorn.run(app, port=int(sys.argv[3]), log_level="warning", access_log=False)


async def work() -> None:
    settings = RedisSettings.from_dsn(sys.argv[2])
    functions = [func(noop, name="noop")]
    options: dict[str, Any] = {"max_jobs": CONCURRENCY, "poll_delay": POLL_S, "log_results": False}
    await Worker(functions, redis_settings=settings, **options).main()


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    web() if sys.argv[1] == "web" else asyncio.run(work())
