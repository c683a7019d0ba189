"""A batch's counts while it runs: as its lines end, in whatever order, with few writes, and through a take-over."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest

from stoker.queue.broker import Broker
from stoker.runtime.batches.batch_shelf import BatchShelf
from stoker.runtime.gateway.batch_runner import COUNT_S
from stoker.runtime.gateway.settings import GatewaySettings

from .peers import Task, worker
from .test_batches import client as client
from .test_batches import count_prompt, counts_of, line, rows, start, until_over

LINES = 100


async def test_lines_count_as_they_end(
    client: openai.AsyncOpenAI, chat_model: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line's job ends last, so that no result is stored before."""
    changes: Counter[str] = Counter()
    change = BatchShelf.change
    held: list[Task] = []

    async def counting(shelf: BatchShelf, tenant: str, batch_id: str, *arguments: Any) -> Any:
        changes[batch_id] += 1
        return await change(shelf, tenant, batch_id, *arguments)

    async def hold_the_first(task: Task) -> None:
        if held and task.claim.job_id != held[0].claim.job_id:
            await count_prompt(task)
        else:
            held[:] = [task]

    async def until_counted(completed: int, failed: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            batch = await client.batches.retrieve(made.id)
            if counts_of(batch) == (completed, failed):
                break
            assert time.monotonic() < deadline, batch
            await asyncio.sleep(0.02)
        assert batch.status == "in_progress"

    monkeypatch.setattr(BatchShelf, "change", counting)
    begun = time.monotonic()
    lines = [line(chat_model, number) for number in range(LINES)]
    lines[50] = lines[-1] = "{"
    made = await start(client, lines)
    await until_counted(0, 2)
    async with worker(broker, chat_model, hold_the_first):
        await until_counted(LINES - 3, 2)
        assert changes[made.id] <= 1 + (time.monotonic() - begun) / COUNT_S
        await count_prompt(held[0])
        batch = await until_over(client, made.id)
    assert (batch.status, counts_of(batch)) == ("completed", (LINES - 2, 2)), batch


@contextlib.contextmanager
def gateway_process(settings: GatewaySettings, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "stoker.runtime.cli", "gateway", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--redis", settings.redis_url, "--store", settings.store_url]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


async def test_a_gateway_that_takes_over_a_batch_runs_no_line_twice(
    settings: GatewaySettings, chat_model: str, broker: Broker, unused_tcp_port: int
) -> None:
    """The first gateway is killed in the middle; every answer is there once, and each prompt was run once. What was
    counted stays so."""
    runs: Counter[tuple[int, ...]] = Counter()
    killed = asyncio.Event()

    async def slowly(task: Task) -> None:
        runs[tuple(task.payload["prompt_ids"])] += 1
        await asyncio.sleep(0.02)
        if len(runs) > 150:
            await killed.wait()
        await count_prompt(task)

    url, lines = f"http://127.0.0.1:{unused_tcp_port}/v1", [line(chat_model, number) for number in range(300)]
    lines[150] = "{"
    client = openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=30, timeout=20)
    async with client, worker(broker, chat_model, slowly):
        with gateway_process(settings, unused_tcp_port):
            batch = await start(client, lines)
            while sum(runs.values()) < 100 or counts_of(batch) == (0, 0):
                batch = await client.batches.retrieve(batch.id)
                await asyncio.sleep(0.01)
        killed.set()
        with gateway_process(settings, unused_tcp_port):
            seen = [counts_of(batch)]
            batch = await until_over(client, batch.id, look=lambda batch: seen.append(counts_of(batch)))
            good, bad = await rows(client, batch.output_file_id), await rows(client, batch.error_file_id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 299, 1)
    assert [row["custom_id"] for row in good] == [f"line-{number}" for number in range(300) if number != 150]
    assert len(bad) == 1
    assert len(runs) == 299 and set(runs.values()) == {1}
    assert 0 < sum(seen[0]) < 300 and seen[-1] == (299, 1)
    assert all(now[0] >= last[0] and now[1] >= last[1] for last, now in pairwise(seen)), seen
