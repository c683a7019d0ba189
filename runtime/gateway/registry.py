"""Deployed functions as the gateway reads them: cached for a moment, to save each call a round trip."""

import time
import uuid
from dataclasses import replace
from typing import Any

from stoker.queue.cluster import Cluster
from stoker.runtime.gateway.errors import function_not_found
from stoker.runtime.spec import FunctionSpec, readable

FRESH_S = 1.0


class Registry:
    """A deployment through another gateway is seen after `FRESH_S`; one through this gateway at once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[str, tuple[float, FunctionSpec]] = {}

    async def get(self, name: str, *, param: str | None = None) -> FunctionSpec:
        """Raises ApiError 404 (`model_not_found`) naming the request field `param`."""
        read_at, spec = self._known.get(name, (0.0, None))
        if spec is not None and time.monotonic() - read_at < FRESH_S:
            return spec
        found = await self._cluster.function(name)
        if found is None:
            self._known.pop(name, None)
            raise function_not_found(name, param)
        return self._remember(found)

    async def all(self) -> dict[str, FunctionSpec]:
        return readable(await self._cluster.functions())

    async def put(self, spec: FunctionSpec) -> None:
        await self._cluster.put_function(spec.name, spec.to_dict())
        self._remember(spec.to_dict())

    async def with_birth(self, spec: FunctionSpec) -> FunctionSpec:
        """Marks the spec as a version of what is deployed under its name, or as a new function."""
        found = await self._cluster.function(spec.name) or {}
        return replace(spec, born=found.get("born") or uuid.uuid4().hex)

    async def replace(self, specs: list[FunctionSpec], deleted: list[str]) -> None:
        """All of it in one step."""
        await self._cluster.replace_functions({spec.name: spec.to_dict() for spec in specs}, deleted)
        for spec in specs:
            self._remember(spec.to_dict())
        for name in deleted:
            self._known.pop(name, None)

    async def delete(self, name: str) -> None:
        """Raises ApiError 404."""
        self._known.pop(name, None)
        if not await self._cluster.delete_function(name):
            raise function_not_found(name)

    def _remember(self, found: dict[str, Any]) -> FunctionSpec:
        spec = FunctionSpec.from_dict(found)
        self._known[spec.name] = (time.monotonic(), spec)
        return spec
