"""Server-sent events, taken out of an answer's text as it comes."""

from dataclasses import dataclass
from typing import Any

from stoker.runtime.client.media import parsed

LAST = ("end", "error")


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """`name` is "" for what a function yields or a model says; "waiting" tells why there is nothing yet; "state" has
    the job's record, "retry" the attempt that begins again from the start, "end" result and usage, "error" the error.
    """

    name: str
    data: Any
    id: str = ""
    job_id: str = ""


def parts_of(event: ServerEvent, begun: bool) -> list[Any]:
    """What a stream yields of an event: a generator's part, or at the end the one value of a function that yields none.
    `begun`: there were parts before. A generator that yields nothing ends with []."""
    if not event.name:
        return [event.data]
    if event.name != "end" or begun:
        return []
    result = event.data["result"]
    return [] if isinstance(result, list) and not result else [result]


class EventParser:
    """Lines end with a newline alone: other separators (U+2028, say) may stand in a text."""

    def __init__(self, job_id: str = "") -> None:
        self._job_id = job_id
        self._rest = ""
        self._fields: dict[str, str] = {}

    def feed(self, text: str) -> list[ServerEvent]:
        """The events that `text` completes."""
        *lines, self._rest = (self._rest + text).split("\n")
        return [event for line in lines if (event := self._line(line.removesuffix("\r")))]

    def _line(self, line: str) -> ServerEvent | None:
        if line.startswith(":"):
            return ServerEvent("waiting", line[1:].strip())
        if line:
            name, _, value = line.partition(": ")
            self._fields[name] = value
            return None
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            return None
        return ServerEvent(fields.get("event", ""), parsed(fields["data"]), fields.get("id", ""), self._job_id)
