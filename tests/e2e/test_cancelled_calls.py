"""Calls that nobody wants any more, beside ones that somebody does: what runs in a function's process hears of it, and
its neighbours don't."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.runtime.client.client import Client
from stoker.runtime.local import LocalStack

pytestmark = pytest.mark.xdist_group("cancelled calls")

# Each kind writes what it hears into the file that its input names. "neighbour" ends by itself, after the others were
# cancelled and would have been killed.
APP = """
import asyncio, os, time
import stoker

app = stoker.App("kinds")
SECONDS = {"neighbour": 6, "long": 60, "quick": 0}


def say(path, text):
    with open(path, "a") as file:
        file.write(text + "\\n")


@app.function(concurrency=3, retries=0, idle_timeout=60, timeout={timeout})
async def coroutine(kind, path):
    try:
        say(path, "began")
        await asyncio.sleep(SECONDS[kind])
    except asyncio.CancelledError:
        say(path, "heard")
        raise
    finally:
        say(path, "ended")
    return kind


@app.function(concurrency=3, retries=0, idle_timeout=60, timeout={timeout})
async def async_generator(kind, path):
    say(path, "began")
    try:
        yield kind
        await asyncio.sleep(SECONDS[kind])
    except asyncio.CancelledError:
        say(path, "heard")
        raise
    finally:
        say(path, "ended")


@app.function(concurrency=3, retries=0, idle_timeout=60, timeout={timeout})
def generator(kind, path):
    say(path, "began")
    deadline = time.monotonic() + SECONDS[kind]
    try:
        yield kind
        while time.monotonic() < deadline:
            time.sleep(0.1)
            yield
    except GeneratorExit:
        say(path, "heard")
        raise
    finally:
        say(path, "ended")


@app.function(concurrency=3, retries=0, idle_timeout=60, timeout={timeout})
def sync(kind, path):
    say(path, "began")
    time.sleep(SECONDS[kind])
    return kind


@app.function(concurrency=3, retries=0, idle_timeout=60, timeout={timeout})
async def deaf(kind, path):
    say(path, "began")
    deadline = time.monotonic() + SECONDS[kind]
    while time.monotonic() < deadline:
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            say(path, "heard")
    return kind


@app.function(retries=0, idle_timeout=60)
async def single(kind, path):
    if kind == "pid":
        return os.getpid()
    return await coroutine.body(kind, path)


@app.function(retries=0, idle_timeout=60)
def stuck(kind, path):
    if kind == "pid":
        return os.getpid()
    say(path, "began")
    time.sleep(SECONDS[kind])


@app.function(batch=stoker.Batch(max_size=2, max_wait_ms=2000), retries=0, idle_timeout=60)
async def batch(items):
    path = items[0]["path"]
    try:
        say(path, "began")
        await asyncio.sleep(max(SECONDS[item["kind"]] for item in items))
    except asyncio.CancelledError:
        say(path, "heard")
        raise
    return [item["kind"] for item in items]
"""
# What was killed has not said that it ended; the long ones would take a minute.
SOON_S = 15
DEAF = ("sync", "deaf")
HEARING = ("coroutine", "async_generator", "generator")
TIMEOUT_S = 7


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("cancelled")
    with LocalStack(folder / "data") as stack:
        (folder / "kinds_app.py").write_text(APP.replace("{timeout}", str(TIMEOUT_S)))
        stack.deploy(folder / "kinds_app.py")
        yield stack


@pytest.fixture
def client(stack: LocalStack) -> Iterator[Client]:
    with stack.client() as client:
        yield client


class Calls:
    """Starts calls of one function and reads what they wrote."""

    def __init__(self, client: Client, function: str, folder: Path) -> None:
        self.client, self.function, self._folder = client, function, folder

    def begin(self, kind: str, name: str = "") -> str:
        job = self.client.spawn(self.function, self.input(kind, name))
        self.until(name or kind, "began")
        return job.id

    def input(self, kind: str, name: str = "") -> dict[str, str]:
        return {"kind": kind, "path": str(self._folder / (name or kind))}

    def said(self, name: str) -> list[str]:
        path = self._folder / name
        return path.read_text().split() if path.exists() else []

    def until(self, name: str, text: str, within_s: float = 90) -> None:
        until(lambda: self.said(name), lambda said: text in said, within_s)


def cancel(stack: LocalStack, calls: Calls) -> str:
    job_id = calls.begin("long")
    calls.client.request("DELETE", f"/v1/jobs/{job_id}")
    return job_id


def disconnect(stack: LocalStack, calls: Calls) -> str:
    """A caller who follows the answer, and leaves."""
    headers = {"accept": "text/event-stream"}
    with (
        httpx.Client(base_url=stack.url, timeout=60) as http,
        http.stream("POST", f"/v1/functions/{calls.function}", json=calls.input("long"), headers=headers) as response,
    ):
        calls.until("long", "began")
    return response.headers["x-job-id"]


def calls_of(client: Client, folder: Path, *functions: str) -> list[Calls]:
    for function in functions:
        (folder / function).mkdir()
    return [Calls(client, function, folder / function) for function in functions]


@pytest.mark.parametrize("leave", [cancel, disconnect])
def test_a_neighbour_ends_normally_at_its_first_attempt(
    stack: LocalStack, client: Client, tmp_path: Path, leave: Callable[[LocalStack, Calls], str]
) -> None:
    every = calls_of(client, tmp_path, *HEARING, *DEAF)
    neighbours = [calls.begin("neighbour") for calls in every]
    for calls in every:
        job_id = leave(stack, calls)
        if calls.function in HEARING:
            calls.until("long", "ended", SOON_S)
        check_lost(client, job_id, "cancelled", f"the call of job {job_id} was cancelled")
    check_neighbours(client, every, neighbours)


def test_nor_does_it_suffer_from_one_that_times_out(stack: LocalStack, client: Client, tmp_path: Path) -> None:
    every = calls_of(client, tmp_path, *HEARING, *DEAF)
    long = [(calls.begin("long"), time.monotonic()) for calls in every]
    neighbours = []
    for calls, (_, began) in zip(every, long, strict=True):
        time.sleep(max(0, began + TIMEOUT_S - 2 - time.monotonic()))
        neighbours.append(calls.begin("neighbour"))
    for calls, (job_id, _) in zip(every, long, strict=True):
        if calls.function in HEARING:
            calls.until("long", "ended", SOON_S)
        check_lost(client, job_id, "timed_out", f"the call of job {job_id} timed out")
    check_neighbours(client, every, neighbours)


def check_lost(client: Client, job_id: str, state: str, said: str) -> None:
    until(lambda: client.job(job_id)["state"], lambda now: now == state, SOON_S)
    logged = lambda: client.request("GET", f"/v1/jobs/{job_id}/logs")["data"]  # noqa: E731
    until(lambda: [row["text"] for row in logged()], lambda texts: said in texts, SOON_S)


def check_neighbours(client: Client, every: list[Calls], neighbours: list[str]) -> None:
    for calls, job_id in zip(every, neighbours, strict=True):
        record = client.wait(job_id)
        assert (calls.function, record["state"], record["attempt"]) == (calls.function, "succeeded", 1), record
        if calls.function in HEARING:
            assert calls.said("long") == ["began", "heard", "ended"]


def test_the_next_call_does_not_wait_for_a_cancelled_one_that_has_ended(
    stack: LocalStack, client: Client, tmp_path: Path
) -> None:
    (calls,) = calls_of(client, tmp_path, "single")
    process = calls.client.invoke("single", calls.input("pid"))
    calls.client.request("DELETE", f"/v1/jobs/{calls.begin('long')}")
    began = time.monotonic()
    assert client.invoke("single", calls.input("pid")) == process
    assert time.monotonic() - began < SOON_S
    assert calls.said("long") == ["began", "heard", "ended"]


def test_a_process_is_ended_once_all_that_it_does_is_unwanted(
    stack: LocalStack, client: Client, tmp_path: Path
) -> None:
    """Its log says for what; what waited behind it runs in the next one, at its first attempt."""
    (calls,) = calls_of(client, tmp_path, "stuck")
    first = client.invoke("stuck", calls.input("pid"))
    cancelled = calls.begin("long")
    waiting = client.spawn("stuck", calls.input("pid"))
    client.request("DELETE", f"/v1/jobs/{cancelled}")
    assert waiting.get(timeout=30) != first
    assert client.job(waiting.id)["attempt"] == 1
    texts = [row["text"] for row in client.request("GET", "/v1/functions/stuck/logs")["data"]]
    why = f"the call of job {cancelled} was cancelled and had not ended 2 s later, so its process was ended"
    assert f"stopped: {why}" in texts and not any("failed" in text or "lost" in text for text in texts)


def test_a_batch_is_cancelled_once_nobody_wants_any_of_it(stack: LocalStack, client: Client, tmp_path: Path) -> None:
    (calls,) = calls_of(client, tmp_path, "batch")
    first, second = (client.spawn("batch", calls.input("long", "batch")).id for _ in range(2))
    calls.until("batch", "began")
    client.request("DELETE", f"/v1/jobs/{first}")
    time.sleep(3)
    assert calls.said("batch") == ["began"] and client.job(second)["state"] == "running"
    client.request("DELETE", f"/v1/jobs/{second}")
    calls.until("batch", "heard", SOON_S)


def until(look: Callable[[], Any], holds: Callable[[Any], Any], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not holds(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
