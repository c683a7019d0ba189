"""From a request's path to what answers it, without walking the whole route table."""

from collections.abc import Sequence

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from stoker.runtime.gateway.errors import not_found

Shape = tuple[list[tuple[int, str]], list[tuple[int, str]], ASGIApp]
# "", "v1" and the kind of thing: no parameter stands before those.
STEM = 3


class Dispatch:
    """The routes' own applications by path; `others` gets what is no HTTP request. A parameter is one whole segment."""

    def __init__(self, routes: Sequence[Route], others: ASGIApp) -> None:
        self._others = others
        self._fixed = {route.path: route.app for route in routes if "{" not in route.path}
        self._shaped: dict[tuple[int, str], list[Shape]] = {}
        for route in routes:
            if "{" in route.path:
                parts = route.path.split("/")
                self._shaped.setdefault(stem(parts), []).append(shape_of(parts, route.app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        await self._found(scope)(scope, receive, send)

    def _found(self, scope: Scope) -> ASGIApp:
        """Raises ApiError 404."""
        path = scope["path"]
        if app := self._fixed.get(path):
            scope["path_params"] = {}
            return app
        parts = path.split("/")
        for literals, names, app in self._shaped.get(stem(parts), ()):
            if all([parts[place] == wanted for place, wanted in literals]):
                parameters = {name: parts[place] for place, name in names}
                if all(parameters.values()):
                    scope["path_params"] = parameters
                    return app
        raise not_found(f"Unknown request URL: {scope['method']} {path}.")


def stem(parts: list[str]) -> tuple[int, str]:
    return len(parts), "/".join(parts[:STEM])


def shape_of(parts: list[str], app: ASGIApp) -> Shape:
    places = list(enumerate(parts))[STEM:]
    literals = [(place, part) for place, part in places if not part.startswith("{")]
    return literals, [(place, part.strip("{}")) for place, part in places if part.startswith("{")], app
