"""The Lua scripts: one file each, with the shared parts its first line names, run by content hash."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from stoker.queue import keys

Argument = str | bytes | int | float

HEADER = "-- uses: "


@dataclass(frozen=True, slots=True)
class Script:
    source: str
    sha: str


@cache
def script(name: str) -> Script:
    """`name`.lua behind the parts of its "-- uses: flags | part part" line, in that order.

    The flags become the script's shebang: `allow-oom` for what must still work, and frees memory, on a full server.
    """
    body = read(name)
    first = body.split("\n", 1)[0]
    if not first.startswith(HEADER):
        raise ValueError(f"{name}.lua must start with {HEADER!r}")
    flags, _, parts = first.removeprefix(HEADER).partition("|")
    shebang = f"#!lua flags={flags.strip()}" if flags.strip() else "#!lua"
    source = "\n".join([shebang, *(read(part) for part in parts.split()), body])
    return Script(source, hashlib.sha1(source.encode()).hexdigest())


def read(name: str) -> str:
    return Path(__file__).with_name(f"{name}.lua").read_text()


class Scripts:
    def __init__(self, client: Redis) -> None:
        self._redis = client

    async def run(self, name: str, function: str, arguments: Sequence[Argument] = ()) -> Any:
        """One round trip; a second one sends the source when the server doesn't know it (any more)."""
        wanted = script(name)
        try:
            return await self._redis.evalsha(wanted.sha, 1, keys.meta(function), *arguments)  # type: ignore[misc]
        except NoScriptError:
            return await self._redis.eval(wanted.source, 1, keys.meta(function), *arguments)  # type: ignore[misc]

    async def run_each(self, name: str, functions: Sequence[str]) -> list[Any]:
        """The same script without arguments for many functions, in one round trip."""
        wanted = script(name)
        try:
            return await self._pipeline(wanted, functions)
        except NoScriptError:
            await self._redis.script_load(wanted.source)
            return await self._pipeline(wanted, functions)

    async def _pipeline(self, wanted: Script, functions: Sequence[str]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for function in functions:
                pipeline.evalsha(wanted.sha, 1, keys.meta(function))
            return await pipeline.execute()
