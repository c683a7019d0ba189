"""The Lua scripts: one file each, with the shared parts its first line names, run by content hash."""

import asyncio
import hashlib
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from stoker.queue import keys
from stoker.queue.pipeline import PipelinedRedis

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
            return await self._redis.execute_command("EVALSHA", wanted.sha, 1, keys.meta(function), *arguments)
        except NoScriptError:
            return await self._redis.eval(wanted.source, 1, keys.meta(function), *arguments)  # type: ignore[misc]

    def begin(self, name: str, function: str, arguments: Sequence[Argument]) -> Awaitable[Any]:
        """Like `run`, but what can be sent at once is."""
        command = ("EVALSHA", script(name).sha, 1, keys.meta(function), *arguments)
        sent = self._redis.sent(*command) if isinstance(self._redis, PipelinedRedis) else None
        return self.run(name, function, arguments) if sent is None else self._reply(sent, name, function, arguments)

    async def _reply(self, sent: Awaitable[Any], name: str, function: str, arguments: Sequence[Argument]) -> Any:
        try:
            return await sent
        except NoScriptError:
            return await self.run(name, function, arguments)

    async def run_each(self, name: str, functions: Sequence[str], arguments: Sequence[Argument] = ()) -> list[Any]:
        """The same script with the same arguments for many functions, in one round trip."""
        return await asyncio.gather(*(self.run(name, function, arguments) for function in functions))
