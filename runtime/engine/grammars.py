"""Grammars of running requests: compiled in a thread of their own, followed token by token, asked for what may come
next. Their place in the step: between the forward pass, which is under way by then, and the sampling of their rows."""

from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from stoker.runtime.grammar import compiled, gist, token_table


class Follower:
    """One answer's place in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self._consumed = 0

    def follow(self, tokens: Seq[int]) -> str:
        """Catches up with the answer so far; why that can't be, or ""."""
        fresh = tokens[self._consumed :]
        self._consumed = len(tokens)
        if len(fresh) and not self.matcher.consume_tokens(list(fresh)):
            return f"the grammar can't be followed any further: {gist(self.matcher.get_error())}"
        return ""


class Grammars:
    """Of one model. `tokenizer` is its tokenizer.json, `ends` its end-of-sequence tokens."""

    def __init__(self, tokenizer: str, vocab_size: int, ends: Seq[int]) -> None:
        self._source = (tokenizer, vocab_size, ends)
        self._vocab_size = vocab_size
        self._table: LLTokenizer | None = None
        # One thread: the table is made once, and compiling never takes more than a core from the steps.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._executor = LLExecutor()

    def compile(self, grammar: str) -> Future[Follower]:
        """The future raises GrammarRefused."""
        return self._pool.submit(self._compile, grammar)

    def allowed(self, followers: Seq[Follower | None]) -> np.ndarray:
        """int32[rows, ceil(V / 32)]: a bit for every token that may come next; all where there is no grammar."""
        masks = np.full((len(followers), -(-self._vocab_size // 32)), -1, np.int32)
        asked = [(follower.matcher, row) for row, follower in enumerate(followers) if follower]
        fill_next_token_bitmask_par(self._executor, asked, masks)
        return masks

    def _compile(self, grammar: str) -> Follower:
        if self._table is None:
            self._table = token_table(*self._source)
        return Follower(compiled(grammar, self._table))
