"""Who calls, and what that key may do: every route asks here before anything else is read."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from stoker.runtime.gateway.errors import ApiError
from stoker.runtime.tenancy.api_key import OPERATOR, ROOT, SCOPES, KeyRecord, Keyring, Scope, parse
from stoker.runtime.tenancy.directory import Directory
from stoker.runtime.tenancy.tenant import Tenant

Access = Literal["anyone"] | Scope

FRESH_S = 0.5
MOST_CACHED = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenant` is the name of `account`; `key_id` is "" where the gateway asks for no keys."""

    account: Tenant
    scopes: Collection[Scope]
    key_id: str = ""

    @property
    def tenant(self) -> str:
        return self.account.name

    @property
    def owner(self) -> str:
        """Of the functions that this caller deploys; the operator's have none."""
        return "" if self.account.name == OPERATOR else self.account.name

    @property
    def reads_all(self) -> bool:
        """The operator's functions have a key too, which reads what is their own only."""
        return not self.owner and "admin" in self.scopes


EVERYONE = Caller(Tenant(OPERATOR), SCOPES)
NOBODY = Caller(Tenant("nobody"), ())


class Doorkeeper:
    """Without a `keyring` every caller is the operator. What Redis says of a key is believed for `FRESH_S`."""

    def __init__(self, directory: Directory, keyring: Keyring | None) -> None:
        self._directory = directory
        self._keyring = keyring
        self._known: dict[str, tuple[float, KeyRecord | None, Tenant | None]] = {}

    async def admit(self, headers: Mapping[str, str], access: Access) -> Caller:
        """Raises ApiError 401 for no or a wrong key, 403 for one that may not do this."""
        if self._keyring is None or access == "anyone":
            return EVERYONE if self._keyring is None else NOBODY
        caller = await self._caller(self._keyring, bearer(headers))
        if access not in caller.scopes:
            raise forbidden(access)
        return caller

    async def _caller(self, keyring: Keyring, text: str) -> Caller:
        parts = parse(text)
        if parts is None:
            raise unauthorized("The API key is not one of this service." if text else NO_KEY)
        key_id, secret = parts
        record, tenant = await self._look_up(keyring, key_id)
        right = keyring.opens(secret, record)
        if not right or record is None or tenant is None or not record.alive(time.time()):
            raise unauthorized("The API key is wrong, has expired or was revoked.")
        return Caller(tenant, record.scopes, key_id)

    async def _look_up(self, keyring: Keyring, key_id: str) -> tuple[KeyRecord | None, Tenant | None]:
        if key_id == ROOT:
            return keyring.root_record(), Tenant(OPERATOR)
        read_at, record, tenant = self._known.get(key_id, (0.0, None, None))
        if time.monotonic() - read_at < FRESH_S:
            return record, tenant
        record = await self._directory.key(key_id)
        tenant = await self._tenant(record.tenant) if record else None
        if len(self._known) >= MOST_CACHED:
            self._known.clear()
        self._known[key_id] = (time.monotonic(), record, tenant)
        return record, tenant

    async def _tenant(self, name: str) -> Tenant | None:
        """The operator, whose functions that run have keys, is in no directory."""
        return Tenant(OPERATOR) if name == OPERATOR else await self._directory.get(name)


NO_KEY = "This service needs an API key: send it as 'Authorization: Bearer sk-stoker-…'."


def bearer(headers: Mapping[str, str]) -> str:
    kind, _, text = headers.get("authorization", "").partition(" ")
    return text.strip() if kind.lower() == "bearer" else ""


def unauthorized(message: str) -> ApiError:
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, type="authentication_error", code="invalid_api_key", headers=headers)


def forbidden(access: str) -> ApiError:
    message = f"This API key lacks the scope '{access}', which this route needs."
    return ApiError(403, message, type="permission_error", code="insufficient_scope")
