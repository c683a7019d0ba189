"""What holds for every answer, whatever was asked."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.connections import connected

from .conftest import BODY_LIMIT, RunningGateway
from .peers import Deploy, error_of


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/models/", 404, "not_found"),
        ("GET", "/v1/models/a/b", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PATCH", "/v1/jobs/x", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_unknown_routes_and_methods(
    http: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    response = await http.request(method, path)
    assert (response.status_code, error_of(response)["code"]) == (status, code)


async def test_a_405_says_what_is_allowed(http: httpx.AsyncClient) -> None:
    response = await http.patch("/v1/jobs/x")
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}


async def test_heads_have_no_body(http: httpx.AsyncClient) -> None:
    response = await http.head("/v1/models")
    assert (response.status_code, response.content) == (200, b"")
    assert (await http.head("/v1/jobs/x/events")).status_code == 405


@pytest.mark.parametrize("path", ["/healthz", "/nothing", "/v1/models", "/"])
async def test_request_ids_are_kept_when_sane_and_made_otherwise(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path, headers={"x-request-id": "my-id_1.2:3"})).headers["x-request-id"] == "my-id_1.2:3"
    for insane in ("", "a b", "x" * 129, "é"):
        made = (await http.get(path, headers={b"x-request-id": insane.encode("latin-1")})).headers["x-request-id"]
        assert made.startswith("req_") and made != insane


async def test_bodies_are_capped_in_bytes(http: httpx.AsyncClient, deploy: Deploy) -> None:
    name = await deploy()
    url = f"/v1/functions/{name}/jobs"
    fits = b'"' + b"x" * (BODY_LIMIT - 2) + b'"'
    assert (await http.post(url, content=fits)).status_code == 202
    response = await http.post(url, content=fits + b" ")
    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")


async def test_chunked_bodies_are_capped_too(http: httpx.AsyncClient, deploy: Deploy) -> None:
    name = await deploy()

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * 10_000

    response = await http.post(f"/v1/functions/{name}/jobs", content=endless())
    assert response.status_code == 413
    assert (await http.get("/healthz")).status_code == 200


async def test_a_lying_length_is_refused_before_the_body(gateway: RunningGateway) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n"
    answer = await exchange(gateway, head.encode())
    assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer


async def test_a_body_that_never_comes_is_408(gateway: RunningGateway) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
    answer = await exchange(gateway, head.encode())
    assert answer.startswith(b"HTTP/1.1 408 ") and b"request_timeout" in answer


async def exchange(gateway: RunningGateway, request: bytes) -> bytes:
    host, port = gateway.url.removeprefix("http://").split(":")
    async with connected(host, int(port)) as (reader, writer), asyncio.timeout(10):
        writer.write(request)
        return await reader.read()
