"""Memory over loads and unloads of one model in one engine: device and host bytes before, at their peak, and after.

Host bytes are what the process has to itself (anonymous and shared memory): pages of mapped files belong to the page
cache. `park` parks the model and brings it back in each round instead. Run: python -m benchmarks.coldstart_memory
"""

import argparse
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlparse

import torch

from benchmarks.models import published
from benchmarks.report import print_table, save
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import read_manifest
from stoker.coldstart.ring import Ring
from stoker.coldstart.timeline import Timeline
from stoker.runtime.engine.models import Models
from stoker.runtime.wire import Frame

DATA = Path(".stoker")
RING_SLOTS = 16


def host_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    kept = [line.split() for line in lines if line.startswith(("RssAnon", "RssShmem"))]
    return sum(int(fields[1]) << 10 for fields in kept)


def device_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


class Watch:
    """The highest values seen, looked at a hundred times a second."""

    def __init__(self) -> None:
        self.host = self.device = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self.host, self.device = max(self.host, host_bytes()), max(self.device, device_bytes())

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class Engine:
    """What an engine process does with its frames, in this process."""

    def __init__(self) -> None:
        self.frames: SimpleQueue[Frame] = SimpleQueue()
        self._inbox: SimpleQueue[Frame] = SimpleQueue()
        self._models = Models(self.frames.put, Ring.create(RING_SLOTS), self._inbox.put, Timeline())

    def ask(self, frame: Frame, answer: str) -> Frame:
        """Sends a frame and works until one of kind `answer` comes back."""
        if not self._models.route(frame):
            self._models.handle(frame)
        while True:
            try:
                found = self.frames.get_nowait()
            except Empty:
                self._models.handle(self._inbox.get(timeout=60))
                continue
            if found["t"] == "load_error":
                raise SystemExit(found["error"]["message"])
            if found["t"] == answer:
                return found


def load_frame(folder: Path, kv_bytes: int) -> Frame:
    store = FileStore(folder)
    manifest = read_manifest(store)
    files = [str(folder / entry.name) for entry in manifest.files]
    options = {"device": "cuda" if torch.cuda.is_available() else "cpu", "kv_bytes": kv_bytes, "max_model_len": 2048}
    documents = {"config.json": store.read("config.json")}
    body = {"manifest": manifest.pack(), "documents": documents, "options": options, "files": files}
    return {"t": "load", "model": "m", **body}


def rounds(engine: Engine, frame: Frame, count: int, park: bool) -> list[dict[str, Any]]:
    found = []
    for number in range(count):
        began = time.perf_counter()
        comes = {"t": "unpark", "model": "m", "name": "image"} if park and number else frame
        engine.ask(comes, "loaded")
        loaded = time.perf_counter()
        goes = (
            ({"t": "park", "model": "m", "name": "image"}, "parked")
            if park
            else ({"t": "unload", "model": "m"}, "unloaded")
        )
        engine.ask(*goes)
        ended = time.perf_counter()
        sizes = {"host_bytes": host_bytes(), "device_bytes": device_bytes()}
        found.append({"load_s": loaded - began, "unload_s": ended - loaded, **sizes})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--park", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    folder = Path(urlparse(published(options.model, DATA.resolve())).path)
    engine, frame = Engine(), load_frame(folder, 1 << 30)
    device_bytes()
    before = {"host_bytes": host_bytes(), "device_bytes": device_bytes()}
    watch = Watch()
    results = rounds(engine, frame, options.rounds, options.park)
    watch.stop()
    rows = [("before", "", "", before["host_bytes"] / 1e9, before["device_bytes"] / 1e9)]
    for number in sorted({0, 1, options.rounds - 1}):
        if number < len(results):
            one = results[number]
            sizes = one["host_bytes"] / 1e9, one["device_bytes"] / 1e9
            rows.append((f"after {number + 1}", one["load_s"], one["unload_s"], *sizes))
    rows.append(("peak", "", "", watch.host / 1e9, watch.device / 1e9))
    print_table(f"memory, {options.model}", ("when", "load s", "unload s", "host GB", "device GB"), rows)
    peak = {"host_bytes": watch.host, "device_bytes": watch.device}
    arguments = {"model": options.model, "rounds": options.rounds, "park": options.park}
    name = "coldstart_memory_park" if options.park else "coldstart_memory"
    print("written to", save(name, arguments, {"before": before, "peak": peak, "rounds": results}, options.json))


if __name__ == "__main__":
    main()
