"""What is read of a published model before its weights: the manifest and the small files."""

from stoker.coldstart.failures import ColdStartError
from stoker.coldstart.headers import read_or_describe
from stoker.coldstart.manifest import Manifest, read_documents
from stoker.coldstart.store import ObjectStore, open_store


def read_model(url: str) -> tuple[ObjectStore, Manifest]:
    """The store and the manifest of a published model. Raises ColdStartError."""
    store = open_store(url)
    return store, read_or_describe(store)


def read_with_tokenizer(store: ObjectStore, manifest: Manifest) -> dict[str, bytes]:
    """The small documents of a published model. Raises ColdStartError."""
    documents = read_documents(store, manifest)
    if "tokenizer.json" not in documents:
        raise ColdStartError(f"{store.url}/tokenizer.json", None, "the model was published without a tokenizer")
    return documents
