"""What follows from one try to deliver a webhook: a pure decision."""

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.queue.deliveries import Status

# Seconds between tries, as Standard Webhooks proposes; beside them stands the first try, at once.
PAUSES_S = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
GONE = 410


@dataclass(frozen=True, slots=True)
class Verdict:
    """`pause_s` until the next try, None when there is none."""

    status: Status
    pause_s: float | None = None


def verdict(answer: int, tries_before: int, pauses_s: Sequence[float]) -> Verdict:
    """`answer` is an HTTP status, 0 for none. Everything but 2xx is a failure, redirects too; 410 wants no more."""
    if 200 <= answer < 300:
        return Verdict("delivered")
    if answer == GONE:
        return Verdict("disabled")
    if tries_before < len(pauses_s):
        return Verdict("pending", pauses_s[tries_before])
    return Verdict("failed")
