"""The Python client against a real gateway, and with none."""

import asyncio
import base64
from typing import Any

import pytest

import stoker
from stoker.queue.broker import Broker
from stoker.queue.records import JobState
from stoker.runtime import cli
from stoker.runtime.sdk import Client, InvalidInput, StokerError, Unreachable

from .conftest import RunningGateway
from .peers import Deploy, Task, double, until_state, worker

NO_JSON = [b"bytes", float("nan"), {1, 2}, {"deep": [object()]}]
NOBODY = "http://127.0.0.1:9"


async def count(task: Task) -> None:
    for number in range(task.payload["input"]):
        await task.emit({"value": {"n": number, "text": "é\n: data"}})
    await task.done({"value": None})


async def half(task: Task) -> None:
    await task.emit({"value": 1})
    await task.fail({"type": "function_error", "message": "boom", "code": "ValueError", "traceback": None})


async def test_a_job_is_submitted_and_waited_for(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    with Client(gateway.url) as client:
        job = await asyncio.to_thread(client.submit, name, 4)
        with pytest.raises(TimeoutError, match="still queued"):
            await asyncio.to_thread(client.wait, job["id"], 0.1)
        async with worker(broker, name, double):
            ended = await asyncio.to_thread(client.wait, job["id"], 10)
    assert (ended["state"], ended["result"]) == ("succeeded", 8)


async def test_a_cancelled_job_is_waited_for_as_well(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    with Client(gateway.url) as client:
        job = await asyncio.to_thread(client.submit, name, 4)
        await broker.cancel(job["id"])
        await until_state(broker, job["id"], JobState.CANCELLED)
        assert (await asyncio.to_thread(client.wait, job["id"]))["state"] == "cancelled"


async def test_a_generators_parts_come_one_by_one(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    with Client(gateway.url) as client:
        async with worker(broker, name, count):
            parts = await asyncio.to_thread(lambda: list(client.stream(name, 3)))
    assert parts == [{"n": n, "text": "é\n: data"} for n in range(3)]


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
        with pytest.raises(StokerError, match="boom") as caught:
            await asyncio.to_thread(follow)
    assert (seen, caught.value.code) == ([1], "ValueError")


@pytest.mark.parametrize("value", NO_JSON, ids=lambda v: type(v).__name__)
def test_what_can_not_be_sent_says_what_can(value: Any) -> None:
    with Client(NOBODY) as client, pytest.raises(InvalidInput, match="an input is JSON: .* encode bytes with base64"):
        client.invoke("f", value)


async def test_bytes_as_base64_arrive(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    async def echo(task: Task) -> None:
        await task.done({"value": task.payload["input"]})

    name, text = await deploy(), base64.b64encode(b"\xff\x00").decode()
    with Client(gateway.url) as client:
        async with worker(broker, name, echo):
            assert await asyncio.to_thread(client.invoke, name, text) == text


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


def test_the_module_lists_what_it_offers() -> None:
    assert dir(stoker) == ["App", "Batch", "Client", "SLO", "StokerError"]
    assert all(getattr(stoker, name).__module__.startswith("stoker.runtime.") for name in dir(stoker))
