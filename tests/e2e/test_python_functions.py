"""Python functions from an app's file to their answers, with callers who need keys, in real processes."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgpack
import numpy as np
import pytest

from stoker.runtime.arrays import opened, to_ext
from stoker.runtime.client.client import Client
from stoker.runtime.client.errors import StokerError
from stoker.runtime.local import LocalStack
from stoker.runtime.tenancy.api_key import Keyring

pytestmark = pytest.mark.xdist_group("python functions")

SECRET = "the secret of this deployment"
MSGPACK = {"content-type": "application/msgpack", "accept": "application/msgpack"}


class Tenants:
    """The operator and one tenant, each with a key."""

    def __init__(self, stack: LocalStack) -> None:
        self.url = stack.url
        self.operator = Client(stack.url, Keyring(SECRET).root_text())
        self.operator.request("PUT", "/v1/tenants/shop", json={})
        body = {"scopes": ["invoke", "deploy"]}
        self.key = self.operator.request("POST", "/v1/tenants/shop/keys", json=body)["key"]
        self.shop = Client(stack.url, self.key)

    def stoker(self, *arguments: str, given: str = "") -> str:
        """The command line as the tenant."""
        command = [sys.executable, "-m", "stoker.runtime.cli", *arguments]
        env = {**os.environ, "STOKER_URL": self.url, "STOKER_API_KEY": self.key}
        done = subprocess.run(command, env=env, input=given, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("kinds")
    shutil.copy(Path(__file__).with_name("python_app.py"), folder / "python_app.py")
    env = {"STOKER_AUTH": "keys", "STOKER_SECRET": SECRET}
    with LocalStack(folder / "data", env=env) as stack:
        tenants = Tenants(stack)
        tenants.stoker("secrets", "set", "api-token", given="0123456789\n")
        tenants.stoker("deploy", str(folder / "python_app.py"))
        yield tenants
        tenants.operator.close()
        tenants.shop.close()


@pytest.fixture
def shop(tenants: Tenants) -> Client:
    return tenants.shop


def test_an_annotated_input_arrives_as_its_type(shop: Client) -> None:
    assert shop.invoke("price", {"order": {"sku": "a", "count": 3}, "currency": "USD"}) == {"sku": "a", "cents": 330}


def test_a_wrong_input_is_422_wherever_it_is_seen(shop: Client) -> None:
    """A type before the worker wakes, the model's own check in the worker."""
    for order, param, said in (({"sku": 1}, "order.sku", "string"), ({"sku": "unknown"}, "order.sku", "no such")):
        with pytest.raises(StokerError, match=said) as caught:
            shop.invoke("price", {"order": order})
        assert (caught.value.status, caught.value.param) == (422, param)


def test_arrays_and_bytes_travel_as_msgpack(tenants: Tenants) -> None:
    with httpx.Client(base_url=tenants.url, headers={"authorization": f"Bearer {tenants.key}", **MSGPACK}) as http:
        image = np.arange(100_000, dtype=np.float32).reshape(100, 1000)
        answer = http.post("/v1/functions/half", content=msgpack.packb(to_ext(image)), timeout=60)
        assert answer.status_code == 200, answer.text
        np.testing.assert_array_equal(msgpack.unpackb(answer.content, ext_hook=opened), image / 2)
        answer = http.post("/v1/functions/reverse", content=msgpack.packb(b"\x00\xff"), timeout=60)
        assert msgpack.unpackb(answer.content) == b"\xff\x00"


def test_the_same_as_json(shop: Client) -> None:
    accept = {"accept": "application/json"}
    half = shop.request("POST", "/v1/functions/half", json=[[2, 4], [6, 8]], headers=accept)
    assert half == [[1.0, 2.0], [3.0, 4.0]]
    assert shop.request("POST", "/v1/functions/reverse", json={"$bytes": "AP8="}, headers=accept) == {"$bytes": "/wA="}


def test_the_client_sends_and_reads_them(tenants: Tenants) -> None:
    images = [np.full((200, 300), number, np.float32) for number in range(3)]
    for image, half in zip(images, tenants.shop.map("half", images), strict=True):
        assert half.dtype == np.float32
        np.testing.assert_array_equal(half, image / 2)
    assert tenants.shop.spawn("reverse", b"\x00\xff").get() == b"\xff\x00"
    assert tenants.stoker("invoke", "reverse", '{"$bytes": "AP8="}') == '{"$bytes": "/wA="}\n'
    assert tenants.stoker("invoke", "half", "[2, 4]") == "[1.0, 2.0]\n"


def test_an_item_of_a_batch_fails_alone(shop: Client) -> None:
    skus = ["a", "odd", "unknown", "b"]
    with ThreadPoolExecutor(4) as pool:
        jobs = list(pool.map(lambda sku: shop.spawn("cents", {"sku": sku, "count": 7}), skus))
    records = [shop.wait(job.id) for job in jobs]
    assert [record["state"] for record in records] == ["succeeded", "failed", "failed", "succeeded"]
    assert [record["result"] for record in records] == [7, None, None, 7]
    assert (records[1]["error"]["code"], records[2]["error"]["code"]) == ("KeyError", "invalid_input")


def test_what_a_batch_raises_fails_all_of_it(shop: Client) -> None:
    jobs = [shop.spawn("cents", {"sku": sku}) for sku in ("poison", "poison")]
    errors = [shop.wait(job.id)["error"] for job in jobs]
    assert [error["message"] for error in errors] == ["RuntimeError: the whole batch"] * 2
    assert "python_app.py" in errors[0]["traceback"] and "stoker/runtime" not in errors[0]["traceback"]


def test_a_class_loads_once_and_its_coroutines_share_a_loop(shop: Client) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda by: shop.invoke("counter-add", by), [1] * 8))
    assert max(answer["calls"] for answer in answers) == 8
    assert {answer["loads"] for answer in answers} == {1} and all(answer["same_loop"] for answer in answers)


def test_a_class_streams_and_batches(shop: Client) -> None:
    assert list(shop.stream("counter-count", 3)) == [0, 1, 2]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda word: shop.invoke("word-length", word), ["a", "bb", "ccc"])) == [1, 2, 3]


def test_a_load_step_that_fails_is_a_version_that_can_not_start(shop: Client) -> None:
    with pytest.raises(StokerError, match="FileNotFoundError: weights.bin"):
        shop.invoke("broken", 1)
    row = next(row for row in shop.functions() if row["name"] == "broken")
    assert row["rollout"] is None or "weights.bin" in row["rollout"]["error"]


def test_errors_and_results_have_a_size(shop: Client) -> None:
    with pytest.raises(StokerError, match="more characters") as raised:
        shop.invoke("loud", 20_000_000)
    assert str(raised.value).startswith("ValueError: xxx") and len(str(raised.value)) < 5_000
    with pytest.raises(StokerError, match="more than the 256 MiB that a result may have"):
        shop.invoke("loud", 300_000_000)
    with pytest.raises(StokerError, match="ValueError: x$"):
        shop.invoke("loud", 1)


def test_a_function_calls_functions_of_its_owner(shop: Client) -> None:
    assert shop.invoke("total", ["a", "b"]) == 200


def test_a_secret_reaches_its_function_and_nobody_else(tenants: Tenants) -> None:
    assert tenants.shop.invoke("token_length") == 10
    assert "api-token" in tenants.stoker("secrets", "list")
    assert tenants.operator.request("GET", "/v1/secrets")["data"] == []
    shown = [row["spec"] for row in tenants.shop.functions() if row["name"] == "token_length"]
    assert shown[0]["secrets"] == ["api-token"] and "0123456789" not in str(shown)


def test_a_missing_module_says_what_to_do(shop: Client) -> None:
    with pytest.raises(StokerError, match="pip install a_module_that_nobody_has") as caught:
        shop.invoke("missing")
    assert "include=('a_module_that_nobody_has.py',)" in str(caught.value)


def test_another_tenant_sees_none_of_it(tenants: Tenants) -> None:
    with pytest.raises(StokerError) as caught:
        tenants.operator.invoke("price", {"order": {"sku": "a"}})
    assert caught.value.status == 404


def test_a_call_that_waits_for_itself_says_so(shop: Client) -> None:
    """Its only replica runs one call at a time."""
    assert shop.invoke("nested", 0) == 0
    outer = shop.spawn("nested", 1)
    waiting = {"function": "nested", "state": "queued"}
    deadline, reason = time.monotonic() + 30, ""
    while "led to this call" not in reason:
        assert time.monotonic() < deadline, reason
        inner = [row["id"] for row in shop.request("GET", "/v1/jobs", params=waiting)["data"] if row["id"] != outer.id]
        reason = (shop.job(inner[0])["wait_reason"] or "") if inner else ""
        time.sleep(0.05)
    assert reason.startswith("all 1 replicas are busy and max_replicas is 1; ") and outer.id in reason
    outer.cancel()
    assert shop.wait(inner[0])["state"] == "cancelled"


def test_what_waited_for_itself_until_its_time_was_over_says_so(shop: Client) -> None:
    outer = shop.spawn("nested_in_a_thread", 1)
    ended = shop.wait(outer.id)
    assert ended["state"] == "timed_out"
    message = ended["error"]["message"]
    assert message.startswith("ran longer than its limit of 3 s; its code led to job shop.nested_in_a_thread-")
    assert "it waited for itself; a higher max_replicas or concurrency leaves room" in message
