"""A batch whose language model is deployed anew while its lines run."""

from collections import Counter

import openai
import pytest

from stoker.queue.broker import Broker
from stoker.runtime.gateway import batch_line

from .peers import Task, worker
from .test_batches import client, count_prompt, line, start, until_over

__all__ = ["client"]


async def test_a_line_that_a_deployment_overtook_is_made_again_and_found_by_its_key(
    client: openai.AsyncOpenAI, chat_model: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_line, "VERSION_PAUSE_S", 0.0)
    """By the key a batch's clean-up knows the jobs that are still to be cancelled."""
    seen: Counter[tuple[int, ...]] = Counter()
    last: set[str] = set()

    async def overtaken(task: Task) -> None:
        seen[tuple(task.payload["prompt_ids"])] += 1
        if seen[tuple(task.payload["prompt_ids"])] < 3:
            await task.fail({"type": "invalid_request_error", "message": "another version", "code": "version_changed"})
        else:
            last.add(task.claim.job_id)
            await count_prompt(task)

    async with worker(broker, chat_model, overtaken):
        batch = await start(client, [line(chat_model, number) for number in range(5)])
        batch = await until_over(client, batch.id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (5, 0)
    assert set(seen.values()) == {3}
    keys = [batch_line.line_key(batch, number) for number in range(5)]
    assert {await broker.job_id_of(chat_model, "default", key) for key in keys} == last and len(last) == 5
