"""A model that nobody published: Hugging Face's layout in a store, known by its headers. It loads, but nothing tells
whether its bytes are the right ones: only lengths and versions are checked."""

from stoker.coldstart.chunk_plan import plan_chunks
from stoker.coldstart.failures import ObjectMissing
from stoker.coldstart.manifest import UNPUBLISHED, Chunk, FileEntry, Manifest, read_manifest, revision_of
from stoker.coldstart.repository import scan
from stoker.coldstart.store import ObjectInfo, ObjectStore


def read_or_describe(store: ObjectStore) -> Manifest:
    """The model's manifest, or what its headers tell when it has none. Raises a ColdStartError."""
    try:
        return read_manifest(store)
    except ObjectMissing:
        return describe(store)


def describe(store: ObjectStore) -> Manifest:
    """A manifest without checksums, for the versions that are stored now. Its revision names those versions."""
    repository = scan(store)
    files = [entry_of(repository.found[name]) for name in repository.shards]
    documents = [entry_of(repository.found[name]) for name in repository.documents]
    return Manifest(
        revision=revision_of(files, documents),
        files=files,
        chunks=[Chunk(*span, None) for span in plan_chunks(repository.tensors)],
        tensors=repository.tensors,
        documents={entry.name: entry for entry in documents},
        aliases=repository.aliases,
    )


def entry_of(found: ObjectInfo) -> FileEntry:
    return FileEntry(found.key, found.size, found.etag, UNPUBLISHED + found.etag)
