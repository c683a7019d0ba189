"""Which tokens of which sequences are computed in the next step, and what its results mean. Pure: no tensors, no clock.

Steps may be planned one ahead: while a step is in flight, the tokens it samples count as pending, and the next step is
planned on top of them. Ending a sequence then keeps its blocks until the last step that may write them is committed,
and what that step found for it is dropped. Preemption waits until nothing is in flight.

One token budget a step. Running sequences come first: those that decode (one token each), then those whose prompt is
partly computed, then new ones. A sequence that runs out of blocks takes them from the latest one, which is computed
again later (recompute preemption, as in vLLM, SOSP '23) and keeps its place at the head of the queue.

Patient sequences (of batches) have what others leave: while there are any, they sit most steps out with what they have
(`Leeway` says how many), and give up row and blocks, the latest first, when another needs them.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from stoker.runtime.engine.blocks import BlockPool, Entry
from stoker.runtime.engine.kv_tier import HostTier
from stoker.runtime.engine.prefix import BLOCK_TOKENS
from stoker.runtime.engine.request import Delta, FinishReason, TokenLogprobs
from stoker.runtime.engine.sequence import NO_ROW, Sequence
from stoker.runtime.pool.block_uses import BlockUses
from stoker.runtime.pool.leeway import Leeway

# A waiting sequence that doesn't fit is passed by at most this many smaller ones; then all others wait for it.
MAX_OVERTAKES = 8
# How many waiting sequences that don't fit are looked at before the search for one that does is given up.
LOOKAHEAD = 16


@dataclass(slots=True)
class Work:
    """Tokens `start` to `start + count` of a sequence. After the last known one, the next token is sampled."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


class Outcome(NamedTuple):
    """What a step computed for one `Work`: the sampled token (if it samples), or why the sequence can't go on: if it is
    `refused`, by its own fault."""

    token: int
    error: str = ""
    logprobs: TokenLogprobs | None = None
    refused: bool = False


@dataclass(slots=True)
class Budget:
    """Tokens that are left of a step, and how many of them patient sequences may have."""

    tokens: int
    patient: int

    def of(self, sequence: Sequence) -> int:
        return min(self.tokens, self.patient) if sequence.patient else self.tokens

    def take(self, sequence: Sequence, wanted: int) -> int:
        count = min(wanted, self.of(sequence))
        self.tokens -= count
        self.patient -= count * sequence.patient
        return count


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        *,
        token_budget: int,
        max_seqs: int,
        prefix_cache: bool,
        leeway: Leeway,
        tier: HostTier | None = None,
    ) -> None:
        """`leeway` says what patient sequences have of the steps of others. With a `tier`, `loads` (slot, block) are to
        be carried out before a step is launched, and after a commit `saves` (block, slot), whose blocks are held until
        then."""
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.hit_tokens = 0
        self.host_hit_tokens = 0
        self.computed_tokens = 0
        self._token_budget = self._step_tokens = self._patient_step_tokens = token_budget
        self._max_seqs = max_seqs
        # As many again for sequences that ended while a step was in flight.
        self._rows = list(range(rows_for(max_seqs)))
        self._in_flight = 0
        self.prefix_cache = prefix_cache
        self.tier = tier
        self.loads: list[tuple[int, int]] = []
        self.saves: list[tuple[int, int]] = []
        self._leeway = leeway
        self.uses = BlockUses()

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def limit_step(self, tokens: int, patient: int) -> None:
        """Of the next steps, within the budget; `patient`: of those that only patient sequences have a part in."""
        self._step_tokens = min(tokens, self._token_budget)
        self._patient_step_tokens = min(patient, self._step_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence in whatever state it is, and frees everything it holds that no step in flight writes."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.ended = True
        if not sequence.in_flight:
            self._release(sequence)

    def schedule(self) -> list[Work]:
        """The next step; every one is to be committed, in order. Empty while it depends on the one in flight."""
        budget = Budget(self._step_tokens, self._patient_tokens())
        growing = [sequence for sequence in self.running if sequence.missing_blocks and budget.of(sequence)]
        short = sum(sequence.missing_blocks for sequence in growing) > self.pool.available()
        if self._in_flight and (short or self._in_the_way()):
            return []
        while sequence := self._in_the_way():
            self._preempt(sequence)
        crowded = self._make_room([sequence for sequence in growing if sequence in self.running])
        work: list[Work] = []
        needs = [(sequence, sequence.remaining) for sequence in self.running]
        decoding = shortest_first([need for need in needs if need[1] == 1])
        for sequence, remaining in decoding + [need for need in needs if need[1] > 1]:
            self._append(work, sequence, remaining, budget)
        if not crowded:
            self._admit(work, budget)
        self._in_flight += bool(work)
        return work

    def _patient_tokens(self) -> int:
        """How many tokens of the next step patient sequences may have."""
        if all(sequence.patient for sequence in chain(self.running, self.waiting)):
            return self._patient_step_tokens
        others = [each.remaining for each in chain(self.running, self.waiting) if not each.patient]
        return self._leeway.tokens(others, self._step_tokens)

    def _in_the_way(self) -> Sequence | None:
        """The patient sequence that runs in the place of the next other one."""
        first = next((sequence for sequence in self.waiting if not sequence.patient), None)
        patient = next((sequence for sequence in reversed(self.running) if sequence.patient), None)
        if first is None or patient is None:
            return None
        fits = len(self.running) < self._max_seqs and self.pool.available() > first.missing_blocks
        return None if fits else patient

    def preempt_all(self) -> None:
        """Whatever runs is computed again later. Nothing may be in flight."""
        while self.running:
            self._preempt(self.running[-1])

    def wanted_blocks(self) -> int:
        """What running sequences need for their next step, and the next waiting ones to begin."""
        coming = islice(self.waiting, LOOKAHEAD)
        return sum(each.missing_blocks for each in self.running) + sum(each.missing_blocks + 1 for each in coming)

    def commit(self, work: Seq[Work], outcomes: Seq[Outcome]) -> list[Delta]:
        """Books the oldest step in flight. Only blocks of finite results enter the prefix cache."""
        self._in_flight -= bool(work)
        return [
            delta
            for item, outcome in zip(work, outcomes, strict=True)
            if (delta := self._commit_one(item, outcome)) is not None
        ]

    def _commit_one(self, item: Work, outcome: Outcome) -> Delta | None:
        sequence = item.sequence
        sequence.in_flight -= 1
        if sequence.ended:
            if not sequence.in_flight:
                self._release(sequence)
            return None
        sequence.pending -= item.samples
        if outcome.error:
            return self._finish(sequence, [], "refused" if outcome.refused else "error", outcome.error)
        self.computed_tokens += item.count
        if item.start + item.count >= (sequence.published + 1) * BLOCK_TOKENS:
            self._publish(sequence, item.start + item.count)
        return self._accept(sequence, outcome) if item.samples else None

    def _accept(self, sequence: Sequence, outcome: Outcome) -> Delta:
        token = outcome.token
        if token in sequence.stops:
            return self._finish(sequence, [], "stop")
        sequence.tokens.append(token)
        if len(sequence.tokens) == sequence.end:
            accepted = self._finish(sequence, [token], "length")
        else:
            accepted = delta(sequence, [token], None)
        return accepted if outcome.logprobs is None else accepted._replace(logprobs=[outcome.logprobs])

    def _finish(self, sequence: Sequence, tokens: list[int], reason: FinishReason, error: str = "") -> Delta:
        self.remove(sequence)
        return delta(sequence, tokens, reason, error)

    def _append(self, work: list[Work], sequence: Sequence, remaining: int, budget: "Budget") -> None:
        count = budget.take(sequence, remaining)
        if count:
            samples = count == remaining
            work.append(Work(sequence, sequence.computed, count, samples))
            sequence.computed += count
            sequence.pending += samples
            sequence.in_flight += 1

    def _make_room(self, growing: list[Sequence]) -> bool:
        """Gives running sequences the block their next token needs; True when that took preemption."""
        before = self.preemptions
        for sequence in growing:
            while sequence in self.running and sequence.missing_blocks > self.pool.available():
                self._preempt(max(self.running, key=lambda other: (other.patient, other.arrival)))
            if sequence in self.running:
                sequence.blocks.extend(self.pool.allocate(sequence.missing_blocks))
        return self.preemptions > before

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _admit(self, work: list[Work], budget: "Budget") -> None:
        passed: list[Sequence] = []
        pending = self._pending_keys(budget)
        for sequence in sorted(self.waiting, key=lambda each: each.patient):
            if not budget.of(sequence) or len(self.running) == self._max_seqs or len(passed) == LOOKAHEAD:
                return
            hits = self._hits(sequence)
            kept = self._kept(sequence, len(hits))
            if not self._is_held(sequence, len(hits) + len(kept), pending) and self._fits(sequence, hits):
                self._start(sequence, hits, kept)
                pending |= self._unpublished_keys(sequence)
                self._append(work, sequence, sequence.remaining, budget)
                for other in passed:
                    other.overtaken += 1
            else:
                passed.append(sequence)
            if any(other.overtaken >= MAX_OVERTAKES for other in passed):
                return

    def _fits(self, sequence: Sequence, hits: list[Entry]) -> bool:
        """All known tokens must fit, and a spare block beside those that run already, so that admitting one doesn't at
        once preempt another."""
        spare = 1 if self.running else 0
        return self.pool.available(hits) >= sequence.missing_blocks - len(hits) + spare

    def _start(self, sequence: Sequence, hits: list[Entry], kept: list[int]) -> None:
        self.pool.take(hits)
        sequence.blocks.extend(entry.block for entry in hits)
        sequence.blocks.extend(self.pool.allocate(sequence.missing_blocks))
        sequence.parent = hits[-1].serial if hits else 0
        for index, slot in enumerate(kept, len(hits)):
            block, key, content = sequence.blocks[index], sequence.chain.key(index), sequence.chain.content(index)
            self.loads.append((slot, block))
            sequence.parent = self.pool.publish(block, key, content, sequence.parent)
        self.host_hit_tokens += len(kept) * BLOCK_TOKENS
        sequence.published = len(hits) + len(kept)
        sequence.computed = sequence.published * BLOCK_TOKENS
        sequence.row = self._rows.pop()
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            self.hit_tokens += sequence.cached_tokens
            self.uses.found(sequence.chain, sequence.published)
        sequence.overtaken = 0
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda s: s.arrival)

    def _hits(self, sequence: Sequence) -> list[Entry]:
        """Cached blocks that the sequence can begin with."""
        hits: list[Entry] = []
        parent = 0
        for index in range(cacheable_blocks(sequence) if self.prefix_cache else 0):
            entry = self.pool.find(sequence.chain.key(index), sequence.chain.content(index), parent)
            if entry is None:
                break
            hits.append(entry)
            parent = entry.serial
        return hits

    def _kept(self, sequence: Sequence, matched: int) -> list[int]:
        """Slots of the second tier with the blocks that come after the `matched` first ones."""
        slots: list[int] = []
        if self.tier is None or not self.prefix_cache:
            return slots
        for index in range(matched, cacheable_blocks(sequence)):
            slot = self.tier.find(*named(sequence, index))
            if slot is None:
                break
            slots.append(slot)
        return slots

    def _is_held(self, sequence: Sequence, matched: int, pending: set[bytes]) -> bool:
        """Waits while a running sequence computes the very block it needs next, so that a burst with a shared prefix
        computes it once."""
        if not pending or sequence.overtaken >= MAX_OVERTAKES or matched >= cacheable_blocks(sequence):
            return False
        return sequence.chain.key(matched) in pending

    def _pending_keys(self, budget: "Budget") -> set[bytes]:
        """Blocks that are being computed; not by those that sit out."""
        if not self.waiting:
            return set()
        computing = (sequence for sequence in self.running if not sequence.patient or budget.patient)
        return {key for sequence in computing for key in self._unpublished_keys(sequence)}

    def _unpublished_keys(self, sequence: Sequence) -> set[bytes]:
        if not self.prefix_cache:
            return set()
        return {sequence.chain.key(i) for i in range(sequence.published, len(sequence.tokens) // BLOCK_TOKENS)}

    def _publish(self, sequence: Sequence, computed: int) -> None:
        if not self.prefix_cache:
            return
        for index in range(sequence.published, computed // BLOCK_TOKENS):
            key, content = sequence.chain.key(index), sequence.chain.content(index)
            sequence.parent = self.pool.publish(sequence.blocks[index], key, content, sequence.parent)
            self._save(sequence, index)
        sequence.published = computed // BLOCK_TOKENS

    def _save(self, sequence: Sequence, index: int) -> None:
        if self.tier is not None and (slot := self.tier.make_room(*named(sequence, index))) is not None:
            self.pool.hold(sequence.blocks[index])
            self.saves.append((sequence.blocks[index], slot))

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        if sequence.row != NO_ROW:
            self._rows.append(sequence.row)
        sequence.restart()


def shortest_first(decoding: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
    """Attention starts with the last rows: the longest contexts first leave short ones to even out the end."""
    return sorted(decoding, key=lambda need: need[0].computed)


def named(sequence: Sequence, index: int) -> tuple[bytes, bytes, bytes]:
    """Key and tokens of a full block, and the key of the one before it."""
    chain = sequence.chain
    return chain.key(index), chain.content(index), chain.key(index - 1) if index else b""


def rows_for(max_seqs: int) -> int:
    """Rows of the device's table of sequences."""
    return 2 * max_seqs


def cacheable_blocks(sequence: Sequence) -> int:
    """Full blocks that may come from the cache: at least one token is left to compute, or nothing could be sampled."""
    return (len(sequence.tokens) - 1) // BLOCK_TOKENS


def delta(sequence: Sequence, tokens: list[int], reason: FinishReason | None, error: str = "") -> Delta:
    return Delta(sequence.id, tokens, reason, error, sequence.prompt_tokens, sequence.cached_tokens or 0)
