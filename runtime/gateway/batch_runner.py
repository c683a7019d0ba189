"""Drives batches: each line becomes a job of the lowest priority, results are stored in stretches, in input order.

Whoever holds a batch's lease drives it. A line's job has an idempotency key made from the batch and the line, so a
gateway that takes over after a crash asks for the same jobs again and gets their results, and none runs twice.
"""

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from redis.exceptions import RedisError

from stoker.runtime.batches.batch import MAX_LINES, Batch, advanced, finalizing, finished, refused, started, stop_reason
from stoker.runtime.batches.batch_lines import LineResult
from stoker.runtime.batches.batch_shelf import LEASE_MS, BatchShelf, LeaseLost
from stoker.runtime.batches.file_shelf import FileRecord, FileShelf
from stoker.runtime.gateway.batch_line import OUTAGES, LineRunner
from stoker.runtime.gateway.context import Gateway

LOOK_S = 1.0
SEGMENT_LINES = 500
BEGUN = 2 * SEGMENT_LINES
MOST_DRIVEN, MOST_OF_A_TENANT = 64, 8

log = logging.getLogger("stoker.batches")


@contextlib.asynccontextmanager
async def driving_batches(gateway: Gateway) -> AsyncIterator[None]:
    running = asyncio.create_task(BatchRunner(gateway).run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class BatchRunner:
    """Looks for batches that nobody drives, until cancelled. What it has no room for waits, or goes elsewhere."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._driver = gateway.settings.gateway_id
        self._drives: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                with contextlib.suppress(RedisError, OSError, TimeoutError):
                    await self._look()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gateway.new_batch.wait(), LOOK_S)
                self._gateway.new_batch.clear()
        finally:
            for task in self._drives.values():
                task.cancel()
            await asyncio.gather(*self._drives.values(), return_exceptions=True)

    async def _look(self) -> None:
        active = await self._gateway.batches.active()
        self._drives = {batch: task for batch, task in self._drives.items() if not task.done()}
        for tenant, batch_id in active:
            wanted = (tenant, batch_id) not in self._drives and self._has_room(tenant)
            if wanted and await self._gateway.batches.take(batch_id, self._driver):
                self._drives[tenant, batch_id] = asyncio.create_task(self._drive(tenant, batch_id))

    def _has_room(self, tenant: str) -> bool:
        """Each batch has its input on this machine's disk, and up to `BEGUN` lines in memory."""
        own = sum(driven == tenant for driven, _ in self._drives)
        return own < MOST_OF_A_TENANT and len(self._drives) < MOST_DRIVEN

    async def _drive(self, tenant: str, batch_id: str) -> None:
        """Ends when the batch is over, or when another gateway has the lease; failures are tried again."""
        work = asyncio.create_task(Drive(self._gateway, tenant, batch_id, self._driver).run())
        try:
            while not work.done():
                await asyncio.wait((work,), timeout=LEASE_MS / 4000)
                if not work.done() and not await self._gateway.batches.take(batch_id, self._driver):
                    raise LeaseLost(batch_id)
            await work
        except LeaseLost:
            log.info("batch %s is driven by another gateway now", batch_id)
        except OUTAGES as error:
            log.warning("batch %s stops for a moment: %s", batch_id, error)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await self._gateway.batches.leave(batch_id, self._driver)


@dataclass
class Drive:
    """One batch in this gateway's hands."""

    gateway: Gateway
    tenant: str
    batch_id: str
    driver: str

    @property
    def files(self) -> FileShelf:
        return self.gateway.files

    @property
    def shelf(self) -> BatchShelf:
        return self.gateway.batches

    async def run(self) -> None:
        batch = await self.shelf.get(self.tenant, self.batch_id)
        if batch is None or batch.over:
            return
        with tempfile.TemporaryDirectory(prefix="stoker-batch-") as folder:
            source = Path(folder) / "input.jsonl"
            if problem := await self._fetch(batch, source):
                await self._change(partial(refused, code=problem[0], message=problem[1], now=int(time.time())))
                return
            total = await asyncio.to_thread(count_lines, source)
            if not 0 < total <= MAX_LINES:
                message = f"The input file has {total} lines; a batch has 1 to {MAX_LINES}."
                await self._change(partial(refused, code="invalid_line_count", message=message, now=int(time.time())))
                return
            batch = await self._change(partial(started, total=total, now=int(time.time())))
            await self._run_segments(batch, source)
            await self._finish(Path(folder))

    async def _change(self, step: "partial[Batch]") -> Batch:
        batch = await self.shelf.change(self.tenant, self.batch_id, step, self.driver)
        if batch is None:
            raise LeaseLost(self.batch_id)
        return batch

    async def _fetch(self, batch: Batch, to: Path) -> tuple[str, str] | None:
        record = await asyncio.to_thread(self.files.get, self.tenant, batch.input_file_id)
        if record is None:
            return "input_file_not_found", f"The input file '{batch.input_file_id}' was deleted."
        await asyncio.to_thread(self.files.fetch, self.tenant, record, to)
        return None

    async def _run_segments(self, batch: Batch, source: Path) -> None:
        runner, lines = await LineRunner.of(self.gateway, batch, self._why_stop), enumerate(read_lines(source))
        for _, text in islice(lines, batch.segments_done * SEGMENT_LINES):
            runner.skip(text)
        segment = batch.segments_done
        async for results in in_stretches(runner, lines):
            await self._store(segment, results)
            good, failed = sum(result.good for result in results), sum(result.failed for result in results)
            await self._change(partial(advanced, completed=good, failed=failed, stopped=runner.stopped))
            segment += 1

    async def _why_stop(self) -> str:
        batch = await self.shelf.get(self.tenant, self.batch_id)
        return stop_reason(batch, time.time()) if batch else "batch_cancelled"

    async def _store(self, segment: int, results: list[LineResult]) -> None:
        for good in (True, False):
            text = b"".join(result.text for result in results if result.good == good)
            await asyncio.to_thread(self.gateway.store.write, self._key(segment, good), text)

    def _key(self, segment: int, good: bool) -> str:
        return f"batches/{self.tenant}/{self.batch_id}/{segment:06d}.{'output' if good else 'errors'}"

    async def _finish(self, folder: Path) -> None:
        batch = await self._change(partial(finalizing, now=int(time.time())))
        names = [await self._write_file(batch, folder, good) for good in (True, False)]
        await self._change(partial(finished, output=names[0], errors=names[1], now=int(time.time())))
        for segment in range(batch.segments_done):
            for good in (True, False):
                await asyncio.to_thread(self.gateway.store.delete, self._key(segment, good))

    async def _write_file(self, batch: Batch, folder: Path, good: bool) -> str:
        """The id of the file of all good (or all other) lines, "" when there are none. Written again it is the same."""
        path = folder / "answer.jsonl"
        with path.open("wb") as file:
            for segment in range(batch.segments_done):
                file.write(await asyncio.to_thread(self.gateway.store.read, self._key(segment, good)))
        if not path.stat().st_size:
            return ""
        kind = "output" if good else "errors"
        file_id = f"file-{batch.id.removeprefix('batch_')}{kind[0]}"
        name = f"{batch.id}_{kind}.jsonl"
        record = FileRecord(file_id, path.stat().st_size, batch.finalizing_at, name, "batch_output")
        await asyncio.to_thread(self.files.put, self.tenant, record, path)
        return file_id


async def in_stretches(runner: LineRunner, lines: Iterator[tuple[int, bytes]]) -> AsyncIterator[list[LineResult]]:
    """Results in order, `SEGMENT_LINES` at a time; up to `BEGUN` lines are under way or wait for an earlier one."""
    running: list[asyncio.Task[LineResult]] = []
    results: list[LineResult] = []
    try:
        while True:
            for number, text in islice(lines, BEGUN - len(running)):
                running.append(asyncio.create_task(runner.result(number, text)))
            if not running:
                break
            results.append(await running.pop(0))
            if len(results) == SEGMENT_LINES:
                yield results
                results = []
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if results:
        yield results


def read_lines(path: Path) -> Iterator[bytes]:
    """Without those that are blank."""
    with path.open("rb") as file:
        yield from (line for line in file if line.strip())


def count_lines(path: Path) -> int:
    return sum(1 for _ in read_lines(path))
