"""One loaded model: requests in, tokens out. A step is scheduled, launched on the device, and settled: its tokens are
read and booked. With asynchronous scheduling, a step is launched before the one before it is settled, so that the
device always has work; the tokens in between are known to the device alone."""

import logging
import time
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from stoker.kernels import ops
from stoker.runtime.engine.attribution import TOKENS_PER_READ, parts_of
from stoker.runtime.engine.blocks import BlockPool
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.kv_tier import Copies, HostTier
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.prefix import PUBLIC, root_key
from stoker.runtime.engine.request import Delta, FinishReason, GenerationRequest, require, validate
from stoker.runtime.engine.runner import Launched, Runner
from stoker.runtime.engine.scheduler import Outcome, Scheduler, Work, delta
from stoker.runtime.engine.sequence import Sequence
from stoker.runtime.engine.sizing import KVSize, free_bytes, kv_size
from stoker.runtime.engine.weights import ModelWeights
from stoker.runtime.pool.leeway import BATCH_SHARE, TENANTS_SHARE
from stoker.runtime.pool.meter import Spent
from stoker.runtime.pool.pace import Pace

if TYPE_CHECKING:
    from stoker.runtime.adapters.adapters import Adapters
    from stoker.runtime.engine.grammars import Follower, Grammars

COMPILE_PAUSE_S = 0.01

log = logging.getLogger(__name__)


def new_adapters(config: ModelConfig, options: EngineOptions, memory: torch.Tensor | None) -> "Adapters":
    # Few models have any.
    from stoker.runtime.adapters.adapters import Adapters

    return Adapters(config, options, memory)


class Engine:
    """Not thread-safe: one thread calls everything. Sampling depends on (seed, absolute position) only, so a request's
    tokens don't depend on its neighbours, on preemption, or on whether it was resumed."""

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        weights: ModelWeights,
        revision: str = "",
        cache: tuple[KVSize, torch.Tensor] | None = None,
        slots: torch.Tensor | None = None,
    ) -> None:
        """`weights` are filled and of the options' dtype. `cache` is memory that other models have a part in, and the
        most that is of use to this one: which blocks of it are its own, the pool is told as they come and go. Without
        it, there is a KV cache of this model's own. Raises NotEnoughMemory when that doesn't fit. `slots` is memory for
        adapters, if it needn't be allocated."""
        self.options = options = options.resolve(config)
        self.config = config = config.within(options.max_model_len)
        self.adapters = new_adapters(config, options, slots) if options.adapter_slots else None
        self.kv, memory = cache or (kv_size(config, options, free_bytes(options.device)), None)
        self.pool = BlockPool(0 if cache else self.kv.num_blocks)
        self.runner = Runner(config, options, weights, self.kv, memory, self.adapters)
        self._tokens_per_read = TOKENS_PER_READ[options.device]
        self.pace = Pace(self._tokens_per_read // 4)
        kept = options.host_cache_bytes // self.kv.block_bytes
        self.copies = Copies(self.runner.kv, kept) if kept else None
        self.scheduler = Scheduler(
            self.pool,
            token_budget=options.token_budget,
            max_seqs=options.max_seqs,
            prefix_cache=options.prefix_cache,
            leeway=self.pace.leeway,
            tier=HostTier(kept) if kept else None,
        )
        self.revision = revision
        self._weights_bytes = weights.arena.nbytes
        self._in_flight: Launched | None = None
        self._sequences: dict[str, Sequence] = {}
        self._compiling: dict[str, Future[Follower]] = {}
        self._outbox: list[Delta] = []
        self._spent: list[Spent] = []
        self._arrivals = 0
        self._steps = 0

    def submit(self, request: GenerationRequest) -> None:
        """Raises ValueError for a request that can never run."""
        if request.id in self._sequences:
            raise ValueError(f"request {request.id!r} is already here")
        validate(request, self.config.vocab_size, self.options.max_model_len)
        self._arrivals += 1
        model = (self.revision.encode(), self.options.arithmetic.encode())
        adapter = request.adapter.revision.encode() if request.adapter else b""
        root, public = root_key(*model, request.cache_salt, adapter), root_key(*model, PUBLIC, adapter)
        sequence = Sequence.of(request, self._arrivals, root, self.config.eos_token_ids, public)
        if len(sequence.tokens) == sequence.end:
            self._outbox.append(delta(sequence, [], "length"))
            return
        grammar, file = request.params.grammar, request.adapter
        require(not file or self.adapters is not None, "this model was loaded without room for adapters")
        if grammar:
            require(self.grammars is not None, "this model was loaded without a tokenizer: it can't follow a grammar")
            assert self.grammars is not None
            self._compiling[request.id] = self.grammars.compile(grammar)
        if file and self.adapters:
            self.adapters.ask(sequence, file)
        self._sequences[request.id] = sequence
        self._add(sequence)

    def abort(self, request_id: str) -> None:
        """Frees what no step in flight still writes; the next step reports "abort", whatever the one in flight finds.
        An unknown or finished id is ignored."""
        if sequence := self._sequences.pop(request_id, None):
            self._outbox.append(delta(sequence, [], "abort"))
            self._remove(sequence)

    def step(self) -> list[Delta]:
        """Launches the next step and returns the tokens of the oldest one under way: with asynchronous scheduling the
        one before, so that the first call returns none."""
        if self._compiling:
            self._admit_compiled()
        if self.adapters and self.adapters.waiting:
            self._admit_adapted(self.adapters)
        work = self.scheduler.schedule()
        if not work and not self._in_flight and self.copies and self._move_blocks(wait=True):
            work = self.scheduler.schedule()
        self._move_blocks()
        if not work and not self._in_flight and not all(map(self._is_held, self._sequences.values())):
            raise RuntimeError(f"no progress is possible: {self.stats()}")
        launched, failed = self._launch(work) if work else (None, False)
        before, self._in_flight = self._in_flight, launched
        deltas = self._settle(before) if before else []
        if launched and not self._finish(launched):
            failed, launched = True, None
            self._in_flight = None
        if failed:
            deltas += self._commit(work, [self._alone(item) for item in work])
        elif launched and not self._runs_ahead():
            self._in_flight = None
            deltas += self._settle(launched)
        return self.take_outbox() + deltas

    def _runs_ahead(self) -> bool:
        """While weights are on their way, the first token would wait for the kernels of the second."""
        return self.options.async_scheduling == "on" and self.runner.weights.arrival.done

    def suspend(self) -> list[Delta]:
        """Weights and blocks may be taken away after this: nothing is under way, and whatever ran is computed again
        once it was told to `resume`. Until then there are no steps."""
        launched, self._in_flight = self._in_flight, None
        deltas = self._settle(launched) if launched else []
        self.scheduler.preempt_all()
        while self._move_blocks(wait=True):
            pass
        return deltas

    @property
    def redo_s(self) -> float:
        """What it would take to compute again what is lost with the KV blocks of those that run."""
        return self.pace.token_s * sum(sequence.computed for sequence in self.scheduler.running)

    def resume(self, weights: ModelWeights) -> None:
        """`weights` are there or on their way."""
        self.runner.rebind(weights)

    def give_way(self, ahead: Collection[str], shared: bool) -> None:
        """Requests of tenants that are `ahead` have what others leave of the next steps. As long as they do, that is
        what makes steps longer by a quarter at most: the others' latency is theirs, and not much of the device is lost.
        Where the device is `shared` by tenants, steps are short, and those of batches are shorter as long as there has
        lately been anything else: whoever comes next waits for one."""
        if ahead or self.pace.leeway.share == TENANTS_SHARE:
            self.pace.leeway.share = TENANTS_SHARE if ahead else BATCH_SHARE
            for sequence in self._sequences.values():
                sequence.patient = sequence.of_batch or sequence.tenant in ahead
        most = self.pace.shared_step_tokens() if shared else 0
        budget = self.options.token_budget
        patient = 0 if self.rest_s() else self.pace.patient_step_tokens(time.monotonic_ns(), budget)
        self.scheduler.limit_step(max(most or budget, self.options.max_seqs, 64), patient)

    def rest_s(self) -> float:
        """How long batches still leave the device to nobody, because others have just been here."""
        if self._in_flight or not self._sequences or not all(each.of_batch for each in self._sequences.values()):
            return 0.0
        return self.pace.rest_s(time.monotonic_ns())

    def take_outbox(self) -> list[Delta]:
        """What can be told without a step."""
        told, self._outbox = self._outbox, []
        return told

    def take_spent(self) -> list[Spent]:
        """What steps that ended since the last call have computed, and when."""
        spent, self._spent = self._spent, []
        return spent

    def add_blocks(self, blocks: Seq[int]) -> None:
        """As many of them as are of use. What was queued on the device before this may still write them."""
        self.pool.add(blocks[: self.kv.num_blocks - self.pool.total])
        if self.copies:
            self.copies.follow()

    @property
    def arena(self) -> torch.Tensor:
        return self.runner.weights.arena

    @property
    def grammars(self) -> "Grammars | None":
        """Set it, and requests may ask for a grammar."""
        return self.runner.grammars

    @grammars.setter
    def grammars(self, grammars: "Grammars") -> None:
        self.runner.grammars = grammars

    @property
    def in_flight(self) -> Seq[Work]:
        """What the step under way computes."""
        return self._in_flight.work if self._in_flight else ()

    def has_work(self) -> bool:
        return bool(self._outbox or self._sequences or self._in_flight)

    def prepare_idle(self) -> bool:
        """Uses a moment without work to make later steps faster; False when there is nothing (more) to do."""
        return not self.has_work() and self.runner.capture_one()

    def fail_all(self, error: str) -> list[Delta]:
        """Ends every request with `error`."""
        deltas = [*self._outbox, *(delta(sequence, [], "error", error) for sequence in self._sequences.values())]
        for sequence in self._sequences.values():
            self._remove(sequence)
        self._sequences, self._outbox = {}, []
        if launched := self._in_flight:
            self._in_flight = None
            with suppress(Exception):
                launched.outcomes()
            self.scheduler.commit(launched.work, [Outcome(-1, error)] * len(launched.work))
        return deltas

    def stats(self) -> dict[str, int]:
        self._move_blocks()
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "free_blocks": self.pool.free,
            "cached_blocks": self.pool.cached,
            "used_blocks": self.pool.used,
            "total_blocks": self.pool.total,
            "prefix_hit_tokens": self.scheduler.hit_tokens,
            "host_hit_tokens": self.scheduler.host_hit_tokens,
            "computed_tokens": self.scheduler.computed_tokens,
            "preemptions": self.scheduler.preemptions,
            "steps": self._steps,
            "late_kernels": ops.late_kernels(),
            "graphs": len(self.runner.graphs),
            "graph_bytes": self.runner.graphs.bytes,
            "graph_steps": self.runner.graphs.replays,
            **(self.adapters.stats() if self.adapters else {}),
        }

    def generate(self, requests: Iterable[GenerationRequest]) -> dict[str, list[int]]:
        """Runs requests to their end; tokens by request id. Raises RuntimeError when one of them fails."""
        tokens: dict[str, list[int]] = {}
        for request in requests:
            self.submit(request)
            tokens[request.id] = []
        while self.has_work():
            for item in self.step():
                if item.finish_reason in ("error", "refused"):
                    raise RuntimeError(f"request {item.request_id}: {item.error}")
                tokens[item.request_id] += item.tokens
        return tokens

    def _is_held(self, sequence: Sequence) -> bool:
        """It waits for its grammar or adapter; the scheduler doesn't know it."""
        return sequence.id in self._compiling or (self.adapters is not None and self.adapters.awaits(sequence))

    def _add(self, sequence: Sequence) -> None:
        """Once nothing holds it any more."""
        if not self._is_held(sequence):
            self.scheduler.add(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if not self._is_held(sequence):
            self.scheduler.remove(sequence)
            return
        sequence.ended = True
        if compiling := self._compiling.pop(sequence.id, None):
            compiling.cancel()
        if self.adapters:
            self.adapters.withdraw(sequence)

    def _refuse(self, sequence: Sequence, reason: FinishReason, error: str) -> None:
        del self._sequences[sequence.id]
        self._remove(sequence)
        self._outbox.append(delta(sequence, [], reason, error))

    def _admit_adapted(self, adapters: "Adapters") -> None:
        """Without any others, this waits for one."""
        idle = not self._in_flight and all(map(self._is_held, self._sequences.values()))
        for sequence, error in adapters.advance(idle):
            self._refuse(sequence, "error", error)
        for sequence in adapters.admit():
            self._add(sequence)

    def _admit_compiled(self) -> None:
        """Sequences whose grammar is ready wait with the others from now on; without any others, this waits for one."""
        idle = len(self._sequences) == len(self._compiling) and not self._in_flight
        wait(self._compiling.values(), COMPILE_PAUSE_S if idle else 0, FIRST_COMPLETED)
        for id, compiling in [item for item in self._compiling.items() if item[1].done()]:
            sequence = self._sequences[id]
            if error := compiling.exception():
                # A GrammarRefused; whoever asks for no grammar doesn't import what defines it.
                self._refuse(sequence, "refused" if isinstance(error, ValueError) else "error", str(error))
            else:
                sequence.follower = compiling.result()
                del self._compiling[id]
                self._add(sequence)

    def _move_blocks(self, wait: bool = False) -> bool:
        """Between the tiers of the prompt cache; loads before the launch of the step that was planned with them. True
        when blocks came free."""
        if self.copies is None:
            return False
        loads, self.scheduler.loads = self.scheduler.loads, []
        saves, self.scheduler.saves = self.scheduler.saves, []
        if saves:
            self.copies.save(saves)
        if loads:
            self.copies.restore(loads)
        saved = self.copies.saved(wait)
        for block in saved:
            self.pool.release([block])
        return bool(saved)

    def _launch(self, work: list[Work]) -> tuple[Launched | None, bool]:
        """The step under way, or None and True when it couldn't be launched."""
        self._steps += 1
        began = time.monotonic_ns()
        try:
            launched = self.runner.launch(work)
            launched.began_ns = began
            return launched, False
        except torch.AcceleratorError:
            # The device context is broken for good: the process has to be replaced.
            raise
        except Exception:
            log.exception("a step of %d sequences failed", len(work))
            return None, True

    def _finish(self, launched: Launched) -> bool:
        try:
            self.runner.finish(launched)
        except torch.AcceleratorError:
            raise
        except Exception:
            log.exception("sampling for %d sequences failed", len(launched.work))
            return False
        return True

    def _alone(self, item: Work) -> Outcome:
        """One sequence of a failed step by itself, so that only those to blame fail."""
        if item.sequence.ended:
            return Outcome(-1)
        try:
            return self.runner.run([item])[0]
        except torch.AcceleratorError:
            raise
        except Exception as error:
            return Outcome(-1, f"{type(error).__name__}: {error}")

    def _settle(self, launched: Launched) -> list[Delta]:
        outcomes = launched.outcomes()
        ended = time.monotonic_ns()
        parts = parts_of(launched.work, self._weights_bytes, self.kv.block_bytes, self._tokens_per_read)
        self._spent.append(Spent(parts, launched.began_ns, ended))
        self.pace.settled([(item.count, item.sequence.patient) for item in launched.work], launched.began_ns, ended)
        return self._commit(launched.work, outcomes)

    def _commit(self, work: Seq[Work], outcomes: Seq[Outcome]) -> list[Delta]:
        deltas = self.scheduler.commit(work, outcomes)
        self._move_blocks()
        for item in deltas:
            if item.finish_reason:
                del self._sequences[item.request_id]
        self.runner.may_capture |= bool(deltas)
        return deltas
