"""What routers learned from their examples: kept in the object store under a digest of what it was learned from."""

import asyncio
import hashlib
from collections.abc import Sequence

import msgpack

from stoker.coldstart.failures import ObjectMissing
from stoker.coldstart.store import ObjectStore
from stoker.runtime.routing.classifier import Classifier

MOST_KEPT = 1000


def lessons_key(lessons: Sequence[tuple[str, str]], encoder: str, version: str) -> str:
    """Of what is learned from these (text, target) with this version of an embedding function."""
    told = bytes(msgpack.packb([list(lessons), encoder, version]) or b"")
    return f"routers/{hashlib.sha256(told).hexdigest()}"


class Lessons:
    """Classifiers that were asked for are kept in memory."""

    def __init__(self) -> None:
        self._kept: dict[str, Classifier] = {}

    async def learned(self, store: ObjectStore, key: str) -> Classifier | None:
        """Raises ColdStartError when the store can't be read."""
        if key not in self._kept:
            try:
                data = await asyncio.to_thread(store.read, key)
            except ObjectMissing:
                return None
            self._keep(key, Classifier.from_bytes(data))
        return self._kept[key]

    async def put(self, store: ObjectStore, key: str, classifier: Classifier) -> None:
        await asyncio.to_thread(store.write, key, classifier.to_bytes())
        self._keep(key, classifier)

    def _keep(self, key: str, classifier: Classifier) -> None:
        if len(self._kept) >= MOST_KEPT:
            self._kept.clear()
        self._kept[key] = classifier
