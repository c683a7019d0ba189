"""A map over a thousand inputs while processes are killed: each input has one result, whatever dies."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stoker.runtime.client.async_client import AsyncClient
from stoker.runtime.local import LocalStack
from tests.children import child

pytestmark = pytest.mark.xdist_group("faults")

INPUTS = 1000
CONCURRENCY = 48
APP = """
import os
import time

import stoker

app = stoker.App("squares")


@app.function(batch=stoker.Batch(max_size=8, max_wait_ms=2), retries=5, idle_timeout=60)
def square(numbers: list[int]) -> list[int]:
    time.sleep(0.02)
    with open({log!r}, "a") as log:
        log.write("".join(f"{{n}}\\n" for n in numbers))
    return [n * n for n in numbers]
"""
PROGRAM = """
import sys
import stoker

with stoker.Client(sys.argv[1]) as client:
    for result in client.map("square", range(1000), concurrency=48, key="nightly"):
        print(result, flush=True)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A line for each input that was worked on."""
    return tmp_path / "runs.log"


@pytest.fixture
def stack(tmp_path: Path, log: Path) -> Iterator[LocalStack]:
    app = tmp_path / "squares_app.py"
    app.write_text(APP.format(log=str(log)))
    with LocalStack(tmp_path / "data", env={"STOKER_LEASE_MS": "1500"}) as stack:
        stack.deploy(app)
        yield stack


def runs(log: Path) -> Counter[int]:
    return Counter(map(int, log.read_text().split())) if log.exists() else Counter()


def agent(stack: LocalStack) -> psutil.Process:
    children = psutil.Process(stack.pid).children(recursive=True)
    return next(child for child in children if "--host-id" in child.cmdline())


async def until_runs(log: Path, count: int) -> None:
    async with asyncio.timeout(60):
        while sum(runs(log).values()) < count:
            await asyncio.sleep(0.02)


async def test_workers_die_and_each_input_has_one_result(stack: LocalStack, log: Path) -> None:
    async def kill() -> None:
        await until_runs(log, INPUTS // 3)
        os.kill(agent(stack).pid, signal.SIGKILL)

    killing = asyncio.create_task(kill())
    async with AsyncClient(stack.url) as client:
        results = [result async for result in client.map("square", range(INPUTS), concurrency=CONCURRENCY)]
    await killing
    assert results == [n * n for n in range(INPUTS)]
    again = sum(runs(log).values()) - INPUTS
    assert set(runs(log)) == set(range(INPUTS)) and 0 <= again <= CONCURRENCY


async def test_gateways_die_and_no_input_runs_twice(stack: LocalStack, log: Path) -> None:
    """The supervisor starts another one at the same address; what was queued is found again by its id."""

    async def kill() -> None:
        await until_runs(log, INPUTS // 3)
        children = psutil.Process(stack.pid).children(recursive=True)
        next(child for child in children if "gateway" in child.cmdline()).kill()

    killing = asyncio.create_task(kill())
    async with AsyncClient(stack.url) as client:
        results = [result async for result in client.map("square", range(INPUTS), concurrency=CONCURRENCY)]
    await killing
    assert results == [n * n for n in range(INPUTS)]
    assert runs(log) == Counter(range(INPUTS))


def test_the_caller_dies_and_its_next_run_finds_what_is_there(stack: LocalStack, log: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, stack.url]
    with child(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        seen = [int(first.stdout.readline()) for _ in range(300)]
    assert seen == [n * n for n in range(300)]
    time.sleep(0.5)
    assert sum(runs(log).values()) < INPUTS
    second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert [int(line) for line in second.stdout.split()] == [n * n for n in range(INPUTS)]
    assert runs(log) == Counter(range(INPUTS))
