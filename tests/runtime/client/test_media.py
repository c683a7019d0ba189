"""What is sent and read: JSON where it suffices, else msgpack; numpy only where there are arrays."""

import json
import math
import subprocess
import sys
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.arrays import opened, to_ext
from stoker.runtime.client.errors import InvalidInput
from stoker.runtime.client.media import JSON, MSGPACK, encoded, parsed, unpacked
from stoker.runtime.gateway.media import marked

PLAIN = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text()
BEYOND_JSON = st.binary() | st.just(math.inf)


def values(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=5
    )


@given(values(PLAIN | BEYOND_JSON))
def test_what_is_sent_is_what_was_given(value: Any) -> None:
    content, media = encoded(value)
    assert {JSON: json.loads, MSGPACK: unpacked}[media](content) == value


@given(values(PLAIN.filter(lambda value: value not in (math.inf, -math.inf))))
def test_json_is_enough_for_what_json_has(value: Any) -> None:
    assert encoded(value)[1] == JSON


def test_arrays_and_numpys_numbers_go_as_msgpack() -> None:
    image = np.arange(6, dtype=np.float32).reshape(2, 3)
    content, media = encoded({"image": image, "n": np.int32(7), "yes": np.bool_(True), "t": (1, b"")})
    assert media == MSGPACK
    assert msgpack.unpackb(content) == {"image": to_ext(image), "n": 7, "yes": True, "t": [1, b""]}
    np.testing.assert_array_equal(unpacked(content)["image"], image)


def test_keys_of_results_stay_numbers() -> None:
    assert unpacked(msgpack.packb({1: {2.5: b"x"}})) == {1: {2.5: b"x"}}


@pytest.mark.parametrize(
    "value", [{1, 2}, {"deep": [object()]}, [b"", 1 << 64], np.array(["text"]), "\ud800", [b"", "\ud800"]]
)
def test_what_can_not_be_sent_says_what_can(value: Any) -> None:
    with pytest.raises(InvalidInput, match="an input is None, bool, .*; encode other things as text"):
        encoded(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = [b""]
    value.append(value)
    with pytest.raises(InvalidInput, match="recursion"):
        encoded(value)


@given(values(PLAIN.filter(lambda value: value not in (math.inf, -math.inf)) | st.binary()))
def test_events_give_bytes_back(value: Any) -> None:
    assert parsed(json.dumps(marked(value))) == value


def test_events_give_arrays_back() -> None:
    image = np.arange(6, dtype=np.int16).reshape(3, 2)
    read = parsed(json.dumps(marked([to_ext(image), {"a": to_ext(image)}])))
    for array in (read[0], read[1]["a"]):
        assert array.dtype == image.dtype
        np.testing.assert_array_equal(array, image)


@pytest.mark.parametrize("fields", [{"$bytes": "?"}, {"$bytes": 1}, {"$array": "AAAA"}, {"$bytes": "AA==", "n": 1}])
def test_what_only_looks_like_a_mark_stays(fields: dict[str, Any]) -> None:
    assert parsed(json.dumps([fields])) == [fields]


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import msgpack, stoker
from stoker.runtime.client import async_client, client, media
assert media.encoded(b"x") == (b"\\xc4\\x01x", media.MSGPACK) and media.unpacked(b"\\xc4\\x01x") == b"x"
for read in (lambda: media.unpacked(msgpack.packb(msgpack.ExtType(78, b""))), lambda: media.parsed('{"$array": ""}')):
    try:
        read()
    except client.StokerError as error:
        assert "install numpy" in str(error)
    else:
        raise AssertionError
"""


def test_the_client_works_without_numpy_and_names_it_when_an_array_comes() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], check=True)


def test_numpy_is_not_loaded_for_what_has_no_arrays() -> None:
    uses = "from stoker.runtime.client import client, media; media.encoded(b'')"
    subprocess.run([sys.executable, "-c", f"import sys; {uses}; assert 'numpy' not in sys.modules"], check=True)


def test_an_extension_of_others_is_left_alone() -> None:
    assert unpacked(msgpack.packb(msgpack.ExtType(7, b"x"))) == msgpack.ExtType(7, b"x") == opened(7, b"x")
