"""Loading alone, side by side: the same safetensors files into device memory by stoker and by other loaders.

Each load runs in a process of its own whose device context exists already, and ends when all is in place (with stoker:
and checked). `cached`: files in the page cache; `disk`: evicted; `s3`: from `benchmarks.range_server`. What isn't
installed is reported as such.

Run: python -m benchmarks.coldstart_peers [--model llama3-8b] [--runs 2]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from benchmarks.coldstart import range_server
from benchmarks.first_token import evict, preload
from benchmarks.models import published
from benchmarks.report import print_table, save

DATA = Path(".stoker")
LIMIT_S = 180


def stoker(source: str, files: list[str], device: str) -> int:
    """As engine and agent do it: mapped when in the page cache, else read by the fetcher into the ring."""
    import torch

    from stoker.coldstart.manifest import read_manifest
    from stoker.coldstart.store import open_store
    from stoker.coldstart.upload import DTYPES, Uploader
    from stoker.runtime.worker.weights_feed import resident_files

    store = open_store(source)
    manifest = read_manifest(store)
    arena = torch.empty(sum(-(-t.length // 256) * 256 for t in manifest.tensors), dtype=torch.uint8, device=device)
    targets, offset = {}, 0
    for tensor in manifest.tensors:
        targets[tensor.name] = arena[offset : offset + tensor.length].view(DTYPES[tensor.dtype]).view(tensor.shape)
        offset += -(-tensor.length // 256) * 256
    uploader = Uploader(manifest, targets)
    if paths := resident_files(store, manifest):
        mapped(manifest, paths, uploader, targets)
    else:
        fetched(store, manifest, uploader, targets)
    return manifest.total_bytes


def mapped(manifest: Any, paths: list[str], uploader: Any, targets: Any) -> None:
    from stoker.coldstart.device_check import DeviceCheck
    from stoker.coldstart.mapped_source import MappedSource

    source = MappedSource(manifest, [Path(path) for path in paths])
    source.deliver(uploader.place)
    check = DeviceCheck(manifest, targets)
    uploader.finish()
    assert check.run() == check.converted == []


def fetched(store: Any, manifest: Any, uploader: Any, targets: Any) -> None:
    from stoker.coldstart.device_check import DeviceCheck
    from stoker.coldstart.fetch import Fetcher
    from stoker.coldstart.pinned import Registration
    from stoker.coldstart.ring import Ring
    from stoker.coldstart.upload import mark

    ring = Ring.create(32)
    pin = Registration(ring.address, ring.size)
    fetcher = Fetcher(store, manifest, ring, verify=uploader.device.type != "cuda")
    fetcher.start()
    busy = []
    while ready := fetcher.next():
        uploader.place(ready.chunk, ring.slot(ready.slot))
        busy.append((mark(uploader.device), ready.slot))
        while busy and (len(busy) > 8 or not busy[0][0] or busy[0][0].query()):
            event, slot = busy.pop(0)
            event.synchronize() if event else None
            fetcher.release(slot)
    if uploader.device.type == "cuda":
        check = DeviceCheck(manifest, targets)
        uploader.finish()
        assert check.run() == check.converted == []
    uploader.finish()
    pin.release()


def load_checksum_kernels() -> None:
    """A start finds them compiled (and so does a second run of this one)."""
    import torch

    from stoker.coldstart.xxh3 import Part, digests

    one = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    digests([[Part(one.data_ptr(), one.numel())]], one.device)


def safetensors(source: str, files: list[str], device: str) -> int:
    from safetensors.torch import load_file

    kept = [load_file(local(source, file), device=device) for file in files]
    return sum(tensor.nbytes for tensors in kept for tensor in tensors.values())


def boto3_and_safetensors(source: str, files: list[str], device: str) -> int:
    """Each file by boto3's own parallel download into memory, then loaded."""
    import boto3
    from boto3.s3.transfer import TransferConfig

    bucket, _, prefix = source.removeprefix("s3://").partition("/")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        for file in files:
            target = str(Path(scratch) / file)
            config = TransferConfig(max_concurrency=16)
            boto3.client("s3").download_file(bucket, f"{prefix}/{file}", target, Config=config)
        return safetensors(Path(scratch).as_uri(), files, device)


def fastsafetensors(source: str, files: list[str], device: str) -> int:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # type: ignore[import-not-found]

    loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)
    loader.add_filenames({0: [local(source, file) for file in files]})
    buffers = loader.copy_files_to_device()
    kept = [buffers.get_tensor(name) for name in buffers.key_to_rank_lidx]
    return sum(tensor.nbytes for tensor in kept)


def runai(source: str, files: list[str], device: str) -> int:
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found]

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([local(source, file) for file in files])
        kept = [tensor.to(device) for _, tensor in streamer.get_tensors()]
    return sum(tensor.nbytes for tensor in kept)


def instanttensor(source: str, files: list[str], device: str) -> int:
    from instanttensor import safe_open  # type: ignore[import-not-found]

    with safe_open([local(source, file) for file in files], framework="pt", device=device) as opened:
        kept = [tensor for _, tensor in opened.tensors()]
    return sum(tensor.nbytes for tensor in kept)


def local(source: str, file: str) -> str:
    """The path of a file:// source, the URL of another one."""
    return f"{source.removeprefix('file://')}/{file}"


Loader = Callable[[str, list[str], str], int]
LOADERS: dict[str, Loader] = {
    "stoker": stoker,
    "safetensors": safetensors,
    "fastsafetensors": fastsafetensors,
    "runai-model-streamer": runai,
    "instanttensor": instanttensor,
}
S3_LOADERS: dict[str, Loader] = {
    "stoker": stoker,
    "runai-model-streamer": runai,
    "boto3 and safetensors": boto3_and_safetensors,
}


MODULES = {
    "stoker": (
        "stoker.coldstart.s3_store",
        "stoker.coldstart.device_check",
        "stoker.coldstart.mapped_source",
        "stoker.runtime.worker.weights_feed",
    ),
    "safetensors": ("safetensors.torch",),
    "fastsafetensors": ("fastsafetensors",),
    "runai-model-streamer": ("runai_model_streamer",),
    "instanttensor": ("instanttensor",),
    "boto3 and safetensors": ("boto3", "safetensors.torch"),
}
"""What each imports before the clock runs."""


def child(name: str, source: str, files: list[str]) -> None:
    """Prints seconds, bytes and peak device bytes of one load as JSON."""
    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    torch.zeros(1, device=device)
    if name == "stoker" and device != "cpu":
        load_checksum_kernels()
    try:
        for module in MODULES[name]:
            import_module(module)
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return
    began = time.perf_counter()
    size = (LOADERS | S3_LOADERS)[name](source, files, device)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if device != "cpu" else 0
    print(json.dumps({"seconds": seconds, "bytes": size, "peak_bytes": peak}))


def measure(name: str, folder: Path, kind: str) -> dict[str, Any]:
    evict(folder.as_uri()) if kind == "disk" else preload(folder.as_uri())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    command = [sys.executable, "-m", "benchmarks.coldstart_peers", "--child", name]
    try:
        with range_server(folder.as_uri()) as remote:
            source = remote if kind == "s3" else folder.as_uri()
            command += [source, *files]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"loader": name, "files": kind, "error": f"not done after {LIMIT_S} s"}
    if done.returncode:
        return {"loader": name, "files": kind, "error": done.stderr.strip().splitlines()[-1]}
    return {"loader": name, "files": kind, **json.loads(done.stdout.splitlines()[-1])}


def row(result: dict[str, Any]) -> tuple[Any, ...]:
    if "seconds" not in result:
        return result["files"], result["loader"], "-", "-", "-", (result.get("missing") or result["error"])[:60]
    rate = result["bytes"] / 1e9 / result["seconds"]
    return result["files"], result["loader"], result["seconds"], rate, result["peak_bytes"] / 1e9, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--files", default="cached,disk,s3")
    parser.add_argument("--loaders", default=",".join(LOADERS | S3_LOADERS))
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--child", nargs="+", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], options.child[1], options.child[2:])
        return
    folder = Path(urlparse(published(options.model, DATA.resolve())).path)
    kinds, loaders = options.files.split(","), options.loaders.split(",")
    runs = range(options.runs)
    results = [
        measure(name, folder, kind)
        for kind in kinds
        for _ in runs
        for name in (S3_LOADERS if kind == "s3" else LOADERS)
        if name in loaders
    ]
    header = ("files", "loader", "seconds", "GB/s", "device peak GB", "")
    print_table(f"load to device, {options.model}", header, [row(result) for result in results])
    arguments = {"model": options.model, "runs": options.runs}
    print("written to", save("coldstart_peers", arguments, results, options.json))


if __name__ == "__main__":
    main()
