"""User code that is told to stop, in this process."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stoker.runtime.worker.interrupt import Interrupt, Interrupted, Interrupts
from stoker.runtime.worker.user_code import UserCode

PATIENCE_S = 30


class Running:
    """One call in a thread of its own; `said` is what its code noted, `chunks` what it streamed."""

    def __init__(self, make: Callable[[list[str]], Callable[..., Any]], *, batched: bool = False) -> None:
        self.said: list[str] = []
        self.chunks: list[Any] = []
        self.result: Any = None
        self.interrupt = Interrupt()
        self._code = UserCode(make(self.said), batched=batched)
        self._thread = threading.Thread(target=self._run, args=(batched,))

    def start(self) -> "Running":
        self._thread.start()
        return self

    def until(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.said:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.005)

    def end(self) -> Any:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.result

    def _run(self, batched: bool) -> None:
        if batched:
            self.result = self._code.batch([["a", 1], ["b", 2]], self.interrupt)
        else:
            self.result = self._code.single(["a", 1], lambda _, value: self.chunks.append(value), self.interrupt)


def sleeper(said: list[str]) -> Callable[..., Any]:
    async def body(x: Any) -> Any:
        try:
            said.append("began")
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            said.append("heard")
            await asyncio.sleep(0.05)
            said.append("tidied")
            raise

    return body


def async_counter(said: list[str]) -> Callable[..., Any]:
    async def body(x):  # type: ignore[no-untyped-def]
        try:
            said.append("began")
            for number in range(1_000_000_000):
                yield number
        finally:
            said.append("tidied")

    return body


def counter(said: list[str]) -> Callable[..., Any]:
    def body(x: Any) -> Iterator[int]:
        try:
            said.append("began")
            for number in range(1_000_000_000):
                time.sleep(0.001)
                yield number
        except GeneratorExit:
            said.append("heard")
            raise
        finally:
            said.append("tidied")

    return body


@pytest.mark.parametrize("make", [sleeper, async_counter, counter])
def test_it_tidies_up_before_its_call_has_ended(make: Callable[[list[str]], Callable[..., Any]]) -> None:
    call = Running(make).start()
    call.until("began")
    call.interrupt.set()
    call.interrupt.set()
    job_id, succeeded, _ = call.end()
    assert (job_id, succeeded) == ("a", False) and call.said[-1] == "tidied"


def test_a_batch_is_one_call() -> None:
    call = Running(sleeper, batched=True).start()
    call.until("began")
    call.interrupt.set()
    assert [item[:2] for item in call.end()] == [["a", False], ["b", False]]
    assert call.said == ["began", "heard", "tidied"]


@pytest.mark.parametrize("make", [sleeper, async_counter, counter])
def test_what_has_not_begun_never_does(make: Callable[[list[str]], Callable[..., Any]]) -> None:
    call = Running(make)
    call.interrupt.set()
    assert call.start().end()[1] is False
    assert call.said == [] and call.chunks == []


def test_one_is_told_and_its_neighbour_on_the_same_loop_goes_on() -> None:
    async def body(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    code, interrupts = UserCode(body), Interrupts()
    results: list[Any] = []

    def run(job_id: str, seconds: float) -> None:
        results.append(code.single([job_id, seconds], lambda *_: None, interrupts.open([job_id])))

    threads = [threading.Thread(target=run, args=each) for each in (("long", 60.0), ("neighbour", 0.3))]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    interrupts.set("long")
    interrupts.set("nobody")
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [item[:2] for item in results] == [["long", False], ["neighbour", True]]


def test_a_call_that_has_ended_is_told_nothing() -> None:
    interrupts = Interrupts()
    old = interrupts.open(["a"])
    new = interrupts.open(["a"])
    interrupts.close(["a"], old)
    interrupts.set("a")
    old.check()
    with pytest.raises(Interrupted):
        new.check()


def test_the_only_call_is_told_from_several() -> None:
    interrupts = Interrupts()
    assert interrupts.only_call() == ""
    batch = interrupts.open(["a", "b"])
    assert interrupts.only_call() in ("a", "b")
    other = interrupts.open(["c"])
    assert interrupts.only_call() == ""
    interrupts.close(["a", "b"], batch)
    assert interrupts.only_call() == "c"
    interrupts.close(["c"], other)
    assert interrupts.only_call() == ""
