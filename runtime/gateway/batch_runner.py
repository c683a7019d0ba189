"""Drives batches: each line becomes a job of the lowest priority, results are stored in stretches, in input order.
What is in memory doesn't grow with the batch: a few hundred lines, and their results until it is their turn.

Whoever holds a batch's lease drives it. A line's job has an idempotency key made from the batch and the line, so a
gateway that takes over after a crash asks for the same jobs again and gets their results, and none runs twice.
"""

import asyncio
import contextlib
import logging
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from redis.exceptions import RedisError

from stoker.coldstart.failures import ObjectMissing
from stoker.runtime.batches.batch import (
    MAX_LINES,
    Batch,
    advanced,
    counted,
    finalizing,
    finished,
    refused,
    started,
    stop_reason,
)
from stoker.runtime.batches.batch_lines import UTF8_BOM, LineResult
from stoker.runtime.batches.batch_shelf import LEASE_MS, BatchShelf, LeaseLost
from stoker.runtime.batches.file_shelf import FileRecord, FileShelf, result_key
from stoker.runtime.gateway.batch_line import IN_FLIGHT, OUTAGES, LineRunner, line_key
from stoker.runtime.gateway.context import Gateway

LOOK_S = 1.0
COUNT_S = 1.0
SEGMENT_LINES = 500
BEGUN, BEGUN_BYTES = 2 * IN_FLIGHT, 64 << 20
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
            if not batch.finalizing_at:
                batch = await self._run_lines(batch, Path(folder) / "input.jsonl")
            if not batch.over:
                await self._finish(Path(folder))

    async def _run_lines(self, batch: Batch, source: Path) -> Batch:
        """Until each has its result in the store, or until no more of them can have one."""
        total = await self._fetch(batch, source)
        if problem := problem_of(batch, total):
            await self._cancel_jobs(batch)
            return await self._change(partial(refused, code=problem[0], message=problem[1], now=int(time.time())))
        batch = await self._change(partial(started, total=total or 0, now=int(time.time())))
        await self._run_segments(batch, source)
        return batch

    async def _change(self, step: "partial[Batch]") -> Batch:
        batch = await self.shelf.change(self.tenant, self.batch_id, step, self.driver)
        if batch is None:
            await asyncio.to_thread(self.files.remove_results, self.tenant, self.batch_id)
            raise LeaseLost(self.batch_id)
        return batch

    async def _fetch(self, batch: Batch, to: Path) -> int | None:
        """How many lines there are; None when the file is gone."""
        try:
            record = await asyncio.to_thread(self.files.get, self.tenant, batch.input_file_id)
            if record is None:
                return None
            await asyncio.to_thread(self.files.fetch, self.tenant, record, to)
        except ObjectMissing:
            return None
        return await asyncio.to_thread(count_lines, to)

    async def _cancel_jobs(self, batch: Batch) -> None:
        """Of lines that an earlier drive began and whose results aren't stored: nobody can tell any more what they
        belong to."""
        broker, first = self.gateway.broker, batch.segments_done * SEGMENT_LINES
        begun = range(first, min(batch.total, first + SEGMENT_LINES + BEGUN))
        for function in await broker.functions_with_work() if begun else ():
            for number in begun:
                if job_id := await broker.job_id_of(function, self.tenant, line_key(batch, number)):
                    await broker.cancel(job_id, "the batch's input file was deleted")

    async def _run_segments(self, batch: Batch, source: Path) -> None:
        runner, lines = await LineRunner.of(self.gateway, batch, self._why_stop), enumerate(read_lines(source))
        for _, text in islice(lines, batch.segments_done * SEGMENT_LINES):
            runner.skip(text)
        segment, stretch = batch.segments_done, Stretch(source.parent)
        async with self._counting(batch, runner):
            async for result in in_order(runner, lines):
                stretch.add(result)
                if stretch.lines == SEGMENT_LINES:
                    await self._store(segment, stretch, runner.stopped)
                    segment, stretch = segment + 1, Stretch(source.parent)
            if stretch.lines:
                await self._store(segment, stretch, runner.stopped)

    @contextlib.asynccontextmanager
    async def _counting(self, batch: Batch, runner: LineRunner) -> AsyncIterator[None]:
        counting = asyncio.create_task(self._count(batch, runner))
        try:
            yield
        finally:
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)

    async def _count(self, batch: Batch, runner: LineRunner) -> None:
        """Lines end in any order and their results are stored in order, so that people would wait long for counts. What
        ends a drive is found where its results are stored."""
        written = (0, 0)
        while True:
            await asyncio.sleep(COUNT_S)
            ended = runner.ended
            if ended == written:
                continue
            step = partial(counted, completed=batch.completed + ended[0], failed=batch.failed + ended[1])
            with contextlib.suppress(LeaseLost, *OUTAGES):
                await self.shelf.change(self.tenant, self.batch_id, step, self.driver)
                written = ended

    async def _why_stop(self) -> str:
        batch = await self.shelf.get(self.tenant, self.batch_id)
        return stop_reason(batch, time.time()) if batch else "batch_cancelled"

    async def _store(self, segment: int, stretch: "Stretch", stopped: str) -> None:
        for good in (True, False):
            await asyncio.to_thread(self.gateway.store.write, self._key(segment, good), stretch.paths[good])
        await self._change(partial(advanced, completed=stretch.good, failed=stretch.failed, stopped=stopped))

    def _key(self, segment: int, good: bool) -> str:
        return result_key(self.tenant, self.batch_id, segment, good)

    async def _finish(self, folder: Path) -> None:
        batch = await self._change(partial(finalizing, now=int(time.time())))
        names = [await self._write_file(batch, folder, good) for good in (True, False)]
        await self._change(partial(finished, output=names[0], errors=names[1], now=int(time.time())))
        await asyncio.to_thread(self.files.remove_results, self.tenant, self.batch_id)

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


class Stretch:
    """Results of consecutive lines, on this machine's disk."""

    def __init__(self, folder: Path) -> None:
        self.paths = {good: folder / f"stretch.{good}" for good in (True, False)}
        for path in self.paths.values():
            path.write_bytes(b"")
        self.lines = self.good = self.failed = 0

    def add(self, result: LineResult) -> None:
        with self.paths[result.good].open("ab") as file:
            file.write(result.text)
        self.lines += 1
        self.good += result.good
        self.failed += result.failed


async def in_order(runner: LineRunner, lines: Iterator[tuple[int, bytes]]) -> AsyncIterator[LineResult]:
    """Results in order. `BEGUN` lines, and `BEGUN_BYTES` of them, are under way or wait for an earlier one."""
    running: deque[tuple[asyncio.Task[LineResult], int]] = deque()
    held = 0
    try:
        while True:
            while len(running) < BEGUN and held < BEGUN_BYTES and (line := next(lines, None)):
                running.append((asyncio.create_task(runner.result(*line)), len(line[1])))
                held += len(line[1])
            if not running:
                break
            result = await running[0][0]
            held -= running.popleft()[1]
            yield result
    finally:
        for task, _ in running:
            task.cancel()
        await asyncio.gather(*(task for task, _ in running), return_exceptions=True)


def problem_of(batch: Batch, total: int | None) -> tuple[str, str] | None:
    """Of an input with so many lines, or without a file: a code, and a message."""
    if total is None:
        return "input_file_not_found", f"The input file '{batch.input_file_id}' was deleted."
    if not 0 < total <= MAX_LINES:
        return "invalid_line_count", f"The input file has {total} lines; a batch has 1 to {MAX_LINES}."
    return None


def read_lines(path: Path) -> Iterator[bytes]:
    """Without those that are blank."""
    with path.open("rb") as file:
        yield from (line for line in file if line.removeprefix(UTF8_BOM).strip())


def count_lines(path: Path) -> int:
    return sum(1 for _ in read_lines(path))
