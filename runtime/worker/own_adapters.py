"""The adapters of one replica's function: found in the store when somebody first asks for them, and again after that
failed."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stoker.coldstart.failures import ColdStartError, StoreUnavailable
from stoker.runtime.adapters.shelf import AdapterShelf
from stoker.runtime.worker.replica import Record


class OwnAdapters:
    """`adapters` maps names to store URLs. Whatever is found under a name stays it as long as the replica lives."""

    def __init__(self, adapters: Mapping[str, str], shelf: AdapterShelf) -> None:
        self._urls = adapters
        self._shelf = shelf
        self._found: dict[str, asyncio.Task[Record]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    def ask(self, name: str, found: Callable[[Record], None], failed: Callable[[Record, bool], None]) -> None:
        """Calls `found` with the fields of an AdapterFile, or `failed` with an error record and whether another attempt
        may help."""
        task = asyncio.create_task(self._answer(name, found, failed))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def distrust(self, name: str) -> bool:
        """The engine couldn't load what was found. True: that was this host's copy, and another attempt gets a new
        one."""
        task = self._found.pop(name, None)
        return bool(task and succeeded(task) and self._shelf.discard(Path(task.result()["path"])))

    async def close(self) -> None:
        """Nobody is answered any more."""
        tasks = [*self._asking, *self._found.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, name: str, found: Callable[[Record], None], failed: Callable[[Record, bool], None]) -> None:
        try:
            fields = await self._find(name)
        except (ColdStartError, ValueError) as error:
            message = f"The adapter '{name}' can't be loaded: {error}"
            failed(
                {"type": "model_error", "message": message, "code": "adapter_failed"},
                isinstance(error, StoreUnavailable),
            )
        else:
            found(fields)

    async def _find(self, name: str) -> Record:
        """Raises ColdStartError or ValueError."""
        if name not in self._urls:
            raise ValueError("this version of the function doesn't have it")
        task = self._found.get(name)
        if task and succeeded(task) and not self._shelf.keeps(Path(task.result()["path"])):
            task = None
        if task is None:
            task = self._found[name] = asyncio.create_task(asyncio.to_thread(self._shelf.fetch, self._urls[name]))
        try:
            return await asyncio.shield(task)
        except Exception:
            if self._found.get(name) is task:
                del self._found[name]
            raise


def succeeded(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None
