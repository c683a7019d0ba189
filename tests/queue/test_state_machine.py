"""Random operations against a model in plain Python; an oracle checks the invariants from outside after each."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, ClassVar

import msgpack
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from queue_model import NEW_JOBS, WAITING, ModelJob, ReplyLost, Server, lose
from queue_oracle import Oracle

from stoker.queue import keys, replies
from stoker.queue.broker import Broker, ClaimTicket
from stoker.queue.records import (
    Claim,
    Completion,
    Emission,
    Enqueued,
    Failure,
    IdempotencyMismatch,
    JobState,
    Limits,
    NewJob,
    QueueFull,
    Settled,
    new_job_id,
)
from stoker.queue.scripts import Scripts

LIMIT = 10
TOGETHER = 5
HAND_BACKS = 10
ENDED = tuple(state for state in JobState if state.terminal)
WORKER_NAMES = ["w1", "w2"]
WORKERS = st.sampled_from(WORKER_NAMES)
REASONS = {JobState.CANCELLED: "cancelled", JobState.TIMED_OUT: "timed_out"}


class QueueMachine(RuleBasedStateMachine):
    """One rule draws among all operations that make sense, so that each gets its share."""

    server: ClassVar[Server]

    @initialize()
    def begin(self) -> None:
        self.server.raw.flushall()
        self.broker = Broker(self.server.client, backoff_base_ms=0)
        self.slow = Broker(self.server.client, backoff_base_ms=600_000, backoff_cap_ms=600_000)
        self.oracle = Oracle(self.server.raw, "gw")
        self.jobs: dict[str, ModelJob] = {}
        self.places = 0
        self.tickets = {worker: ClaimTicket() for worker in WORKER_NAMES}
        self.standing: dict[str, tuple[int, int]] = {}
        self.unheard: dict[str, list[tuple[ModelJob, int]]] = {}
        self.messages = self.server.raw.pubsub()
        for worker in WORKER_NAMES:
            self.messages.subscribe(keys.handover_channel(worker))
            assert self.messages.get_message(timeout=5)
        self.used_keys: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.verdicts: list[tuple[Callable[[], Awaitable[Any]], Settled]] = []
        self.server.run(self.broker.set_limits("f", Limits(max_queued=LIMIT)))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        operations = [self.enqueue, self.enqueue, self.claim, self.claim, self.beat, self.claim_or_stand]
        if len(self.found(*WAITING)) <= LIMIT - TOGETHER:
            operations += [self.enqueue_together]
        if self.jobs:
            operations += [self.enqueue_again, self.cancel, self.write_without_holding]
        if self.found(JobState.DEAD, JobState.FAILED):
            operations += [self.replay]
        if self.found(JobState.RUNNING):
            operations += [self.emit, self.emit, self.done, self.fail, self.fail, self.lease_ends, self.deadline_passes]
        if self.verdicts:
            operations += [self.settle_again]
        if self.delayed():
            operations += [self.delay_passes]
        data.draw(st.sampled_from(operations))(data.draw)

    def teardown(self) -> None:
        if not hasattr(self, "oracle"):
            return
        for job in self.found(*WAITING, JobState.RUNNING):
            assert self.server.run(self.broker.cancel(job.new.id)) is JobState.CANCELLED
        shot = self.oracle.check("f")
        self.oracle.close()
        self.messages.close()
        assert not any((shot.lanes, shot.tenant_lanes, shot.ready, shot.waiting, any(shot.zsets.values())))

    def call(self, draw: Any, operation: Callable[[], Awaitable[Any]]) -> Any:
        """Half the time the script runs but its reply never comes, so the caller asks again."""
        if draw(st.booleans(), label="reply lost"):
            with pytest.MonkeyPatch.context() as patch, suppress(ReplyLost):
                patch.setattr(Scripts, "run", lose(Scripts.run))
                patch.setattr(Scripts, "begin", lose(Scripts.begin))
                self.server.run(operation())
        return self.server.run(operation())

    def found(self, *states: JobState) -> list[ModelJob]:
        return [job for job in self.jobs.values() if job.state in states]

    def delayed(self) -> list[ModelJob]:
        return [job for job in self.jobs.values() if job.delayed]

    def any_of(self, draw: Any, *states: JobState) -> ModelJob:
        return draw(st.sampled_from(self.found(*states)), label="job")

    def end(self, job: ModelJob, state: JobState) -> None:
        job.state, job.delayed = state, False

    def requeue(self, job: ModelJob, delayed: bool) -> None:
        job.state, job.delayed, job.sequence = JobState.RETRYING, delayed, 0

    def enqueue(self, draw: Any) -> None:
        new = NewJob(id=new_job_id("f"), function="f", payload=b"payload", gateway="gw", **draw(NEW_JOBS))
        used = self.used_keys.get((new.tenant, new.idempotency_key)) if new.idempotency_key else None
        if used and used[1] != new.request_digest:
            with pytest.raises(IdempotencyMismatch):
                self.call(draw, lambda: self.broker.enqueue(new))
        elif used:
            answer = self.call(draw, lambda: self.broker.enqueue(new))
            assert (answer.job_id, answer.created, answer.wake) == (used[0], False, False)
            assert answer.state is self.jobs[used[0]].state
        elif len(self.found(*WAITING)) >= LIMIT:
            with pytest.raises(QueueFull):
                self.call(draw, lambda: self.broker.enqueue(new))
        else:
            self.accept(draw, new)

    def accept(self, draw: Any, new: NewJob) -> None:
        alone = not new.delay_ms and not any(job.in_lane for job in self.jobs.values())
        answer = self.call(draw, lambda: self.broker.enqueue(new))
        taken = alone and bool(self.standing) and new.priority < 2
        wake = alone and not taken
        assert (answer.job_id, answer.created, answer.wake) == (new.id, True, wake)
        self.jobs[new.id] = ModelJob(new, self.next_place(), bool(new.delay_ms), wake)
        if new.idempotency_key:
            self.used_keys[new.tenant, new.idempotency_key] = (new.id, new.request_digest)
        assert answer.state is (JobState.RUNNING if taken else JobState.QUEUED)
        self.check_handovers(draw, [new.id] if taken else [], 1)

    def enqueue_together(self, draw: Any) -> None:
        """Half the time, jobs that one claim may have together."""
        alike = draw(NEW_JOBS) if draw(st.booleans(), label="alike") else {}
        plain: Any = {"idempotency_key": "", "request_digest": "", "delay_ms": 0}
        drawn = [{**draw(NEW_JOBS), **alike, **plain} for _ in range(draw(st.integers(2, TOGETHER)))]
        new = [NewJob(id=new_job_id("f"), function="f", payload=b"payload", gateway="gw", **each) for each in drawn]
        alone = not any(job.in_lane for job in self.jobs.values())
        answers = self.call(draw, lambda: together(self.broker, new))
        states = [answer.state for answer in answers]
        taken = states.index(JobState.QUEUED) if JobState.QUEUED in states else len(new)
        assert set(states[taken:]) <= {JobState.QUEUED}
        for place, job in enumerate(new):
            self.jobs[job.id] = ModelJob(job, self.next_place(), False, alone and place == taken)
            assert answers[place].wake is (alone and place == taken)
        most = sum(room for _, room in self.standing.values()) if len({job.tenant for job in new}) == 1 else 1
        batches = {job.batch_key for job in new}
        expected = [job.priority < 2 for job in new].index(False) if any(job.priority == 2 for job in new) else len(new)
        if not alone or not self.standing:
            assert taken == 0
        elif len(batches) == 1:
            assert taken == min(expected, most)
        else:
            assert taken <= min(expected, most)
        self.check_handovers(draw, [job.id for job in new[:taken]], most)

    def check_handovers(self, draw: Any, taken: list[str], most: int) -> None:
        """Each job goes to one worker of those that stand, which is told once, in order and no more than there is room
        for; half the time a worker doesn't hear it."""
        told: list[str] = []
        while len(told) < len(taken):
            message = self.messages.get_message(timeout=5)
            assert message is not None
            if not message["data"]:
                # Whether the worker listens.
                continue
            worker = message["channel"].decode().removeprefix(keys.HANDOVER_CHANNEL)
            origin, number, rows = msgpack.unpackb(message["data"], raw=True)
            claims, ticket = [replies.claim("f", row) for row in rows], self.tickets[worker]
            stood, room = self.standing.pop(worker)
            assert (origin.decode(), int(number)) == (ticket.origin, stood)
            assert 1 <= len(claims) <= min(room, most)
            assert len({self.jobs[claim.job_id].new.batch_key for claim in claims}) == 1
            told += [claim.job_id for claim in claims]
            for claim in claims:
                self.check_claim(claim, worker)
            if draw(st.booleans(), label="message lost"):
                self.unheard[worker] = [(self.jobs[claim.job_id], claim.fence) for claim in claims]
            else:
                ticket.standing = None
        assert told == taken
        assert self.messages.get_message() is None

    def claim_or_stand(self, draw: Any) -> None:
        """First comes what the worker's last stand got, as far as that isn't over; then what there is."""
        worker, limit = draw(WORKERS), draw(st.integers(1, 4))
        ticket, missed = self.tickets[worker], self.unheard.pop(worker, [])
        claims = self.call(draw, lambda: self.broker.claim_with(ticket, "f", worker, limit, 600_000))
        self.standing.pop(worker, None)
        held = [(job.new.id, fence) for job, fence in missed if (job.state, job.fence) == (JobState.RUNNING, fence)]
        if held:
            assert [(claim.job_id, claim.fence) for claim in claims] == held
            return
        self.check_claims(claims, worker, limit)
        if not claims:
            assert ticket.standing is not None
            self.standing[worker] = (ticket.standing, limit)

    def enqueue_again(self, draw: Any) -> None:
        job = self.any_of(draw, *JobState)
        answer = self.call(draw, lambda: self.broker.enqueue(job.new))
        assert (answer.job_id, answer.created, answer.wake, answer.state) == (job.new.id, True, job.wake, job.state)

    def claim(self, draw: Any) -> None:
        worker, limit = draw(WORKERS), draw(st.integers(1, 4))
        self.check_claims(self.call(draw, lambda: self.broker.claim("f", worker, limit)), worker, limit)

    def check_claims(self, claims: list[Claim], worker: str, limit: int) -> None:
        ready = [job for job in self.jobs.values() if job.in_lane]
        assert len(claims) <= limit and bool(claims) == bool(ready)
        if claims:
            batch = self.jobs[claims[0].job_id].new.batch_key
            self.check_order(claims, [job for job in ready if job.new.batch_key == batch], limit)
        for claim in claims:
            self.check_claim(claim, worker)

    def check_order(self, claims: list[Claim], fitting: list[ModelJob], limit: int) -> None:
        """All that fit are taken, up to the limit, and from each lane the first ones."""
        taken = {claim.job_id for claim in claims}
        assert len(claims) == len(taken) == min(limit, len(fitting))
        for lane in {job.lane for job in fitting}:
            in_order = sorted((job for job in fitting if job.lane == lane), key=lambda job: job.place)
            flags = [job.new.id in taken for job in in_order]
            assert flags == sorted(flags, reverse=True)

    def check_claim(self, claim: Claim, worker: str) -> None:
        job = self.jobs[claim.job_id]
        assert claim.fence > max(other.fence for other in self.jobs.values())
        assert [chunk.data for chunk in claim.chunks] == job.chunks
        job.state, job.attempt, job.worker, job.fence = JobState.RUNNING, job.attempt + 1, worker, claim.fence
        assert (claim.attempt, claim.payload, claim.stream) == (job.attempt, b"payload", job.new.stream)

    def beat(self, draw: Any) -> None:
        worker = draw(WORKERS)
        mine = {job_id: job for job_id, job in self.jobs.items() if job.worker == worker}
        held = {job_id: job.fence for job_id, job in mine.items()}
        lost = {job_id: job for job_id, job in mine.items() if job.state is not JobState.RUNNING}
        expected = {job_id: REASONS.get(job.state, "lost") for job_id, job in lost.items()}
        assert self.call(draw, lambda: self.broker.beat("f", worker, held)) == expected

    def emit(self, draw: Any) -> None:
        """New chunks, or some that were sent before, in one call or two."""
        job = self.any_of(draw, JobState.RUNNING)
        first = draw(st.sampled_from([1, job.sequence + 1]))
        sequence = range(first, first + draw(st.integers(1, 3)))
        emissions = [Emission(job.new.id, job.fence, seq, b"%d.%d" % (job.fence, seq)) for seq in sequence]
        assert self.call(draw, lambda: self.broker.emit("f", emissions)) == []
        if job.new.stream:
            job.chunks += [item.data for item in emissions if item.seq > job.sequence]
        job.sequence = max(job.sequence, emissions[-1].seq)
        self.check_chunks(job)

    def check_chunks(self, job: ModelJob) -> None:
        kept = self.server.run(self.broker.chunks(job.new.id))
        assert [chunk.data for chunk in kept] == job.chunks

    def done(self, draw: Any) -> None:
        job = self.any_of(draw, JobState.RUNNING)
        cost = draw(st.none() | st.sampled_from([0.0, 3.0]))
        completion = Completion(job.new.id, job.fence, b"result", b"usage", b"", cost)
        self.settle(draw, job, lambda: self.broker.done("f", [completion]), Settled.DONE)
        self.end(job, JobState.SUCCEEDED)

    def fail(self, draw: Any) -> None:
        job = self.any_of(draw, JobState.RUNNING)
        retry, counts, delayed = draw(st.booleans()), draw(st.sampled_from([True, True, False])), draw(st.booleans())
        failure = Failure(job.new.id, job.fence, b"error", retry, counts)
        broker = self.slow if delayed else self.broker
        hand_back = not counts and job.handed < HAND_BACKS
        if hand_back or (retry and job.attempt < job.new.max_attempts):
            self.settle(draw, job, lambda: broker.fail("f", [failure]), Settled.RETRYING)
            self.requeue(job, delayed and not hand_back)
            job.attempt -= hand_back
            job.handed += hand_back
        else:
            self.settle(draw, job, lambda: broker.fail("f", [failure]), Settled.DEAD if retry else Settled.DONE)
            self.end(job, JobState.DEAD if retry else JobState.FAILED)

    def settle(self, draw: Any, job: ModelJob, operation: Callable[[], Awaitable[Any]], answer: Settled) -> None:
        assert self.call(draw, operation) == [answer]
        job.settled[job.fence] = answer
        self.verdicts.append((operation, answer))

    def settle_again(self, draw: Any) -> None:
        """However late a repeated verdict comes, it gets its first answer and changes nothing."""
        operation, answer = draw(st.sampled_from(self.verdicts))
        assert self.call(draw, operation) == [answer]

    def write_without_holding(self, draw: Any) -> None:
        """With the fence of an attempt that has ended, or one that nobody had."""
        job = self.any_of(draw, *JobState)
        known = [*job.settled, job.fence] if job.state is not JobState.RUNNING else [*job.settled]
        fence = draw(st.sampled_from([*known, job.fence + 1, job.fence - 1]))
        late = Emission(job.new.id, fence, 10_000, b"late")
        assert self.call(draw, lambda: self.broker.emit("f", [late])) == [job.new.id]
        self.check_chunks(job)
        answer = [job.settled.get(fence, Settled.STALE)]
        completion, failure = Completion(job.new.id, fence, b"x", b"x"), Failure(job.new.id, fence, b"x", True)
        assert self.call(draw, lambda: self.broker.done("f", [completion])) == answer
        assert self.call(draw, lambda: self.broker.fail("f", [failure])) == answer
        lost = self.call(draw, lambda: self.broker.beat("f", "w1", {job.new.id: fence}))
        assert lost == {job.new.id: REASONS.get(job.state, "lost") if fence == job.fence > 0 else "lost"}

    def cancel(self, draw: Any) -> None:
        job = self.any_of(draw, *JobState)
        expected = job.state if job.state.terminal else JobState.CANCELLED
        assert self.call(draw, lambda: self.broker.cancel(job.new.id)) is expected
        self.end(job, expected)

    def replay(self, draw: Any) -> None:
        job = self.any_of(draw, JobState.DEAD, JobState.FAILED)
        name = str(draw(st.uuids()))
        assert self.call(draw, lambda: self.broker.replay(job.new.id, name)) is JobState.QUEUED
        job.state, job.place, job.wake = JobState.QUEUED, self.next_place(), False
        job.attempt = job.handed = job.sequence = 0

    def next_place(self) -> int:
        self.places += 1
        return self.places

    def lease_ends(self, draw: Any) -> None:
        job = self.any_of(draw, JobState.RUNNING)
        assert self.server.raw.zadd(keys.key("f", "lease"), {job.new.id: 1}, xx=True, ch=True) == 1
        self.call(draw, lambda: self.broker.tick("f"))
        if job.attempt >= job.new.max_attempts:
            self.end(job, JobState.DEAD)
        else:
            self.requeue(job, False)

    def deadline_passes(self, draw: Any) -> None:
        """A tick notices it, or a beat, or a claim."""
        job = self.any_of(draw, *WAITING, JobState.RUNNING)
        if self.server.raw.zadd(keys.key("f", "dl"), {job.new.id: 1}, xx=True, ch=True):
            self.end(job, JobState.TIMED_OUT if job.state is JobState.RUNNING else JobState.EXPIRED)
            if draw(st.booleans()):
                self.call(draw, lambda: self.broker.tick("f"))
            else:
                draw(st.sampled_from([self.claim, self.notice]))(draw)

    def notice(self, draw: Any) -> None:
        self.call(draw, lambda: self.broker.beat("f", "w1", {new_job_id("f"): 1}))

    def delay_passes(self, draw: Any) -> None:
        """A tick promotes it, or the next claim."""
        job = draw(st.sampled_from(self.delayed()))
        assert self.server.raw.zadd(keys.key("f", "delay"), {job.new.id: 1}, xx=True, ch=True) == 1
        job.delayed = False
        if draw(st.booleans()):
            self.call(draw, lambda: self.broker.tick("f"))
        else:
            self.claim(draw)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "oracle"):
            return
        shot = self.oracle.check("f")
        stored = {job_id: (row["state"], int(row.get("attempt", 0))) for job_id, row in shot.jobs.items()}
        assert stored == {job_id: (job.state.value, job.attempt) for job_id, job in self.jobs.items()}
        standing = [(self.tickets[worker].origin, *stands, 10000, worker) for worker, stands in self.standing.items()]
        assert shot.standing == {" ".join(map(str, entry)) for entry in standing}
        assert set(shot.zsets["delay"]) == {job.new.id for job in self.delayed()}


async def together(broker: Broker, jobs: list[NewJob]) -> list[Enqueued]:
    """In one call of the script."""
    return await asyncio.gather(*map(broker.enqueue, jobs))


def test_the_queue_is_the_model(server_url: str) -> None:
    QueueMachine.server = Server(server_url)
    try:
        run_state_machine_as_test(
            QueueMachine,
            settings=settings(
                max_examples=12,
                stateful_step_count=50,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                # Shrinking a failure takes longer than a test may.
                phases=(Phase.reuse, Phase.generate),
            ),
        )
    finally:
        QueueMachine.server.close()
