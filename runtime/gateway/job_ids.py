"""Ids of jobs say who made them: the last digits are a mark that only this deployment can make for that tenant. So a
job whose record is gone can be told from one that never was, without keeping anything of it."""

import hashlib
import hmac

from stoker.queue.records import CROCKFORD, function_of, new_job_id
from stoker.runtime.secret import derive

# 25 bits: enough against chance, and no secret hangs on it. It leaves 55 random ones to each millisecond.
MARK_DIGITS = 5


class JobIds:
    """`secret` is the deployment's; without one, marks can be forged."""

    def __init__(self, secret: str) -> None:
        self._key = derive(secret, "job-ids")

    def new(self, function: str, tenant: str) -> str:
        base = new_job_id(function)[:-MARK_DIGITS]
        return base + self._mark(base, tenant)

    def made_here(self, job_id: str, tenant: str) -> bool:
        """Whether it is the id of a job of this tenant, kept or not. Raises ValueError for what is no job's id."""
        function_of(job_id)
        base, mark = job_id[:-MARK_DIGITS], job_id[-MARK_DIGITS:]
        return hmac.compare_digest(mark, self._mark(base, tenant))

    def _mark(self, base: str, tenant: str) -> str:
        """By BLAKE2's keyed mode, which every request pays for, and which is the quickest there is."""
        number = int.from_bytes(hashlib.blake2b(f"{base} {tenant}".encode(), key=self._key, digest_size=4).digest())
        return "".join([CROCKFORD[number >> 5 * place & 31] for place in range(MARK_DIGITS)])
