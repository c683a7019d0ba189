from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.client.server_events import EventParser, ServerEvent
from stoker.runtime.gateway import sse

VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=4
)
EVENTS = st.lists(
    st.builds(ServerEvent, st.sampled_from(["", "state", "retry", "end"]), VALUES, st.sampled_from(["", "12-0", "end"]))
)


@given(EVENTS, st.lists(st.integers(1, 9)))
def test_what_the_gateway_writes_is_read_however_it_is_cut(events: list[ServerEvent], cuts: list[int]) -> None:
    text = "".join(sse.event(event.data, name=event.name, id=event.id).decode() for event in events)
    parser, read = EventParser(), []
    for size in cuts:
        read += parser.feed(text[:size])
        text = text[size:]
    assert read + parser.feed(text) == events


def test_comments_tell_why_there_is_nothing_yet() -> None:
    text = sse.comment("loading weights 43 %").decode() + "data: 1\r\n\r\n\n\nevent: bare\n\n"
    assert EventParser().feed(text) == [ServerEvent("waiting", "loading weights 43 %"), ServerEvent("", 1)]
