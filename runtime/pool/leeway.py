"""How much work of those that give way goes into the steps of others, so that these take little longer. Measured, not
assumed: on one device a further row costs nothing, on another it doubles the step. Pure."""

from collections.abc import Sequence

TENANTS_SHARE = 0.25
"""Of tenants that have had more than theirs: not much of the device is lost."""
BATCH_SHARE = 0.1
RECENT = 0.3
"""Part of the last step in what steps are expected to take."""
PROBE = 32
"""So many steps in a row may have work of both; then one shows how long they take without."""


class Leeway:
    """Steps of others earn `share` of their own length; what a step takes longer because of up to `most` tokens of
    those that give way has to be earned before."""

    def __init__(self, most: int) -> None:
        self.share = BATCH_SHARE
        self._most = most
        self._alone: dict[int, float] = {}
        self._extra = 0.0
        self._earned = 0.0
        self._owed = 0.0
        self._mixed = 0

    def tokens(self, others: Sequence[int], step: int) -> int:
        """How many may be in the next step of up to `step` tokens. `others` are what the others' rows could compute;
        with prompts among them, a step takes as long as it has tokens."""
        if max(others, default=0) > 1:
            self._owed += self.share * min(sum(others), step)
            tokens = int(self._owed)
            self._owed -= tokens
            return tokens
        is_known = others.count(1) in self._alone and self._mixed < PROBE
        return self._most if is_known and self._earned >= self._extra else 0

    def took(self, rows: int, mixed: bool, seconds: float) -> None:
        """A step with one token for each of so many rows of others, `mixed` with work of those that give way."""
        alone = self._alone.setdefault(rows, seconds)
        if mixed:
            self._mixed += 1
            # A token takes no longer than a step: one that did was held up by something else.
            extra = min(max(0.0, seconds - alone), self._most * alone)
            self._extra += (RECENT if self._extra else 1.0) * (extra - self._extra)
            self._earned -= extra
        else:
            self._mixed = 0
            self._alone[rows] += RECENT * (seconds - alone)
        self._earned = min(self._earned, self._extra) + self.share * alone
