"""Delivers webhooks: takes what is due from the queue's outbox, posts it, and says what became of it.

Any gateway that knows the deployment's secret does so. One that dies leaves its deliveries to the others once their
lease is over: each is made at least once, always under the same `webhook-id`.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator

from redis.exceptions import RedisError

from stoker.queue.cluster import Signal
from stoker.queue.deliveries import Delivery, Try
from stoker.queue.keys import DELIVERY_BELL, function_at
from stoker.queue.records import ULID_LENGTH, function_of
from stoker.queue.retry import insist
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.job_cost import cost_of
from stoker.runtime.gateway.webhook_body import event_body
from stoker.runtime.webhooks.schedule import GONE, Verdict, verdict
from stoker.runtime.webhooks.sender import NoAnswer, Refused, Sender
from stoker.runtime.webhooks.signing import signed_headers
from stoker.runtime.webhooks.target import InvalidTarget, target_of

LOOK_S, SWEEP_S = 1.0, 5.0
SPACING_S = 0.02
MOST, MOST_OF_A_TENANT = 64, 32
NO_ROOM_PAUSE_S = 1.0
PATIENCE_S = 10.0

log = logging.getLogger("stoker.webhooks")


@contextlib.asynccontextmanager
async def delivering_webhooks(gateway: Gateway) -> AsyncIterator[None]:
    if not gateway.settings.secret:
        yield
        return
    running = asyncio.create_task(WebhookRunner(gateway).run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class WebhookRunner:
    """Asks often where a delivery was announced or found before, and everywhere once in a while."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._bell = Signal(gateway.settings.redis_url, DELIVERY_BELL, self._heeds)
        self._known: set[str] = set()
        self._sweep_at = 0.0
        self._sender = Sender(gateway.settings.webhook_networks)
        self._lease_ms = round(gateway.settings.webhook_lease_s * 1000)
        self._running: dict[asyncio.Task[None], Delivery] = {}

    async def run(self) -> None:
        """Until cancelled; then what is under way is given back."""
        await self._bell.start()
        try:
            while True:
                try:
                    await self._look()
                except (RedisError, OSError, TimeoutError):
                    self._sweep_at = 0.0
                await asyncio.sleep(SPACING_S)
                await self._bell.wait(LOOK_S)
        finally:
            unfinished = dict(self._running)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
            given_back = (self._postpone(delivery, 0.0) for delivery in unfinished.values())
            await asyncio.gather(*given_back, return_exceptions=True)
            await self._bell.close()

    def _heeds(self, message: bytes) -> bool:
        """Which function has a new delivery; nothing: any may have."""
        if message:
            self._known.add(function_at(message.decode()))
        else:
            self._sweep_at = 0.0
        return True

    async def _functions(self) -> list[str]:
        now = time.monotonic()
        if now < self._sweep_at:
            return list(self._known)
        self._sweep_at, before = now + SWEEP_S, set(self._known)
        functions = await self._gateway.deliveries.functions()
        self._known -= before.difference(functions)
        return functions

    async def _look(self) -> None:
        """Until nothing more can be started."""
        if len(self._running) >= MOST:
            return
        functions = await self._functions()
        random.shuffle(functions)
        while (room := MOST - len(self._running)) > 0:
            of_each = max(1, min(room, MOST_OF_A_TENANT) // max(1, len(functions)))
            taken = await self._gateway.deliveries.take(functions, of_each, self._lease_ms)
            self._known.update(function_of(delivery.job_id) for delivery in taken)
            if not any([await self._start(delivery) for delivery in taken]):
                return

    async def _start(self, delivery: Delivery) -> bool:
        """One tenant's slow receivers leave room for others'."""
        under_way = Counter(each.tenant for each in self._running.values())
        if len(self._running) >= MOST or under_way[delivery.tenant] >= MOST_OF_A_TENANT:
            await self._postpone(delivery, NO_ROOM_PAUSE_S)
            return False
        task = asyncio.create_task(self._deliver(delivery))
        self._running[task] = delivery
        task.add_done_callback(self._finished)
        return True

    def _finished(self, task: asyncio.Task[None]) -> None:
        delivery = self._running.pop(task)
        self._bell.ring()
        if not task.cancelled() and (error := task.exception()):
            log.warning("webhook %s stays as it is for now: %s", delivery.id, error, exc_info=error)

    async def _postpone(self, delivery: Delivery, pause_s: float) -> None:
        await self._gateway.deliveries.tried(delivery, None, "pending", pause_s, delivery.body)

    async def _deliver(self, delivery: Delivery) -> None:
        body = delivery.body or await self._body(delivery)
        started, clock = time.time(), time.monotonic()
        answer, error, refused = await self._post(delivery, body)
        what = Try(started, time.monotonic() - clock, answer, error)
        found = verdict(answer, delivery.tries, self._gateway.settings.webhook_pauses_s)
        if refused:
            found = Verdict("failed")
        if found.status == "disabled":
            await self._gateway.webhooks.disable(delivery.tenant, delivery.url)
        kept = b"" if found.status == "delivered" else body
        settle = lambda: self._gateway.deliveries.tried(delivery, what, found.status, found.pause_s, kept)  # noqa: E731
        await insist(settle, PATIENCE_S)
        self._gateway.metrics.webhook_tried(found.status)

    async def _body(self, delivery: Delivery) -> bytes:
        job = await self._gateway.broker.job(delivery.job_id)
        return event_body(delivery, job, await cost_of(self._gateway, job) if job else None)

    async def _post(self, delivery: Delivery, body: bytes) -> tuple[int, str, bool]:
        """The answer's status, else why there is none, and whether trying again is no use."""
        shelf = self._gateway.webhooks
        if await shelf.is_disabled(delivery.tenant, delivery.url):
            return GONE, "not sent: this URL answered 410 before; a replay enables it again", False
        secrets = await shelf.secrets_of(delivery.tenant)
        headers = signed_headers(webhook_id(delivery), body, secrets.valid, time.time())
        try:
            return await self._sender.post(target_of(delivery.url), headers, body), "", False
        except (Refused, InvalidTarget) as error:
            return 0, str(error), True
        except NoAnswer as error:
            return 0, str(error), False


def webhook_id(delivery: Delivery) -> str:
    """Without a full stop, which separates the parts of what is signed."""
    job, _, life = delivery.id.rpartition(".")
    return f"msg_{job[-ULID_LENGTH:]}_{life}"
