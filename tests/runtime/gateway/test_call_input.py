"""What a call may send: checked against the function's schema before anything wakes, as JSON and as msgpack."""

import math
from datetime import date, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import msgpack
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.queue.records import JobState
from stoker.runtime.arrays import opened, to_ext
from stoker.runtime.inputs import Inputs
from stoker.runtime.spec import FunctionSpec

from .conftest import Login
from .peers import Deploy, Task, error_of, make_key, until_state, worker

MSGPACK = {"content-type": "application/msgpack", "accept": "application/msgpack"}


class Line(BaseModel):
    sku: str
    count: int = 1


class Order(BaseModel):
    lines: list[Line]
    note: str | None = None
    label: bytes = b""


def order(order: Order) -> None: ...
def many(lines: list[Line]) -> None: ...
def fields(line: Line, times: int = 1) -> None: ...
def seconds(seconds: float) -> None: ...
def array(image: np.ndarray) -> None: ...
def day(when: date) -> None: ...
def moment(when: datetime, by: timedelta = timedelta(), id: UUID | None = None) -> None: ...


def schema(body: Any, batched: bool = False) -> dict[str, Any]:
    found = Inputs(body, batched=batched).schema()
    assert found is not None
    return found


async def echo(task: Task) -> None:
    await task.done({"value": task.payload["input"]})


@pytest.mark.parametrize(
    ("body", "value", "param", "said"),
    [
        (order, {"lines": [{"sku": "a"}, {"sku": 1}]}, "lines.1.sku", '1 is not of type "string"'),
        (order, {"lines": [{}]}, "lines.0.sku", "required"),
        (order, {"lines": [], "note": 3}, "note", '3 is not of type "string"'),
        (order, [], None, '[] is not of type "object"'),
        (order, None, None, "null is not of type"),
        (order, {"lines": [], "label": "text"}, "label", '"text" is not of type "object"'),
        (order, {"lines": [], "label": {"$bytes": "?"}}, "$bytes", "base64"),
        (fields, {"line": {"sku": "a"}, "times": "2"}, "times", '"2" is not of type "integer"'),
        (fields, {"line": {"sku": "a"}, "tims": 2}, None, "'tims' was unexpected"),
        (fields, {}, "line", "required"),
        (fields, 3, None, "it takes an object with the fields line, times (optional)"),
        (seconds, {"seconds": 1}, None, "gets the whole body: send 1"),
        (seconds, "1", None, '"1" is not of type "number"'),
        (array, "pixels", None, '"pixels" is not of type'),
        (day, "tomorrow", None, '"tomorrow" is not a "date"'),
        (day, "2026-02-30", None, '"2026-02-30" is not a "date"'),
        (moment, {"when": "noon"}, "when", '"noon" is not a "date-time"'),
        (moment, {"when": "2026-01-02", "by": "long"}, "by", '"long" is not a "duration"'),
        (moment, {"when": "2026-01-02", "id": "7"}, "id", '"7" is not a "uuid"'),
    ],
)
async def test_an_input_that_does_not_fit_is_422_and_no_job(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, body: Any, value: Any, param: str | None, said: str
) -> None:
    name = await deploy(input_schema=schema(body))
    for path in (f"/v1/functions/{name}", f"/v1/functions/{name}/jobs"):
        response = await http.post(path, json=value)
        error = error_of(response)
        assert (response.status_code, error["code"], error["param"]) == (422, "invalid_input", param)
        assert error["type"] == "invalid_request_error" and said in error["message"]
        assert "x-job-id" not in response.headers
    assert await broker.claim(name, "worker-a", 1) == []


def stock(sku: str, qty: int) -> None: ...


@pytest.mark.parametrize(
    ("body", "value", "said"),
    [
        (stock, {"sku": "a", "qty": float("nan")}, "Invalid value for 'qty': NaN is not of type \"integer\"."),
        (stock, {"sku": "a", "qty": -math.inf}, "Invalid value for 'qty': -Infinity is not of type \"integer\"."),
        (stock, math.inf, 'Invalid input: Infinity is not of type "object" (it takes'),
        (stock, [1, math.inf], "Invalid input: [1,Infinity] is not of type"),
        (seconds, {"seconds": math.nan}, "gets the whole body: send NaN)"),
    ],
)
async def test_of_a_number_that_is_not_finite_the_message_has_what_was_sent(
    http: httpx.AsyncClient, deploy: Deploy, body: Any, value: Any, said: str
) -> None:
    path = f"/v1/functions/{await deploy(input_schema=schema(body))}/jobs"
    response = await http.post(path, content=msgpack.packb(value), headers={"content-type": MSGPACK["content-type"]})
    assert response.status_code == 422 and said in error_of(response)["message"]


async def test_too_great_a_number_of_json_is_infinite(http: httpx.AsyncClient, deploy: Deploy) -> None:
    counted, measured = await deploy(input_schema=schema(stock)), await deploy(input_schema=schema(seconds))
    response = await http.post(f"/v1/functions/{counted}/jobs", content=b'{"sku": "a", "qty": 1e999}')
    assert response.status_code == 422 and 'Infinity is not of type "integer"' in error_of(response)["message"]
    assert (await http.post(f"/v1/functions/{measured}/jobs", content=b"1e999")).status_code == 202


async def test_a_batched_function_takes_single_inputs(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    name = await deploy(input_schema=schema(many, batched=True))
    assert (await http.post(f"/v1/functions/{name}", json=[{"sku": "a"}])).status_code == 422
    async with worker(broker, name, echo):
        assert (await http.post(f"/v1/functions/{name}", json={"sku": "a"})).json() == {"sku": "a"}


async def test_bytes_in_json_are_bytes_for_the_worker_and_back(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    seen: list[Any] = []

    async def look(task: Task) -> None:
        seen.append(task.payload["input"])
        await task.done({"value": task.payload["input"]})

    name = await deploy(input_schema=schema(order))
    value = {"lines": [], "label": {"$bytes": "AP8="}}
    async with worker(broker, name, look):
        assert (await http.post(f"/v1/functions/{name}", json=value)).json() == value
    assert seen == [{"lines": [], "label": b"\x00\xff"}]


async def test_msgpack_carries_bytes_and_arrays_both_ways(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    image = np.arange(6, dtype=np.float32).reshape(2, 3)
    body = msgpack.packb({"image": to_ext(image), "raw": b"\x00\xff", "n": 3})
    async with worker(broker, name, echo):
        response = await http.post(f"/v1/functions/{name}", content=body, headers=MSGPACK)
        assert (response.status_code, response.headers["content-type"]) == (200, "application/msgpack")
        value = msgpack.unpackb(response.content, ext_hook=opened)
        assert (value["raw"], value["n"], value["image"].dtype) == (b"\x00\xff", 3, np.float32)
        np.testing.assert_array_equal(value["image"], image)
        headers = {"content-type": "application/msgpack"}
        as_json = await http.post(f"/v1/functions/{name}", content=body, headers=headers)
    assert as_json.json() == {"image": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], "raw": {"$bytes": "AP8="}, "n": 3}


async def test_a_job_is_read_as_msgpack_too_and_big_values_go_through_the_store(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    body = msgpack.packb(to_ext(np.arange(20_000, dtype=np.int64)))
    posted = await http.post(f"/v1/functions/{name}/jobs", content=body, headers=MSGPACK)
    assert posted.status_code == 202
    job_id = posted.json()["id"]
    claim = (await broker.claim(name, "worker-a", 1))[0]
    assert len(claim.payload) < 100
    task = Task(broker, claim)
    await task.done({"value": to_ext(np.ones(3))})
    record = msgpack.unpackb((await http.get(f"/v1/jobs/{job_id}", headers=MSGPACK)).content, ext_hook=opened)
    assert record["state"] == "succeeded" and record["result"].tolist() == [1.0, 1.0, 1.0]
    assert (await http.get(f"/v1/jobs/{job_id}")).json()["result"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("body", "value", "status"),
    [
        (order, {"lines": [], "label": b"raw"}, 200),
        (order, {"lines": [], "note": b"raw"}, 422),
        (array, to_ext(np.ones(2)), 200),
        (order, {"lines": to_ext(np.ones(2))}, 422),
        (seconds, float("inf"), 200),
        (seconds, b"1", 422),
    ],
)
async def test_msgpack_is_checked_like_json(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy, body: Any, value: Any, status: int
) -> None:
    name = await deploy(input_schema=schema(body))
    async with worker(broker, name, echo):
        response = await http.post(f"/v1/functions/{name}", content=msgpack.packb(value), headers=MSGPACK)
    assert response.status_code == status


LONG = msgpack.ExtType(78, msgpack.packb(["<f4", [1 << 31, 1 << 31]]) + b"1234")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\xc1", "not valid msgpack"),
        (b"\x92\x01", "not valid msgpack"),
        (b"\x91" * 2000 + b"\x01", "msgpack"),
        (b"\x91" * 200 + b"\x01", "deeper than 100"),
        (msgpack.packb({1: 2}), "msgpack"),
        (msgpack.packb(msgpack.Timestamp(1)), "send times as text"),
        (msgpack.packb(msgpack.ExtType(5, b"x")), "only arrays"),
        (msgpack.packb(msgpack.ExtType(78, b"")), "[dtype, shape]"),
        (msgpack.packb(msgpack.ExtType(78, msgpack.packb(["|O8", [1]]) + bytes(8))), "dtype"),
        (msgpack.packb(msgpack.ExtType(78, msgpack.packb(["<f4", [-1]]) + bytes(4))), "[dtype, shape]"),
        (msgpack.packb(LONG), "has 18446744073709551616 bytes"),
    ],
)
async def test_what_is_no_input_is_400(http: httpx.AsyncClient, deploy: Deploy, body: bytes, said: str) -> None:
    response = await http.post(f"/v1/functions/{await deploy()}", content=body, headers=MSGPACK)
    assert response.status_code == 400 and said in error_of(response)["message"]


async def test_a_key_with_the_same_msgpack_body_runs_once(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    headers = {**MSGPACK, "idempotency-key": "k"}
    async with worker(broker, name, echo):
        first = await http.post(f"/v1/functions/{name}", content=msgpack.packb(b"a"), headers=headers)
        again = await http.post(f"/v1/functions/{name}", content=msgpack.packb(b"a"), headers=headers)
        other = await http.post(f"/v1/functions/{name}", content=msgpack.packb(b"b"), headers=headers)
    assert first.content == again.content and again.headers["idempotency-replayed"] == "true"
    assert other.status_code == 409


async def test_what_the_worker_refuses_is_the_callers_error_too(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy()
    error = {"type": "invalid_request_error", "message": "no", "code": "invalid_input", "param": "lines.0"}
    async with worker(broker, name, lambda task: task.fail(error)):
        response = await http.post(f"/v1/functions/{name}", json=1)
    assert (response.status_code, error_of(response)["param"]) == (422, "lines.0")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"type": "nonsense"}, "no JSON Schema"),
        ({"$ref": "http://127.0.0.1:1/schema"}, "define everything under $defs"),
        ({"$ref": "file:///etc/passwd"}, "define everything under $defs"),
        ({"pattern": "("}, "no JSON Schema"),
        ({"description": "x" * 70_000}, "64 KiB"),
    ],
)
async def test_a_schema_that_can_not_be_used_is_refused_when_it_is_deployed(
    http: httpx.AsyncClient, wrong: dict[str, Any], said: str
) -> None:
    spec = {"kind": "python", "entry": "m:f", "code": "0" * 64, "input_schema": wrong}
    response = await http.put("/v1/functions/typed", json={"spec": spec})
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_spec")
    assert said in error_of(response)["message"]


async def test_who_calls_a_shared_function_sees_no_traceback(
    root: httpx.AsyncClient, login: Login, broker: Broker, deploy: Deploy
) -> None:
    """Only its owner, here the operator, sees code."""
    name = await deploy()
    tenant = login((await make_key(root, "caller", "invoke"))["key"])
    boom = {"type": "function_error", "message": "boom", "code": "ValueError", "traceback": "line 3 of theirs"}
    shown = {}
    async with worker(broker, name, lambda task: task.fail(boom)):
        for who, client in (("caller", tenant), ("owner", root)):
            posted = await client.post(f"/v1/functions/{name}/jobs", json=1)
            await until_state(broker, posted.json()["id"], JobState.FAILED)
            shown[who] = (await client.get(posted.headers["location"])).json()["error"]
    assert [shown[who]["traceback"] for who in ("caller", "owner")] == [None, "line 3 of theirs"]
    assert [shown[who]["message"] for who in ("caller", "owner")] == ["boom", "boom"]


async def test_the_description_has_each_functions_input(
    http: httpx.AsyncClient, deploy: Deploy, root: httpx.AsyncClient, login: Login
) -> None:
    """For who may call it; references lead somewhere."""
    name = await deploy(input_schema=schema(fields))
    free = await deploy()
    for client in (http, root):
        document = (await client.get("/openapi.json")).json()
        body = document["paths"][f"/v1/functions/{name}"]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"] == {"$ref": f"#/components/schemas/{name}.input"}
        whole = {**body["schema"], "components": document["components"]}
        checks = Draft202012Validator(whole)
        assert checks.is_valid({"line": {"sku": "a"}}) and not checks.is_valid({"line": {"sku": 1}})
        assert f"/v1/functions/{free}" not in document["paths"]
    for key in ("", "sk-stoker-aaaaaaaa-" + "a" * 43):
        assert name not in (await login(key).get("/openapi.json")).text


async def test_what_another_gateway_just_deployed_is_known_to_who_needs_it(
    http: httpx.AsyncClient, broker: Broker, cluster: Cluster
) -> None:
    """What this one has read is not a second old."""

    def version(number: int, body: Any) -> dict[str, Any]:
        made = {"name": "just_now", "kind": "python", "code": "0" * 64, "entry": "m:f", "version": str(number)}
        return FunctionSpec(**made, input_schema=schema(body)).to_dict()

    def first(x: int) -> int:
        return x

    def second(x: int, y: int) -> int:
        return x + y

    assert (await http.post("/v1/functions/just_now", json=1)).status_code == 404
    try:
        await cluster.put_function("just_now", version(1, first))
        async with worker(broker, "just_now", echo):
            assert (await http.post("/v1/functions/just_now", json=1)).json() == 1
            await cluster.put_function("just_now", version(2, second))
            assert (await http.post("/v1/functions/just_now", json={"x": 1, "y": 2})).json() == {"x": 1, "y": 2}
            assert (await http.post("/v1/functions/just_now", json=1)).status_code == 422
    finally:
        await cluster.delete_function("just_now")
