"""Row 6: a weights file that lies about itself is a typed error, at once and without the memory that it asks for."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MOST_S, MOST_BYTES = 0.25, 50 << 20
A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}

READ = """
import json, sys, threading, time
from pathlib import Path
import psutil
from stoker.coldstart.failures import ColdStartError
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.safetensors_header import read_header

def peak():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024

store = FileStore(Path(sys.argv[1]))
for name in ("warm.safetensors", "m.safetensors"):
    before, began = peak(), time.process_time()
    try:
        read_header(store, store.stat(name), 0)
        error = ""
    except ColdStartError as failure:
        error = type(failure).__name__
    print(json.dumps([error, time.process_time() - began, peak() - before]))
"""


def header_of(count: int) -> bytes:
    entry = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return ("{" + ",".join(entry % number for number in range(count)) + "}").encode()


def twice() -> bytes:
    text = json.dumps({"a": A}).encode()
    return text[:-1] + b"," + text[1:]


def as_json(value: object) -> Callable[[], bytes]:
    return lambda: json.dumps(value).encode()


CASES: dict[str, tuple[Callable[[], bytes], int | None]] = {
    "length of 2^64-1": (as_json({"a": A}), 2**64 - 1),
    "length of 2^63": (as_json({"a": A}), 2**63),
    "duplicate keys": (twice, None),
    "overlap": (as_json({"a": A, "b": {**A, "data_offsets": [4, 12]}}), None),
    "hole": (as_json({"a": A, "b": {**A, "data_offsets": [16, 24]}}), None),
    "shape lies": (as_json({"a": {**A, "shape": [2**40, 2**40]}}), None),
    "negative shape": (as_json({"a": {**A, "shape": [-1, -2]}}), None),
    "huge numbers": (lambda: b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', None),
    "10 million tensors": (lambda: b"{" + b" " * 16, 10_000_000 * 55),
    "more tensors than any model": (lambda: header_of(70_000), None),
    "huge sizes": (as_json({"a": {**A, "shape": [2**64], "data_offsets": [0, 2**66]}}), None),
    "deep nesting": (lambda: b"[" * 4_000_000, None),
    "a long name": (lambda: b'{"' + b"a" * (64 << 20) + b'":1}', None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_lying_header_is_a_typed_error_at_once(case: str, tmp_path: Path) -> None:
    make, length = CASES[case]
    text = make()
    for name, header, size in (("warm", json.dumps({"a": A}).encode(), None), ("m", text, length)):
        prefix = (len(header) if size is None else size).to_bytes(8, "little")
        (tmp_path / f"{name}.safetensors").write_bytes(prefix + header + bytes(8))
    if length and length < 1 << 40:
        with (tmp_path / "m.safetensors").open("r+b") as file:
            file.truncate(8 + length)
    done = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=True)
    (fine, _, _), (error, seconds, grown) = map(json.loads, done.stdout.splitlines())
    assert fine == "" and error in ("ManifestInvalid", "ObjectTruncated")
    assert seconds < MOST_S and grown < MOST_BYTES, (seconds, grown >> 20)
