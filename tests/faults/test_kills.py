"""SIGKILL, for real, of each process while a request streams: the request goes on or ends with a clear error, once."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
from redis.asyncio import Redis

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.cluster import Cluster
from stoker.runtime.local import LocalStack

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("faults")]

PROMPT = "Write a long story about a lighthouse keeper and the sea."
TOKENS = 80


class Stream(threading.Thread):
    """Reads one streamed answer; `texts` grows as tokens come."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.texts: list[str] = []
        self.expected = ""
        self.lines: list[str] = []
        self.error: dict[str, Any] | None = None
        self.finish: list[str] = []
        self.job_id = ""
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self.read()
        except Exception as failure:
            self.failure = failure

    def read(self) -> None:
        body = {"model": "chat", "messages": [{"role": "user", "content": PROMPT}], "stream": True}
        body |= {"temperature": 0, "max_tokens": TOKENS}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=120) as response:
            self.job_id = response.headers.get("x-job-id", "")
            for line in response.iter_lines():
                self.lines.append(line)
                if line.startswith("data: {"):
                    self.take(json.loads(line[6:]))

    def take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]
            return
        for choice in chunk["choices"]:
            if choice["delta"].get("content"):
                self.texts.append(choice["delta"]["content"])
            if choice["finish_reason"]:
                self.finish.append(choice["finish_reason"])

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def wait_for_tokens(self, count: int) -> None:
        until(lambda: len(self.texts) >= count, "tokens to arrive")


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting for {what}"
        time.sleep(0.02)


def processes(stack: LocalStack, marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(stack.pid).children(recursive=True):
        try:
            if marker in " ".join([process.name(), *process.cmdline()]):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill(stack: LocalStack, marker: str) -> None:
    (victim,) = processes(stack, marker)
    os.kill(victim.pid, signal.SIGKILL)


def queue(stack: LocalStack, look: Callable[[Redis, Broker], Any]) -> Any:
    async def run() -> Any:
        client = connect(stack.redis_url)
        try:
            return await look(client, Broker(client))
        finally:
            await client.aclose()

    return asyncio.run(run())


def leftovers(stack: LocalStack) -> dict[str, Any]:
    """What must be zero when nothing runs: queued and running jobs, and KV blocks in use."""

    async def look(client: Redis, broker: Broker) -> dict[str, Any]:
        log = (await broker.backlogs(["chat"]))["chat"]
        hosts = await Cluster(client).hosts()
        engines = [replica.get("engine") or {} for host in hosts.values() for replica in host.body["replicas"].values()]
        blocks = sum(engine.get("used_blocks", 0) for engine in engines)
        return {"queued": log.queued, "running": log.running, "delayed": log.delayed, "used_blocks": blocks}

    return queue(stack, look)


def check_end(stack: LocalStack, stream: Stream) -> None:
    """Exactly one end, and nothing left behind."""
    assert stream.failure is None, stream.failure
    assert len(stream.finish) + (stream.error is not None) == 1, stream.lines[-5:]
    assert sum(line == "data: [DONE]" for line in stream.lines) == (1 if stream.finish else 0)
    zero = {"queued": 0, "running": 0, "delayed": 0, "used_blocks": 0}
    until(lambda: leftovers(stack) == zero, f"nothing to be left: {leftovers(stack)}")
    with stack.client() as client:
        job = client.job(stream.job_id)
    assert job["state"] in ("succeeded", "failed", "dead_lettered"), job


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    """The same request's text without a fault, asked for once."""
    return {}


@pytest.fixture
def streaming(stack: LocalStack, undisturbed: dict[str, str]) -> Iterator[Stream]:
    """A stream under way, and (in `expected`) what it must say in the end."""
    if not undisturbed:
        calm = Stream(stack.url)
        calm.run()
        assert calm.finish in (["length"], ["stop"]), calm.lines[-3:]
        undisturbed["text"] = calm.text
    stream = Stream(stack.url)
    stream.expected = undisturbed["text"]
    stream.start()
    stream.wait_for_tokens(8)
    yield stream
    stream.join(timeout=120)


@pytest.mark.parametrize(
    "victim", ["stoker-engine", "worker --host-id", "valkey-server"], ids=["engine", "agent", "valkey"]
)
def test_a_stream_survives_the_kill_of(victim: str, stack: LocalStack, streaming: Stream) -> None:
    kill(stack, victim)
    streaming.join(timeout=120)
    check_end(stack, streaming)
    if streaming.error is None:
        assert streaming.text == streaming.expected
    assert streaming.error is None, streaming.error


def test_a_stream_goes_on_after_its_engine_was_stopped(stack: LocalStack, streaming: Stream) -> None:
    """For longer than a lease: the agent, which renews it, waits for the engine."""
    (engine,) = processes(stack, "stoker-engine")
    engine.suspend()
    time.sleep(2.5)
    engine.resume()
    streaming.join(timeout=120)
    check_end(stack, streaming)
    assert streaming.text == streaming.expected


def test_the_controller_is_not_missed_by_a_running_request(stack: LocalStack, streaming: Stream) -> None:
    kill(stack, "stoker.runtime.cli controller")
    streaming.join(timeout=120)
    check_end(stack, streaming)
    assert streaming.text == streaming.expected


def test_killing_stoker_up_leaves_no_process(stack: LocalStack, streaming: Stream) -> None:
    with stack.client() as client:
        client.invoke("add", {"x": 1})
    family = psutil.Process(stack.pid).children(recursive=True)
    names = [" ".join([process.name(), *process.cmdline()]) for process in family]
    for part in ("gateway", "controller", "worker", "stoker-engine", "stoker-function", "zygote", "valkey-server"):
        assert any(part in name for name in names), names
    stack.kill()
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, [process.cmdline() for process in alive]


def test_a_second_up_on_the_same_folder_is_refused(stack: LocalStack) -> None:
    from stoker.runtime.local import StartFailed

    with pytest.raises(StartFailed, match="in use"):
        LocalStack(stack.data_dir).start()
