"""The other sides of a gateway: workers that claim from the real queue, and readers of its streams."""

import asyncio
import contextlib
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from stoker.queue.broker import Broker
from stoker.queue.records import Claim, Completion, Emission, Failure, Job, JobState, pack, unpack

# A job or an answer that has not come by then never does.
PATIENCE_S = 30.0

Deploy = Callable[..., Awaitable[str]]


@dataclass
class Task:
    """A claimed job in the hands of a worker that is part of the test."""

    broker: Broker
    claim: Claim
    sent: int = 0

    @property
    def payload(self) -> Any:
        return unpack(self.claim.payload)

    async def emit(self, chunk: Any) -> bool:
        """False: the job isn't this worker's any more."""
        self.sent += 1
        emission = Emission(self.claim.job_id, self.claim.fence, self.sent, pack(chunk))
        return not await self.broker.emit(self.claim.function, [emission])

    async def done(self, result: Any, **usage: Any) -> None:
        timeline = [{"name": "run", "start_ns": 1_000_000_000, "end_ns": 3_000_000_000, "bytes": 7, "limit": "cpu"}]
        queue_ms = self.claim.claimed_ms - self.claim.since_ms
        completion = Completion(
            self.claim.job_id,
            self.claim.fence,
            pack(result),
            pack({"tenant": self.claim.tenant, "attempt": self.claim.attempt, "queue_ms": queue_ms, **usage}),
            pack({"timeline": timeline, "host": "test"}),
        )
        await self.broker.done(self.claim.function, [completion])

    async def fail(self, error: dict[str, Any], *, retry: bool = False) -> None:
        failure = Failure(self.claim.job_id, self.claim.fence, pack(error), retry)
        await self.broker.fail(self.claim.function, [failure])


Answer = Callable[[Task], Awaitable[None]]


@contextlib.asynccontextmanager
async def worker(broker: Broker, function: str, answer: Answer) -> AsyncIterator[None]:
    """Claims the function's jobs from the real queue, each answered by a task of its own."""
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(claim_until(stopping, broker, function, answer))
        yield
        stopping.set()


async def claim_until(stopping: asyncio.Event, broker: Broker, function: str, answer: Answer) -> None:
    async with asyncio.TaskGroup() as group:
        while not stopping.is_set():
            claims = await broker.claim(function, f"worker-{function}", 8)
            await broker.tick(function)
            for claim in claims:
                group.create_task(answer(Task(broker, claim)))  # type: ignore[arg-type]
            await asyncio.sleep(0.005)


async def double(task: Task) -> None:
    await task.done({"value": task.payload["input"] * 2})


async def until_state(broker: Broker, job_id: str, state: JobState, timeout_s: float = PATIENCE_S) -> Job:
    async with asyncio.timeout(timeout_s):
        while True:
            job = await broker.job(job_id)
            if job is not None and job.state is state:
                return job
            await asyncio.sleep(0.01)


@dataclass(frozen=True)
class ServerEvent:
    """One event of a stream; `comment` for a comment line."""

    data: str = ""
    name: str = ""
    id: str = ""
    comment: str = ""


async def server_events(response: httpx.Response) -> AsyncIterator[ServerEvent]:
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line.startswith(":"):
            yield ServerEvent(comment=line[1:].strip())
        elif line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield ServerEvent(fields.get("data", ""), fields.get("event", ""), fields.get("id", ""))
            fields = {}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, after checking that it has OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert response.headers["x-request-id"]
    return body["error"]


def write_bundle(folder: Path) -> bytes:
    path = folder / "bundle.zip"
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr("m.py", "def f(x):\n    return x * 2\n")
    return path.read_bytes()


async def make_key(root: httpx.AsyncClient, tenant: str, *scopes: str, **fields: Any) -> dict[str, Any]:
    await root.put(f"/v1/tenants/{tenant}", json={})
    response = await root.post(f"/v1/tenants/{tenant}/keys", json={"scopes": list(scopes), **fields})
    assert response.status_code == 201
    return response.json()
