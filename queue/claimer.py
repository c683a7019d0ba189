"""One replica's claims. While there is no work, its claim stands at the server and the next jobs come by themselves."""

from collections.abc import Collection

from stoker.queue.broker import Broker, ClaimTicket
from stoker.queue.events import Bells, Row
from stoker.queue.records import Claim
from stoker.queue.replies import claim

STAND_MARGIN_MS = 250


class Claimer:
    """`claim_or_stand`, then `wait`, one call at a time; `leave` at the end, or a job may still be handed to nobody.

    Jobs that a standing claim got are claimed from that moment on. Their message may get lost: the next `claim` asks.
    """

    def __init__(self, broker: Broker, bells: Bells, function: str, worker: str, wait_s: float) -> None:
        self._broker = broker
        self._bells = bells
        self._function = function
        self._worker = worker
        self._wait_s = wait_s
        self._ticket = ClaimTicket()
        self._handed: tuple[int, list[Row]] | None = None

    async def claim(self, limit: int, stand_ms: int = 0, lowest: int = -1, but: Collection[str] = ()) -> list[Claim]:
        """Up to `limit` jobs; after a lost reply, call again with the same arguments. With `lowest`, up to that many
        jobs of the lowest priority on top. None of the tenants in `but`."""
        return await self._broker.claim_with(self._ticket, self._function, self._worker, limit, stand_ms, lowest, but)

    async def claim_or_stand(self, limit: int, lowest: int = -1, but: Collection[str] = ()) -> list[Claim]:
        """What `claim` gives. When that is nothing, a claim of all tenants' jobs stands for a little longer than a
        wait; the bell rings for the first job of each."""
        self._bells.expect(self._ticket.origin, self._on_jobs)
        return await self.claim(limit, 0 if but else round(self._wait_s * 1000) + STAND_MARGIN_MS, lowest, but)

    def nudge(self) -> None:
        """There is more room than the claim that waits has told."""
        self._bells.ring(self._function)

    async def wait(self) -> list[Claim]:
        """For the jobs of the standing claim, but no longer than to the function's bell or `wait_s`; []: claim."""
        if not self._arrived():
            await self._bells.wait(self._function, self._wait_s)
        if not self._arrived():
            return []
        assert self._handed is not None
        (_, rows), self._handed = self._handed, None
        self._ticket.standing = None
        return [claim(self._function, row) for row in rows]

    async def leave(self) -> list[Claim]:
        """Takes the standing claim back; the jobs it got in the meantime, if any."""
        claims = await self.claim(0)
        self._bells.forget(self._ticket.origin)
        return claims

    def _arrived(self) -> bool:
        """Only the answered claim that stands: what was handed to another is in the answer of a claim."""
        return self._handed is not None and self._handed[0] == self._ticket.standing

    def _on_jobs(self, number: int, rows: list[Row]) -> None:
        self._handed = (number, rows)
        self._bells.ring(self._function)
