"""A model in Hugging Face's file layout: one safetensors file, or shards with an index, and a config."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stoker.coldstart.failures import ManifestInvalid, ObjectMissing, UnsupportedModel
from stoker.coldstart.manifest import TensorEntry
from stoker.coldstart.safetensors_header import HeaderInvalid, read_header, unique_keys
from stoker.coldstart.store import ObjectInfo, ObjectStore, checked_key

HEADER_READS = 16
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DOCUMENTS = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
)
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
TIED_HEAD = ("lm_head.weight", "model.embed_tokens.weight")


@dataclass(frozen=True, slots=True)
class Repository:
    """`tensors[i].file` counts into `shards`; `documents` are the small files a runtime needs beside the weights;
    `found` has the version of each file."""

    shards: list[str]
    tensors: list[TensorEntry]
    aliases: dict[str, str]
    documents: list[str]
    found: dict[str, ObjectInfo]


def scan(store: ObjectStore) -> Repository:
    """Reads headers only, several at once, and checks them against each other and the index.

    Raises ObjectMissing for an absent shard or config, ManifestInvalid for files that contradict each other,
    UnsupportedModel for a folder without safetensors.
    """
    found = {entry.key: entry for entry in store.list()}
    names = set(found)
    if CONFIG not in names:
        raise ObjectMissing(f"{store.url}/{CONFIG}", None, "the model has no config")
    config = read_json(store, CONFIG)
    weight_map = read_index(store) if INDEX in names else None
    shards = [find_single(store, names)] if weight_map is None else sorted(set(weight_map.values()))
    for shard in shards:
        if shard not in names:
            raise ObjectMissing(f"{store.url}/{shard}", None, f"{INDEX} names this shard, but it isn't there")
    with ThreadPoolExecutor(HEADER_READS) as pool:
        headers = pool.map(lambda number: read_header(store, found[shards[number]], number), range(len(shards)))
        tensors = [tensor for header in headers for tensor in header]
    check_index(store.url, shards, tensors, weight_map)
    aliases = tied_aliases(config, {tensor.name for tensor in tensors})
    stored = [tensor for tensor in tensors if tensor.name not in aliases]
    return Repository(shards, stored, aliases, [name for name in DOCUMENTS if name in names], found)


def scan_adapter(store: ObjectStore) -> Repository:
    """The same for an adapter in PEFT's layout. Raises ObjectMissing for an absent part."""
    found = {name: store.stat(name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
    tensors = read_header(store, found[ADAPTER_WEIGHTS], 0)
    return Repository([ADAPTER_WEIGHTS], tensors, {}, [ADAPTER_CONFIG], found)


def find_single(store: ObjectStore, names: set[str]) -> str:
    candidates = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    if SINGLE in candidates:
        return SINGLE
    if not candidates:
        raise UnsupportedModel(store.url, None, "it has no .safetensors file; convert the weights to safetensors")
    if len(candidates) > 1:
        raise ObjectMissing(f"{store.url}/{INDEX}", None, f"{len(candidates)} safetensors files need an index")
    return candidates[0]


def read_index(store: ObjectStore) -> dict[str, str]:
    name = f"{store.url}/{INDEX}"
    weight_map = read_json(store, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ManifestInvalid(name, None, "weight_map must map tensor names to shard names")
    try:
        for shard in set(weight_map.values()):
            checked_key(shard)
    except ValueError as error:
        raise ManifestInvalid(name, None, str(error)) from error
    return weight_map


def read_json(store: ObjectStore, key: str) -> dict[str, Any]:
    try:
        value = json.loads(store.read(key), object_pairs_hook=unique_keys)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, HeaderInvalid) as error:
        raise ManifestInvalid(f"{store.url}/{key}", None, f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ManifestInvalid(f"{store.url}/{key}", None, "not a JSON object")
    return value


def check_index(url: str, shards: list[str], tensors: list[TensorEntry], weight_map: dict[str, str] | None) -> None:
    """Every tensor stands in exactly one shard, and in the one that the index names."""
    found: dict[str, str] = {}
    for tensor in tensors:
        shard = shards[tensor.file]
        if tensor.name in found:
            raise ManifestInvalid(f"{url}/{shard}", None, f"tensor {tensor.name} is also in {found[tensor.name]}")
        found[tensor.name] = shard
    if weight_map is None:
        return
    for name in sorted(found.keys() | weight_map.keys()):
        holder, named = found.get(name), weight_map.get(name)
        if holder != named:
            where = f"is in {holder}" if holder else "is in no shard"
            says = f"the index says {named}" if named else "the index doesn't list it"
            raise ManifestInvalid(f"{url}/{holder or named}", None, f"tensor {name} {where}, but {says}")


def tied_aliases(config: dict[str, Any], names: set[str]) -> dict[str, str]:
    """A tied head is the embedding, whether or not the export also stored it."""
    head, embedding = TIED_HEAD
    tied = config.get("tie_word_embeddings") is True and embedding in names
    return {head: embedding} if tied else {}
