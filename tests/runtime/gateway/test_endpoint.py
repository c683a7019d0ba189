import asyncio
import contextlib

import pytest
from starlette.types import Message

from stoker.runtime.gateway import endpoint
from stoker.runtime.gateway.body import ClientGone
from stoker.runtime.gateway.endpoint import while_connected

END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


async def gone_at_once() -> Message:
    return {"type": "http.disconnect"}


async def silent() -> Message:
    await asyncio.sleep(60)
    raise AssertionError


async def never(message: Message) -> None:
    raise AssertionError("nothing was to be sent")


async def test_a_swallowed_cancellation_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "CANCEL_AGAIN_S", 0.02)
    swallowed = 0

    async def deaf_at_first(send: object) -> None:
        nonlocal swallowed
        while swallowed < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1
        await asyncio.sleep(60)

    with pytest.raises(ClientGone):
        await asyncio.wait_for(while_connected(gone_at_once, never, deaf_at_first), 5)
    assert swallowed == 2
    current = asyncio.current_task()
    assert current and not current.cancelling()


async def test_work_that_ends_in_spite_of_its_cancellation_has_no_client_any_more() -> None:
    async def deaf(send: object) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    with pytest.raises(ClientGone):
        await while_connected(gone_at_once, never, deaf)
    await asyncio.sleep(0)


async def test_a_cancellation_from_outside_is_no_disconnect() -> None:
    async def work(send: object) -> None:
        await asyncio.sleep(60)

    task = asyncio.create_task(while_connected(silent, never, work))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_disconnect_in_the_middle_stops_the_work() -> None:
    gone = asyncio.Event()

    async def receive() -> Message:
        if not gone.is_set():
            await gone.wait()
            return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.disconnect"}

    async def work(send: object) -> None:
        await asyncio.sleep(60)

    asyncio.get_running_loop().call_later(0.02, gone.set)
    with pytest.raises(ClientGone):
        await asyncio.wait_for(while_connected(receive, never, work), 5)


async def test_a_disconnect_cancels_the_work_and_waits_for_its_clean_up() -> None:
    cleaned = False

    async def work(send: object) -> None:
        nonlocal cleaned
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned = True

    with pytest.raises(ClientGone):
        await while_connected(gone_at_once, never, work)
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
    async def work(send: object) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await while_connected(silent, never, work)
