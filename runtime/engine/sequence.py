"""One request's life inside the engine: its tokens, how many of them are computed, and the KV blocks it holds."""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.runtime.engine.prefix import BLOCK_TOKENS, HashChain
from stoker.runtime.engine.request import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from stoker.runtime.engine.grammars import Follower

NO_ROW = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are prompt, prior and generated ones that the host knows; `pending` more are being sampled by steps in
    flight. Steps up to now compute the first `computed` of all these into `blocks`. The first `published` blocks are
    in the prefix cache, the last of them under serial number `parent`.

    While it runs it owns row `row` of the device's table, which knows the first `sent_blocks` of its blocks (-1: the
    row is new to it). `in_flight` steps may still write its blocks, also after it has `ended`. `follower` knows where
    in its grammar the answer stands. A `patient` one has what others leave: one of a batch,
    or of a `tenant` that has had more than its share. `adapter` is its adapter's slot, 0 for none.
    """

    id: str
    params: SamplingParams
    tokens: "array[int]"
    prompt_tokens: int
    end: int
    stops: frozenset[int]
    chain: HashChain
    arrival: int
    computed: int = 0
    pending: int = 0
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    row: int = NO_ROW
    sent_blocks: int = -1
    in_flight: int = 0
    ended: bool = False
    published: int = 0
    parent: int = 0
    cached_tokens: int | None = None
    overtaken: int = 0
    follower: "Follower | None" = None
    patient: bool = False
    of_batch: bool = False
    tenant: str = ""
    adapter: int = 0

    @classmethod
    def of(
        cls, request: GenerationRequest, arrival: int, root: bytes, eos: tuple[int, ...], public_root: bytes = b""
    ) -> "Sequence":
        tokens = array("i", [*request.prompt, *request.prior])
        params = request.params
        ends_itself = params.ignore_eos and not params.grammar
        return cls(
            id=request.id,
            params=params,
            tokens=tokens,
            prompt_tokens=len(request.prompt),
            end=len(request.prompt) + params.max_tokens,
            stops=frozenset(params.stop_token_ids) | (frozenset() if ends_itself else frozenset(eos)),
            chain=HashChain(root, tokens, public_root, min(request.public_tokens, len(tokens)) // BLOCK_TOKENS),
            arrival=arrival,
            patient=request.patient,
            of_batch=request.patient,
            tenant=request.tenant,
        )

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled; 0 when the last one is being sampled."""
        length = len(self.tokens) + self.pending
        return length - self.computed if length < self.end else 0

    @property
    def missing_blocks(self) -> int:
        length = len(self.tokens) + self.pending
        return blocks_for(length) - len(self.blocks) if length < self.end else 0

    def restart(self) -> None:
        """Forgets what was computed; the tokens stay. The caller has released blocks and row; no step is in flight."""
        self.blocks = array("i")
        self.computed = self.published = self.parent = 0
        self.row, self.sent_blocks = NO_ROW, -1


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
