"""Row 10: what has no key is refused, by every route that the application serves, with every method."""

import re

import httpx
import pytest
from starlette.routing import Route

from stoker.runtime.gateway.app import create_app
from stoker.runtime.gateway.routes import ENDPOINTS
from stoker.runtime.gateway.settings import GatewaySettings
from tests.runtime.gateway.conftest import Login
from tests.runtime.gateway.peers import error_of

PUBLIC = {"/health", "/healthz", "/readyz", "/openapi.json"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
WRONG = ("", "sk-other", "sk-stoker-root-" + "A" * 43, "sk-stoker-abcdefghijkl-" + "A" * 43)


def filled(path: str) -> str:
    return re.sub(r"\{\w+(:\w+)?\}", "x", path)


def served(settings: GatewaySettings) -> list[str]:
    """Paths as the application has them; one that stands there without an endpoint's checks would be an open door."""
    routes = create_app(settings).routes
    assert all(type(route) is Route for route in routes)
    paths = {route.path for route in routes if isinstance(route, Route)}
    assert paths == {endpoint.path for endpoint in ENDPOINTS}
    return sorted(paths)


@pytest.mark.parametrize("method", METHODS)
async def test_no_route_opens_without_a_key(method: str, settings: GatewaySettings, login: Login) -> None:
    client = login("")
    for path in served(settings):
        response = await client.request(method, filled(path))
        if path in PUBLIC:
            assert response.status_code == (200 if method in ("GET", "HEAD") else 405), path
            continue
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer", path
        if method != "HEAD":
            error = error_of(response)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize("key", WRONG[1:])
async def test_no_route_opens_to_a_wrong_key(key: str, login: Login) -> None:
    client = login(key)
    for endpoint in ENDPOINTS:
        response = await client.request(endpoint.method, filled(endpoint.path))
        assert response.status_code == (200 if endpoint.path in PUBLIC else 401), endpoint


async def test_what_is_public_says_nothing_about_anybody(login: Login, root: httpx.AsyncClient) -> None:
    await root.put("/v1/tenants/canary-tenant", json={})
    client = login("")
    for path in sorted(PUBLIC):
        assert "canary-tenant" not in (await client.get(path)).text
