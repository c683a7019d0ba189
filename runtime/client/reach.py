"""How either kind of client tells that nobody answers."""

import contextlib
from collections.abc import Iterator

import httpx

from stoker.runtime.client.errors import Unreachable


class Reach:
    """`url` has the gateway, which has answered once it was `_reached`."""

    url: str
    _reached = False

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raises Unreachable, which is final when nobody is there and nobody has ever answered."""
        try:
            yield
        except httpx.TransportError as error:
            nobody = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise Unreachable(self.url, error, final=nobody and not self._reached) from error
