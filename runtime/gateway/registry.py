"""Deployed functions as the gateway reads them: cached for a moment, to save each call a round trip."""

import contextlib
import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from stoker.queue.cluster import Change, Cluster, Records
from stoker.runtime.gateway.auth import Caller
from stoker.runtime.gateway.errors import ApiError, function_not_found, not_found
from stoker.runtime.gateway.router_uses import refuse_named
from stoker.runtime.spec import FunctionSpec, full_name, owner_of, readable, short_name

FRESH_S = 1.0
MOST_KNOWN = 10_000


def born_of(record: Mapping[str, Any] | None) -> str:
    """Of what is deployed, or of a new function."""
    return (record or {}).get("born") or birth_at(time.time())


def birth_at(seconds: float) -> str:
    """A UUID of version 7: a time in unix milliseconds, then 74 random bits."""
    high = int(seconds * 1000) << 16 | 7 << 12 | secrets.randbits(12)
    return uuid.UUID(int=high << 64 | 0b10 << 62 | secrets.randbits(62)).hex


def time_of(birth: str) -> int:
    """In unix seconds; 0 for what doesn't tell it."""
    with contextlib.suppress(ValueError):
        if (made := uuid.UUID(birth)).version == 7:
            return (made.int >> 80) // 1000
    return 0


class Known(NamedTuple):
    """What was read when (monotonic seconds); None: there is no such function."""

    read_at: float
    record: Mapping[str, Any] | None
    spec: FunctionSpec | None


class Registry:
    """A deployment through another gateway is seen after `FRESH_S`; one through this gateway at once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[str, Known] = {}
        self._changes = 0

    async def get(self, name: str, *, param: str | None = None) -> FunctionSpec:
        """By full name. Raises ApiError 404 (`model_not_found`) naming the request field `param`."""
        known = self._known.get(name)
        if known is None or known.spec is None or time.monotonic() - known.read_at >= FRESH_S:
            known = await self._read(name, known)
        if known.spec is None:
            raise function_not_found(short_name(name), param)
        return known.spec

    async def newest(self, name: str) -> FunctionSpec:
        """The same, read now: for whom what was known doesn't do."""
        self._known.pop(name, None)
        return await self.get(name)

    async def _read(self, name: str, known: "Known | None") -> "Known":
        """One caller does; those who come meanwhile are answered with what was known."""
        now, changes = time.monotonic(), self._changes
        if known is not None:
            self._known[name] = Known(now, known.record, known.spec)
        try:
            record = await self._cluster.function(name)
        except BaseException:
            self._known.pop(name, None)
            raise
        same = known is not None and known.record == record
        found = Known(now, record, known.spec if known and same else FunctionSpec.from_dict(record) if record else None)
        if changes == self._changes:
            self._remember(name, found)
        return found

    async def find(self, caller: Caller, name: str, *, param: str | None = None) -> FunctionSpec:
        """What `caller` means by `name`: a function of its own, else one that the operator shares with all. Another
        tenant's is as unknown as one that never was. Raises ApiError 404 (`model_not_found`) naming `param`."""
        if "." in name:
            raise function_not_found(name, param)
        if caller.owner:
            with contextlib.suppress(ApiError):
                return await self.get(full_name(caller.owner, name))
        return await self.get(name, param=param)

    async def own(self, caller: Caller, name: str) -> FunctionSpec:
        """A function that `caller` may replace and delete. Raises ApiError 404."""
        if "." in name:
            raise function_not_found(name)
        return await self._read_now(full_name(caller.owner, name), name)

    async def logged(self, caller: Caller, name: str) -> FunctionSpec:
        """A function whose log `caller` may read: its own, and for the operator any by its full name. Raises ApiError
        404, which tells of one that may only be called."""
        if "." in name and caller.reads_all:
            return await self._read_now(name, name)
        try:
            return await self.own(caller, name)
        except ApiError:
            await self.find(caller, name)
        raise not_found(
            f"The log of function '{name}' is for the function's owner.", code="log_not_found", param="name"
        )

    async def _read_now(self, full: str, name: str) -> FunctionSpec:
        found = await self._cluster.function(full)
        if found is None:
            raise function_not_found(name)
        return FunctionSpec.from_dict(found)

    async def visible(self, caller: Caller) -> dict[str, FunctionSpec]:
        """What `find` finds, by the names that it finds them under."""
        functions = (await self.all()).values()
        shared = {spec.name: spec for spec in functions if not owner_of(spec.name)}
        own = {short_name(spec.name): spec for spec in functions if owner_of(spec.name) == caller.owner}
        return dict(sorted({**shared, **own}.items()))

    async def listed(self, caller: Caller) -> dict[str, FunctionSpec]:
        """The same, and for the operator all tenants' by their full names."""
        return dict(sorted((await self.all()).items())) if caller.reads_all else await self.visible(caller)

    async def all(self) -> dict[str, FunctionSpec]:
        """By full name."""
        return readable(await self._cluster.functions())

    async def change(self, app: str, decide: Callable[[Records, Records], Change]) -> None:
        """In one step; see Cluster.change_functions."""
        change = Change({})

        def decided(functions: Records, releases: Records) -> Change:
            nonlocal change
            change = decide(functions, releases)
            return change

        await self._cluster.change_functions(app, decided)
        self._changes += 1
        for name in (*change.put, *change.delete):
            self._known.pop(name, None)

    async def put(self, spec: FunctionSpec) -> FunctionSpec:
        """Marked as a version of what is deployed under its name, or as a new function."""
        made = spec

        def decide(functions: Records, _: Records) -> Change:
            nonlocal made
            made = replace(spec, born=born_of(functions.get(spec.name)))
            refuse_named(readable(functions), [made], [])
            return Change({made.name: made.to_dict()})

        await self.change("", decide)
        return made

    async def delete(self, name: str) -> None:
        """By full name. Raises ApiError 404, and 409 while a router names it."""

        def decide(functions: Records, _: Records) -> Change:
            if name not in functions:
                raise function_not_found(short_name(name))
            refuse_named(readable(functions), [], [name])
            return Change({}, [name])

        await self.change("", decide)

    def _remember(self, name: str, known: "Known") -> None:
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[name] = known
