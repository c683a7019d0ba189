"""`stoker invoke`: what a call tells is printed as it comes."""

import asyncio
import contextlib
import json
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from stoker.queue.broker import Broker
from stoker.queue.records import JobState
from stoker.runtime.client.async_client import AsyncClient
from stoker.runtime.client.client import Client

from .conftest import RunningGateway
from .peers import Deploy, Task, double, until_state, worker

BOOM = {"type": "function_error", "message": "boom", "code": "ValueError", "traceback": "line 7"}


@contextlib.asynccontextmanager
async def invoking(gateway: RunningGateway, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """As a script does: nothing is a terminal."""
    command = ("-m", "stoker.runtime.cli", "invoke", "--url", gateway.url, *arguments)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def said(gateway: RunningGateway, *arguments: str) -> tuple[int, list[str], str]:
    """Exit code, lines on standard output, standard error."""
    async with invoking(gateway, *arguments) as process:
        out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, out.decode().splitlines(), err.decode()


@pytest.mark.parametrize("as_json", [False, True])
async def test_each_value_is_a_line_as_it_comes(
    gateway: RunningGateway, broker: Broker, deploy: Deploy, as_json: bool
) -> None:
    name, read = await deploy(), asyncio.Event()

    async def count(task: Task) -> None:
        await task.emit({"value": {"n": 0, "text": "é\n"}})
        await asyncio.wait_for(read.wait(), 30)
        await task.emit({"value": 1.5})
        await task.done({"value": [{"n": 0, "text": "é\n"}, 1.5]})

    async with worker(broker, name, count), invoking(gateway, name, *(["--json"] if as_json else [])) as process:
        assert process.stdout
        first = await asyncio.wait_for(process.stdout.readline(), 30)
        read.set()
        rest, err = await asyncio.wait_for(process.communicate(), 30)
    assert first.decode() == '{"n": 0, "text": "é\\n"}\n' and (rest, err, process.returncode) == (b"1.5\n", b"", 0)


@pytest.mark.parametrize("value", ["8", "[]", '{"a": [null]}'])
async def test_a_plain_value_is_one_line(gateway: RunningGateway, broker: Broker, deploy: Deploy, value: str) -> None:
    name = await deploy()
    async with worker(broker, name, lambda task: task.done({"value": task.payload["input"]})):
        assert await said(gateway, name, value) == (0, [value], "")


async def answer(task: Task) -> None:
    for text in ("Hel", "lo,\nyou"):
        await task.emit({"text": text, "ids": [1]})
    await task.done({"text": "Hello,\nyou", "finish_reason": "stop", "usage": {"completion_tokens": 2}})


async def test_a_models_text_is_text_and_its_pieces_and_answer_are_json(
    gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    async with worker(broker, name, answer):
        assert await said(gateway, name) == (0, ["Hello,", "you"], "")
        code, lines, _ = await said(gateway, name, "--json")
    pieces = [{"text": "Hel", "ids": [1]}, {"text": "lo,\nyou", "ids": [1]}]
    whole = {"text": "Hello,\nyou", "finish_reason": "stop", "usage": {"completion_tokens": 2}}
    assert (code, [json.loads(line) for line in lines]) == (0, [*pieces, whole])


async def test_an_attempt_that_begins_again_and_a_failure_are_told(
    gateway: RunningGateway, broker: Broker, deploy: Deploy
) -> None:
    async def flaky(task: Task) -> None:
        await task.emit({"value": task.claim.attempt})
        await task.fail(BOOM, retry=task.claim.attempt == 1)

    name = await deploy()
    async with worker(broker, name, flaky):
        code, lines, err = await said(gateway, name)
    assert (code, lines) == (1, ["1", "2"])
    assert err.index("attempt 2 begins again") < err.index("error: boom\nline 7\n(`stoker jobs get ")


async def test_a_script_that_is_killed_ends_its_call(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    name, ids = await deploy(), []

    async def endless(task: Task) -> None:
        ids.append(task.claim.job_id)
        while await task.emit({"value": 1}):
            await asyncio.sleep(0.02)

    async with worker(broker, name, endless), invoking(gateway, name) as process:
        assert process.stdout and await asyncio.wait_for(process.stdout.readline(), 30) == b"1\n"
        process.kill()
        await until_state(broker, ids[0], JobState.CANCELLED)


@contextlib.contextmanager
def busy_at_first(times: int) -> Iterator[str]:
    """A gateway that asks to come back so many times."""
    left = [times]

    class Busy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            left[0] -= 1
            free = left[0] < 0
            body = b'data: 1\n\nevent: end\ndata: {"result": [1]}\n\n' if free else b'{"error": {"message": "busy"}}'
            self.send_response(200 if free else 503)
            self.send_header("retry-after", "0")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


async def test_a_stream_that_is_asked_to_come_back_later_does() -> None:
    def parts(url: str) -> list[Any]:
        with Client(url) as client:
            return list(client.stream("f"))

    with busy_at_first(2) as url:
        assert await asyncio.to_thread(parts, url) == [1]
    with busy_at_first(2) as url:
        async with AsyncClient(url) as client:
            assert [part async for part in client.stream("f")] == [1]


async def test_detached_it_prints_the_jobs_id(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    name = await deploy()
    async with worker(broker, name, double):
        code, (job_id,), _ = await said(gateway, name, "4", "--detach")
        await until_state(broker, job_id, JobState.SUCCEEDED)
    assert code == 0


async def test_under_a_key_it_runs_once(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    name, runs = await deploy(), []

    async def one(task: Task) -> None:
        runs.append(task.claim.job_id)
        await task.done({"value": len(runs)})

    async with worker(broker, name, one):
        for _ in range(2):
            assert await said(gateway, name, "4", "--key", "k") == (0, ["1"], "")
        code, (job_id,), _ = await said(gateway, name, "4", "--key", "k", "--detach")
    assert (code, [job_id]) == (0, runs)
    code, _, err = await said(gateway, name, "4", "--key", "not a key")
    assert code == 2 and "a key is 1 to 128 of the letters" in " ".join(err.replace("│", " ").split())


async def test_its_time_is_up_and_its_job_goes_on(gateway: RunningGateway, broker: Broker, deploy: Deploy) -> None:
    name, over = await deploy(), asyncio.Event()

    async def slow(task: Task) -> None:
        await task.emit({"value": 1})
        await over.wait()
        await task.done({"value": [1]})

    async with worker(broker, name, slow):
        code, lines, err = await said(gateway, name, "--timeout", "2")
        found = re.search(r"job (\S+) is still running after 2 s\n\(it goes on: `stoker jobs wait (\S+)`", err)
        assert (code, lines) == (1, ["1"]) and found and found[1] == found[2]
        over.set()
        await until_state(broker, found[1], JobState.SUCCEEDED)
        assert await said(gateway, name, "--timeout", "60") == (0, ["1"], "")
