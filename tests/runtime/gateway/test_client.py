"""The Python client against a real gateway, and with none."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import stoker
from stoker.queue.broker import Broker
from stoker.queue.records import JobState
from stoker.runtime import cli
from stoker.runtime.client.async_client import AsyncClient
from stoker.runtime.client.client import Client
from stoker.runtime.client.errors import InvalidInput, JobFailed, StokerError, Unreachable
from stoker.runtime.client.remote import default_client, input_of

from .conftest import RunningGateway
from .peers import Deploy, Task, double, until_state, worker

NOT_SENT = [{1, 2}, {"deep": [object()]}]
IMAGE = np.arange(600, dtype=np.float32).reshape(20, 30)
NOBODY = "http://127.0.0.1:9"


async def count(task: Task) -> None:
    for number in range(task.payload["input"]):
        await task.emit({"value": {"n": number, "text": "é\n: data\u2028"}})
    await task.done({"value": None})


async def half(task: Task) -> None:
    await task.emit({"value": 1})
    await task.fail({"type": "function_error", "message": "boom", "code": "ValueError", "traceback": "line 7"})


async def test_a_job_is_submitted_and_waited_for(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    with Client(gateway.url) as client:
        job = await asyncio.to_thread(client.spawn, name, 4)
        with pytest.raises(TimeoutError, match="still queued"):
            await asyncio.to_thread(client.wait, job.id, 0.1)
        async with worker(broker, name, double):
            ended = await asyncio.to_thread(client.wait, job.id, 10)
    assert (ended["state"], ended["result"]) == ("succeeded", 8)


async def test_a_cancelled_job_is_waited_for_as_well(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    with Client(gateway.url) as client:
        job = await asyncio.to_thread(client.spawn, name, 4)
        await broker.cancel(job.id)
        await until_state(broker, job.id, JobState.CANCELLED)
        assert (await asyncio.to_thread(client.wait, job.id))["state"] == "cancelled"
        with pytest.raises(StokerError, match="cancelled") as caught:
            await asyncio.to_thread(job.get)
        assert caught.value.job_id == job.id


async def test_a_generators_parts_come_one_by_one(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    with Client(gateway.url) as client:
        async with worker(broker, name, count):
            parts = await asyncio.to_thread(lambda: list(client.stream(name, 3)))
    assert parts == [{"n": n, "text": "é\n: data\u2028"} for n in range(3)]


async def test_a_stream_of_a_plain_function_is_its_one_value(
    gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    async with worker(broker, name, double), AsyncClient(gateway.url) as client:
        with Client(gateway.url) as blocking:
            job = await asyncio.to_thread(blocking.spawn, name, 4)
            for stream in (partial(blocking.stream, name, 4), job.stream):
                assert await asyncio.to_thread(lambda stream=stream: list(stream())) == [8]
        assert [part async for part in client.stream(name, 4)] == [8]
        assert [part async for part in (await client.spawn(name, 4)).stream()] == [8]


async def test_a_stream_that_fails_raises_behind_its_parts(
    gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    name, seen = await deploy(), []

    def follow() -> None:
        with Client(gateway.url) as client:
            parts = client.stream(name)
            seen.append(next(parts))
            next(parts)

    async with worker(broker, name, half):
        with pytest.raises(JobFailed, match="boom") as caught:
            await asyncio.to_thread(follow)
        async with AsyncClient(gateway.url) as client:
            with pytest.raises(JobFailed, match="boom") as awaited:
                [part async for part in client.stream(name)]
    for error in (caught.value, awaited.value):
        assert (error.code, error.status, error.traceback) == ("ValueError", 500, "line 7")
        assert error.record["id"] == error.job_id
    assert seen == [1]


@pytest.mark.parametrize("value", NOT_SENT, ids=lambda v: type(v).__name__)
def test_what_can_not_be_sent_says_what_can(value: Any) -> None:
    with Client(NOBODY) as client, pytest.raises(InvalidInput, match="an input is None, bool, .* encode other things"):
        client.invoke("f", value)


async def echo(task: Task) -> None:
    """With one part for each of the input, if it is a list."""
    value = task.payload["input"]
    for part in value if isinstance(value, list) else []:
        await task.emit({"value": part})
    await task.done({"value": value})


def assert_same(read: Any, value: Any) -> None:
    """Arrays in their types and shapes."""
    assert type(read) is type(value)
    if isinstance(value, list):
        assert len(read) == len(value)
        for one, other in zip(read, value, strict=True):
            assert_same(one, other)
    elif isinstance(value, np.ndarray):
        assert read.dtype == value.dtype
        np.testing.assert_array_equal(read, value)
    else:
        assert read == value


@pytest.mark.parametrize("value", [b"\xff\x00", IMAGE, [b"", IMAGE[:2], "text"]], ids=["bytes", "array", "parts"])
async def test_bytes_and_arrays_go_and_come_back(
    gateway: RunningGateway, broker: Broker, deploy: Deploy, value: Any
) -> None:
    """By every way to a result."""
    name = await deploy()

    def every_way(client: Client) -> Iterator[Any]:
        yield client.invoke(name, value)
        job = client.spawn(name, value)
        yield job.get()
        yield client.attach(job.id).status()["result"]
        yield client.wait(job.id)["result"]
        yield client.request("GET", f"/v1/jobs/{job.id}/result")
        yield client.cancel(job.id)["result"]
        *_, end = job.events()
        yield end.data["result"]
        first, *_ = job.events()
        yield first.data["result"]
        yield from client.map(name, [value])
        if isinstance(value, list):
            yield list(client.stream(name, value))
            yield list(job.stream())

    async with worker(broker, name, echo), AsyncClient(gateway.url) as client:
        with Client(gateway.url) as blocking:
            for read in await asyncio.to_thread(lambda: list(every_way(blocking))):
                assert_same(read, value)
        assert_same(await client.invoke(name, value), value)
        assert_same([read async for read in client.map(name, [value])], [value])
        assert_same(await (await client.spawn(name, value)).get(), value)
        if isinstance(value, list):
            assert_same([part async for part in client.stream(name, value)], value)


async def test_numbers_that_json_lacks(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    async with worker(broker, name, echo), AsyncClient(gateway.url) as client:
        assert str(await client.invoke(name, [float("nan"), float("-inf")])) == "[nan, -inf]"


def test_a_gateway_that_is_not_there_is_named() -> None:
    with Client(NOBODY) as client:
        for call in (lambda: client.invoke("f"), lambda: list(client.stream("f"))):
            with pytest.raises(Unreachable, match=f"no gateway answers at {NOBODY} ") as caught:
                call()
            assert isinstance(caught.value, StokerError) and caught.value.status == 0


def test_the_command_line_says_so_with_exit_code_3(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["stoker", "functions", "--url", NOBODY])
    assert cli.run(lambda: cli.app(standalone_mode=False)) == 3
    assert f"no gateway answers at {NOBODY}" in capsys.readouterr().err


async def test_a_function_is_called_by_itself(
    gateway: RunningGateway, broker: Broker, deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, app = await deploy(), stoker.App("mine")
    monkeypatch.setenv("STOKER_URL", gateway.url)
    default_client.cache_clear()

    @app.function(name=name)
    def one(x: int) -> int:
        return -x

    async def echo(task: Task) -> None:
        await task.done({"value": task.payload["input"]})

    def run() -> list[Any]:
        return [one(5), one.remote(5), one.remote(x=6), one.spawn(7).get(), *one.map([8, 9])]

    async with worker(broker, name, echo):
        assert await asyncio.to_thread(run) == [-5, 5, 6, 7, 8, 9]
    default_client().close()
    default_client.cache_clear()


@pytest.mark.parametrize(
    ("body", "args", "kwargs", "value"),
    [
        (lambda x: x, (1,), {}, 1),
        (lambda x=3: x, (), {}, 3),
        (lambda x, y=2: x, (1,), {}, {"x": 1}),
        (lambda x, y=2: x, (1,), {"y": 3}, {"x": 1, "y": 3}),
        (lambda: 0, (), {}, {}),
    ],
)
def test_arguments_become_the_input_that_the_worker_expects(body: Any, args: Any, kwargs: Any, value: Any) -> None:
    assert input_of(body, args, kwargs) == value
    with pytest.raises(TypeError):
        input_of(body, args, {**kwargs, "unknown": 1})


def test_the_module_lists_what_it_offers() -> None:
    assert {"App", "AsyncClient", "Client", "JobFailed", "Route", "StokerError"} <= set(dir(stoker))
    assert all(getattr(stoker, name).__module__.startswith("stoker.runtime.") for name in dir(stoker))
