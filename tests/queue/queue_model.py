"""What the state machine knows about a job, the operations' arguments that it draws, and the server that it drives."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import redis
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError

from stoker.queue.client import connect
from stoker.queue.records import JobState, NewJob, Settled

WAITING = (JobState.QUEUED, JobState.RETRYING)
NEW_JOBS = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from("ab"),
        "priority": st.sampled_from([0, 1, 2]),
        "batch_key": st.sampled_from(["", "", "k"]),
        "max_attempts": st.integers(1, 3),
        "stream": st.sampled_from([True, True, False]),
        "delay_ms": st.sampled_from([0, 0, 0, 600_000]),
        "finish_within_ms": st.sampled_from([0, 600_000]),
        "run_within_ms": st.sampled_from([0, 600_000]),
        "idempotency_key": st.sampled_from(["", "", "x"]),
        "request_digest": st.sampled_from([b"1", b"1", b"2"]),
    }
)


@dataclass
class ModelJob:
    new: NewJob
    place: int
    delayed: bool
    wake: bool
    state: JobState = JobState.QUEUED
    attempt: int = 0
    handed: int = 0
    fence: int = 0
    worker: str = ""
    chunks: list[bytes] = field(default_factory=list)
    sequence: int = 0
    settled: dict[int, Settled] = field(default_factory=dict)

    @property
    def in_lane(self) -> bool:
        return self.state in WAITING and not self.delayed

    @property
    def lane(self) -> tuple[int, str, str]:
        return self.new.priority, self.new.tenant, self.new.batch_key


class ReplyLost(RedisConnectionError):
    pass


class Server:
    """One connection and one event loop for all examples."""

    def __init__(self, url: str) -> None:
        self.raw = redis.Redis.from_url(url)
        self.runner = asyncio.Runner()
        self.client = connect(url)

    def run(self, call: Any) -> Any:
        return self.runner.run(call)

    def close(self) -> None:
        self.run(self.client.aclose())
        self.runner.close()
        self.raw.close()


def lose(run: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def lossy(*arguments: Any) -> Any:
        await run(*arguments)
        raise ReplyLost

    return lossy
