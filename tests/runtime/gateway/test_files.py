from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from .conftest import Login, RunningGateway
from .peers import error_of, make_key


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        yield client


async def test_a_file_comes_back_as_it_went(client: openai.AsyncOpenAI) -> None:
    content = bytes(range(256)) * 500
    made = await client.files.create(file=("some data.jsonl", content), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.status) == (
        len(content),
        "some data.jsonl",
        "batch",
        "processed",
    )
    assert (await client.files.content(made.id)).content == content
    assert await client.files.retrieve(made.id) == made
    assert made.id in [file.id async for file in client.files.list()]
    assert (await client.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made.id)
    assert made.id not in [file.id async for file in client.files.list()]


async def test_files_are_listed_page_by_page(client: openai.AsyncOpenAI) -> None:
    made = [(await client.files.create(file=("f", b"x"), purpose="user_data")).id for _ in range(5)]
    newest_first = [file.id async for file in client.files.list(limit=2, purpose="user_data")]
    assert newest_first[:5] == made[::-1]
    assert [file.id async for file in client.files.list(limit=2, order="asc")][-5:] == made
    for name in made:
        await client.files.delete(name)


async def test_a_page_is_full_whatever_is_between_its_files(client: openai.AsyncOpenAI) -> None:
    wanted, others = [
        [(await client.files.create(file=("f", b"x"), purpose=purpose)).id for _ in range(3)]
        for purpose in ("fine-tune", "vision")
    ]
    page = await client.files.list(limit=2, purpose="fine-tune")
    assert ([file.id for file in page.data], page.has_more) == (wanted[:0:-1], True)
    rest = await page.get_next_page()
    assert ([file.id for file in rest.data], rest.has_more) == (wanted[:1], False)
    for name in [*wanted, *others]:
        await client.files.delete(name)


async def test_pages_go_on_behind_a_file_that_is_gone(client: openai.AsyncOpenAI) -> None:
    made = [(await client.files.create(file=("f", b"x"), purpose="assistants")).id for _ in range(4)]
    await client.files.delete(made[2])
    for order, rest in (("desc", made[1::-1]), ("asc", made[3:])):
        page = await client.files.list(after=made[2], order=order, purpose="assistants")  # type: ignore[arg-type]
        assert [file.id for file in page.data] == rest
    for name in made[:2] + made[3:]:
        await client.files.delete(name)


@pytest.mark.parametrize("path", ["files", "batches"])
async def test_what_is_no_id_has_no_page_behind_it(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(f"/v1/{path}", params={"after": "../x"})
    assert (response.status_code, error_of(response)["param"]) == (400, "after")


@pytest.mark.parametrize(
    ("data", "files", "param"),
    [
        ({"purpose": "batch"}, {}, "file"),
        ({}, {"file": ("f", b"x")}, "purpose"),
        ({"purpose": "nonsense"}, {"file": ("f", b"x")}, "purpose"),
        ({"purpose": "batch", "file": "text"}, {}, "file"),
    ],
    ids=str,
)
async def test_bad_forms(http: httpx.AsyncClient, data: dict, files: dict, param: str) -> None:
    response = await http.post("/v1/files", data=data, files=files or None)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize(
    "limit", ["0", "10001", "x", "00000000010001", "000000001" + "9" * 5000], ids=lambda text: text[:20]
)
async def test_limits_that_are_none(http: httpx.AsyncClient, limit: str) -> None:
    response = await http.get("/v1/files", params={"limit": limit})
    assert (response.status_code, error_of(response)["param"]) == (400, "limit")


@pytest.mark.parametrize(
    "kind",
    ["application/json", "multipart/form-data", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"],
)
async def test_bodies_that_are_no_form(http: httpx.AsyncClient, kind: str) -> None:
    response = await http.post("/v1/files", content=b"--y\r\nnonsense", headers={"content-type": kind})
    assert response.status_code == 400


async def test_a_file_over_the_limit_is_refused(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("f", b"x" * 500_000)})
    assert response.status_code == 413


@pytest.mark.parametrize("name", ["file-unknown", "..%2Fother", "a.json", "%00"])
async def test_unknown_files(http: httpx.AsyncClient, name: str) -> None:
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert (await http.request(method, f"/v1/files/{name}{path}")).status_code == 404


async def test_another_tenants_file_is_unknown(login: Login, root: httpx.AsyncClient) -> None:
    ann, bob = [login((await make_key(root, name, "invoke"))["key"]) for name in ("ann", "bob")]
    made = (await ann.post("/v1/files", data={"purpose": "batch"}, files={"file": ("f", b"x")})).json()["id"]
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert (await bob.request(method, f"/v1/files/{made}{path}")).status_code == 404
    assert (await bob.get("/v1/files")).json()["data"] == []
    assert (await ann.get(f"/v1/files/{made}/content")).content == b"x"
