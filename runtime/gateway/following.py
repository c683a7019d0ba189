"""Reading the events of one job, from its start or from the middle."""

import asyncio
from collections.abc import Callable
from typing import Self

from stoker.queue.events import Event, Subscription
from stoker.queue.records import Job
from stoker.queue.retry import insist
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.errors import ApiError
from stoker.runtime.gateway.large import aside
from stoker.runtime.gateway.letting_go import GatewayStops
from stoker.runtime.gateway.outcome import Outcome, outcome_of_end, outcome_of_job
from stoker.runtime.gateway.stored_results import end_with_result, with_result

READ_PATIENCE_S = 10.0


class Following:
    """A job that exists, as an async iterator of its events. Use as a context manager around it or `outcome()`.
    `exists` is for those who can't wait for the events."""

    def __init__(self, gateway: Gateway, job_id: str, after: str = "0") -> None:
        self._gateway = gateway
        self._after = after
        self._subscription: Subscription | None = None
        self._take: Callable[[Event], bool] | None = None
        self._ended = self._has_key = False
        self.exists = asyncio.Event()
        self.job_id = job_id

    async def __aenter__(self) -> Self:
        self.exists.set()
        await self._subscribe()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._close()

    def relay(self, take: Callable[[Event], bool]) -> None:
        """From now on chunks are offered to `take` as they come; see Subscription."""
        self._take = take
        if self._subscription is not None:
            self._subscription.relay = take

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        assert self._subscription is not None
        try:
            event = await anext(self._subscription)
        except StopAsyncIteration:
            if self._gateway.followings.over and not self._ended:
                raise GatewayStops(self.job_id, has_key=self._has_key) from None
            raise
        self._ended = event.kind == "end"
        return event

    def detach(self) -> None:
        """The job goes on without this client, as it does anyway."""

    async def outcome(self) -> Outcome:
        """Waits for the end. Raises GatewayStops."""
        async for event in self:
            if event.kind == "end":
                return await self.outcome_at(event)
        raise AssertionError("a subscription ends with the job's last event")

    async def outcome_at(self, event: Event) -> Outcome:
        """From the last event, or from the record when the result was too big for it."""
        if event.ending is None:
            return await self._read_outcome()
        ending = await end_with_result(self._gateway, self.job_id, event.ending)
        return await aside(len(ending.result or b""), outcome_of_end, event.state, ending)

    async def job(self) -> Job:
        """As it is now. Raises ApiError 410 and 503."""
        job = await insist(lambda: self._gateway.broker.job(self.job_id), READ_PATIENCE_S)
        if job is None:
            raise job_expired(self.job_id)
        return job

    async def _read_outcome(self) -> Outcome:
        job = await with_result(self._gateway, await self.job())
        return await aside(len(job.result or b""), outcome_of_job, job)

    async def _subscribe(self) -> None:
        """What is already there is read at once; only the rest comes as messages."""
        self._watch().relay = self._take
        await self._gateway.broker.listen(self.job_id, self._gateway.settings.gateway_id)
        self._gateway.bus.read(self.job_id)

    def _watch(self) -> Subscription:
        self._subscription = self._gateway.bus.watch(self.job_id, self._after)
        self._gateway.followings.add(self._subscription, self)
        return self._subscription

    async def _close(self) -> None:
        if self._subscription is not None:
            self._gateway.followings.discard(self._subscription)
            await self._subscription.close()


def job_expired(job_id: str) -> ApiError:
    return ApiError(410, f"The job '{job_id}' is no longer kept.", code="result_expired", param="id")
