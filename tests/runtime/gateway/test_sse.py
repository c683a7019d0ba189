import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.gateway import sse
from stoker.runtime.gateway.shapes import ChatShape, CompletionShape


@pytest.mark.parametrize("kind", [ChatShape, CompletionShape])
@given(text=st.text(), model=st.text(), usage=st.booleans(), id=st.sampled_from(["", "12-3"]))
def test_a_filled_event_is_the_event(kind: type[ChatShape], text: str, model: str, usage: bool, id: str) -> None:
    shape = kind("job", model, 5, usage)
    assert sse.TextEvent(shape.text).fill(text, id) == sse.event(shape.text(text), id=id)


def test_a_model_named_like_the_place_changes_nothing() -> None:
    shape = ChatShape("job", sse.PLACE, 5)
    filled = sse.TextEvent(shape.text).fill('"quoted"\n', "1-1")
    assert filled.startswith(b"id: 1-1\ndata: {") and filled.endswith(b"}\n\n")
    chunk = json.loads(filled.partition(b"data: ")[2])
    assert chunk["model"] == sse.PLACE
    assert chunk["choices"][0]["delta"] == {"content": '"quoted"\n'}
