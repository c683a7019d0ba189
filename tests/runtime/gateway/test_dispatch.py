import pytest
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from stoker.runtime.gateway.dispatch import STEM, Dispatch
from stoker.runtime.gateway.errors import ApiError
from stoker.runtime.gateway.routes import routes

PATHS = ["/", "/v1/things", "/v1/things/{name}", "/v1/things/{name}/parts/{id}", "/v1/things/{name}/last"]


class Named:
    def __init__(self, path: str) -> None:
        self.path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["found"] = self.path


async def nothing() -> Message:
    raise AssertionError


async def nowhere(message: Message) -> None:
    raise AssertionError


async def others(scope: Scope, receive: Receive, send: Send) -> None:
    scope["found"] = "others"


async def dispatched(path: str, kind: str = "http") -> Scope:
    scope: Scope = {"type": kind, "method": "GET", "path": path}
    await Dispatch([Route(each, Named(each)) for each in PATHS], others)(scope, nothing, nowhere)
    return scope


@pytest.mark.parametrize(
    ("path", "found", "parameters"),
    [
        ("/", "/", {}),
        ("/v1/things", "/v1/things", {}),
        ("/v1/things/a b", "/v1/things/{name}", {"name": "a b"}),
        ("/v1/things/last", "/v1/things/{name}", {"name": "last"}),
        ("/v1/things/x/last", "/v1/things/{name}/last", {"name": "x"}),
        ("/v1/things/x/parts/7", "/v1/things/{name}/parts/{id}", {"name": "x", "id": "7"}),
    ],
)
async def test_a_path_finds_its_route(path: str, found: str, parameters: dict[str, str]) -> None:
    scope = await dispatched(path)
    assert (scope["found"], scope["path_params"]) == (found, parameters)


@pytest.mark.parametrize("path", ["", "/v1", "/v1/things/", "/v1/things/x/", "/v1/things//last", "/v2/things", "//"])
async def test_an_unknown_path_is_a_404(path: str) -> None:
    with pytest.raises(ApiError) as caught:
        await dispatched(path)
    assert caught.value.status == 404


async def test_what_is_no_request_goes_to_the_router() -> None:
    assert (await dispatched("", "lifespan"))["found"] == "others"


def test_every_route_of_the_gateway_is_made_of_whole_segments() -> None:
    for route in routes():
        parts = [part for part in route.path.split("/") if "{" in part]
        assert all(part.startswith("{") and part.endswith("}") and ":" not in part for part in parts), route.path
        assert not any("{" in part for part in route.path.split("/")[:STEM]), route.path
