"""Weights on their way to a GPU: every byte right, slots reused only when they were read, layers waited for."""

import hashlib
import json
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker.coldstart.arrival import Arrival
from stoker.coldstart.device_check import DeviceCheck
from stoker.coldstart.fetch import Fetcher
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.mapped_source import MappedSource
from stoker.coldstart.pinned import Registration
from stoker.coldstart.publish import publish
from stoker.coldstart.ring import Ring
from stoker.coldstart.timeline import Timeline
from stoker.coldstart.upload import Uploader, copy_stream, mark
from stoker.coldstart.xxh3 import Part, host_digest
from stoker.coldstart.xxh3 import digests as digests_on
from stoker.runtime.engine.models import Models
from stoker.runtime.wire import Frame
from tests.gpu.test_engine import HF_CONFIG, STATE, engine, requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LIMIT = 2 << 30
"""Of the device's memory, so that these tests leave the others theirs."""
CLOCK_HZ = 1_500_000_000


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[FileStore, Manifest]:
    folder = tmp_path_factory.mktemp("published")
    state = {name: tensor.nan_to_num() for name, tensor in STATE.items()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    store = FileStore(folder / "store")
    return store, publish(folder, store, chunk_bytes=1 << 16)


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(t.cpu().contiguous().numpy().tobytes()).hexdigest() for name, t in tensors.items()}


def empty(manifest: Manifest, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {tensor.name: torch.zeros(tensor.shape, dtype=dtype, device="cuda") for tensor in manifest.tensors}


def published_tensors(store: FileStore, manifest: Manifest) -> dict[str, torch.Tensor]:
    found = {}
    for tensor in manifest.tensors:
        data = bytearray(tensor.length)
        store.read_range(manifest.files[tensor.file].name, tensor.offset, memoryview(data))
        found[tensor.name] = torch.frombuffer(data, dtype=torch.float32).view(tensor.shape)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mapped_files_arrive_as_published(published: tuple[FileStore, Manifest], dtype: torch.dtype) -> None:
    store, manifest = published
    targets = empty(manifest, dtype)
    source = MappedSource(manifest, [store.folder / entry.name for entry in manifest.files])
    uploader = Uploader(manifest, targets)
    source.check(range(len(manifest.chunks)))
    source.deliver(uploader.place)
    uploader.finish()
    source.verify()
    source.close()
    wanted = {name: tensor.to(dtype) for name, tensor in published_tensors(store, manifest).items()}
    if dtype == torch.bfloat16:
        assert all(targets[name].cpu().equal(tensor) for name, tensor in wanted.items())
    else:
        assert digests(targets) == digests(wanted)
        assert DeviceCheck(manifest, targets).run() == []


def test_checksums_on_the_device_equal_those_of_the_host() -> None:
    memory = torch.randint(0, 256, (200 << 20,), dtype=torch.uint8, device="cuda")
    host = memory.cpu()
    sizes = [248, 1024, 1032, 100_000, 1 << 20, 16 << 20, (16 << 20) - 2048, 50 << 20]
    for cut in (8, 4096):
        inputs = [
            [Part(a.data_ptr() + 8 * n, cut), Part(a.data_ptr() + size, size - cut)]
            for a in (memory, host)
            for n, size in enumerate(sizes)
            if size > cut
        ]
        half = len(inputs) // 2
        assert digests_on(inputs[:half], memory.device) == [host_digest(parts) for parts in inputs[half:]]


def test_checking_the_device_takes_little_time() -> None:
    """A fraction of what the load takes: 4 GB in chunks of 16 MiB."""
    memory = torch.empty(240 << 24, dtype=torch.uint8, device="cuda")
    inputs = [[Part(memory.data_ptr() + (n << 24), 1 << 24)] for n in range(240)]
    digests_on(inputs[:2], memory.device)
    began = time.perf_counter()
    digests_on(inputs, memory.device)
    seconds = time.perf_counter() - began
    print(f"checksums on the device: {memory.numel() / 1e9 / seconds:.0f} GB/s")
    assert seconds < 0.08


def test_slots_are_reused_only_after_their_copies(published: tuple[FileStore, Manifest]) -> None:
    """The copy stream is held up, so that every copy is late, and freed slots are overwritten at once."""
    store, manifest = published
    ring = Ring.create(2, 1 << 16)
    pin = Registration(ring.address, ring.size)
    assert pin.active
    targets = empty(manifest)
    uploader = Uploader(manifest, targets)
    fetcher = Fetcher(store, manifest, ring, connections=2)
    fetcher.start()
    while ready := fetcher.next(30):
        with torch.cuda.stream(copy_stream()):
            torch.cuda._sleep(CLOCK_HZ // 30)
        uploader.place(ready.chunk, ring.slot(ready.slot), pin.active)
        event = mark(uploader.device)
        assert event and not event.query(), "the copy was not asynchronous"
        event.synchronize()
        ring.slot(ready.slot)[:] = bytes([255]) * ring.slot_bytes
        fetcher.release(ready.slot)
    uploader.finish()
    fetcher.cancel()
    pin.release()
    ring.close()
    assert digests(targets) == digests(published_tensors(store, manifest))


class Process:
    """A Models as the engine process has it, without the process: frames in, frames out."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.inbox: SimpleQueue[Frame] = SimpleQueue()
        self.ring = Ring.create(1, 1 << 16)
        self.models = Models(self.frames.append, self.ring, self.inbox.put, Timeline(), LIMIT)

    def send(self, frame: Frame) -> None:
        if not self.models.route(frame):
            self.models.handle(frame)

    def until(self, kind: str) -> Frame:
        while not (found := [frame for frame in self.frames if frame["t"] == kind]):
            wait_s = self.models.wait_s()
            try:
                self.models.handle(self.inbox.get(timeout=30 if wait_s is None else wait_s))
            except Empty:
                self.models.step()
        return found[0]

    def load(self, store: FileStore, manifest: Manifest, **options: Any) -> None:
        chosen = {"device": "cuda", "dtype": "float32", "num_blocks": 512, "max_model_len": 1024, **options}
        documents = {"config.json": store.read("config.json")}
        files = [str(store.folder / entry.name) for entry in manifest.files]
        body = {"manifest": manifest.pack(), "documents": documents, "options": chosen, "files": files}
        self.send({"t": "load", "model": "m", "check": True, **body})

    def ask(self, name: str, prompt: list[int]) -> None:
        params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        self.send({"t": "submit", "model": "m", "id": name, "prompt": prompt, "params": params, "prior": []})

    def answer(self, name: str) -> list[int]:
        while True:
            items = [item for frame in self.frames if frame["t"] == "deltas" for item in frame["items"]]
            tokens = [token for item in items if item[0] == name for token in item[1]]
            if any(item[0] == name and item[2] for item in items):
                return tokens
            self.models.step()


def test_a_prefill_during_the_load_gives_the_tokens_of_one_after_it(published: tuple[FileStore, Manifest]) -> None:
    store, manifest = published
    process = Process()
    with torch.cuda.stream(copy_stream()):
        torch.cuda._sleep(CLOCK_HZ // 4)
    process.load(store, manifest)
    process.until("ready")
    assert all(frame["t"] != "loaded" for frame in process.frames)
    (request,) = requests(1)
    process.ask("early", request.prompt)
    process.until("loaded")
    early = process.answer("early")
    process.ask("late", request.prompt)
    assert early == process.answer("late") == engine("cuda").generate([request])["0"][:8]


def test_a_flipped_byte_is_an_error_and_no_answer(published: tuple[FileStore, Manifest], tmp_path: Path) -> None:
    store, manifest = published
    bad = FileStore(tmp_path)
    for entry in store.list():
        bad.write(entry.key, store.read(entry.key))
    path = tmp_path / manifest.files[0].name
    data = bytearray(path.read_bytes())
    data[manifest.chunks[-1].offset] ^= 1
    path.write_bytes(data)
    process = Process()
    before = torch.cuda.memory_allocated()
    process.load(bad, manifest)
    assert process.until("load_error")["error"]["code"] == "ObjectAltered"
    assert not any(frame["t"] in ("deltas", "loaded") for frame in process.frames)
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_a_parked_model_leaves_the_device_and_comes_back(published: tuple[FileStore, Manifest]) -> None:
    store, manifest = published
    process = Process()
    # What cuBLAS takes for good with the first products.
    engine("cuda").generate(requests(1))
    before = torch.cuda.memory_allocated()
    process.load(store, manifest)
    process.until("loaded")
    process.ask("first", [1, 2, 3])
    first = process.answer("first")
    process.frames.clear()
    process.send({"t": "park", "model": "m", "name": "image"})
    assert process.until("parked")["error"] == ""
    assert torch.cuda.memory_allocated() - before < 1 << 20
    process.send({"t": "unpark", "model": "m", "name": "image", "check": True})
    process.until("loaded")
    process.ask("second", [1, 2, 3])
    assert process.answer("second") == first
    process.send({"t": "unload", "model": "m"})
    process.send({"t": "forget", "name": "image"})


def test_waiting_for_a_stage_orders_the_streams() -> None:
    """What reads after `wait` sees what the copy stream wrote, however late."""
    arrival = Arrival(1)
    target = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(copy_stream()):
        torch.cuda._sleep(CLOCK_HZ // 10)
        target.fill_(1)
    arrival.issued(0, mark(target.device))
    arrival.wait(0)
    assert target.sum().item() == 1 << 20


def test_loads_and_unloads_leave_the_memory_as_it_was(published: tuple[FileStore, Manifest]) -> None:
    store, manifest = published
    process = Process()
    free: list[int] = []
    for _ in range(20):
        process.load(store, manifest)
        process.until("loaded")
        process.send({"t": "unload", "model": "m"})
        process.frames.clear()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[1] - (1 << 21), free
    assert str(store.folder) not in Path("/proc/self/maps").read_text()
