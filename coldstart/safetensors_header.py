"""Reads and checks the header of a safetensors file, in any store, without its data."""

import json
from collections.abc import Iterable
from math import prod
from typing import Any

from stoker.coldstart.failures import ManifestInvalid, ObjectTruncated
from stoker.coldstart.manifest import ITEM_BYTES, TensorEntry
from stoker.coldstart.store import ObjectInfo, ObjectStore

LENGTH_BYTES = 8
# Far above any model's: one of 100 MB, as the format allows, would take seconds and a gigabyte to read.
MAX_HEADER_BYTES, MAX_TENSORS, MAX_SIZE = 16 << 20, 1 << 16, 1 << 63
FIRST_BYTES = 1 << 20


class HeaderInvalid(ValueError):
    """What is wrong with a header; the caller adds the file's name."""


def read_header(store: ObjectStore, found: ObjectInfo, file: int) -> list[TensorEntry]:
    """The tensors of a safetensors object (number `file` of its model) in file order. One read, or two for a header
    over 1 MiB, both of the version that was `found`.

    Raises ManifestInvalid for a header that breaks the format, ObjectTruncated for a file shorter than it announces.
    """
    name, size = f"{store.url}/{found.key}", found.size
    if size < LENGTH_BYTES:
        raise ManifestInvalid(name, (0, LENGTH_BYTES), f"{size} bytes can't be a safetensors file")
    first = fetch(store, found, 0, min(size, FIRST_BYTES))
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    data_start = LENGTH_BYTES + length
    if not 0 < length <= MAX_HEADER_BYTES or data_start > size:
        raise ManifestInvalid(name, (0, LENGTH_BYTES), f"its header can't be {length} bytes long (file: {size})")
    if data_start > len(first):
        first += fetch(store, found, len(first), data_start - len(first))
    try:
        tensors = parse_header(first[LENGTH_BYTES:data_start], file, data_start)
    except HeaderInvalid as error:
        raise ManifestInvalid(name, (LENGTH_BYTES, data_start), str(error)) from error
    end = max((tensor.offset + tensor.length for tensor in tensors), default=data_start)
    if end > size:
        raise ObjectTruncated(name, (size, end), f"the file ends at byte {size}, its header announces {end}")
    if end < size:
        raise ManifestInvalid(name, (end, size), f"{size - end} bytes after the last tensor")
    return tensors


def fetch(store: ObjectStore, found: ObjectInfo, offset: int, length: int) -> bytearray:
    data = bytearray(length)
    store.read_range(found.key, offset, memoryview(data), found.etag)
    return data


def parse_header(data: bytes | bytearray, file: int, data_start: int) -> list[TensorEntry]:
    """Tensors must follow each other without gap or overlap from `data_start` on. Raises HeaderInvalid."""
    if data.count(b"data_offsets") > MAX_TENSORS:
        raise HeaderInvalid(f"its header lists more than {MAX_TENSORS} tensors")
    try:
        header = json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys)
    except HeaderInvalid:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderInvalid(f"its header is not UTF-8 JSON ({error})") from error
    if not isinstance(header, dict):
        raise HeaderInvalid("its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = [parse_tensor(name, fields, file, data_start) for name, fields in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.length))
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            kind = "overlaps the one before" if tensor.offset < position else "leaves a gap before itself"
            raise HeaderInvalid(f"tensor {tensor.name} {kind} (starts at byte {tensor.offset}, not {position})")
        position += tensor.length
    return tensors


def parse_tensor(name: str, fields: Any, file: int, data_start: int) -> TensorEntry:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise HeaderInvalid(f"tensor {name} needs dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise HeaderInvalid(f"tensor {name} has unknown dtype {dtype!r}")
    if not is_sizes(shape) or not is_sizes(offsets) or len(offsets) != 2:
        raise HeaderInvalid(f"tensor {name} has shape {shape!r} and data_offsets {offsets!r}")
    begin, end = offsets
    if end - begin != prod(shape) * ITEM_BYTES[dtype]:
        raise HeaderInvalid(f"tensor {name} of shape {shape} and dtype {dtype} can't have {end - begin} bytes")
    return TensorEntry(name, dtype, tuple(shape), file, data_start + begin, end - begin)


def is_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < MAX_SIZE for value in values)


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise HeaderInvalid(f"{key} is listed twice")
        found[key] = value
    return found
