"""What a published model consists of: files, checksummed chunks in load order, and the tensors in them."""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import msgpack
import xxhash

from stoker.coldstart.failures import ManifestInvalid, ObjectAltered
from stoker.coldstart.store import ObjectStore

MANIFEST_KEY = "manifest.msgpack"
VERSION = 1
CHUNK_BYTES = 16 << 20
DOCUMENT_READS = 8
UNPUBLISHED = "version "

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class FileEntry(NamedTuple):
    """`digest` is the SHA-256 of the whole file, in hex; `etag` is the store's when it was published. Of a model that
    was never published nothing but the version is known: `digest` is UNPUBLISHED and that."""

    name: str
    size: int
    etag: str
    digest: str


class Chunk(NamedTuple):
    """`length` bytes of a file from absolute `offset` on; `checksum` is their XXH3-64, None for a model that was never
    published."""

    file: int
    offset: int
    length: int
    checksum: int | None


class TensorEntry(NamedTuple):
    """Little-endian, row-major, from absolute `offset` of its file on; `dtype` in safetensors' spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`aliases` maps the name of a tied tensor to the stored one. `revision` follows from the content alone."""

    revision: str
    files: list[FileEntry]
    chunks: list[Chunk]
    tensors: list[TensorEntry]
    documents: dict[str, FileEntry]
    aliases: dict[str, str] = field(default_factory=dict)
    version: int = VERSION

    @property
    def total_bytes(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def published(self) -> bool:
        """False for one that was made from the headers of a model without a manifest: it has no checksums."""
        return all(chunk.checksum is not None for chunk in self.chunks)

    def pack(self) -> bytes:
        """A msgpack map of version, XXH3-64 of the body, and the body: the fields in msgpack."""
        return enveloped(packed({name: getattr(self, name) for name in self.__slots__}))

    @classmethod
    def unpack(cls, data: bytes, name: str = MANIFEST_KEY) -> "Manifest":
        """Raises ManifestInvalid (naming `name`) for bytes that aren't a consistent manifest of this version."""
        try:
            manifest = decode(data)
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise ManifestInvalid(name, None, f"not a manifest ({type(error).__name__}: {error})") from error
        for problem in problems(manifest):
            raise ManifestInvalid(name, None, problem)
        return manifest


def read_manifest(store: ObjectStore) -> Manifest:
    return Manifest.unpack(store.read(MANIFEST_KEY), f"{store.url}/{MANIFEST_KEY}")


def revision_of(files: Iterable[FileEntry], documents: Iterable[FileEntry]) -> str:
    """SHA-256 over names, sizes and digests, so that the same content has the same revision in every store."""
    entries = sorted((entry.name, entry.size, entry.digest) for entry in [*files, *documents])
    return hashlib.sha256(packed(entries)).hexdigest()


def packed(value: Any) -> bytes:
    data = msgpack.packb(value)
    assert data is not None
    return data


def enveloped(body: bytes) -> bytes:
    return packed({"version": VERSION, "checksum": xxhash.xxh3_64_intdigest(body), "body": body})


def read_documents(store: ObjectStore, manifest: Manifest, names: Collection[str] = ()) -> dict[str, bytes]:
    """The published small files (all, or those of `names` that exist). Raises ObjectAltered for a changed one."""
    wanted = [entry for name, entry in manifest.documents.items() if not names or name in names]
    with ThreadPoolExecutor(DOCUMENT_READS) as pool:
        read = pool.map(lambda entry: read_checked(store, entry), wanted)
        return {entry.name: data for entry, data in zip(wanted, read, strict=True)}


def read_checked(store: ObjectStore, entry: FileEntry) -> bytes:
    if entry.digest.startswith(UNPUBLISHED):
        found = bytearray(entry.size)
        store.read_range(entry.name, 0, memoryview(found), entry.etag)
        return bytes(found)
    data = store.read(entry.name)
    if hashlib.sha256(data).hexdigest() != entry.digest:
        raise ObjectAltered(f"{store.url}/{entry.name}", None, "its SHA-256 is not the published one")
    return data


def decode(data: bytes) -> Manifest:
    envelope = msgpack.unpackb(data)
    if envelope["version"] != VERSION:
        raise ValueError(f"its version is {envelope['version']}, this program reads {VERSION}")
    if envelope["checksum"] != xxhash.xxh3_64_intdigest(envelope["body"]):
        raise ValueError("its checksum doesn't match")
    if data != enveloped(envelope["body"]):
        # The same values can be told by other bytes, such as a signed checksum.
        raise ValueError("a byte outside its body was changed")
    fields = msgpack.unpackb(envelope["body"])
    return Manifest(
        revision=fields["revision"],
        files=[FileEntry(*entry) for entry in fields["files"]],
        chunks=[Chunk(*chunk) for chunk in fields["chunks"]],
        tensors=[TensorEntry(name, dtype, tuple(shape), *place) for name, dtype, shape, *place in fields["tensors"]],
        documents={name: FileEntry(*entry) for name, entry in fields["documents"].items()},
        aliases=dict(fields["aliases"]),
    )


def problems(manifest: Manifest) -> Iterable[str]:
    """Every way in which a decoded manifest contradicts itself."""
    if manifest.revision != revision_of(manifest.files, manifest.documents.values()):
        yield "its revision doesn't match its file digests"
    names = [tensor.name for tensor in manifest.tensors]
    if len(set(names)) != len(names):
        yield "a tensor is listed twice"
    yield from (f"alias {alias} names no tensor" for alias, name in manifest.aliases.items() if name not in set(names))
    yield from (problem for tensor in manifest.tensors for problem in tensor_problems(tensor))
    numbers = {item.file for item in [*manifest.chunks, *manifest.tensors]} - set(range(len(manifest.files)))
    yield from (f"a chunk or tensor names file {number}" for number in numbers)
    spans = [[(t.offset, t.length) for t in manifest.tensors if t.file == file] for file in range(len(manifest.files))]
    yield from tiling_problems(manifest, spans)


def tensor_problems(tensor: TensorEntry) -> Iterable[str]:
    if tensor.dtype not in ITEM_BYTES:
        yield f"tensor {tensor.name} has unknown dtype {tensor.dtype}"
    elif prod(tensor.shape) * ITEM_BYTES[tensor.dtype] != tensor.length or min(tensor.shape, default=0) < 0:
        yield f"tensor {tensor.name} of shape {list(tensor.shape)} can't have {tensor.length} bytes"


def tiling_problems(manifest: Manifest, spans: Sequence[Sequence[tuple[int, int]]]) -> Iterable[str]:
    """Chunks must cover every tensor byte exactly once and stay inside their files."""
    for number, entry in enumerate(manifest.files):
        tiles = sorted((c.offset, c.length) for c in manifest.chunks if c.file == number)
        if any(offset < 0 or not 0 < length <= CHUNK_BYTES or offset + length > entry.size for offset, length in tiles):
            yield f"a chunk lies outside {entry.name} or is over {CHUNK_BYTES} bytes"
        elif merged(spans[number]) != merged(tiles):
            yield f"the chunks of {entry.name} don't cover its tensors exactly once"


def merged(spans: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Joins adjacent `(offset, length)` spans into `[start, end]`; an overlap yields an entry that matches nothing."""
    ordered = sorted(span for span in spans if span[1])
    joined: list[list[int]] = []
    for offset, length in ordered:
        if joined and joined[-1][1] == offset:
            joined[-1][1] = offset + length
        elif joined and joined[-1][1] > offset:
            joined.append([offset, -1])
        else:
            joined.append([offset, offset + length])
    return joined
