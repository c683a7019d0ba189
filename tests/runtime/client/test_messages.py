"""Keys and names that can't be sent are refused before anything is."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.client.async_client import AsyncClient
from stoker.runtime.client.client import Client
from stoker.runtime.client.errors import BadUrl
from stoker.runtime.client.messages import MAP_KEY_MOST, OWN_ID_MOST, body_of, checked_key, job_body, own_job
from stoker.runtime.current_job import CALLER, current_job, this_process
from stoker.runtime.gateway.function_routes import CLIENT_JOB_ID

ALLOWED = r"a key is 1 to \d+ of the letters a-z and A-Z, digits, '\.', '_', '~' and '-'"
# Nobody listens here: a request would be Unreachable.
NOBODY = "http://127.0.0.1:9"
BAD_KEYS = ["bad key/", "é", "a\n", "..", ".", "a%20", "k" * 129]


@pytest.mark.parametrize("key", BAD_KEYS)
async def test_a_bad_key_says_which_are_allowed(key: str) -> None:
    with Client(NOBODY) as client, pytest.raises(ValueError, match=ALLOWED):
        client.spawn("f", 1, key=key)
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(ValueError, match=ALLOWED):
            await client.spawn("f", 1, key=key)


async def test_a_maps_key_leaves_room_for_the_inputs_numbers() -> None:
    longest = "k" * MAP_KEY_MOST
    assert len(f"{longest}.{10**20}") <= OWN_ID_MOST
    for key in ("bad key/", longest + "k"):
        with Client(NOBODY) as client, pytest.raises(ValueError, match=f"{ALLOWED}.*not '{key}'"):
            next(client.map("f", [1], key=key))
        async with AsyncClient(NOBODY) as client:
            with pytest.raises(ValueError, match=ALLOWED):
                await anext(client.map("f", [1], key=key))


@given(st.text(max_size=140) | st.from_regex(r"[A-Za-z0-9._~-]{1,140}", fullmatch=True))
def test_keys_are_those_that_arrive_and_that_the_gateway_takes(key: str) -> None:
    try:
        path = own_job("f", checked_key(key))
    except ValueError:
        assert not CLIENT_JOB_ID.fullmatch(key) or key in (".", "..")
        return
    arrived = httpx.Request("PUT", f"{NOBODY}{path}").url.path
    assert arrived == f"/v1/functions/f/jobs/{key}" and CLIENT_JOB_ID.fullmatch(key)


@pytest.mark.parametrize("key", ["a\nb", "é", " a", "a ", "k" * 256])
def test_an_idempotency_key_is_text_of_a_header(key: str) -> None:
    with Client(NOBODY) as client, pytest.raises(ValueError, match="1 to 255 printable ASCII"):
        client.invoke("f", 1, key=key)


@pytest.mark.parametrize("name", ["", "a/b", "..", "/"])
def test_what_would_be_another_path_is_no_name(name: str) -> None:
    calls: list[Any] = [lambda c: c.invoke(name), lambda c: c.spawn(name), lambda c: c.delete(name)]
    calls += [lambda c: c.dead(name), lambda c: next(c.stream(name)), lambda c: next(c.map(name, [1]))]
    with Client(NOBODY) as client:
        for call in calls:
            with pytest.raises(ValueError, match="is no function name"):
                call(client)
        for call in (client.wait, client.job, client.cancel, client.replay):
            with pytest.raises(ValueError, match="is no job id"):
                call(name)


def test_other_odd_characters_stay_in_their_part_of_the_path() -> None:
    arrived = httpx.Request("PUT", f"{NOBODY}{own_job('a b?c#d', 'k')}").url
    assert (arrived.path, arrived.query) == ("/v1/functions/a b?c#d/jobs/k", b"")


async def test_what_is_no_job_can_not_be_gathered() -> None:
    with Client(NOBODY) as client:
        for wrong in (["f", [1]], [[client.attach("j")]]):
            with pytest.raises(TypeError, match=r"gather\(\*jobs\) with Job objects, not (str|list)"):
                client.gather(*wrong)  # type: ignore[arg-type]
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(TypeError, match=r"gather\(\*jobs\) with AsyncJob objects, not list"):
            await client.gather([client.attach("j")])  # type: ignore[arg-type]


def test_results_that_come_one_by_one_say_how_they_are_taken() -> None:
    for method in (AsyncClient.map, AsyncClient.stream):
        assert "`async for" in (method.__doc__ or "")


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_url_may_end_in_v1(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setenv("STOKER_URL", NOBODY + end)
    for client in (Client(), Client(NOBODY + end)):
        assert client.url == NOBODY
    assert Client("http://host/stoker/v1").url == "http://host/stoker"


@pytest.mark.parametrize("url", ["localhost:8123", "ftp://localhost", "//localhost"])
def test_a_url_needs_its_scheme(url: str) -> None:
    with pytest.raises(BadUrl, match="needs http:// or https://"):
        Client(url)
    with pytest.raises(BadUrl, match="needs http:// or https://"):
        AsyncClient(url)


def test_a_call_names_the_job_whose_code_makes_it() -> None:
    assert CALLER not in body_of(1)["headers"]
    token = current_job.set("f-01")
    try:
        assert body_of(1)["headers"][CALLER] == job_body(1, "")["headers"][CALLER] == "f-01"
    finally:
        current_job.reset(token)


def test_a_call_from_a_thread_names_the_job_of_the_only_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is all that runs in its process, so that the thread is its."""
    monkeypatch.setattr(this_process, "only_call", lambda: "f-02")
    token = current_job.set("f-01")
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(body_of, 1).result()["headers"][CALLER] == "f-02"
    finally:
        current_job.reset(token)
