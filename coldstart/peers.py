"""Reads chunks from the caches of other hosts. They may be slow, gone or wrong: that costs little and no bytes."""

import http.client
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from stoker.coldstart.chunk_cache import chunk_name, domain_of
from stoker.coldstart.failures import FetchCancelled
from stoker.coldstart.http_connection import Cancelled, HttpConnection, Origin, Patience
from stoker.coldstart.manifest import Chunk
from stoker.coldstart.peer_access import signed_now
from stoker.coldstart.sources import is_right
from stoker.coldstart.store import ReadWatch

PATIENCE = Patience(connect_s=0.5, first_byte_s=1.0, stall_s=1.0, body_s=5.0)
READS_PER_PEER = 4
MISSES = 3
MAX_ERROR_BODY = 4 << 10

log = logging.getLogger("stoker.coldstart")


@dataclass(eq=False, slots=True)
class Peer:
    """`misses` counts chunks in a row that it didn't have: it is dropped after a few, at once for anything worse."""

    origin: Origin
    running: int = 0
    misses: int = 0
    dropped: bool = False
    idle: list[HttpConnection] = field(default_factory=list)


class PeerSource:
    """Peers of one load, "host:port" each. A few reads of each at a time: the rest goes to the store meanwhile."""

    def __init__(self, addresses: Sequence[str], key: bytes, url: str) -> None:
        self._key, self._domain = key, domain_of(url)
        self._lock = threading.Lock()
        self._peers = [Peer(origin_of(address)) for address in addresses]

    def read(self, chunk: Chunk, into: memoryview, watch: ReadWatch) -> bool:
        """Fills `into` with the chunk's verified bytes. False when no peer has it, or has time for it."""
        asked: set[Peer] = set()
        while (peer := self._borrow(asked)) is not None:
            asked.add(peer)
            try:
                if self._read_from(peer, chunk, into, watch):
                    return True
            finally:
                with self._lock:
                    peer.running -= 1
        return False

    def close(self) -> None:
        with self._lock:
            for peer in self._peers:
                for connection in peer.idle:
                    connection.close()
                peer.idle.clear()

    def _borrow(self, asked: set[Peer]) -> Peer | None:
        """The least busy one that wasn't asked yet."""
        with self._lock:
            free = [
                peer for peer in self._peers if not peer.dropped and peer not in asked and peer.running < READS_PER_PEER
            ]
            peer = min(free, key=lambda peer: (peer.running, peer.misses), default=None)
            if peer:
                peer.running += 1
            return peer

    def _read_from(self, peer: Peer, chunk: Chunk, into: memoryview, watch: ReadWatch) -> bool:
        with self._lock:
            connection = peer.idle.pop() if peer.idle else HttpConnection(peer.origin, None, PATIENCE)
        try:
            status = self._exchange(connection, chunk, into, watch)
        except Cancelled as error:
            connection.close()
            raise FetchCancelled(address_of(peer), None, "the read was cancelled") from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self._drop(peer, f"{type(error).__name__}: {error}")
            return False
        with self._lock:
            peer.idle.append(connection)
        if status == http.client.NOT_FOUND:
            return self._missed(peer)
        if status != http.client.OK or not is_right(chunk, into, watch):
            self._drop(peer, f"HTTP {status}" if status != http.client.OK else "it sent bytes of another checksum")
            return False
        peer.misses = 0
        return True

    def _exchange(self, connection: HttpConnection, chunk: Chunk, into: memoryview, watch: ReadWatch) -> int:
        path = f"/{self._domain}/{chunk_name(chunk)}"
        response = connection.request(path, signed_now(self._key, path), watch)
        if response.status != http.client.OK:
            connection.read(response, MAX_ERROR_BODY, watch)
            return response.status
        if response.length != len(into):
            raise http.client.HTTPException(f"it sent {response.length} bytes")
        if connection.receive(response, into, watch) < len(into):
            raise http.client.IncompleteRead(b"", len(into))
        return response.status

    def _missed(self, peer: Peer) -> bool:
        peer.misses += 1
        if peer.misses >= MISSES:
            self._drop(peer, "it has too little of this model")
        return False

    def _drop(self, peer: Peer, reason: str) -> None:
        with self._lock:  # one read of several at once says why
            first, peer.dropped = not peer.dropped, True
        if first:
            log.info("peer %s is not asked any more in this load: %s", address_of(peer), reason)


def origin_of(address: str) -> Origin:
    host, _, port = address.rpartition(":")
    return Origin("http", host.strip("[]"), int(port))


def address_of(peer: Peer) -> str:
    return f"{peer.origin.host}:{peer.origin.port}"
