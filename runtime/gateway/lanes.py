"""Threads that tenants share: each tenant has a line of its own, of which only a few at a time are in a thread."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

Answer = TypeVar("Answer")


class Lanes:
    def __init__(self, threads: int, per_tenant: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._per_tenant = per_tenant
        self._lanes: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, tenant: str, work: Callable[..., Answer], *arguments: Any) -> Answer:
        """Work that nobody waits for any more keeps its place until it has ended: a thread can't be interrupted."""
        lane = self._lanes.setdefault(tenant, asyncio.Semaphore(self._per_tenant))
        await lane.acquire()
        try:
            running = self._pool.submit(work, *arguments)
        except BaseException:
            lane.release()
            raise
        running.add_done_callback(releaser(lane))
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def releaser(lane: asyncio.Semaphore) -> Callable[[Future[Any]], None]:
    loop = asyncio.get_running_loop()

    def release(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the line
            loop.call_soon_threadsafe(lane.release)

    return release
