"""What some rows ask for beyond plain sampling: penalties, biases, grammars, log-probabilities.

The step samples every row plainly, in its graph. For the rows that ask, its logits are then gone through once more,
outside the graph, and their tokens replaced before anything reads them. Nobody else pays; everything stays in the order
of one stream, so a step may be planned before the tokens of the one before are known. Tokens are counted on the device,
as they are sampled there.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from stoker.kernels import ops
from stoker.kernels.reference import SEEN_IN_PROMPT
from stoker.runtime.engine.request import MAX_TOP_LOGPROBS, TokenLogprobs
from stoker.runtime.engine.scheduler import Work
from stoker.runtime.engine.sequence import Sequence

if TYPE_CHECKING:
    from stoker.runtime.engine.grammars import Grammars

# JSON has no infinity; this is what vLLM sends instead.
LEAST_LOGPROB = -9999.0


class Steered(NamedTuple):
    """`errors` by place in the step's work. `rows` are the places that `logprobs` f32[R, 1 + K] (the sampled token's,
    then the likeliest tokens') and `likeliest` i64[R, K] are for, each with how many of the K it asked for. They are on
    the host once the step is."""

    errors: dict[int, str]
    rows: list[tuple[int, int]]
    logprobs: torch.Tensor | None = None
    likeliest: torch.Tensor | None = None

    def reports(self) -> dict[int, TokenLogprobs]:
        if self.logprobs is None or self.likeliest is None:
            return {}
        values = self.logprobs.nan_to_num(nan=LEAST_LOGPROB, neginf=LEAST_LOGPROB).tolist()
        ids = self.likeliest.tolist()
        return {
            place: TokenLogprobs(own[0], names[:count], own[1 : 1 + count])
            for (place, count), own, names in zip(self.rows, values, ids, strict=True)
        }


class Asked(NamedTuple):
    """A row that asks: its place in the step, and its work."""

    place: int
    work: Work

    @property
    def sequence(self) -> Sequence:
        return self.work.sequence


class Steering:
    def __init__(self, vocab_size: int, device: str, batch_invariant: bool) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._invariant = batch_invariant
        self._seen = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._slots: dict[Sequence, int] = {}
        self._free: list[int] = []

    def sample(
        self,
        work: Seq[Work],
        logits: torch.Tensor,
        tokens: torch.Tensor,
        last: torch.Tensor,
        grammars: "Grammars | None",
    ) -> Steered:
        """Replaces the tokens of the rows that ask in `tokens` i64[S] and `last` (the table's). The host must know all
        tokens before this step's."""
        asked, errors = self._follow(work)
        if not asked:
            return Steered(errors, [])
        index, rows, seed, position = self._upload(
            np.array([[a.place, a.sequence.row, a.sequence.params.seed, a.work.start + a.work.count] for a in asked]).T
        )
        scores = logits.index_select(0, index).float()
        wanting = [i for i, a in enumerate(asked) if a.sequence.params.logprobs is not None]
        wanted = self._upload(np.array(wanting, np.int64))
        raw = scores.index_select(0, wanted)
        slots = self._steer(asked, scores, grammars)
        temperature, top_p, min_p = self._floats(asked, "temperature", "top_p", "min_p")
        [top_k] = self._upload(np.array([[a.sequence.params.top_k for a in asked]], np.int32))
        chosen = self._draw(scores, temperature, top_k, top_p, min_p, seed, position)
        tokens.index_copy_(0, index, chosen)
        last.index_copy_(0, rows, chosen)
        self._count(slots, chosen)
        if not wanting:
            return Steered(errors, [])
        counts = [(asked[i].place, asked[i].sequence.params.logprobs or 0) for i in wanting]
        most = max(count for _, count in counts)
        return Steered(errors, counts, *self._logprobs(raw, chosen.index_select(0, wanted), most))

    def warm_up(self) -> None:
        """Runs the kernels that plain steps don't."""
        scores = torch.zeros(2, self._vocab_size, device=self._device)
        words = torch.full((2, -(-self._vocab_size // 32)), -1, dtype=torch.int32, device=self._device)
        slots, top_k = words[:, 0].contiguous(), torch.zeros(2, dtype=torch.int32, device=self._device)
        one, seeds = scores[:, 0] + 1, torch.zeros(2, dtype=torch.int64, device=self._device)
        for allowed in (None, words):
            ops.steer(scores, words, slots, one, one, one, allowed)
        ops.sample(scores, one, top_k, one, one * 0, seeds, seeds)
        ops.log_total(scores)

    def _draw(self, *columns: torch.Tensor) -> torch.Tensor:
        """Plain torch may round the same number differently at another place of a tensor."""
        if self._invariant and self._device == "cpu":
            return torch.cat([ops.sample(*row) for row in zip(*(column.split(1) for column in columns), strict=True)])
        return ops.sample(*columns)

    def _follow(self, work: Seq[Work]) -> tuple[list[Asked], dict[int, str]]:
        """The rows to go through, and those whose grammar can't go on."""
        asked: list[Asked] = []
        errors: dict[int, str] = {}
        for place, item in enumerate(work):
            sequence = item.sequence
            if not item.samples or sequence.ended or not sequence.params.steered:
                continue
            follower = sequence.follower
            if follower and (error := follower.follow(sequence.tokens[sequence.prompt_tokens :])):
                errors[place] = error
            else:
                asked.append(Asked(place, item))
        return asked, errors

    def _steer(self, asked: Seq[Asked], scores: torch.Tensor, grammars: "Grammars | None") -> list[int]:
        """Changes `scores` f32[R, V]; returns the rows' slots of the table of seen tokens."""
        slots = self._assign(asked)
        [slot] = self._upload(np.array([slots], np.int32))
        names = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        presence, frequency, repetition = self._floats(asked, *names)
        followers = [a.sequence.follower for a in asked]
        allowed = None
        if any(followers):
            assert grammars is not None
            allowed = self._upload(grammars.allowed(followers))
        ops.steer(scores, self._seen, slot, presence, frequency, repetition, allowed)
        self._add_biases(asked, scores)
        return slots

    def _add_biases(self, asked: Seq[Asked], scores: torch.Tensor) -> None:
        cells: list[int] = []
        values: list[float] = []
        for row, a in enumerate(asked):
            for token, bias in a.sequence.params.logit_bias:
                cells.append(row * self._vocab_size + token)
                values.append(bias)
        if cells:
            scores.view(-1).index_add_(0, self._upload(np.array(cells)), self._upload(np.array(values, np.float32)))

    def _assign(self, asked: Seq[Asked]) -> list[int]:
        for sequence in [sequence for sequence in self._slots if sequence.ended]:
            self._free.append(self._slots.pop(sequence))
        return [self._slot(a.sequence) if a.sequence.params.penalised else -1 for a in asked]

    def _slot(self, sequence: Sequence) -> int:
        """A sequence keeps its slot until it ends, also while it is preempted."""
        if sequence not in self._slots:
            if not self._free:
                self._grow()
            self._slots[sequence] = slot = self._free.pop()
            self._fill(self._seen[slot], sequence)
        return self._slots[sequence]

    def _grow(self) -> None:
        slots = len(self._seen)
        more = torch.zeros(max(4, slots), self._vocab_size, dtype=torch.int32, device=self._device)
        self._seen = torch.cat((self._seen, more))
        self._free += range(slots, len(self._seen))

    def _fill(self, line: torch.Tensor, sequence: Sequence) -> None:
        """From the tokens that an earlier attempt or the prompt brought along."""
        line.zero_()
        tokens = np.array(sequence.tokens)
        prompt, answer = tokens[: sequence.prompt_tokens], tokens[sequence.prompt_tokens :]
        line.index_fill_(0, self._upload(np.unique(prompt).astype(np.int64)), SEEN_IN_PROMPT)
        if len(answer):
            ids, counts = np.unique(answer, return_counts=True)
            line.index_add_(0, self._upload(ids.astype(np.int64)), self._upload(counts.astype(np.int32)))

    def _count(self, slots: Seq[int], chosen: torch.Tensor) -> None:
        penalised = [row for row, slot in enumerate(slots) if slot >= 0]
        if penalised:
            row, offset = self._upload(np.array([[r, slots[r] * self._vocab_size] for r in penalised]).T)
            # -1 stands for a broken row; its sequence ends and is counted no more.
            cells = offset + chosen.index_select(0, row).clamp(min=0)
            self._seen.view(-1).index_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))

    def _logprobs(self, raw: torch.Tensor, chosen: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the model's own distribution: before temperature, penalties and grammar. Which of equal logits comes first
        depends on how many rows there are, and how many tokens are wanted."""
        rows, count = (1, min(MAX_TOP_LOGPROBS, self._vocab_size)) if self._invariant and most else (len(raw), most)
        found = [part.topk(count, -1) for part in raw.split(rows)]
        values, ids = (torch.cat(column)[:, :most] for column in zip(*found, strict=True))
        own = raw.gather(1, chosen.clamp(min=0)[:, None])
        return self._download(torch.cat((own, values), 1) - ops.log_total(raw)), self._download(ids)

    def _floats(self, asked: Seq[Asked], *names: str) -> torch.Tensor:
        return self._upload(np.array([[getattr(a.sequence.params, name) for a in asked] for name in names], np.float32))

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        """Without waiting for the device."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        return host if self._device == "cpu" else host.pin_memory().to(self._device, non_blocking=True)

    def _download(self, values: torch.Tensor) -> torch.Tensor:
        if self._device == "cpu":
            return values
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values, non_blocking=True)
