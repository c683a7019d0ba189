"""Jobs made from requests, and clients that wait for them."""

import asyncio
import hashlib
import json
import math
import time
from dataclasses import replace
from functools import partial
from typing import Any, Self

from stoker.coldstart.failures import ColdStartError
from stoker.queue.events import Event
from stoker.queue.records import Enqueued, IdempotencyMismatch, Job, JobState, NewJob, QueueFull, pack
from stoker.queue.retry import insist
from stoker.runtime import payloads
from stoker.runtime.contract import contract_of
from stoker.runtime.gateway.calling_jobs import calling_job, tell_who_led
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.endpoint import PLACE, RATES, ROUTED, Incoming
from stoker.runtime.gateway.errors import (
    NO_RETRY,
    VERSION_CHANGED,
    ApiError,
    bad_request,
    gateway_stopping,
    queue_full,
    store_unavailable,
)
from stoker.runtime.gateway.following import Following
from stoker.runtime.gateway.media import is_msgpack
from stoker.runtime.gateway.outcome import Outcome, outcome_of_job
from stoker.runtime.gateway.steps import Unbroken
from stoker.runtime.gateway.waiting import replicas_of
from stoker.runtime.gateway.webhook_url import webhook_url
from stoker.runtime.spec import FunctionSpec, short_name
from stoker.runtime.tenancy.tenant import NONE, Tenant

ENQUEUE_PATIENCE_S = 2.0
CANCEL_PATIENCE_S = 60.0
MAX_KEY = 255
MANY_FAILURES = 3


def idempotency_key(incoming: Incoming) -> str:
    key = incoming.headers.get("idempotency-key", "")
    if len(key) > MAX_KEY:
        raise bad_request(f"The Idempotency-Key header is longer than {MAX_KEY} characters.", param="Idempotency-Key")
    return tenants_key(incoming, "key", key) if key else ""


def own_id_key(incoming: Incoming, client_id: str) -> str:
    """An id of the client's own names its job within one function and tenant."""
    return tenants_key(incoming, "id", client_id)


def tenants_key(incoming: Incoming, kind: str, name: str) -> str:
    """Not the key of an earlier tenant with the same name."""
    return f"{kind}:{incoming.caller.account.created_at:.3f}:{name}"


def new_job(
    incoming: Incoming,
    spec: FunctionSpec,
    payload: dict[str, Any],
    *,
    key: str = "",
    cost: float = 1.0,
    stream: bool = False,
) -> NewJob:
    limits = spec.limits
    return NewJob(
        id=incoming.scope.get(PLACE) or incoming.gateway.job_ids.new(spec.name, incoming.caller.tenant),
        function=spec.name,
        tenant=incoming.caller.tenant,
        payload=packed({"for": contract_of(spec), **payload}),
        cost=cost,
        weight=incoming.caller.account.weight,
        max_attempts=limits.max_attempts,
        stream=stream,
        gateway=incoming.gateway.settings.gateway_id,
        idempotency_key=key,
        request_digest=request_digest(incoming) if key else b"",
        start_within_ms=milliseconds(limits.start_within_s),
        run_within_ms=milliseconds(limits.run_within_s),
        finish_within_ms=milliseconds(limits.finish_within_s),
        retention_ms=milliseconds(limits.retention_s),
        webhook=webhook_url(incoming, spec.webhook),
        caller=calling_job(incoming),
        route=incoming.scope.get(ROUTED, ("", b"", ""))[1],
    )


def packed(payload: Any) -> bytes:
    try:
        return pack(payload)
    except OverflowError:
        raise bad_request("The input holds an integer that doesn't fit into 64 bits.") from None


def request_digest(incoming: Incoming) -> bytes:
    """Of the parsed body, so that white space and the order of keys don't matter."""
    if is_msgpack(incoming.headers):
        return hashlib.sha256(incoming.body).digest()
    return hashlib.sha256(json.dumps(incoming.json(), sort_keys=True).encode()).digest()


def milliseconds(seconds: float) -> int:
    """Of a limit: one above 0 stays one, since 0 is none."""
    return max(1, round(seconds * 1000)) if seconds else 0


async def take_place(incoming: Incoming, spec: FunctionSpec, key: str) -> None:
    """For the job that `new_job` will make: counts the request, and refuses one that has no place within the tenant's
    limits before any work is spent on it. Raises ApiError 429."""
    gateway, account = incoming.gateway, incoming.caller.account
    if account.limits == NONE or await was_queued(gateway, spec.name, account.name, key):
        return
    incoming.scope[PLACE] = job_id = gateway.job_ids.new(spec.name, account.name)
    await gateway.quota.take_place(account, job_id)


async def enqueue(incoming: Incoming, job: NewJob) -> Enqueued:
    """Within the tenant's limits, in which a repeated request takes no place. Raises what `enqueue_admitted` raises."""
    gateway, account = incoming.gateway, incoming.caller.account
    placed = incoming.scope.pop(PLACE, "")
    known = not placed and await was_queued(gateway, job.function, job.tenant, job.idempotency_key)
    if account.limits == NONE or known:
        return await enqueue_admitted(gateway, job)
    try:
        incoming.scope[RATES] = await gateway.quota.reserve(account, job.id, job.payload)
    except BaseException:
        if placed:
            gateway.background(gateway.quota.release(account.name, job.id))
        raise
    admitted = asyncio.create_task(enqueue_reserved(gateway, account, job))
    admitted.add_done_callback(lambda task: task.cancelled() or task.exception())
    return await asyncio.shield(admitted)


async def was_queued(gateway: Gateway, function: str, tenant: str, key: str) -> bool:
    """Whether the queue knows the idempotency key. It forgets one whose job a deployment overtook: that has not run,
    and a repeated request makes it anew, for the version that is there now."""
    broker = gateway.broker
    job_id = await insist(lambda: broker.job_id_of(function, tenant, key), ENQUEUE_PATIENCE_S) if key else None
    if job_id is None:
        return False
    job = await insist(lambda: broker.job(job_id), ENQUEUE_PATIENCE_S)
    if job is None or not was_overtaken(job):
        return True
    await insist(lambda: broker.forget_key(job_id, tenant, key), ENQUEUE_PATIENCE_S)
    return False


def was_overtaken(job: Job) -> bool:
    return job.state is JobState.FAILED and (outcome_of_job(job).error or {}).get("code") == VERSION_CHANGED


async def enqueue_reserved(gateway: Gateway, account: Tenant, job: NewJob) -> Enqueued:
    """To its end, or a client that leaves could part a job from its reservation. After an outage nobody knows whether
    there is a job: then the reservation ends by itself."""
    try:
        enqueued = await enqueue_admitted(gateway, job)
    except ApiError:
        gateway.background(gateway.quota.release(account.name, job.id))
        raise
    follow_up = gateway.quota.queued if enqueued.job_id == job.id else gateway.quota.release
    gateway.background(follow_up(account.name, job.id))
    return enqueued


async def enqueue_admitted(gateway: Gateway, job: NewJob) -> Enqueued:
    """Raises ApiError 409, 429 and 503; a lost reply is asked for again, which the queue answers without a new job."""
    stored = await with_payload_stored(gateway, job)
    try:
        enqueued = await insist(lambda: gateway.broker.enqueue(stored), ENQUEUE_PATIENCE_S)
    except QueueFull as full:
        forget_payload(gateway, stored)
        raise queue_full(full.message, full.retry_after_s) from None
    except IdempotencyMismatch:
        forget_payload(gateway, stored)
        raise key_reused(job.idempotency_key) from None
    if enqueued.job_id != job.id:
        forget_payload(gateway, stored)
    if enqueued.wake:
        gateway.background(gateway.cluster.ring(job.function))
    if job.caller and enqueued.created and enqueued.state is JobState.QUEUED:
        gateway.background(tell_who_led(gateway.broker, job))
    return enqueued


def key_reused(key: str) -> ApiError:
    kind, _, name = key.partition(":")
    named = f"The job id '{name.partition(':')[2]}'" if kind == "id" else "This idempotency key"
    message = f"{named} was used before with a different request body."
    return ApiError(409, message, code="idempotency_key_reused", headers=NO_RETRY)


async def with_payload_stored(gateway: Gateway, job: NewJob) -> NewJob:
    """A big payload goes to the object store. Raises ApiError 503."""
    if len(job.payload) <= payloads.INLINE_LIMIT:
        return job
    try:
        return replace(job, payload=await asyncio.to_thread(payloads.put, gateway.store, job.id, job.payload))
    except ColdStartError as error:
        raise store_unavailable(str(error)) from error


def forget_payload(gateway: Gateway, job: NewJob) -> None:
    """Of a job that was not queued after all."""
    if payloads.is_reference(job.payload):
        gateway.background(asyncio.to_thread(gateway.store.delete, payloads.object_key(job.id)))


async def replay(gateway: Gateway, account: Tenant, job: Job, request: str) -> JobState | None:
    """Within the tenant's limits, like a new job. None for a job that is no longer kept.

    Raises NotReplayable, ApiError 429 and 503."""
    again = partial(gateway.broker.replay, job.id, request)
    if account.limits == NONE or job.state not in (JobState.DEAD, JobState.FAILED):
        return await insist(again, ENQUEUE_PATIENCE_S)
    payload = await gateway.broker.payload(job.id)
    if payload is None:
        return None
    await gateway.quota.reserve(account, job.id, await payload_of(gateway, job.id, payload))
    state = await insist(again, ENQUEUE_PATIENCE_S)
    follow_up = gateway.quota.release if state is None or state.terminal else gateway.quota.queued
    gateway.background(follow_up(account.name, job.id))
    return state


async def payload_of(gateway: Gateway, job_id: str, carried: bytes) -> bytes:
    """Raises ApiError 503."""
    try:
        return await asyncio.to_thread(payloads.get, gateway.store, job_id, carried)
    except ColdStartError as error:
        raise store_unavailable(str(error)) from error


async def refuse_failing(gateway: Gateway, spec: FunctionSpec) -> None:
    """A caller who waits is told at once that the function's workers keep failing to start, and when the next one is
    tried. Jobs that nobody waits for are accepted as ever. Raises ApiError 503."""
    view = await gateway.view.snapshot()
    failing = view.failing.get(spec.name)
    if not failing or failing["count"] < MANY_FAILURES:
        return
    if failing["version"] != (await gateway.registry.get(spec.name)).version:
        return
    ready = any(replica["state"] == "ready" for replica in replicas_of(view.hosts, spec.name))
    left_s = math.ceil(failing["retry_at"] - time.time())
    if left_s > 0 and not ready:
        error = failing["error"]
        raise ApiError(
            503,
            f"Function '{short_name(spec.name)}' failed to start {failing['count']} times in a row; the next try is in "
            f"{left_s} s, or with the next deployment. The last error: {error.get('message') or 'unknown'}",
            type=str(error.get("type") or "internal_error"),
            code=error.get("code"),
            headers={"retry-after": str(left_s), **NO_RETRY},
        )


class Call(Following):
    """A job and the client that waits for it: subscribed before it is enqueued.

    Leaving before the job has ended cancels the job, at whatever moment, unless the function detaches on disconnect or
    the client gave an idempotency key, with which it can come back for the result.
    """

    def __init__(self, incoming: Incoming, spec: FunctionSpec, job: NewJob) -> None:
        super().__init__(incoming.gateway, job.id)
        self._incoming = incoming
        self._job = job
        self._enqueueing: Unbroken[Enqueued] | None = None
        self._spec = spec
        self._has_key = bool(job.idempotency_key)
        self._abort = spec.on_disconnect == "abort" and not job.idempotency_key
        self._replayed = False
        self.function = spec.name

    async def __aenter__(self) -> Self:
        await refuse_failing(self._gateway, self._spec)
        if self._gateway.followings.over:
            raise gateway_stopping()
        self._watch()
        self._enqueueing = Unbroken(enqueue(self._incoming, self._job))
        try:
            enqueued = await self._enqueueing.result()
        except BaseException as error:
            await self._leave(refused=isinstance(error, ApiError))
            raise
        self._replayed = not enqueued.created
        self._incoming.about_job(enqueued.job_id, replayed=self._replayed)
        if enqueued.job_id != self.job_id:
            await self._join(enqueued.job_id)
        self.exists.set()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._leave()

    def detach(self) -> None:
        """The job goes on without this client."""
        self._abort = False

    async def outcome_at(self, event: Event) -> Outcome:
        outcome = await super().outcome_at(event)
        if not self._replayed:
            self._gateway.metrics.job_ended(self.function, outcome.state, outcome.usage)
        return outcome

    async def _join(self, job_id: str) -> None:
        """The key was seen before: wait for the job that it made."""
        await self._close()
        self.job_id = job_id
        await self._subscribe()

    async def _leave(self, refused: bool = False) -> None:
        await self._close()
        account = self._incoming.caller.account
        if self._ended and account.limits != NONE:
            self._gateway.background(self._gateway.quota.ended(account.name, self.job_id))
        if self._abort and not self._ended and not refused:
            self._gateway.background(self._cancel())

    async def _cancel(self) -> None:
        """Waits for an enqueue that is still under way, or it could arrive after the cancel."""
        if self._enqueueing is not None and self._enqueueing.task is not None:
            await asyncio.wait((self._enqueueing.task,))
        await insist(lambda: self._gateway.broker.cancel(self.job_id, "client disconnected"), CANCEL_PATIENCE_S)
