"""What a model's steps have taken, and what follows for the next ones where tenants share a device. Pure."""

from collections.abc import Sequence

from stoker.runtime.pool.leeway import Leeway

SHARED_STEP_S = 0.02
PREFILL_TOKENS = 16
"""With so many tokens for each sequence a step is a prefill."""
BATCH_STEP_S = 0.01
"""Whoever comes while a batch has the device to itself waits for a step that is under way."""
LIVELY_S = 10.0
"""So long after others a batch expects the next one."""
REST_S = 0.015
"""So long it leaves the device to nobody: an answer is often followed by the next question at once."""
RESTED_MOST_S = 0.25
"""When the device has been idle so long in all for that, a batch has a step nevertheless."""
LEAST_TOKENS = 16
RECENT = 0.3


class Pace:
    """`token_s` is what a token of a prompt takes. `leeway`: for about as many tokens as come with reading the
    weights."""

    def __init__(self, tokens: int) -> None:
        self.token_s = 0.0
        self.leeway = Leeway(max(LEAST_TOKENS, tokens))
        self._at = 0
        self._others_ns = -round(LIVELY_S * 1e9)
        self._rested = 0.0

    def settled(self, rows: Sequence[tuple[int, bool]], began_ns: int, ended_ns: int) -> None:
        """A step: of each row how many tokens it had and whether it gives way. Steps may be queued behind each other:
        it had the device since the end of the one before."""
        tokens, others = sum(count for count, _ in rows), [count for count, patient in rows if not patient]
        if tokens >= PREFILL_TOKENS * len(rows):
            self.token_s += RECENT * ((ended_ns - began_ns) / 1e9 / tokens - self.token_s)
        if others:
            self._rested += min(REST_S, max(0.0, (began_ns - self._at) / 1e9))
            self._others_ns = ended_ns
        else:
            self._rested = 0.0
        if others and max(others) == 1:
            seconds = (ended_ns - max(began_ns, self._at)) / 1e9
            self.leeway.took(len(others), len(others) < len(rows), seconds)
        self._at = ended_ns

    def shared_step_tokens(self) -> int:
        """0 while it isn't known what a token takes."""
        return int(SHARED_STEP_S / self.token_s) if self.token_s else 0

    def rest_s(self, now_ns: int) -> float:
        """How long the device is still not for batches, though nobody else is here. Source: anticipatory
        scheduling, S. Iyer and P. Druschel, SOSP 2001."""
        if self._rested >= RESTED_MOST_S:
            return 0.0
        return max(0.0, REST_S - (now_ns - self._others_ns) / 1e9)

    def patient_step_tokens(self, now_ns: int, budget: int) -> int:
        """Of a step without others."""
        if now_ns - self._others_ns >= LIVELY_S * 1e9:
            return budget
        return max(LEAST_TOKENS, int(BATCH_STEP_S / self.token_s)) if self.token_s else LEAST_TOKENS
