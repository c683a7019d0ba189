"""A text encoder on this host: jobs of many texts in, their vectors out. It is loaded as a language model is."""

from collections.abc import Sequence
from typing import Any

from stoker.queue.records import Claim, unpack
from stoker.runtime.spec import FunctionSpec
from stoker.runtime.worker.deltas import Delta, job_of, request_id
from stoker.runtime.worker.engine_link import EngineDied
from stoker.runtime.worker.host import Host
from stoker.runtime.worker.llm_replica import LlmReplica
from stoker.runtime.worker.replica import Start

FLOAT_BYTES = 4


class EmbedReplica(LlmReplica):
    def __init__(self, id: str, spec: FunctionSpec, host: Host, start: Start, device: str) -> None:
        super().__init__(id, spec, host, start, device)
        self._running: dict[str, Claim] = {}

    def abort(self, job_id: str) -> None:
        if claim := self._running.pop(job_id, None):
            self._send_abort(claim, 0)

    def _begin(self, claim: Claim) -> None:
        body = unpack(claim.payload)
        if not self.aside.takes(claim, body):
            return
        self._running[claim.job_id] = claim
        request = {"model": self.id, "id": request_id(claim, 0), "texts": body["texts"]}
        try:
            self._engine.send({"t": "submit", **request, "salt": claim.tenant.encode(), "weight": claim.weight})
        except EngineDied as error:
            self._on_gone(str(error))

    def _on_delta(self, item: Sequence[Any]) -> None:
        delta = Delta(*item)
        job_id, _ = job_of(delta.request_id)
        claim = self._running.get(job_id)
        if claim is None or request_id(claim, 0) != delta.request_id:
            return
        del self._running[job_id]
        if delta.finish_reason == "stop":
            usage = {"prompt_tokens": delta.prompt_tokens}
            prefill, _, swap = delta.charge
            spent = {"prefill_us": prefill, "swap_us": swap, "busy_ms": prefill / 1000}
            dimension = len(delta.vectors) // FLOAT_BYTES // len(unpack(claim.payload)["texts"])
            result = {"vectors": delta.vectors, "dimension": dimension, "usage": usage}
            self.complete(claim, result, {**usage, **spent}, cost=float(delta.prompt_tokens))
        else:
            failure = {"type": "model_error", "message": delta.error or "the job was aborted", "code": None}
            self.fail(claim, failure, retry=False)
