import asyncio

import pytest
from starlette.types import Message

from stoker.runtime.gateway import endpoint
from stoker.runtime.gateway.body import ClientGone
from stoker.runtime.gateway.endpoint import stop, while_connected

END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


async def test_a_swallowed_cancellation_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "CANCEL_AGAIN_S", 0.02)
    swallowed = 0

    async def deaf_at_first() -> None:
        nonlocal swallowed
        while swallowed < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1
        await asyncio.sleep(60)

    task = asyncio.create_task(deaf_at_first())
    await asyncio.sleep(0)
    await asyncio.wait_for(stop(task), 5)
    assert task.cancelled() and swallowed == 2


async def test_a_disconnect_cancels_the_work_and_waits_for_its_clean_up() -> None:
    cleaned = False

    async def work(send: object) -> None:
        nonlocal cleaned
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned = True

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError("nothing was to be sent")

    with pytest.raises(ClientGone):
        await while_connected(receive, send, work)
    assert cleaned


async def test_a_disconnect_behind_the_last_byte_is_none() -> None:
    sent = asyncio.Event()
    finished = False

    async def receive() -> Message:
        await sent.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.set()

    async def work(send: endpoint.Send) -> None:
        nonlocal finished
        await send(END)
        await asyncio.sleep(0.05)
        finished = True

    await while_connected(receive, send, work)
    assert finished


async def test_what_the_work_raises_comes_out() -> None:
    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def send(message: Message) -> None:
        pass

    async def work(send: object) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await while_connected(receive, send, work)
