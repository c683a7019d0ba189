"""Those who wait for jobs when the gateway stops: they are answered at once, and their jobs go on."""

from typing import TYPE_CHECKING

from stoker.queue.events import Subscription
from stoker.runtime.gateway.errors import NO_RETRY, ApiError

if TYPE_CHECKING:
    from stoker.runtime.gateway.following import Following


class GatewayStops(ApiError):
    """The job goes on without its waiting client. Sent again the request would make another, unless it has a key."""

    def __init__(self, job_id: str, *, has_key: bool = False) -> None:
        super().__init__(
            503,
            f"The gateway stops; the job goes on: ask for it at /v1/jobs/{job_id}.",
            type="server_error",
            code="gateway_stopping",
            headers={} if has_key else NO_RETRY,
        )


class Followings:
    """All that wait in this gateway."""

    def __init__(self) -> None:
        self.over = False
        self._waiting: dict[Subscription, Following] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, subscription: Subscription, following: "Following") -> None:
        if self.over:
            subscription.deliver((None,))
        self._waiting[subscription] = following

    def discard(self, subscription: Subscription) -> None:
        self._waiting.pop(subscription, None)

    def let_go(self) -> None:
        self.over = True
        for subscription, following in self._waiting.items():
            following.detach()
            # The end of what there is to read.
            subscription.deliver((None,))
