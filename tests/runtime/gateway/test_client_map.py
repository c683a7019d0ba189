"""Map, spawn and gather against a real gateway: behind a bad connection, a full queue, and a caller who leaves."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from stoker.queue.broker import Broker
from stoker.queue.records import JobState, Limits
from stoker.runtime.client import async_client
from stoker.runtime.client.async_client import AsyncClient
from stoker.runtime.client.client import Client
from stoker.runtime.client.errors import JobFailed, StokerError, Unreachable, WaitTimeout
from stoker.runtime.spec import Limits as SpecLimits
from tests.connections import connected, serving

from .conftest import RunningGateway, running
from .peers import Deploy, Task, double, worker

RESET_EVERY = 7


class BadLine:
    """A TCP proxy that delivers what clients send, and now and then resets instead of delivering the answer."""

    def __init__(self, target: str) -> None:
        self._host, port = target.removeprefix("http://").split(":")
        self._port = int(port)
        self._answers = itertools.count(1)
        self.resets = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        async with serving(self._serve) as port:
            yield f"http://127.0.0.1:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with connected(self._host, self._port) as (answers, requests):
            asking = asyncio.create_task(self._ask(reader, requests))
            try:
                while answer := await answers.read(65536):
                    if next(self._answers) % RESET_EVERY == 0:
                        self.resets += 1
                        return writer.transport.abort()
                    writer.write(answer)
            finally:
                asking.cancel()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while request := await reader.read(65536):
                writer.write(request)
            writer.close()


class Counting:
    """A worker's side that counts how often it is asked for each input."""

    def __init__(self) -> None:
        self.runs: Counter[int] = Counter()

    async def __call__(self, task: Task) -> None:
        self.runs[task.payload["input"]] += 1
        if task.payload["input"] < 0:
            await task.fail({"type": "function_error", "message": "boom", "code": "ValueError", "traceback": "T"})
        else:
            await double(task)


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.url) as client:
        yield client


async def in_thread(call: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(call)


@pytest.mark.parametrize("ordered", [True, False])
async def test_lost_answers_lose_and_repeat_nothing(
    gateway: RunningGateway, broker: Broker, deploy: Deploy, ordered: bool
) -> None:
    name, asked, line = await deploy(), Counting(), BadLine(gateway.url)
    async with line.running() as url, AsyncClient(url) as client, worker(broker, name, asked):
        results = client.map(name, range(300), concurrency=16, order_outputs=ordered)
        got = [result async for result in results]
    assert (got if ordered else sorted(got)) == [2 * n for n in range(300)]
    assert line.resets > 20 and asked.runs == Counter(range(300))


async def test_the_blocking_map_takes_inputs_in_the_callers_thread(
    gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    name, threads, ahead = await deploy(), set(), []

    def inputs(results: list[int]) -> Iterator[int]:
        for n in range(400):
            threads.add(threading.get_ident())
            ahead.append(n - len(results))
            yield n

    def run() -> tuple[int, list[int]]:
        results: list[int] = []
        with Client(gateway.url) as client:
            results.extend(client.map(name, inputs(results), concurrency=8))
        return threading.get_ident(), results

    async with worker(broker, name, double):
        caller, results = await in_thread(run)
    assert results == [2 * n for n in range(400)]
    assert threads == {caller} and max(ahead) <= 8 * 9


async def test_progress_is_shown(
    gateway: RunningGateway, broker: Broker, deploy: Deploy, capsys: pytest.CaptureFixture[str]
) -> None:
    name = await deploy()

    def run() -> list[int]:
        with Client(gateway.url) as client:
            return list(client.map(name, range(5), progress=True))

    async with worker(broker, name, double):
        assert await in_thread(run) == [0, 2, 4, 6, 8]
    shown = capsys.readouterr().out
    assert name in shown and "100%" in shown


async def test_progress_is_shown_in_an_event_loop(
    client: AsyncClient, broker: Broker, deploy: Deploy, capsys: pytest.CaptureFixture[str]
) -> None:
    name = await deploy()
    async with worker(broker, name, double):
        assert [result async for result in client.map(name, range(3))] == [0, 2, 4]
        assert capsys.readouterr().out == ""
        assert [result async for result in client.map(name, range(5), progress=True)] == [0, 2, 4, 6, 8]
    shown = capsys.readouterr().out
    assert name in shown and "100%" in shown


async def test_failures_are_raised_or_stand_in_their_places(
    client: AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name, seen = await deploy(), []
    async with worker(broker, name, Counting()):
        with pytest.raises(JobFailed, match="boom") as caught:
            async for result in client.map(name, [1, -2, 3]):
                seen.append(result)  # noqa: PERF401 (what came before the error counts)
        first, second, third, fourth = [r async for r in client.map(name, [1, -2, 3, {4}], return_exceptions=True)]
    assert seen == [2] and (caught.value.code, caught.value.state) == ("ValueError", "failed")
    assert caught.value.record["error"]["traceback"] == "T"
    assert (first, third) == (2, 6) and isinstance(second, JobFailed) and "type set" in str(fourth)


async def test_a_function_that_is_not_there_ends_the_map(client: AsyncClient) -> None:
    with pytest.raises(StokerError) as caught:
        [result async for result in client.map("nowhere", [1, 2], return_exceptions=True)]
    assert caught.value.status == 404


async def test_a_full_queue_is_waited_for(client: AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name, statuses = await deploy(), Counter()

    async def count(response: httpx.Response) -> None:
        statuses[response.status_code] += 1

    client._http.event_hooks = {"response": [count]}

    async def slow(task: Task) -> None:
        await asyncio.sleep(0.05)
        await double(task)

    async with worker(broker, name, slow):
        # From how fast jobs go the queue knows when to come back.
        assert len([result async for result in client.map(name, range(100, 140))]) == 40
        await broker.set_limits(name, Limits(max_queued=4))
        got = [result async for result in client.map(name, range(40), concurrency=20)]
    assert got == [2 * n for n in range(40)] and statuses[429] > 0


async def test_a_caller_who_leaves_cancels_what_is_under_way(
    gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    name, jobs = await deploy(), []

    async def first_only(task: Task) -> None:
        jobs.append(task.claim.job_id)
        if task.payload["input"] == 0:
            await double(task)

    def leave() -> float:
        with Client(gateway.url) as client:
            results = client.map(name, itertools.count(), concurrency=6)
            assert next(results) == 0
            while len(jobs) < 6:
                time.sleep(0.01)
            left = time.monotonic()
            results.close()  # type: ignore[attr-defined]
            return time.monotonic() - left

    async with worker(broker, name, first_only):
        assert await in_thread(leave) < 5
        states = [(await broker.job(job)).state for job in jobs[1:]]  # type: ignore[union-attr]
    assert len(states) >= 5 and set(states) == {JobState.CANCELLED}


async def test_under_a_key_a_second_map_finds_the_results_of_the_first(
    client: AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name, asked = await deploy(), Counting()
    async with worker(broker, name, asked):
        async with contextlib.aclosing(client.map(name, range(50), concurrency=8, key="nightly")) as results:
            async for _ in results:
                break
        got = [result async for result in client.map(name, range(50), concurrency=8, key="nightly")]
        with pytest.raises(StokerError, match="^key 'nightly' was used before with a different input 0 "):
            [result async for result in client.map(name, [5], key="nightly")]
    assert got == [2 * n for n in range(50)] and asked.runs == Counter(range(50))


async def test_a_key_that_is_used_for_other_work_is_named(
    client: AsyncClient, gateway: RunningGateway, deploy: Deploy
) -> None:
    name = await deploy()
    await client.spawn(name, 1, key="mine")
    with Client(gateway.url) as blocking:
        with pytest.raises(WaitTimeout):
            await client.invoke(name, 1, key="mine", timeout=0)
        blocked: list[Any] = [blocking.spawn, blocking.invoke]
        for way in (client.spawn, client.invoke, *(partial(asyncio.to_thread, way) for way in blocked)):
            with pytest.raises(StokerError, match="^key 'mine' was used before with a different input: ") as caught:
                await way(name, 2, key="mine")
            assert (caught.value.status, caught.value.code) == (409, "idempotency_key_reused")


async def test_spawned_jobs_are_gathered_in_order(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()

    def run() -> list[Any]:
        with Client(gateway.url) as client:
            jobs = [client.spawn(name, n) for n in (3, -1, 2)]
            assert client.attach(jobs[0].id).status()["state"] in ("queued", "running", "succeeded")
            with pytest.raises(JobFailed):
                client.gather(*jobs)
            return client.gather(*jobs, return_exceptions=True)

    async with worker(broker, name, Counting()), AsyncClient(gateway.url) as client:
        three, failed, two = await in_thread(run)
        jobs = [await client.spawn(name, n, key=f"same-{n % 2}") for n in (4, 5)]
        again = await client.spawn(name, 4, key="same-0")
        assert again.id == jobs[0].id and await client.gather(*jobs, again) == [8, 10, 8]
    assert (three, two) == (6, 4) and isinstance(failed, JobFailed)


async def test_a_job_is_followed_over_a_bad_line(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    name, line = await deploy(), BadLine(gateway.url)

    async def count(task: Task) -> None:
        for n in range(60):
            await task.emit({"value": n})
            await asyncio.sleep(0.005)
        await task.done({"value": None})

    def follow(url: str) -> list[Any]:
        with Client(url) as client:
            return list(client.spawn(name).stream())

    async with line.running() as url, AsyncClient(url) as client, worker(broker, name, count):
        assert await in_thread(lambda: follow(url)) == list(range(60))
        job = await client.spawn(name)
        assert [part async for part in job.stream()] == list(range(60))
        assert (await job.status())["state"] == "succeeded"
    assert line.resets > 4


async def test_a_followed_job_tells_why_it_waits_and_how_it_ends(
    client: AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    job, told = await client.spawn(name, -1), []
    async for event in job.events():
        told.append(event.name)
        if event.name == "waiting":
            break
    assert told == ["state", "waiting"]
    async with worker(broker, name, Counting()):
        with pytest.raises(JobFailed, match="boom"):
            [part async for part in job.stream()]
    cancelled = await client.spawn(name, 1)
    assert (await cancelled.cancel())["state"] == "cancelled"
    with pytest.raises(JobFailed, match="cancelled"):
        await cancelled.get()
    with pytest.raises(TimeoutError):
        await (await client.spawn(name, 1)).get(timeout=0.1)


async def test_a_gateway_that_restarts_is_waited_for(
    settings: Any, broker: Broker, deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the same address, as a load balancer would have it."""
    monkeypatch.setattr(async_client, "WAIT_S", 1.0)
    name = await deploy()
    with running(settings) as first:
        line = BadLine(first.url)
        async with line.running() as url, AsyncClient(url) as client:
            job = await client.spawn(name, 4)
            waiting = asyncio.create_task(job.get())
            await asyncio.sleep(0.2)
            await asyncio.to_thread(first.stop)
            await asyncio.sleep(0.3)
            with running(settings) as second:
                line._port = int(second.url.rsplit(":", 1)[1])
                async with worker(broker, name, double):
                    assert await waiting == 8


async def test_an_address_without_a_gateway_is_told_at_once() -> None:
    async with AsyncClient("http://127.0.0.1:9") as client:
        with pytest.raises(Unreachable):
            async with asyncio.timeout(5):
                await client.spawn("f", 1)


async def test_a_later_map_under_the_key_gives_failed_inputs_one_more_life(
    client: AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    """However often it failed before, and once in each run; what has its result, or was cancelled, is left alone."""
    name, runs, broken = await deploy(limits=SpecLimits(max_attempts=1)), Counter(), {3: False, 5: True, 6: False}

    async def flaky(task: Task) -> None:
        n = task.payload["input"]
        runs[n] += 1
        if n == 8:
            await task.broker.cancel(task.claim.job_id)
        elif n in broken:
            await task.fail({"type": "function_error", "message": "boom", "code": "E"}, retry=broken[n])
        else:
            await double(task)

    async def whole() -> list[Any]:
        results = client.map(name, range(10), key="import", return_exceptions=True)
        return [str(result) async for result in results]

    async with worker(broker, name, flaky):
        first = await whole()
        second = await whole()
        broken.clear()
        with pytest.raises(JobFailed, match="cancelled"):
            [result async for result in client.map(name, range(10), key="import")]
        last = await whole()
    assert first == second and [n for n, said in enumerate(first) if said == "boom"] == [3, 5, 6]
    assert [said for n, said in enumerate(last) if n != 8] == [str(2 * n) for n in range(10) if n != 8]
    assert "cancelled" in last[8] and "cancelled" in first[8]
    assert runs == Counter({n: 3 if n in (3, 5, 6) else 1 for n in range(10)})


async def test_two_maps_at_once_share_what_they_replay(client: AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name, asked = await deploy(), Counting()
    inputs = [-1, -2, 3]

    async def whole() -> list[str]:
        return [str(result) async for result in client.map(name, inputs, key="twice", return_exceptions=True)]

    async with worker(broker, name, asked):
        await whole()
        assert await asyncio.gather(whole(), whole()) == [["boom", "boom", "6"]] * 2
    assert asked.runs[3] == 1 and all(2 <= asked.runs[n] <= 3 for n in (-1, -2))
