"""Keys of functions that run: with one, user code calls functions of its owner, and nothing else. A pass lives as long
as its replica renews it."""

from dataclasses import dataclass

from stoker.runtime.secret import MIN_CHARACTERS
from stoker.runtime.tenancy.api_key import OPERATOR, KeyRecord, Keyring
from stoker.runtime.tenancy.directory import Directory

LASTS_S = 300.0


@dataclass(frozen=True, slots=True)
class Pass:
    """`text` is the API key."""

    text: str
    record: KeyRecord


class Passes:
    """`secret` is the deployment's; without a good one there are no passes."""

    def __init__(self, directory: Directory, secret: str) -> None:
        self._directory = directory
        self._keyring = Keyring(secret) if len(secret) >= MIN_CHARACTERS else None

    async def issue(self, owner: str) -> Pass | None:
        if self._keyring is None:
            return None
        issued = Pass(*self._keyring.make(owner or OPERATOR, ("invoke",)))
        await self.renew(issued)
        return issued

    async def renew(self, issued: Pass) -> None:
        """For `LASTS_S` from now on, also when it had run out."""
        await self._directory.put_pass(issued.record, LASTS_S)

    async def end(self, issued: Pass) -> None:
        await self._directory.end_pass(issued.record.id)
