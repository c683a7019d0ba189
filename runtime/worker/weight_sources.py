"""Where this host's loads find chunks nearer than the store: its own cache on disk, and the caches of other hosts; and
what it offers them in turn."""

import asyncio
import logging
import socket
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.exceptions import RedisError

from stoker.coldstart.chunk_cache import ChunkCache
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.peer_server import PeerServer
from stoker.coldstart.peers import PeerSource
from stoker.coldstart.store import ObjectStore
from stoker.queue.holders import Holders
from stoker.runtime.secret import MIN_CHARACTERS, derive
from stoker.runtime.settings import Settings

ANNOUNCE_S = 10.0
TTL_MS = 30_000
FIND_S = 0.5
PURPOSE = "peers"

log = logging.getLogger("stoker.worker")


class WeightSources:
    """Peers take part only where `settings.peer_port` is set: then the cache is served there, to whoever knows the
    deployment's secret. Raises ValueError when there is none."""

    def __init__(self, settings: Settings, client: Redis | None = None) -> None:
        self._settings = settings
        self._holders = Holders(client) if client and settings.peer_port else None
        if self._holders and len(settings.secret) < MIN_CHARACTERS:
            raise ValueError(f"peers need a secret of {MIN_CHARACTERS} characters")
        self._key = derive(settings.secret, PURPOSE)
        self._server: PeerServer | None = None
        self._held: set[str] = set()
        self._distrusted: set[str] = set()
        self._announcing: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> None:
        if not self._holders or not self._max_bytes:
            return
        try:
            self._server = PeerServer(self._settings.cache_folder, self._key, self._settings.peer_port)
        except OSError as error:
            # Another agent of this machine has the port; they share the cache, so it serves for both.
            log.warning("this host's weights are not offered to others: port %s: %s", self._settings.peer_port, error)
            return
        self._server.start()
        self.address = f"{own_address(self._settings.redis_url)}:{self._server.port}"
        self._announcing = asyncio.create_task(self._announce())

    async def close(self) -> None:
        if self._announcing and self._holders:
            self._announcing.cancel()
            await asyncio.gather(self._announcing, return_exceptions=True)
            try:
                await self._holders.withdraw(self.address, self._held)
            except RedisError as error:
                log.info("can't withdraw this host's weights: %s", error)
        if self._server:
            await asyncio.to_thread(self._server.close)

    def cache(self, store: ObjectStore) -> ChunkCache | None:
        """None for a folder: it is as near as its copy would be."""
        if isinstance(store, FileStore) or not self._max_bytes:
            return None
        return ChunkCache(self._settings.cache_folder, self._max_bytes, store.url)

    async def peers(self, store: ObjectStore, manifest: Manifest) -> PeerSource | None:
        """Other hosts that have loaded this revision lately."""
        if self._holders is None or isinstance(store, FileStore):
            return None
        try:
            async with asyncio.timeout(FIND_S):
                found = await self._holders.find(manifest.revision)
        except (RedisError, TimeoutError) as error:
            log.info("can't look for peers: %s", error)
            return None
        others = [address for address in found if address != self.address]
        return PeerSource(others, self._key, store.url) if others else None

    def verifies(self, manifest: Manifest, device: str, dtype: str) -> bool:
        """Whether the host takes the checksums. A GPU does it in a fraction of the time, where it has the bytes as they
        were published; but the host finds out which source had the wrong ones and asks another, so a model that came
        out wrong is its work from then on."""
        stored = {tensor.dtype for tensor in manifest.tensors}
        as_published = dtype in ("auto", "bfloat16") and stored == {"BF16"}
        return device == "cpu" or not as_published or manifest.revision in self._distrusted

    def distrust(self, manifest: Manifest) -> None:
        self._distrusted.add(manifest.revision)

    async def loaded(self, store: ObjectStore, manifest: Manifest) -> None:
        """The model's chunks are in the cache now, as far as they fit: other hosts may ask for them."""
        if self._announcing is None or self.cache(store) is None or not manifest.published:
            return
        self._held.add(manifest.revision)
        await self._announce_once([manifest.revision])

    async def _announce(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            await self._announce_once(self._held)

    async def _announce_once(self, revisions: "set[str] | list[str]") -> None:
        assert self._holders is not None
        try:
            await self._holders.announce(self.address, sorted(revisions), TTL_MS)
        except RedisError as error:
            log.info("can't announce this host's weights: %s", error)

    @property
    def _max_bytes(self) -> int:
        return int(self._settings.cache_gb * 1e9)


def own_address(redis_url: str) -> str:
    """This host's address on the network in which it reaches the queue's server."""
    parts = urlsplit(redis_url)
    if not parts.hostname:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname, parts.port or 6379))
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        return probe.getsockname()[0]
