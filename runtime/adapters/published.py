"""Published adapters: what their store says of them, and whether those of a deployment fit its model."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from stoker.coldstart.failures import ColdStartError, ObjectMissing, UnsupportedModel
from stoker.coldstart.headers import read_or_describe
from stoker.coldstart.manifest import Manifest, read_documents, read_manifest
from stoker.coldstart.repository import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG
from stoker.coldstart.store import ObjectStore, open_store
from stoker.runtime.adapters.peft import AdapterConfig, Sizes, check_tensors

READS = 16


class AdapterRefused(ValueError):
    """An adapter that can't be served; the message names it."""


def read_adapter(url: str) -> tuple[ObjectStore, Manifest, AdapterConfig]:
    """Raises ColdStartError, or ValueError for what is no store's URL."""
    store = open_store(url)
    try:
        manifest = read_manifest(store)
    except ObjectMissing as error:
        raise ObjectMissing(error.object, None, "no adapter was published there") from error
    if [entry.name for entry in manifest.files] != [ADAPTER_WEIGHTS] or ADAPTER_CONFIG not in manifest.documents:
        raise UnsupportedModel(store.url, None, "what was published there is no adapter")
    return store, manifest, AdapterConfig.read(read_documents(store, manifest, [ADAPTER_CONFIG])[ADAPTER_CONFIG])


def check_adapters(weights: str, adapters: Mapping[str, str], most: int) -> list[str]:
    """Revisions of the adapters that are named, for the model at URL `weights` with room for rank `most`; blocks.
    Raises AdapterRefused."""
    try:
        store = open_store(weights)
        base = Sizes.from_hf(json.loads(read_documents(store, read_or_describe(store), [CONFIG])[CONFIG]))
    except (ColdStartError, ValueError, KeyError) as error:
        raise AdapterRefused(f"The base model can't be read: {error}") from error
    with ThreadPoolExecutor(READS) as pool:
        return list(pool.map(lambda name: checked_revision(name, adapters[name], base, most), sorted(adapters)))


def checked_revision(name: str, url: str, base: Sizes, most: int) -> str:
    try:
        _, manifest, config = read_adapter(url)
        check_tensors(((t.name, t.dtype, t.shape) for t in manifest.tensors), config, base)
    except (ColdStartError, ValueError) as error:
        raise AdapterRefused(f"Adapter {name!r} can't be served: {error}") from error
    if config.rank > most:
        raise AdapterRefused(f"Adapter {name!r} has rank {config.rank}, above adapter_rank {most}: raise that")
    return manifest.revision
