"""Whether a function keeps to its memory, also where no limit can be set: in its sub-processes, beside CUDA."""

import asyncio
from contextlib import suppress

import psutil

LOOK_S = 0.5


async def beyond(pid: int, most: int) -> int:
    """Returns how many bytes the process and its children have for themselves, once that is more than `most`."""
    while (size := await asyncio.to_thread(own_bytes, pid)) <= most:
        await asyncio.sleep(LOOK_S)
    return size


def own_bytes(pid: int) -> int:
    """What is given back when they end: pages that are shared with the zygote don't count. 0 when they are gone."""
    total = 0
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_full_info().uss
    return total
