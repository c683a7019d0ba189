"""An engine process's models in a thread of this process, with the host agent's answers: what the pool's benchmark asks
for tokens, without gateway and queue."""

import gc
import itertools
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import read_manifest
from stoker.coldstart.ring import Ring
from stoker.coldstart.timeline import Timeline
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.models import Models
from stoker.runtime.engine.process import serve
from stoker.runtime.wire import Frame

PATIENCE_S = 120.0
STOP: Frame = {"t": "stop"}


@dataclass(slots=True)
class Reply:
    """One request's tokens and when they came."""

    id: str
    model: str
    asked: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    charge: tuple[int, int, int] = (0, 0, 0)
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> "Reply":
        if not self.over.wait(PATIENCE_S):
            raise SystemExit("a request got no answer")
        return self


class Device:
    """Models on one device that has `limit` bytes for them (0: what is free). Images in host memory are made as the
    models ask for them. Use it as a context manager."""

    def __init__(self, limit: int = 0) -> None:
        self.replies: dict[str, Reply] = {}
        self._frames: SimpleQueue[Frame] = SimpleQueue()
        self._inbox: SimpleQueue[Frame] = SimpleQueue()
        self._ring = Ring.create(2)
        self.models = Models(self._take, self._ring, self._inbox.put, Timeline(), limit)
        self._thread = threading.Thread(target=serve, args=(self.models, self._inbox), daemon=True, name="engine")
        self._numbers = itertools.count()

    def __enter__(self) -> "Device":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for model in list(self.stats()["models"]):
            self.send({"t": "unload", "model": model})
            self.expect("unloaded")
            self.send({"t": "forget", "name": model})
        self.send(STOP)
        self._thread.join()
        del self.models
        self._ring.close()
        # Its parts refer to each other.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def send(self, frame: Frame) -> None:
        if not self.models.route(frame):
            self._inbox.put(frame)

    def expect(self, kind: str) -> Frame:
        while (frame := self._frames.get(timeout=PATIENCE_S))["t"] != kind:
            if frame["t"] == "load_error":
                raise SystemExit(frame["error"]["message"])
        return frame

    def load(self, name: str, folder: Path, variant: int = 0, **options: Any) -> None:
        """A published model. A `variant` (1 or 2) has half of its last norm's signs turned: other tokens from the same
        file."""
        store = FileStore(folder)
        manifest = read_manifest(store)
        chosen = {"device": "cuda" if torch.cuda.is_available() else "cpu", **options}
        body = {"manifest": manifest.pack(), "documents": {"config.json": store.read("config.json")}, "options": chosen}
        self.send({"t": "load", "model": name, "files": [str(folder / file.name) for file in manifest.files], **body})
        self.expect("loaded")
        if variant:
            self._change(name, variant)
        # Only now, so that the copy in host memory is of what is on the device.
        self.send({"t": "image", "model": name, "name": name})
        self.expect("imaged")

    def ask(self, name: str, prompt: list[int], tokens: int, tenant: str = "bench") -> Reply:
        id = f"r{next(self._numbers)}"
        reply = self.replies[id] = Reply(id, name)
        params = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        body = {"prompt": prompt, "params": params, "prior": [], "salt": tenant.encode()}
        self.send({"t": "submit", "model": name, "id": id, **body})
        return reply

    def abort(self, reply: Reply) -> None:
        self.send({"t": "abort", "model": reply.model, "id": reply.id})

    def stats(self) -> Frame:
        self.send({"t": "stats"})
        return self.expect("stats")

    def _change(self, name: str, variant: int) -> None:
        """While nothing runs."""
        engine = self.models.engine(name)
        assert isinstance(engine, Engine)
        engine.runner.weights.norm[variant % 2 :: 2].neg_()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _take(self, frame: Frame) -> None:
        now = time.perf_counter()
        match frame["t"]:
            case "deltas":
                for id, tokens, reason, *_, charge in frame["items"]:
                    self._absorb(self.replies[id], tokens, reason, charge, now)
            case "wants_image":
                pass
            case _:
                self._frames.put(frame)

    def _absorb(self, reply: Reply, tokens: list[int], reason: str | None, charge: Any, now: float) -> None:
        if tokens and not reply.first:
            reply.first = now
        reply.tokens += tokens
        reply.charge = charge
        if reason:
            reply.reason, reply.ended = reason, now
            reply.over.set()
