"""What the engine process says of its requests, and how those are named: a request is one choice of one attempt."""

from typing import Any, NamedTuple

from stoker.queue.records import Claim
from stoker.runtime.worker.answer import LogprobEntry


class Delta(NamedTuple):
    """What the engine says of a request; the fields of its own `request.Delta`. `charge` is what
    it has had of the device up to now: microseconds of prefill, of decoding, and of swaps for its sake."""

    request_id: str
    tokens: list[int]
    finish_reason: str | None
    error: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[tuple[float, list[int], list[float]]]
    vectors: bytes
    charge: tuple[int, int, int]


def request_id(claim: Claim, index: int) -> str:
    """The engine's name for one choice of one attempt: what an earlier attempt still sends can't be taken for this
    one's tokens."""
    return f"{claim.job_id}/{claim.fence}.{index}"


def job_of(request: str) -> tuple[str, int]:
    job_id, _, attempt = request.rpartition("/")
    return job_id, int(attempt.partition(".")[2])


def chunk_of(text: str, tokens: list[int], index: int, entries: list[LogprobEntry]) -> dict[str, Any]:
    """`index` is left out for the first choice, `logprobs` where nobody asked for them."""
    named = {"index": index} if index else {}
    return {"text": text, "ids": tokens, **named, **({"logprobs": entries} if entries else {})}
