"""What a client raises for each end of a job, whichever way it waited: one status, the owner's traceback, the job."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import pytest

from stoker.coldstart.store import ObjectStore
from stoker.queue.broker import Broker
from stoker.queue.records import Completion, JobState, pack
from stoker.queue.records import Limits as QueueLimits
from stoker.runtime import payloads
from stoker.runtime.client.async_client import AsyncClient
from stoker.runtime.client.client import Client
from stoker.runtime.client.errors import JobFailed, StokerError, Unreachable, WaitTimeout
from stoker.runtime.spec import Limits

from .conftest import Login, RunningGateway
from .peers import Deploy, Task, double, make_key, worker

TRACE = 'Traceback (most recent call last):\n  File "shop.py", line 3, in f\nValueError: boom\n'
BIG = "x" * 200_000


def fails(type: str, code: str, *, retry: bool = False) -> Callable[[Task], Awaitable[None]]:
    error = {"type": type, "message": "boom", "code": code, "traceback": TRACE}
    return lambda task: task.fail(error, retry=retry)


async def cancelled(task: Task) -> None:
    await task.broker.cancel(task.claim.job_id)


async def never(task: Task) -> None:
    """Its time runs out."""


ENDS = {
    "raised": (fails("function_error", "ValueError"), Limits(), JobState.FAILED, 500, TRACE),
    "no input of its": (fails("function_error", "invalid_input"), Limits(), JobState.FAILED, 422, TRACE),
    "out of memory": (fails("out_of_memory", "oom"), Limits(), JobState.FAILED, 503, TRACE),
    "dead": (fails("function_error", "E", retry=True), Limits(max_attempts=1), JobState.DEAD, 500, TRACE),
    "cancelled": (cancelled, Limits(), JobState.CANCELLED, 499, ""),
    "timed out": (never, Limits(run_within_s=0.05), JobState.TIMED_OUT, 504, ""),
    "expired": (None, Limits(start_within_s=0.05), JobState.EXPIRED, 504, ""),
}


async def every_way(client: AsyncClient, blocking: Client, name: str) -> dict[str, StokerError]:
    """What each way to wait for a job of its own raises."""

    async def gathered(results: Any) -> list[Any]:
        return [result async for result in results]

    ways: dict[str, Callable[[], Awaitable[Any]]] = {
        "invoke": lambda: client.invoke(name, 1, key="k 1"),
        "stream": lambda: gathered(client.stream(name, 1)),
        "map": lambda: gathered(client.map(name, [1])),
        "blocking invoke": lambda: asyncio.to_thread(blocking.invoke, name, 1),
        "blocking stream": lambda: asyncio.to_thread(lambda: list(blocking.stream(name, 1))),
        "blocking map": lambda: asyncio.to_thread(lambda: list(blocking.map(name, [1]))),
    }
    job, other = await client.spawn(name, 1), await asyncio.to_thread(blocking.spawn, name, 1)
    ways["get"] = job.get
    ways["job's stream"] = lambda: gathered(job.stream())
    ways["blocking get"] = lambda: asyncio.to_thread(other.get)
    ways["blocking job's stream"] = lambda: asyncio.to_thread(lambda: list(other.stream()))
    raised = await asyncio.gather(*(way() for way in ways.values()), return_exceptions=True)
    return dict(zip(ways, raised, strict=True))  # type: ignore[arg-type]


async def ticked(broker: Broker, name: str) -> None:
    while True:
        await broker.tick(name)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", ENDS)
async def test_one_end_is_one_error(gateway: RunningGateway, broker: Broker, deploy: Deploy, end: str) -> None:
    answer, limits, state, status, traceback = ENDS[end]
    name = await deploy(limits=limits)
    async with AsyncClient(gateway.url) as client, httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
        with Client(gateway.url) as blocking:
            if answer is None:
                ticking = asyncio.create_task(ticked(broker, name))
                errors = await every_way(client, blocking, name)
                plain = await http.post(f"/v1/functions/{name}", json=1)
                ticking.cancel()
            else:
                async with worker(broker, name, answer):
                    errors = await every_way(client, blocking, name)
                    plain = await http.post(f"/v1/functions/{name}", json=1)
        for way, error in errors.items():
            assert isinstance(error, JobFailed), (way, error)
            told = (error.status, error.state, error.type, error.code, error.traceback, str(error))
            body = plain.json()["error"]
            assert told == (status, state, body["type"], body["code"], traceback, body["message"]), way
            assert (await client.job(error.job_id))["id"] == error.job_id == error.record["id"]
    assert plain.status_code == status and "Traceback" not in plain.text


async def test_who_calls_a_shared_function_reads_no_traceback(
    root: httpx.AsyncClient, login: Login, keyed: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    theirs = (await make_key(root, "reader", "invoke"))["key"]
    owners = root.headers["authorization"].removeprefix("Bearer ")
    seen = []
    async with worker(broker, name, fails("function_error", "ValueError")):
        for key in (theirs, owners):
            async with AsyncClient(keyed.url, key) as client:
                client._http = login(key)
                for wait in (lambda c=client: c.invoke(name, 1), (await client.spawn(name, 1)).get):
                    with pytest.raises(JobFailed, match="^boom$") as caught:
                        await wait()
                    seen.append((caught.value.status, caught.value.traceback))
    assert seen == [(500, ""), (500, ""), (500, TRACE), (500, TRACE)]


async def test_a_refused_call_has_no_job(gateway: RunningGateway) -> None:
    async with AsyncClient(gateway.url) as client:
        with pytest.raises(StokerError) as caught:
            await client.invoke("nowhere", 1)
    error = caught.value
    assert (type(error), error.status, error.job_id, error.traceback) == (StokerError, 404, "", "")


async def test_waiting_no_longer_is_a_stoker_error_and_a_timeout(
    gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    async with AsyncClient(gateway.url) as client:
        job = await client.spawn(name, 4)
        with Client(gateway.url) as blocking:
            handle = blocking.attach(job.id)
            blocked = [lambda: handle.get(timeout=0.05), lambda: blocking.wait(job.id, 0)]
            waits = [*(lambda b=b: asyncio.to_thread(b) for b in blocked), lambda: job.get(0.05)]
            for kind in (StokerError, TimeoutError):
                for wait in waits:
                    with pytest.raises(kind, match=f"job {job.id} is still queued after 0") as caught:
                        await wait()
                    error = caught.value
                    assert isinstance(error, WaitTimeout) and not isinstance(error, Unreachable)
                    assert (error.status, error.code, error.job_id) == (408, "wait_timeout", job.id)
        async with worker(broker, name, double):
            assert await job.get() == 8


async def test_an_invocation_that_is_waited_for_no_longer_goes_on(
    gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    async with AsyncClient(gateway.url) as client:
        with Client(gateway.url) as blocking:
            waits = [
                lambda: client.invoke(name, 4, timeout=0.05),
                lambda: client.invoke(name, 4, key="k", timeout=0),
                lambda: asyncio.to_thread(lambda: blocking.invoke(name, 4, timeout=0.05)),
                lambda: asyncio.to_thread(lambda: blocking.invoke(name, 4, key="k", timeout=0)),
            ]
            ids = []
            for wait in waits:
                with pytest.raises(WaitTimeout, match="is still queued after 0") as caught:
                    await wait()
                ids.append(caught.value.job_id)
            async with worker(broker, name, double):
                assert [await client.attach(id).get() for id in ids] == [8] * 4
                assert await client.invoke(name, 4, key="k", timeout=10) == 8
                assert await asyncio.to_thread(lambda: blocking.invoke(name, 4, timeout=10)) == 8
    assert ids[1] == ids[3] and len(set(ids)) == 3


async def test_an_invocation_comes_back_later_within_its_time_only(
    gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    await broker.set_limits(name, QueueLimits(max_queued=1))
    async with AsyncClient(gateway.url) as client:
        await client.spawn(name, 1)
        with Client(gateway.url) as blocking:
            for invoke in (client.invoke, partial(asyncio.to_thread, blocking.invoke)):
                with pytest.raises(StokerError) as caught:
                    async with asyncio.timeout(5):
                        await invoke(name, 1, timeout=0.5)
                assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")


async def test_only_an_address_without_a_gateway_has_status_0() -> None:
    async with AsyncClient("http://127.0.0.1:9") as client:
        with pytest.raises(Unreachable) as caught:
            await client.invoke("f")
    assert (caught.value.status, caught.value.code) == (0, "unreachable")


async def test_big_results_come_by_every_way(
    gateway: RunningGateway, broker: Broker, store: ObjectStore, deploy: Deploy
) -> None:
    """The object store has them; the queue only where."""

    async def big(task: Task) -> None:
        claim = task.claim
        carried = payloads.put_result(store, claim.job_id, claim.fence, pack({"value": BIG}))
        assert payloads.is_reference(carried)
        await broker.done(claim.function, [Completion(claim.job_id, claim.fence, carried, b"")])

    name = await deploy()

    def blocking() -> list[str]:
        with Client(gateway.url) as client:
            return [client.invoke(name, 1), client.spawn(name, 1).get(), *client.map(name, [1, 2])]

    async with worker(broker, name, big), AsyncClient(gateway.url) as client:
        job = await client.spawn(name, 1)
        got = [await client.invoke(name, 1), await job.get(), *[part async for part in client.map(name, [1])]]
        got += await asyncio.to_thread(blocking)
    assert got == [BIG] * 7
