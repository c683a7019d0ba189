"""A language model on this host: weights through the ring into the engine process, jobs in, tokens out."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from stoker.coldstart.failures import ColdStartError, ObjectAltered
from stoker.coldstart.manifest import Manifest
from stoker.queue.records import Claim, pack, unpack
from stoker.runtime.adapters.peft import NOT_LOADED
from stoker.runtime.architecture import CONFIG, POOLING
from stoker.runtime.spec import FunctionSpec, owner_of
from stoker.runtime.wire import Frame
from stoker.runtime.worker.answer import Answer, LogprobEntry
from stoker.runtime.worker.deltas import Delta, chunk_of, job_of, request_id
from stoker.runtime.worker.engine_link import EngineDied, EngineLink, ModelPort
from stoker.runtime.worker.error_records import cold_start_record
from stoker.runtime.worker.host import Host
from stoker.runtime.worker.kernel_store import EngineKernels
from stoker.runtime.worker.model_documents import read_model, read_with_tokenizer
from stoker.runtime.worker.own_adapters import OwnAdapters, failed, succeeded
from stoker.runtime.worker.own_copy import OwnCopy
from stoker.runtime.worker.own_prompts import OwnPrompts
from stoker.runtime.worker.parking import Parked, parking_name
from stoker.runtime.worker.pieces import Pieces
from stoker.runtime.worker.replica import Record, Replica, Start, StartFailed
from stoker.runtime.worker.seats import Seats, is_patient, seats
from stoker.runtime.worker.weights_feed import WeightsFeed

ENGINE_DOCUMENTS = (CONFIG, "generation_config.json", POOLING)

log = logging.getLogger("stoker.worker")


class LlmReplica(Replica):
    """One model in the engine process of one device."""

    def __init__(self, id: str, spec: FunctionSpec, host: Host, start: Start, device: str) -> None:
        super().__init__(id, spec, host, start)
        self._device = device
        self._engine: EngineLink = host.engine(device)
        self._answers: dict[str, Answer] = {}
        self._first_token_ns: dict[str, int] = {}
        self._feed: WeightsFeed | None = None
        self._entering: asyncio.Task[dict[str, Any]] | None = None
        self._arriving: asyncio.Task[None] | None = None
        self._kernels: EngineKernels | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._accepting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reading_tokenizer: asyncio.Future[Tokenizer] | None = None
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_given = False
        self._pieces: Pieces | None = None
        self._total_bytes = 0
        self._copy = OwnCopy(id, host.parking, self._engine)
        self._adapters = OwnAdapters(spec.adapters, host.shelf)
        self._prompts = OwnPrompts(id, spec, host, self._engine, self._accepting)

    async def load(self) -> None:
        """Until requests may be sent: the rest of the weights arrives while the first of them is computed, and no token
        leaves before all of them were checked."""
        self._arriving = asyncio.create_task(self._arrive())
        self._arriving.add_done_callback(lambda arrived: self.company.close() if failed(arrived) else None)
        try:
            await asyncio.wait({self._arriving, self._accepting}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._arriving.cancel()
            raise
        if self._arriving.done():
            self._arriving.result()
        assert self._reading_tokenizer is not None
        self._tokenizer = await self._reading_tokenizer
        await self._prompts.settle()

    async def _arrive(self) -> None:
        async with self.host.loading:
            try:
                await self._load_weights()
            except EngineDied as error:
                raise StartFailed({"type": "internal_error", "message": str(error), "code": "engine_died"}) from error
            except ColdStartError as error:
                raise StartFailed(cold_start_record(error)) from error
            finally:
                # The ring is free for the next load only when no fetch thread can write to it any more.
                if self._feed:
                    await asyncio.to_thread(self._feed.cancel)

    async def _load_weights(self) -> None:
        self.state = "loading"
        # Whatever has to be loaded: the process and its device take longer to start than to find that out.
        self._entering = asyncio.create_task(self._engine.enter())
        with self.timeline.phase("manifest"):
            store, manifest = await asyncio.to_thread(read_model, self.spec.weights)
        self._total_bytes = manifest.total_bytes
        self._copy.name = parking_name(manifest.revision, self.spec.engine_options)
        if parked := await self._copy.borrow():
            await self._load_parked(parked)
            return
        reading = asyncio.create_task(asyncio.to_thread(read_with_tokenizer, store, manifest))
        sources = self.host.sources
        peers = await sources.peers(store, manifest)
        verify = sources.verifies(manifest, self._device, self.spec.model.dtype)
        self._feed = feed = await asyncio.to_thread(
            WeightsFeed, store, manifest, self.host.ring, sources.cache(store), peers, verify
        )
        feed.start()
        self._prompts.begin(self._copy.name, self.timeline, feed)
        with self.timeline.phase("documents"):
            documents = await reading
        # That mode has kernels of its own: an artifact without them would leave them to the first request.
        name = manifest.revision + "-batch-invariant" * self.spec.model.batch_invariant
        self._kernels = kernels = EngineKernels(self.host.kernels(self._device), name, self._engine.kernels)
        tokenizer = asyncio.to_thread(self.host.tokenizers.read, documents["tokenizer.json"])
        self._reading_tokenizer = asyncio.create_task(tokenizer)
        self.timeline.extend((await self._begun())["phases"])
        self.timeline.extend(await kernels.place())
        self._engine.open(self.id, ModelPort(self._on_frame, self._on_gone))
        more = {"restored": kernels.restored, "check": self.host.settings.check_device or not verify}
        self._engine.send(self._load_frame(manifest, documents, feed.files) | more)
        try:
            await self._finish_load(feed)
        except StartFailed as error:
            if error.error.get("code") == ObjectAltered.__name__:
                sources.distrust(manifest)
            raise
        await sources.loaded(store, manifest)
        self._keeping = asyncio.create_task(kernels.keep())

    async def _load_parked(self, parked: Parked) -> None:
        self._prompts.begin(self._copy.name, self.timeline)
        self._reading_tokenizer = asyncio.get_running_loop().create_future()
        self._reading_tokenizer.set_result(parked.tokenizer)
        try:
            await self._begun()
            self._engine.open(self.id, ModelPort(self._on_frame, self._on_gone))
            check = self.host.settings.check_device
            self._engine.send({"t": "unpark", "model": self.id, "name": parked.name, "check": check, **self._owned()})
            await self._loaded
        except (StartFailed, EngineDied):
            self._copy.discard()
            raise

    async def _begun(self) -> dict[str, Any]:
        assert self._entering is not None
        return await self._entering

    async def _finish_load(self, feed: WeightsFeed) -> None:
        fetched = feed.connect(self._engine, self.id)
        await asyncio.wait({fetched, self._loaded}, return_when=asyncio.FIRST_COMPLETED)
        if not self._loaded.done():
            await fetched
            if not feed.files:
                self._engine.send({"t": "chunks_done", "model": self.id})
            await self._loaded
        await asyncio.to_thread(feed.cancel)
        await asyncio.gather(fetched, return_exceptions=True)
        self._loaded.result()

    def _load_frame(self, manifest: Manifest, documents: dict[str, bytes], files: list[str]) -> Frame:
        options = {**asdict(self.spec.engine_options), "device": "cpu" if self._device == "cpu" else "cuda"}
        wanted = {name: documents[name] for name in ENGINE_DOCUMENTS if name in documents}
        body = {"manifest": manifest.pack(), "documents": wanted, "options": options, "files": files}
        return {"t": "load", "model": self.id, **body, **self._owned()}

    def _owned(self) -> Frame:
        """Who pays for replicas that are always there has them on the device, whatever others ask for."""
        return {"owner": owner_of(self.spec.name), "kept": self.spec.scaling.min_replicas > 0}

    async def unload(self) -> None:
        await self._adapters.close()
        if self._arriving:
            self._arriving.cancel()
            await asyncio.gather(self._arriving, return_exceptions=True)
        if self._keeping and self._kernels:
            await self._keeping
            # What it compiled since, because it runs with other options than the engine that made the artifact.
            await self._kernels.keep()
        if self._entering:
            await asyncio.gather(self._entering, return_exceptions=True)
        prompts = await self._prompts.export(self.state == "draining" and succeeded(self._loaded))
        is_parked = await self._park()
        self._engine.close(self.id)
        if self._entering and succeeded(self._entering):
            with contextlib.suppress(EngineDied):
                if not is_parked:
                    self._engine.send({"t": "unload", "model": self.id})
            await self._engine.leave()
        self._copy.release()
        await self._prompts.keep(prompts)

    async def _park(self) -> bool:
        """Moves an idle model into host memory, if there is room; False: it is still on the device."""
        if self.state != "draining" or not succeeded(self._loaded) or not self.host.parking.seconds(self._device):
            return False
        assert self._tokenizer is not None
        return await self._copy.park(self._tokenizer)

    async def take_work(self) -> None:
        if self._arriving and self._arriving.done():
            self._arriving.result()
        if free := await self.room():
            claims = await self.claim(free, self._room_for_patient(), self._seats().but)
            async for claim in self.company.admitted(claims):
                self._begin(claim)

    def settled(self) -> bool:
        """Requests are taken before all weights have come."""
        return self._arriving is not None and succeeded(self._arriving)

    def free(self) -> int:
        return self._seats().free

    def _seats(self) -> Seats:
        """Patient jobs don't count: the engine takes their places away when others need them."""
        urgent = (claim.tenant for claim in self.held.values() if not is_patient(claim))
        return seats(self.spec.model.max_seqs, urgent)

    def _room_for_patient(self) -> int:
        most = max(1, self.spec.model.max_seqs * 3 // 4)
        return max(0, most - sum(is_patient(claim) for claim in self.held.values()))

    def _drop(self, claim: Claim) -> bool:
        passed = self._seats().but
        dropped = super()._drop(claim)
        if dropped and (passed or is_patient(claim)):
            self.claimer.nudge()
        return dropped

    def abort(self, job_id: str) -> None:
        if answer := self._answers.pop(job_id, None):
            for index in answer.unfinished:
                self._send_abort(answer.claim, index)

    def used(self, job_id: str) -> Record:
        answer = self._answers.get(job_id)
        return answer.record() if answer else {}

    def progress(self) -> tuple[int, int]:
        return (self._feed.fetched_bytes if self._feed else 0), self._total_bytes

    def report(self) -> Record:
        return {**super().report(), "engine": self._engine.stats.get("models", {}).get(self.id)}

    def run_phases(self, claim: Claim, begun_ns: int) -> list[Record]:
        first = self._first_token_ns.pop(claim.job_id, None)
        return [{"name": "first token", "start_ns": begun_ns, "end_ns": first}] if first else []

    def _begin(self, claim: Claim) -> None:
        assert self._tokenizer is not None
        body = unpack(claim.payload)
        if not self.aside.takes(claim, body):
            return
        answer = Answer(claim, self._tokenizer, body)
        if not answer.unfinished:
            self._end(answer)
            return
        self._answers[claim.job_id] = answer
        if answer.adapter:
            self._adapters.ask(answer.adapter, partial(self._submit, answer), partial(self._give_up, answer))
        else:
            self._submit(answer)

    def _give_up(self, answer: Answer, error: Record, retry: bool) -> None:
        if self._answers.get(answer.claim.job_id) is answer:
            del self._answers[answer.claim.job_id]
            if answer.adapter in self.spec.adapters:
                self.fail(answer.claim, error, retry=retry)
            else:
                self.aside.put(answer.claim, error)

    def _submit(self, answer: Answer, adapter: Record | None = None) -> None:
        if self._answers.get(answer.claim.job_id) is not answer:
            return
        try:
            if answer.params.get("grammar"):
                self._give_tokenizer()
            for index in answer.unfinished:
                self._engine.send(self._submit_frame(answer, index) | ({"adapter": adapter} if adapter else {}))
        except EngineDied as error:
            self._on_gone(str(error))

    def _submit_frame(self, answer: Answer, index: int) -> Frame:
        return {
            "t": "submit",
            "model": self.id,
            "id": request_id(answer.claim, index),
            "prompt": answer.prompt,
            "params": answer.engine_params(index),
            "prior": answer.choices[index].prior,
            "salt": answer.claim.tenant.encode(),
            "weight": answer.claim.weight,
            "patient": is_patient(answer.claim),
            "public_tokens": answer.public_tokens,
        }

    def _give_tokenizer(self) -> None:
        """Only grammars need it in the engine, so it is sent once somebody asks for one."""
        if self._tokenizer and not self._tokenizer_given:
            self._engine.send({"t": "tokenizer", "model": self.id, "tokenizer": self._tokenizer.to_str()})
            self._tokenizer_given = True

    def _on_frame(self, frame: Frame) -> None:
        match frame["t"]:
            # A request that crossed the news of a failed load belongs to `take_work`, which raises that failure.
            case "deltas" if not failed(self._loaded):
                for item in frame["items"]:
                    self._on_delta(item)
            case "slot_free" if self._feed:
                self._feed.release(frame["slot"])
            case "ready" if not self._accepting.done():
                self._copy.know(frame["facts"])
                self._accepting.set_result(None)
            case "loaded" if not self._loaded.done():
                self.timeline.extend([*(self._feed.phases() if self._feed else []), *frame["phases"]])
                self._loaded.set_result(None)
            case "wants_image" if self._tokenizer:
                self._copy.grant(self._tokenizer)
            case "imaged":
                self._copy.imaged(frame["error"])
            case "prompts":
                self._prompts.told(frame)
            case "parked":
                self._copy.parked(frame["error"])
            case "load_error" if not self._loaded.done():
                self._loaded.set_exception(StartFailed(frame["error"]))
            case "load_error":
                # It had left the device for others, and can't come back.
                self.crash(frame["error"])

    def _on_delta(self, item: Sequence[Any]) -> None:
        delta = Delta(*item)
        job_id, index = job_of(delta.request_id)
        answer = self._answers.get(job_id)
        if answer is None or request_id(answer.claim, index) != delta.request_id:
            return
        if delta.finish_reason in ("error", "abort"):
            retry = NOT_LOADED in delta.error and self._adapters.distrust(answer.adapter)
            self.abort(job_id)
            failure = {"type": "model_error", "message": delta.error or "generation was aborted", "code": None}
            self.fail(answer.claim, failure, retry=retry)
        elif delta.finish_reason == "refused":
            self.abort(job_id)
            message = f"The answer can't be held to this grammar: {delta.error}."
            failure = {"type": "invalid_request_error", "message": message, "code": "invalid_grammar"}
            self.fail(answer.claim, failure, retry=False)
        elif answer.choices[index].finish_reason is None:
            self._absorb(answer, index, delta)

    def _absorb(self, answer: Answer, index: int, delta: Delta) -> None:
        job_id, choice = answer.claim.job_id, answer.choices[index]
        if delta.tokens and job_id not in self._first_token_ns:
            self._first_token_ns[job_id] = time.monotonic_ns()
        if index == 0:
            answer.cached_tokens = delta.cached_tokens
        choice.charge = delta.charge
        entries, before = self._entries(delta), choice.tokens
        text = choice.absorb(delta.tokens, delta.finish_reason, entries)
        entries = entries and entries[: choice.tokens - before]
        shown = answer.claim.stream and (text or delta.tokens)
        data, cost = pack(chunk_of(text, delta.tokens, index, entries)) if shown else b"", answer.grown_cost()
        if data or cost:
            self.outbox.emit(job_id, answer.claim.fence, data, cost)
        if choice.finish_reason and delta.finish_reason is None:
            self._send_abort(answer.claim, index)
        if choice.finish_reason and not answer.unfinished:
            del self._answers[job_id]
            self._end(answer)

    def _entries(self, delta: Delta) -> list[LogprobEntry]:
        if not delta.logprobs:
            return []
        assert self._tokenizer is not None
        self._pieces = self._pieces or Pieces(self._tokenizer)
        return [self._pieces.entry(token, *found) for token, found in zip(delta.tokens, delta.logprobs, strict=True)]

    def _end(self, answer: Answer) -> None:
        self.complete(answer.claim, answer.result(), answer.record(), cost=answer.cost)

    def _send_abort(self, claim: Claim, index: int) -> None:
        try:
            self._engine.send({"t": "abort", "model": self.id, "id": request_id(claim, index)})
        except EngineDied:
            return

    def _on_gone(self, reason: str) -> None:
        self._copy.parked(reason)
        if not self._loaded.done():
            self._loaded.set_exception(EngineDied(reason))
        else:
            self.crash({"type": "internal_error", "message": reason, "code": "engine_died"})
        self._answers.clear()
