"""Token ids to text, piece by piece: no split characters, no leaked stop strings, whole == concatenated pieces."""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
LONGEST_PENDING = 16


class Decoder(Protocol):
    """The one method of `tokenizers.Tokenizer` that is needed."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Incremental decoding over a window of recent tokens; bytes that never form a character are let go as U+FFFD."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def feed(self, token: int) -> str:
        self._ids.append(token)
        text = self._pending_text()
        incomplete = not text or text.endswith(REPLACEMENT)
        if incomplete and len(self._ids) - self._read < LONGEST_PENDING:
            return ""
        return self._take(text)

    def flush(self) -> str:
        return self._take(self._pending_text())

    def _pending_text(self) -> str:
        known = self._decoder.decode(self._ids[self._prefix : self._read])
        return self._decoder.decode(self._ids[self._prefix :])[len(known) :]

    def _take(self, text: str) -> str:
        self._prefix, self._read = self._read, len(self._ids)
        return text


def held_suffix(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops if len(stop) > length):
            return length
    return 0


def first_stop(text: str, stops: Sequence[str]) -> int:
    """Index of the earliest stop string in `text`, or -1."""
    found = [index for index in (text.find(stop) for stop in stops) if index >= 0]
    return min(found, default=-1)


class TextStream:
    """Visible text of one answer; `stopped` once a stop string was met."""

    def __init__(self, decoder: Decoder, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(decoder)
        self._stops = tuple(stops)
        self._held = ""
        self._shown: list[str] = []
        self.tokens = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._shown)

    def feed(self, tokens: Sequence[int]) -> str:
        """Newly visible text. Tokens after the one that completes a stop string are not counted."""
        shown = ""
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            shown += self._show(self._detokenizer.feed(token))
        return shown

    def finish(self) -> str:
        """The held-back rest, when the answer ends for another reason than a stop string."""
        if self.stopped:
            return ""
        shown = self._show(self._detokenizer.flush())
        if not self.stopped:
            shown += self._held
            self._shown.append(self._held)
            self._held = ""
        return shown

    def _show(self, piece: str) -> str:
        if not self._stops:
            self._shown.append(piece)
            return piece
        candidate = self._held + piece
        stop = first_stop(candidate, self._stops)
        self.stopped = stop >= 0
        visible = stop if self.stopped else len(candidate) - held_suffix(candidate, self._stops)
        self._held = "" if self.stopped else candidate[visible:]
        self._shown.append(candidate[:visible])
        return candidate[:visible]
