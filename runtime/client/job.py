"""Handles of queued jobs."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stoker.runtime.client.errors import StokerError, Unreachable
from stoker.runtime.client.messages import EVENT_STREAM, failure_of, has_ended, result_of
from stoker.runtime.client.paths import job_path
from stoker.runtime.client.patience import Patience
from stoker.runtime.client.server_events import LAST, ServerEvent, parts_of

if TYPE_CHECKING:
    from stoker.runtime.client.client import Client


class Job:
    """The job itself lives on the service: any client of the tenant can attach to its `id`."""

    def __init__(self, client: "Client", id: str) -> None:
        self._client = client
        self.id = id

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def status(self) -> dict[str, Any]:
        """Its record: `state`, `wait_reason`, `timeline`, `usage`, ..."""
        return self._client.insist("GET", job_path(self.id))

    def get(self, timeout: float | None = None) -> Any:
        """Waits for its result. Raises JobFailed, and WaitTimeout (a TimeoutError) after `timeout` seconds."""
        return result_of(self._client.wait(self.id, timeout))

    def cancel(self) -> dict[str, Any]:
        """Its record afterwards; a job that had ended stays as it was."""
        return self._client.cancel(self.id)

    def stream(self) -> Iterator[Any]:
        """The parts that a generator yields, from the first on, as they come; the pieces of a model's answer; of a
        function that is no generator its one value. When its worker is lost, a generator's parts begin again. Raises
        JobFailed."""
        begun = False
        for event in self.events():
            if event.name == "error":
                raise failure_of(self.status(), StokerError(503, event.data["error"], self.id))
            for part in parts_of(event, begun):
                begun = True
                yield part

    def events(self) -> Iterator[ServerEvent]:
        """Everything that the job tells, up to its end; goes on where it was when the connection was lost, or the
        gateway had trouble or was stopped."""
        patience, last = Patience(), ""
        while True:
            try:
                for event in self._events_after(last):
                    if event.name == "error" and not has_ended(self.status()):
                        break
                    patience.heard()
                    last = event.id or last
                    yield event
                    if event.name in LAST:
                        return
                raise Unreachable(self._client.url, "the stream broke off")
            except StokerError as error:
                time.sleep(patience.pause(error, time.monotonic()))

    def _events_after(self, last: str) -> Iterator[ServerEvent]:
        headers = EVENT_STREAM | ({"last-event-id": last} if last else {})
        return self._client.stream_events("GET", f"{job_path(self.id)}/events", headers=headers)
