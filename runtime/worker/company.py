"""How many jobs may run beside each other in one process.

A job that is tried again may be what ended the process that ran it before. So it runs in smaller company at each
attempt, and alone at the last: what ends processes uses up its own attempts, and its neighbours are done. (Group
testing: Dorfman, "The detection of defective members of large populations", 1943.)
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from stoker.queue.records import Claim
from stoker.runtime.spec import FunctionSpec


def most_at_once(spec: FunctionSpec) -> int:
    if spec.kind != "python":
        return spec.model.max_seqs
    return spec.concurrency * (spec.batch.max_size if spec.batch else 1)


def company(claim: Claim, most: int) -> int:
    """How many may run while this one does, itself among them; `most` is usual."""
    if not is_suspect(claim):
        return most
    return max(1, int(most ** ((claim.max_attempts - claim.attempt) / max(1, claim.max_attempts - 1))))


def is_suspect(claim: Claim) -> bool:
    return claim.attempt > 1


def fitting(claims: list[Claim], running: Iterable[Claim], most: int) -> int:
    """How many of the claims, in their order, may begin now."""
    limits, count = [company(claim, most) for claim in running], 0
    present = len(limits)
    for claim in claims:
        limits.append(company(claim, most))
        # Where there is nobody to suspect, the replica itself knows what it has room for.
        if present + count + 1 > min(limits) < most:
            break
        count += 1
    return count


class Company:
    """Of one replica. `held` are its jobs, of which those `waiting` have not begun; `changed` is set when one of them
    goes; `give_back` is for what has not begun when the replica stops."""

    def __init__(
        self,
        spec: FunctionSpec,
        held: Mapping[str, Claim],
        changed: asyncio.Event,
        stopping: asyncio.Event,
        give_back: Callable[[Claim], None],
    ) -> None:
        self._most = most_at_once(spec)
        self._held, self._changed, self._stopping, self._give_back = held, changed, stopping, give_back
        self._fresh = True
        self.waiting = set[str]()
        self.closed = False

    def close(self) -> None:
        """Nothing more begins: who waits for that is woken."""
        self.closed = True
        self._changed.set()

    def room(self, free: int) -> int:
        """For how many more jobs there is room where `free` are usual. Suspects are claimed one by one, so that none
        waits here with its clock running, and so is a new replica's first job: it may follow one that they ended."""
        if self._fresh:
            self._fresh = False
            return min(1, free)
        if not any(map(is_suspect, self._held.values())):
            return free
        least = min(company(claim, self._most) for claim in self._held.values())
        return min(1, free) if least > len(self._held) else 0

    async def groups(self, claims: list[Claim]) -> AsyncIterator[list[Claim]]:
        """The claims, those together that may begin together, as soon as they may."""
        while claims := [claim for claim in claims if self._held.get(claim.job_id) is claim]:
            self.waiting = {claim.job_id for claim in claims}
            running = [claim for job_id, claim in self._held.items() if job_id not in self.waiting]
            if count := fitting(claims, running, self._most):
                self.waiting.difference_update(claim.job_id for claim in claims[:count])
                yield claims[:count]
                claims = claims[count:]
            elif self.closed:
                return
            elif self._stopping.is_set():
                for claim in claims:
                    self._give_back(claim)
            else:
                self._changed.clear()
                await self._changed.wait()
        self.waiting = set()

    async def admitted(self, claims: list[Claim]) -> AsyncIterator[Claim]:
        async for group in self.groups(claims):
            for claim in group:
                yield claim
