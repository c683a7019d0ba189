"""One line of a function's log."""

import re
from dataclasses import dataclass
from typing import Literal

from stoker.queue.records import pack, unpack

Stream = Literal["stdout", "stderr", "stoker"]

LINE_BYTES = 4096
COLOUR = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Line:
    """`stream` "stoker" is what the replica's host says of it. `job` is "" for a line that can't be told to be one
    job's. `id` is the line's place in the log, which begins with the server's milliseconds; "" before it has one."""

    replica: str
    stream: Stream
    text: str
    job: str = ""
    id: str = ""

    @property
    def at(self) -> float:
        """Unix seconds."""
        return int(self.id.partition("-")[0]) / 1000

    def packed(self) -> bytes:
        return pack([self.replica, self.stream, self.text, self.job])

    @classmethod
    def unpacked(cls, id: str, data: bytes) -> "Line":
        replica, stream, text, job = unpack(data)
        return cls(replica, stream, text, job, id)


def readable(data: bytes) -> str:
    """At most LINE_BYTES of it; what no terminal should get is shown, and of a line that was drawn over, the last."""
    shown = COLOUR.sub(b"", data.rstrip(b"\r").rpartition(b"\r")[2])
    cut = len(shown) - LINE_BYTES
    text = shown[:LINE_BYTES].decode(errors="replace").translate(HARMLESS)
    return f"{text} … ({cut} bytes more)" if cut > 0 else text


# Control characters but the tab become their pictures: a log must not move the cursor of who reads it.
HARMLESS = {code: 0x2400 + code for code in range(32) if code != 9} | {127: 0x2421}
