"""Deployed functions as the gateway reads them: cached for a moment, to save each call a round trip."""

import contextlib
import time
import uuid
from dataclasses import replace

from stoker.queue.cluster import Cluster
from stoker.runtime.gateway.auth import Caller
from stoker.runtime.gateway.errors import ApiError, function_not_found
from stoker.runtime.spec import FunctionSpec, full_name, owner_of, readable, short_name

FRESH_S = 1.0
MOST_KNOWN = 10_000


class Registry:
    """A deployment through another gateway is seen after `FRESH_S`; one through this gateway at once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[str, tuple[float, FunctionSpec | None]] = {}

    async def get(self, name: str, *, param: str | None = None) -> FunctionSpec:
        """By full name. Raises ApiError 404 (`model_not_found`) naming the request field `param`."""
        read_at, spec = self._known.get(name, (0.0, None))
        if not read_at or time.monotonic() - read_at >= FRESH_S:
            found = await self._cluster.function(name)
            spec = self._remember(name, FunctionSpec.from_dict(found) if found else None)
        if spec is None:
            raise function_not_found(short_name(name), param)
        return spec

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
        found = await self._cluster.function(full_name(caller.owner, name))
        if found is None:
            raise function_not_found(name)
        return FunctionSpec.from_dict(found)

    async def visible(self, caller: Caller) -> dict[str, FunctionSpec]:
        """What `find` finds, by the names that it finds them under."""
        functions = (await self.all()).values()
        shared = {spec.name: spec for spec in functions if not owner_of(spec.name)}
        own = {short_name(spec.name): spec for spec in functions if owner_of(spec.name) == caller.owner}
        return dict(sorted({**shared, **own}.items()))

    async def all(self) -> dict[str, FunctionSpec]:
        """By full name."""
        return readable(await self._cluster.functions())

    async def put(self, spec: FunctionSpec) -> None:
        await self._cluster.put_function(spec.name, spec.to_dict())
        self._remember(spec.name, spec)

    async def with_birth(self, spec: FunctionSpec) -> FunctionSpec:
        """Marks the spec as a version of what is deployed under its name, or as a new function."""
        found = await self._cluster.function(spec.name) or {}
        return replace(spec, born=found.get("born") or uuid.uuid4().hex)

    async def replace(self, specs: list[FunctionSpec], deleted: list[str]) -> None:
        """All of it in one step."""
        await self._cluster.replace_functions({spec.name: spec.to_dict() for spec in specs}, deleted)
        for spec in specs:
            self._remember(spec.name, spec)
        for name in deleted:
            self._known.pop(name, None)

    async def delete(self, name: str) -> None:
        """By full name. Raises ApiError 404."""
        self._known.pop(name, None)
        if not await self._cluster.delete_function(name):
            raise function_not_found(short_name(name))

    def _remember(self, name: str, spec: FunctionSpec | None) -> FunctionSpec | None:
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[name] = (time.monotonic(), spec)
        return spec
