"""One request's life inside the engine: its tokens, how many of them are computed, and the KV blocks it holds."""

from array import array
from dataclasses import dataclass, field

from stoker.runtime.engine.prefix import BLOCK_TOKENS, HashChain
from stoker.runtime.engine.request import GenerationRequest, SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are prompt, prior and generated ones. The first `computed` have their keys and values in `blocks`; the
    first `published` blocks are in the prefix cache, the last of them under serial number `parent`."""

    id: str
    params: SamplingParams
    tokens: "array[int]"
    prompt_tokens: int
    end: int
    stops: frozenset[int]
    chain: HashChain
    arrival: int
    computed: int = 0
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    published: int = 0
    parent: int = 0
    cached_tokens: int | None = None
    overtaken: int = 0

    @classmethod
    def of(cls, request: GenerationRequest, arrival: int, root: bytes, eos: tuple[int, ...]) -> "Sequence":
        tokens = array("i", [*request.prompt, *request.prior])
        params = request.params
        return cls(
            id=request.id,
            params=params,
            tokens=tokens,
            prompt_tokens=len(request.prompt),
            end=len(request.prompt) + params.max_tokens,
            stops=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos)),
            chain=HashChain(root, tokens),
            arrival=arrival,
        )

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def missing_blocks(self) -> int:
        return blocks_for(len(self.tokens)) - len(self.blocks)

    def restart(self) -> None:
        """Forgets what was computed; the tokens stay. The caller has released the blocks."""
        self.blocks = array("i")
        self.computed = self.published = self.parent = 0


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
