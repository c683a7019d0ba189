"""Events for gateways and bells for workers, each over one pub/sub connection per process."""

import asyncio
import contextlib
import itertools
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any

import msgpack
from redis.exceptions import RedisError

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.feed import Ending, Event, Feed, Frame
from stoker.queue.records import function_of
from stoker.queue.retry import full_jitter
from stoker.queue.subscriber import Source, Subscriber

__all__ = ["Bells", "Ending", "Event", "EventBus", "Subscription"]

Row = list[Any]

LEVEL_S = 2.0
JOBS_PER_READ = 100
ENTRIES_PER_READ = 256
MOST_WAITING = 4096
MOST_WAITING_BYTES = 1 << 20

log = logging.getLogger(__name__)


class Subscription:
    """The events of one job, in order, without duplicates or gaps; iteration ends behind the "end" event.

    It has one reader. If that one is slow, what is beyond MOST_WAITING events or MOST_WAITING_BYTES waits in the job's
    stream. A chunk that has none before it is first offered to `relay`, which spares the reader's task a turn of the
    event loop; it says whether it took it, at once.
    """

    def __init__(self, bus: "EventBus", job_id: str, after: str) -> None:
        self.feed = Feed(job_id, after)
        self._bus = bus
        self.relay: Callable[[Event], bool] | None = None
        self._events: deque[Event | None] = deque()
        self._waiting_bytes = 0
        self._arrival: asyncio.Future[None] | None = None
        self._behind = False
        self._finished = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._finished:
            raise StopAsyncIteration
        while not self._events:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        event = self._events.popleft()
        if event is None:
            self._finished = True
            raise StopAsyncIteration
        self._waiting_bytes -= len(event.data)
        if self._behind and not self._events:
            self._behind = False
            self._bus.read(self.feed.job_id)
        self._finished = event.kind == "end"
        return event

    async def __aenter__(self) -> "Subscription":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the iteration of whoever still waits."""
        self._bus.forget(self)
        self.deliver((None,))

    def has_room(self) -> bool:
        full = len(self._events) >= MOST_WAITING or self._waiting_bytes >= MOST_WAITING_BYTES
        self._behind = self._behind or full
        return not self._behind

    def deliver(self, events: Iterable[Event | None]) -> None:
        for event in events:
            if event is None or event.kind != "chunk" or self._events or not self._relayed(event):
                self._events.append(event)
                self._waiting_bytes += len(event.data) if event else 0
        if self._events and self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _relayed(self, event: Event) -> bool:
        try:
            return self.relay is not None and self.relay(event)
        except Exception:
            # The reader meets it again, in a task that somebody waits for.
            self.relay = None
            return False


class EventBus:
    """Routes the events of this gateway's jobs to their subscriptions.

    Pub/sub gives the speed, the job's record and stream the truth: after a reconnect, at a gap, and every `level_s`
    seconds the bus reads what its watched jobs have behind the last event delivered.
    """

    def __init__(self, source: Source, broker: Broker, gateway_id: str, *, level_s: float = LEVEL_S) -> None:
        self._broker = broker
        self._channel = keys.gateway_channel(gateway_id)
        self._subscriber = Subscriber(source, self._on_message, lambda _: self.read(*self._watched))
        self._watched: dict[str, list[Subscription]] = {}
        self._unread: set[str] = set()
        self._wanted = asyncio.Event()
        self._level_s = level_s
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises when the server is away."""
        await self._subscriber.start(self._channel)
        self._reader = asyncio.create_task(self._read_forever())

    async def close(self) -> None:
        await self._subscriber.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        for subscription in list(itertools.chain.from_iterable(self._watched.values())):
            await subscription.close()

    def watch(self, job_id: str, after: str = "0") -> Subscription:
        """Before the job is enqueued; for one that exists, call `Broker.listen` afterwards.

        Raises ValueError when `job_id` or `after` (a stream id) is none.
        """
        function_of(job_id)
        subscription = Subscription(self, job_id, after)
        self._watched.setdefault(job_id, []).append(subscription)
        return subscription

    def forget(self, subscription: Subscription) -> None:
        job_id = subscription.feed.job_id
        others = [other for other in self._watched.get(job_id, []) if other is not subscription]
        if others:
            self._watched[job_id] = others
        else:
            self._watched.pop(job_id, None)

    def read(self, *job_ids: str) -> None:
        """Soon, together with others, from the server."""
        self._unread.update(job_ids)
        self._wanted.set()

    def _on_message(self, channel: str, data: bytes) -> None:
        frames: list[Frame] = msgpack.unpackb(data, raw=True)
        for frame in frames:
            for subscription in self._watched.get(frame[1].decode(), []):
                self._on_frame(subscription, frame)

    def _on_frame(self, subscription: Subscription, frame: Frame) -> None:
        events = subscription.feed.live(frame) if subscription.has_room() else []
        if events is None:
            self.read(subscription.feed.job_id)
        else:
            self._deliver(subscription, events)

    def _deliver(self, subscription: Subscription, events: list[Event]) -> None:
        subscription.deliver(events)
        if subscription.feed.over:
            self.forget(subscription)

    async def _read_forever(self) -> None:
        failures = 0
        while True:
            # Not wait_for: before Python 3.12 it can swallow a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._level_s):
                    await self._wanted.wait()
            self._wanted.clear()
            wanted, self._unread = self._unread or set(self._watched), set()
            try:
                await self._read_jobs(wanted)
                failures = 0
            except (RedisError, OSError) as error:
                log.debug("events are not readable now: %s", error)
                self._unread |= wanted
                await asyncio.sleep(full_jitter(failures))
                failures += 1

    async def _read_jobs(self, job_ids: Iterable[str]) -> None:
        by_function: dict[str, list[Subscription]] = defaultdict(list)
        for job_id in job_ids:
            by_function[function_of(job_id)] += [item for item in self._watched.get(job_id, []) if item.has_room()]
        for function, subscriptions in by_function.items():
            for i in range(0, len(subscriptions), JOBS_PER_READ):
                await self._read_some(function, subscriptions[i : i + JOBS_PER_READ])

    async def _read_some(self, function: str, subscriptions: list[Subscription]) -> None:
        positions = [(item.feed.job_id, item.feed.position) for item in subscriptions]
        views = await self._broker.peek(function, positions, ENTRIES_PER_READ)
        for subscription, view in zip(subscriptions, views, strict=True):
            if not subscription.has_room():
                continue
            self._deliver(subscription, subscription.feed.missed(view))
            if view is not None and not view.whole:
                self.read(subscription.feed.job_id)


class Bells:
    """Tells a worker that a function has work, which jobs its standing claims got, and which of its running jobs were
    cancelled or ran out of time: `on_cancel` gets its id and "cancelled" or "timed_out".

    A ring that is lost while the server is away is made up for after the reconnect; a lost cancellation is in the
    answer of the next `Broker.beat`, lost jobs in that of the next claim.
    """

    def __init__(self, source: Source, worker: str, on_cancel: Callable[[str, str], None]) -> None:
        self._control = keys.worker_channel(worker)
        self._handovers = keys.handover_channel(worker)
        self._on_cancel = on_cancel
        self._expected: dict[bytes, Callable[[int, list[Row]], None]] = {}
        self._subscriber = Subscriber(source, self._on_message, self._on_ready)
        self._heard: set[str] = set()
        self._rung: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def start(self) -> None:
        """Raises when the server is away."""
        await self._subscriber.start(self._control, self._handovers)

    async def close(self) -> None:
        await self._subscriber.close()

    def expect(self, origin: str, on_jobs: Callable[[int, list[Row]], None]) -> None:
        """From now on `on_jobs` gets the ticket's number and the jobs for standing claims of this origin."""
        self._expected[origin.encode()] = on_jobs

    def forget(self, origin: str) -> None:
        self._expected.pop(origin.encode(), None)

    def ring(self, function: str) -> None:
        """Ends the waits for this function."""
        self._rung[keys.bell_channel(function)].set()

    async def wait(self, function: str, timeout_s: float) -> bool:
        """True: there may be work that was announced since the last wait (always so for the first one)."""
        channel = keys.bell_channel(function)
        if channel not in self._heard:
            self._heard.add(channel)
            self._rung[channel].set()
            await self._subscriber.subscribe(channel)
        rung = self._rung[channel]
        try:
            async with asyncio.timeout(timeout_s):
                await rung.wait()
        except TimeoutError:
            return False
        rung.clear()
        return True

    def _on_message(self, channel: str, data: bytes) -> None:
        if channel == self._control:
            job_id, _, state = data.decode().partition(" ")
            self._on_cancel(job_id, state)
        elif channel == self._handovers:
            self._on_handover(data)
        else:
            self._rung[channel].set()

    def _on_handover(self, data: bytes) -> None:
        """An empty message only asks whether anybody listens."""
        origin, number, rows = msgpack.unpackb(data, raw=True) if data else (b"", 0, [])
        if origin in self._expected:
            self._expected[origin](int(number), rows)

    def _on_ready(self, channel: str) -> None:
        if channel not in (self._control, self._handovers):
            self._rung[channel].set()
