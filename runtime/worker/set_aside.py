"""Jobs that were made for another version of the function, and that this one can't take.

Around a deployment replicas of two versions claim the same function's jobs. What the older one can't take it keeps,
without running it, until the newer one is ready and this one stops: then it goes back as it came, to the newer one. A
job that the deployed version can't take, also after a rollback, is refused; it can be replayed once the version that it
was accepted for is back.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stoker.queue.records import Claim, Failure, Metered, pack, unpack
from stoker.queue.retry import insist
from stoker.runtime.contract import contract_of, may_try
from stoker.runtime.error_record import bounded
from stoker.runtime.releases import Release, readable_releases
from stoker.runtime.spec import full_name, owner_of
from stoker.runtime.worker.host import PATIENCE_S
from stoker.runtime.worker.overtaken import overtaken

if TYPE_CHECKING:
    from stoker.runtime.worker.replica import Record, Replica

LOOK_S = 0.25
# So long a version that fails to start may still come up at another try.
FAILING_S = 5.0
# Beyond, the replica claims nothing more.
MOST_ASIDE = 1000
GIVEN_BACK = {"type": "internal_error", "message": "left to another version", "code": None}

Verdict = Literal["wait", "refuse", "failing"]


@dataclass(frozen=True, slots=True)
class Aside:
    """`error`: why this version doesn't take it, with no message if it may not look; `since` is in monotonic seconds;
    usage and notes as of then."""

    claim: Claim
    error: "Record"
    usage: bytes
    notes: bytes
    since: float


def verdict_of(mine: str, deployed: str, rollout: Mapping[str, Any]) -> Verdict:
    """`mine`, `deployed`: versions; `rollout`: of a version that fails to start, as the controller tells it."""
    if deployed == mine:
        return "refuse"
    return "failing" if rollout and rollout["version"] == deployed else "wait"


class SetAside:
    """`room` is set when the replica may claim more than before."""

    def __init__(self, replica: "Replica", stopping: asyncio.Event, room: asyncio.Event) -> None:
        self._replica = replica
        self._stopping = stopping
        self._room = room
        self._own = contract_of(replica.spec)
        self._jobs: dict[str, Aside] = {}
        self._looking: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[int]] = set()

    @property
    def full(self) -> bool:
        return len(self._jobs) >= MOST_ASIDE

    def fences(self) -> dict[str, int]:
        return {job_id: aside.claim.fence for job_id, aside in self._jobs.items()}

    def takes(self, claim: Claim, body: Mapping[str, Any]) -> bool:
        """False: it was set aside. True: it fits, or its code can tell by itself; see `misfits`."""
        if may_try(body.get("for", ""), self._own):
            return True
        self.put(claim, {"message": ""})
        return False

    def misfits(self, claim: Claim, body: Mapping[str, Any], error: "Record") -> bool:
        """Whether an input that the code refused unseen was made for another version: then it was set aside."""
        refused = (error.get("type"), error.get("code")) == ("invalid_request_error", "invalid_input")
        if not refused or body.get("for", self._own) == self._own:
            return False
        self.put(claim, error)
        return True

    def put(self, claim: Claim, error: "Record") -> None:
        """`error` is the job's end, should this be the deployed version."""
        aside = self._replica.part_with(claim, error)
        if aside is None:
            return
        self._jobs[claim.job_id] = aside
        self._replica.log.write("stoker", f"job {claim.job_id} was made for another version", claim.job_id)
        if self._stopping.is_set():
            self.give_back()
            return
        telling = asyncio.create_task(self._tell(claim))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    async def _tell(self, claim: Claim) -> int:
        """It waits, and the time limit is for its run, which is yet to come."""
        held = {claim.job_id: claim.fence}
        return await insist(lambda: self._replica.host.broker.set_aside(claim.function, held), PATIENCE_S)

    def lose(self, job_id: str) -> None:
        """It was cancelled, timed out, or given to another worker."""
        if aside := self._jobs.pop(job_id, None):
            self._replica.outbox.meter(Metered(job_id, aside.claim.fence, aside.usage))

    def give_back(self) -> None:
        for job_id in list(self._jobs):
            self._end(job_id, GIVEN_BACK, retry=True)

    def _end(self, job_id: str, error: "Record", *, retry: bool) -> None:
        """With `retry` it goes back as it came."""
        if aside := self._jobs.pop(job_id, None):
            told, fence = pack(bounded(error)), aside.claim.fence
            self._replica.outbox.fail(Failure(job_id, fence, told, retry, not retry, aside.usage, aside.notes))

    async def _look(self) -> None:
        cluster, spec = self._replica.host.cluster, self._replica.spec
        while self._jobs:
            # What is read now is true of all that had come by now.
            jobs = list(self._jobs.items())
            deployed = await insist(lambda: cluster.function(spec.name), PATIENCE_S)
            rollouts = (await insist(cluster.fleet, PATIENCE_S)).get("rollouts", {})
            rollout = rollouts.get(spec.name, {})
            verdict = verdict_of(spec.version, (deployed or {}).get("version", ""), rollout)
            if verdict == "refuse":
                await self._refuse(jobs)
            for job_id, aside in jobs:
                if verdict == "failing" and time.monotonic() - aside.since > FAILING_S:
                    self._end(job_id, unstartable(rollout), retry=False)
            self._room.set()
            await asyncio.sleep(LOOK_S)

    async def _refuse(self, jobs: list[tuple[str, Aside]]) -> None:
        cluster, spec = self._replica.host.cluster, self._replica.spec
        app = full_name(owner_of(spec.name), spec.app)
        kept = readable_releases(await insist(lambda: cluster.releases(app), PATIENCE_S))
        for job_id, aside in jobs:
            self._end(job_id, self._refusal(aside, kept), retry=False)

    def _refusal(self, aside: Aside, kept: list[Release]) -> "Record":
        """What was made for the same is no other version's."""
        made_for = unpack(aside.claim.payload).get("for", "")
        if made_for in ("", self._own):
            return aside.error
        said = str(aside.error.get("message") or "")
        return overtaken(aside.claim, self._replica.spec, made_for, said, kept)


def unstartable(rollout: Mapping[str, Any]) -> "Record":
    message = f"version {rollout['version']}, which the input was made for, does not start: {rollout['error']}"
    return {"type": "function_error", "message": message, "code": "version_failed"}
