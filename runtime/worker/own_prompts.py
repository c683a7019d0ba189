"""The prompts of one language model's replica in the object store: what requests had in common is kept there when it
goes to sleep, and is in its cache again when it wakes. Nothing here fails a start or a request."""

import asyncio
import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from stoker.coldstart.failures import ColdStartError, FetchCancelled
from stoker.coldstart.timeline import Timeline
from stoker.runtime.pool.prompt_file import PromptsUnusable
from stoker.runtime.requirement import InvalidSpec
from stoker.runtime.spec import FunctionSpec
from stoker.runtime.wire import Frame
from stoker.runtime.worker.engine_link import EngineDied, EngineLink
from stoker.runtime.worker.host import Host
from stoker.runtime.worker.weights_feed import WeightsFeed

EXPORT_S = 1.0
"""So much longer a replica may take to fall asleep, and as much again until the store has what it leaves there."""
MOST_HOLD_S = 10.0
"""The first requests wait for what is on its way as long as it would take to compute it, and never longer than this."""
FIND_S = 0.1
"""And so long until it is known whether there is anything."""
LOOK_S = 0.02
FAILURES = (ColdStartError, PromptsUnusable, RedisError, EngineDied, OSError, InvalidSpec)

log = logging.getLogger("stoker.worker")


class OwnPrompts:
    """`accepting` is done when the engine has the model."""

    def __init__(
        self, model: str, spec: FunctionSpec, host: Host, engine: EngineLink, accepting: asyncio.Future[None]
    ) -> None:
        self._model = model
        self._spec = spec
        self._host = host
        self._engine = engine
        self._accepting = accepting
        self._wanted = spec.kind == "llm" and spec.model.prefix_cache and host.settings.prompt_cache_mb > 0
        self._made_for: dict[str, Any] = {}
        self._feed: WeightsFeed | None = None
        self._stop = threading.Event()
        self._restoring: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._hold_s = 0.0
        self._answers: dict[str, asyncio.Future[Frame]] = {}

    def begin(self, name: str, timeline: Timeline, feed: WeightsFeed | None = None) -> None:
        """Fetches in the background what an earlier replica has left, once all of the `feed` is asked for. `name` is
        the same for models that compute the same."""
        self._feed = feed
        if self._wanted:
            self._restoring = asyncio.create_task(self._restore(name, timeline))

    async def settle(self) -> None:
        """Waits for what is on its way, as long as that is worth while."""
        if self._restoring is None or (self._feed and not self._feed.is_under_way):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIND_S):
                await self._looked.wait()
        if self._hold_s:
            await asyncio.wait({self._restoring}, timeout=self._hold_s)

    def told(self, frame: Frame) -> None:
        """The engine's answer."""
        answer = self._answers.pop(frame["path"], None)
        if answer and not answer.done():
            answer.set_result(frame)

    async def export(self, falls_asleep: bool) -> Path | None:
        """A file with what is worth keeping, for `keep`; None: nothing is, or what is kept already."""
        await self.close()
        if not falls_asleep or not self._made_for:
            return None
        path = await asyncio.to_thread(self._host.prompts.scratch)
        blocks = 0
        try:
            async with asyncio.timeout(EXPORT_S):
                blocks = await self._export(path) if await self._is_current() else 0
        except TimeoutError:
            log.warning("prompts of %s are not kept: that took more than %s s", self._spec.name, EXPORT_S)
        except FAILURES as error:
            log.warning("prompts of %s are not kept: %s", self._spec.name, error)
        if not blocks:
            path.unlink(missing_ok=True)
        return path if blocks else None

    async def keep(self, path: Path | None) -> None:
        """Puts it into the store; what takes longer than a moment goes on behind the replica's back."""
        if path:
            await asyncio.wait({asyncio.create_task(asyncio.to_thread(self._keep, path))}, timeout=EXPORT_S)

    async def close(self) -> None:
        """Nothing is fetched any more."""
        self._stop.set()
        if self._restoring:
            self._restoring.cancel()
            await asyncio.gather(self._restoring, return_exceptions=True)

    async def _restore(self, name: str, timeline: Timeline) -> None:
        store, path = self._host.prompts, None
        try:
            self._made_for = await self._purpose(name)
            while self._feed and not self._feed.is_under_way:
                await asyncio.sleep(LOOK_S)
            if found := await asyncio.to_thread(store.find, self._spec.name):
                # What a slow store has would come too late for them.
                if not store.bytes_s or found.size / store.bytes_s < found.worth_s:
                    self._hold_s = min(found.worth_s, MOST_HOLD_S)
                self._looked.set()
                path = await asyncio.to_thread(store.scratch)
                with timeline.phase("fetch prompts", bytes=found.size):
                    await asyncio.to_thread(store.fetch, found, self._made_for, path, self._stop)
                await asyncio.shield(self._accepting)
                with timeline.phase("restore prompts", bytes=found.size) as facts:
                    facts["blocks"] = await self._ask({"t": "import prompts"}, path)
        except FetchCancelled:
            log.info("kept prompts of %s came too late", self._spec.name)
        except FAILURES as error:
            log.warning("kept prompts of %s are not used: %s", self._spec.name, error)
        finally:
            self._looked.set()
            if path:
                path.unlink(missing_ok=True)

    async def _purpose(self, name: str) -> dict[str, Any]:
        """Whose prompts, computed how, and before which tenant was removed."""
        era = await self._host.cluster.era()
        return {"function": self._spec.name, "born": self._spec.born, "model": name, "era": era}

    async def _is_current(self) -> bool:
        """False after its function was deleted, or deployed again with another model."""
        record = await self._host.cluster.function(self._spec.name)
        if record is None or await self._host.cluster.era() != self._made_for["era"]:
            return False
        deployed, own = FunctionSpec.from_dict(record), self._spec
        return (deployed.born, deployed.weights, deployed.engine_options) == (own.born, own.weights, own.engine_options)

    async def _export(self, path: Path) -> int:
        store, feed = self._host.prompts, self._feed
        rate = store.bytes_s or (feed.bytes_s if feed else 0.0)
        limits = {"bytes": store.most_bytes, "bytes_s": rate, "within_s": EXPORT_S}
        return await self._ask({"t": "export prompts", "made_for": self._made_for, **limits}, path)

    async def _ask(self, frame: Frame, path: Path) -> int:
        """How many blocks it was. Raises PromptsUnusable or EngineDied."""
        self._answers[str(path)] = answer = asyncio.get_running_loop().create_future()
        self._engine.send({**frame, "model": self._model, "path": str(path)})
        told = await answer
        if told["error"]:
            raise PromptsUnusable(told["error"])
        return told["blocks"]

    def _keep(self, path: Path) -> None:
        try:
            size = self._host.prompts.keep(self._spec.name, path)
            log.info("%d bytes of prompts of %s are kept", size, self._spec.name)
        except (ColdStartError, OSError) as error:
            log.warning("prompts of %s are not kept: %s", self._spec.name, error)
