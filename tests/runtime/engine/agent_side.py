"""The host agent's side of an engine process, for tests: a real process, a real socket pair, a real ring."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from stoker.coldstart.fetch import Fetcher
from stoker.coldstart.manifest import Manifest, read_manifest
from stoker.coldstart.publish import publish
from stoker.coldstart.ring import Ring
from stoker.coldstart.store import open_store
from stoker.runtime.wire import Channel, ChannelClosed, Frame, socket_pair

if TYPE_CHECKING:
    from conftest import TinyModel

PATIENCE = 60.0
GREEDY = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}


@contextmanager
def one_core() -> Iterator[None]:
    """What is started here runs on one core: a small model is faster without a second thread."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


class Agent:
    """Speaks the host agent's side, and sorts what comes back."""

    def __init__(self, device_bytes: int = 0, device: str = "cpu") -> None:
        sock, fd = socket_pair()
        self.ring = Ring.create(3)
        command = [sys.executable, "-m", "stoker.runtime.engine.process"]
        command += ["--socket-fd", str(fd), "--ring-fd", str(self.ring.fd), "--ring-slots", str(self.ring.slots)]
        command += ["--device-bytes", str(device_bytes)]
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
        with one_core():
            self.process = subprocess.Popen(command, pass_fds=(fd, self.ring.fd), env=environment)
        os.close(fd)
        self.channel = Channel(sock)
        self.send = self.channel.send
        self.frames: dict[str, queue.Queue[Frame]] = defaultdict(queue.Queue)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.hello = self.expect("hello")

    def _read(self) -> None:
        try:
            while True:
                frame = self.channel.receive()
                self.frames[frame["t"]].put(frame)
        except ChannelClosed:
            self.frames["closed"].put({"t": "closed"})

    def expect(self, kind: str) -> Frame:
        return self.frames[kind].get(timeout=PATIENCE)

    def load(self, model: str, url: str, **options: Any) -> Frame:
        """Loads a whole model; the `ready` frame with the phases of `loaded`."""
        manifest = self.announce(model, url, **options)
        self.expect("allocated")
        self.feed(model, url, manifest, len(manifest.chunks))
        self.send({"t": "chunks_done", "model": model})
        ready = self.expect("ready")
        loaded = self.expect("loaded")
        assert ready["model"] == loaded["model"] == model
        return {**ready, "phases": loaded["phases"]}

    def announce(self, model: str, url: str, files: Sequence[str] = (), **options: Any) -> Manifest:
        self.send(self.load_frame(model, url, files, **options))
        return read_manifest(open_store(url))

    def load_frame(self, model: str, url: str, files: Sequence[str] = (), **options: Any) -> Frame:
        store = open_store(url)
        documents = {"config.json": store.read("config.json")}
        chosen = {"num_blocks": 32, "max_model_len": 96, **options}
        body = {"documents": documents, "options": chosen, "files": files}
        return {"t": "load", "model": model, "manifest": read_manifest(store).pack(), **body}

    def feed(self, model: str, url: str, manifest: Manifest, chunks: int) -> None:
        """Sends the first `chunks` chunks, each slot used again only when the engine has freed it."""
        fetcher = Fetcher(open_store(url), manifest, self.ring, connections=2)
        fetcher.start()
        sent = freed = 0
        while freed < chunks:
            if sent < chunks and (ready := fetcher.next(PATIENCE)):
                self.send({"t": "chunk", "model": model, "chunk": ready.chunk, "slot": ready.slot})
                sent += 1
            if sent - freed == self.ring.slots or sent == chunks:
                fetcher.release(self.expect("slot_free")["slot"])
                freed += 1
        fetcher.cancel()

    def submit(self, model: str, name: str, prompt: Any, params: Any = GREEDY, **fields: Any) -> None:
        self.send(
            {"t": "submit", "model": model, "id": name, "prompt": prompt, "params": params, "prior": [], **fields}
        )

    def answers(self, *names: str) -> dict[str, tuple[list[int], str, str]]:
        """Tokens, finish reason and error of each request, once all of them have ended."""
        tokens: dict[str, list[int]] = {name: [] for name in names}
        ends: dict[str, tuple[str, str]] = {}
        while len(ends) < len(names):
            for name, new, reason, error, *_ in self.expect("deltas")["items"]:
                assert name not in ends, "something came after the end"
                tokens[name] += new
                if reason:
                    ends[name] = (reason, error)
        return {name: (tokens[name], *ends[name]) for name in names}

    def stats(self) -> Frame:
        self.send({"t": "stats"})
        return self.expect("stats")

    def close(self) -> int:
        self.channel.send({"t": "stop"})
        return self.bury()

    def bury(self) -> int:
        code = self.process.wait(PATIENCE)
        self.reader.join(PATIENCE)
        self.channel.close()
        self.ring.close()
        return code


def store_of(folder: Path, tiny: "TinyModel") -> str:
    source = folder / "source"
    source.mkdir(parents=True)
    save_file(tiny.state, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(tiny.hf_config))
    url = (folder / "store").as_uri()
    publish(source, open_store(url), chunk_bytes=1 << 14 if tiny.config.hidden_size < 100 else 1 << 24)
    return url
