import asyncio
import time

import pytest

from stoker.runtime.gateway.steps import Begun, Unbroken, Watch


async def at_once() -> int:
    return 7


async def later(log: list[str], value: int = 7) -> int:
    log.append("begun")
    await asyncio.sleep(0.02)
    log.append("on")
    await asyncio.sleep(0)
    log.append("over")
    return value


async def test_what_need_not_wait_is_over() -> None:
    begun = Begun(at_once())
    assert begun.over and begun.value == 7 and await begun == 7


async def test_what_has_begun_can_be_awaited() -> None:
    log: list[str] = []
    begun = Begun(later(log))
    assert not begun.over and log == ["begun"]
    assert await begun == 7 and log == ["begun", "on", "over"]


async def test_a_failure_before_the_first_wait_comes_at_once() -> None:
    async def failing() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        Begun(failing())


async def test_an_undisturbed_coroutine_needs_no_task() -> None:
    unbroken = Unbroken(later([]))
    assert await unbroken.result() == 7
    assert unbroken.task is None


@pytest.mark.parametrize("work", ["sleep", "timeout", "task"])
async def test_a_cancelled_waiter_leaves_the_coroutine_to_its_end(work: str) -> None:
    log: list[str] = []

    async def nested() -> int:
        if work == "timeout":
            async with asyncio.timeout(5):
                return await later(log)
        if work == "task":
            return await asyncio.create_task(later(log))
        return await later(log)

    unbroken = Unbroken(nested())
    waiter = asyncio.create_task(unbroken.result())
    await asyncio.sleep(0.005)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert log == ["begun"] and unbroken.task
    assert await unbroken.task == 7 and log == ["begun", "on", "over"]


async def test_a_failure_after_the_waiter_has_gone_bothers_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> None:
        await asyncio.sleep(0.01)
        raise KeyError("x")

    unbroken = Unbroken(failing())
    waiter = asyncio.create_task(unbroken.result())
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait((waiter,))
    assert unbroken.task
    await asyncio.wait((unbroken.task,))
    assert not caplog.records


async def test_a_failure_comes_to_the_waiter() -> None:
    async def failing() -> None:
        await asyncio.sleep(0.001)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await Unbroken(failing()).result()


async def some_turns() -> None:
    """Of the event loop: whatever can go on has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_watch_asks_until_the_last_answer_and_tells_once() -> None:
    answers: asyncio.Queue[int] = asyncio.Queue()
    told: list[float] = []
    watch = Watch(answers.get, lambda answer: answer == 3, lambda: told.append(time.monotonic()))
    for number in (1, 2):
        answers.put_nowait(number)
        await some_turns()
    assert not told
    answers.put_nowait(3)
    answers.put_nowait(3)
    await some_turns()
    assert len(told) == 1 and answers.qsize() == 1
    watch.close()


@pytest.mark.parametrize("arrived", [False, True])
async def test_a_closed_watch_tells_nothing(arrived: bool) -> None:
    """Not even when an answer has arrived in the same turn of the event loop."""
    answers: asyncio.Queue[int] = asyncio.Queue()
    told: list[bool] = []
    watch = Watch(answers.get, lambda answer: True, lambda: told.append(True))
    if arrived:
        answers.put_nowait(1)
    watch.close()
    answers.put_nowait(2)
    await some_turns()
    assert not told
