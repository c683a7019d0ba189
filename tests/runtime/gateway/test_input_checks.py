"""A check of an input takes as long as a schema's author wants: nobody else waits for it, and it has an end."""

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.queue.broker import Broker
from stoker.runtime.gateway.errors import ApiError
from stoker.runtime.gateway.input_check import ENDLESS, compiled, parts_in, weight_of
from stoker.runtime.gateway.input_checks import MOST_WORK, InputChecks
from stoker.runtime.spec import FunctionSpec, InvalidSpec

from .peers import Deploy, error_of

HELD_UP_S = 0.05


def doubling(levels: int) -> dict[str, Any]:
    """Each level asks the next one twice."""
    defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$defs": {**defs, f"d{levels}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


TREE = {
    "$defs": {
        "t": {"type": "object", "properties": {"of": {"items": {"$ref": "#/$defs/t"}}, "n": {"type": "integer"}}}
    },
    "$ref": "#/$defs/t",
}
FORKING = {"$defs": {"f": {"allOf": [{"items": {"$ref": "#/$defs/f"}}] * 2}}, "$ref": "#/$defs/f"}
WORDS = {"type": "array", "items": {"type": "string"}, "title": "words"}
HARD = [
    (doubling(40), 1),
    ({"items": {"anyOf": [{"items": {"type": "string"}}] * 60}}, [list(range(3_000))]),
]


async def longest_turn(done: asyncio.Event) -> float:
    """Seconds that the event loop's thread computed in one go: others on this machine don't count."""
    longest, before = 0.0, time.thread_time()
    while not done.is_set():
        await asyncio.sleep(0.001)
        now = time.thread_time()
        longest, before = max(longest, now - before), now
    return longest


async def said(checks: InputChecks, schema: dict[str, Any], value: Any, tenant: str = "t") -> str:
    spec = FunctionSpec("f", "python", input_schema=schema)
    body = json.dumps(value).encode()
    try:
        await checks.check(tenant, spec, value, body)
    except ApiError as error:
        assert error.status == 422
        return f"{error.code}: {error.message}"
    return ""


@pytest.mark.parametrize(("schema", "value"), HARD)
async def test_a_check_without_an_end_holds_nobody_up_and_is_the_callers_error(
    schema: dict[str, Any], value: Any
) -> None:
    checks, done = InputChecks(), asyncio.Event()
    turn = asyncio.create_task(longest_turn(done))
    refused = await said(checks, schema, value)
    assert refused.startswith("input_check_too_long: The input can't be checked against the function's schema")
    assert "takes longer than 2 s" in refused
    assert await said(checks, TREE, {"of": [{"n": 1}]}) == "", "the next one has a process again"
    done.set()
    assert await turn < HELD_UP_S
    checks.close()


async def test_the_first_of_many_mistakes_is_named_and_holds_nobody_up() -> None:
    checks, done = InputChecks(), asyncio.Event()
    values: list[Any] = ["word"] * 1000 + [5] * 100_000
    turn = asyncio.create_task(longest_turn(done))
    assert await said(checks, WORDS, values) == (
        "invalid_input: Invalid value for '1000': 5 is not of type \"string\"."
    )
    assert await said(checks, WORDS, ["word"] * 100_000) == ""
    done.set()
    # The test's own dump of the input is on the loop, too.
    assert await turn < 4 * HELD_UP_S
    checks.close()


async def test_another_tenants_checks_go_on_meanwhile() -> None:
    checks = InputChecks()
    await said(checks, TREE, {}, "b")
    slow = asyncio.create_task(said(checks, doubling(40), 1, "a"))
    await asyncio.sleep(0.3)
    assert await said(checks, TREE, {"of": [{"n": "x"}]}, "b") == (
        'invalid_input: Invalid value for \'of.0.n\': "x" is not of type "integer".'
    )
    assert not slow.done()
    assert "too_long" in await slow
    checks.close()


async def test_a_process_that_ended_because_it_was_idle_comes_back() -> None:
    checks = InputChecks()
    assert await said(checks, TREE, {}) == ""
    process = checks._processes["t"]._confined._process
    assert process is not None
    process.send_signal(14)
    process.wait()
    assert await said(checks, TREE, {"n": 1.5}) != ""
    checks.close()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"maximum": 10**30}, "can't be stored"),
        ({"allOf": [{"pattern": rf"[\w\s]{{900}}{number}"} for number in range(1800)]}, "reading it"),
        ({"$ref": "#/$defs/nowhere"}, "no JSON Schema"),
        ({"$dynamicRef": "http://127.0.0.1:1/schema"}, "no JSON Schema"),
    ],
)
async def test_a_schema_that_can_not_be_read_in_time_is_refused(schema: dict[str, Any], reason: str) -> None:
    checks, done = InputChecks(), asyncio.Event()
    turn = asyncio.create_task(longest_turn(done))
    with pytest.raises(InvalidSpec, match=reason):
        await checks.check_schema("t", schema)
    done.set()
    assert await turn < HELD_UP_S
    checks.close()


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        FORKING,
        doubling(12),
        {"$ref": "#"},
        {"$dynamicRef": "#a"},
        {"unevaluatedProperties": False},
        {"pattern": "(?:a{0,100}){0,100}b"},
        {"patternProperties": {"a{20000}": True}},
        {"enum": list(range(ENDLESS))},
    ],
)
def test_what_may_take_any_time_is_known(schema: dict[str, Any]) -> None:
    assert weight_of(schema) == ENDLESS


def test_what_is_written_out_is_weighed_as_often_as_it_is_referred_to() -> None:
    line = {"type": "object", "properties": {"sku": {"type": "string"}}}
    twice = {"$defs": {"l": line}, "properties": {"a": {"$ref": "#/$defs/l"}, "b": {"$ref": "#/$defs/l"}}}
    plain = {"properties": {"a": {"r": line}, "b": {"r": line}}}
    assert weight_of(twice) == weight_of(plain) < 40
    assert weight_of({"$defs": {"a": {}, "unused": {"enum": list(range(ENDLESS))}}}) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda part: st.lists(part) | st.dictionaries(st.text(), part),
)


@given(json_values, st.sampled_from([None, 2]))
def test_no_json_text_has_more_parts_than_are_counted(value: Any, indent: int | None) -> None:
    def count(part: Any) -> int:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return 1 + sum(map(count, inner))

    assert parts_in(json.dumps(value, indent=indent).encode()) >= count(value)


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"items": {"allOf": [{"maximum": 10**9 + i} for i in range(100)]}}, 1.5),
        ({"items": {"anyOf": [{"const": f"x{i}"} for i in range(1000)]}}, "y"),
        ({"items": {"enum": [{"a": i} for i in range(500)]}}, {"a": 499}),
        ({"items": {"pattern": "^(?:ab|a|b)*$"}}, "ab" * 100),
        ({"items": {"multipleOf": 0.1}}, 1e300),
        ({"uniqueItems": True}, None),
    ],
)
def test_what_is_checked_at_once_is_soon_done(schema: dict[str, Any], part: Any) -> None:
    validator, weight = compiled(schema), weight_of(schema)
    each = parts_in(json.dumps([part]).encode())
    values = [[index] if part is None else part for index in range(MOST_WORK // weight // each)]
    began = time.thread_time()
    validator.is_valid(values)
    assert weight < ENDLESS and time.thread_time() - began < HELD_UP_S


async def test_a_gateway_answers_others_while_an_input_is_checked(
    http: httpx.AsyncClient, broker: Broker, deploy: Deploy
) -> None:
    name = await deploy(input_schema=doubling(40))
    call = asyncio.create_task(http.post(f"/v1/functions/{name}", json=1, timeout=120))
    answered = 0
    while not call.done():
        assert (await http.get("/healthz")).status_code == 200
        answered += 1
        await asyncio.sleep(0.02)
    answer = await call
    assert (answer.status_code, error_of(answer)["code"]) == (422, "input_check_too_long")
    assert answered > 20
    assert await broker.claim(name, "w", 1) == []
