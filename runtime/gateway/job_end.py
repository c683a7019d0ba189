"""`Prefer: wait=N` (RFC 7240) on the routes of jobs: the answer comes when the job has ended, or after N seconds."""

import asyncio
import re
from contextlib import suppress

from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.endpoint import Incoming
from stoker.runtime.gateway.following import Following
from stoker.runtime.gateway.letting_go import GatewayStops

SECONDS = re.compile(r"\d{1,9}(?:\.\d{1,3})?", re.ASCII)


def preferred_wait(incoming: Incoming) -> float | None:
    """Seconds that the client would wait: None when it doesn't say, 0 for not at all."""
    prefer = incoming.headers.get("prefer")
    return wait_of(prefer) if prefer else None


def wait_of(prefer: str) -> float | None:
    """As RFC 7240 has it: what isn't understood is as if it weren't there; of what is said twice, the first counts."""
    said = [part.partition(";")[0].partition("=") for part in prefer.lower().split(",")]
    stated = {name.strip(): value.strip().strip('"') for name, _, value in reversed(said)}
    if SECONDS.fullmatch(stated.get("wait", "")):
        return float(stated["wait"])
    return None if stated.get("respond-async") != "" else 0.0


async def until_ended(gateway: Gateway, job_id: str, wait_s: float) -> None:
    """Whoever waits here may leave: the job goes on. Shorter when the gateway stops."""
    with suppress(TimeoutError, GatewayStops):
        async with Following(gateway, job_id) as following, asyncio.timeout(wait_s):
            async for _ in following:
                pass
