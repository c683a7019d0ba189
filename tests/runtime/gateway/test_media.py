"""What a function returned, as JSON shows it."""

import json
from typing import Any

import httpx
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.queue.broker import Broker
from stoker.runtime.gateway.media import UNREADABLE, shown
from stoker.runtime.gateway.sse import json_bytes

from .peers import Deploy, Task, worker

KEYS = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([1.0, 2.5, "1", "1.0", "true", "None", "a", b"a"])
)


@given(st.dictionaries(KEYS, st.integers()))
def test_no_object_has_a_name_twice_nor_loses_a_value(value: dict[Any, int]) -> None:
    pairs: list[tuple[str, Any]] = json.loads(json_bytes(shown(value)), object_pairs_hook=list)
    if [name for name, _ in pairs] != [UNREADABLE]:
        assert len({name for name, _ in pairs}) == len(pairs)
        assert [part for _, part in pairs] == list(value.values())


@pytest.mark.parametrize(
    ("value", "name"), [({1: 3, "1": 9}, '"1"'), ({True: 1, "true": 2}, '"true"'), ({1.0: 1, "1.0": 2}, '"1.0"')]
)
def test_keys_that_json_can_not_tell_apart_are_told_of(value: dict[Any, Any], name: str) -> None:
    says = f"several of its keys are {name} in JSON: make keys text, or read it as msgpack"
    assert shown({"inner": [value], "other": 5}) == {"inner": [{UNREADABLE: says}], "other": 5}


def test_keys_that_are_no_text_stay_what_they_are_where_json_can_tell_them_apart() -> None:
    assert json_bytes(shown({1: 2, 2: {None: 3}, "a": 4})) == b'{"1":2,"2":{"None":3},"a":4}'


async def test_as_msgpack_such_a_result_is_whole(http: httpx.AsyncClient, broker: Broker, deploy: Deploy) -> None:
    async def clashing(task: Task) -> None:
        await task.done({"value": {1: 3, "1": 9}})

    name = await deploy()
    async with worker(broker, name, clashing):
        as_json = await http.post(f"/v1/functions/{name}", json=1)
        packed = await http.post(f"/v1/functions/{name}", json=1, headers={"accept": "application/msgpack"})
    assert as_json.status_code == 200 and UNREADABLE in as_json.json()
    assert msgpack.unpackb(packed.content, strict_map_key=False) == {1: 3, "1": 9}
