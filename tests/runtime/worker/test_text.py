from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.worker.text import TextStream, held_suffix


class Bytes:
    """A tokenizer whose tokens are single bytes, so that every character of several bytes is split."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def run(data: bytes, stops: Sequence[str] = (), chunk: int = 1) -> tuple[list[str], TextStream]:
    stream = TextStream(Bytes(), stops)
    pieces = [stream.feed(list(data[start : start + chunk])) for start in range(0, len(data), chunk)]
    return [*pieces, stream.finish()], stream


@given(st.text(), st.integers(1, 5))
def test_pieces_add_up_to_the_text_and_split_no_character(text: str, chunk: int) -> None:
    pieces, stream = run(text.encode(), chunk=chunk)
    assert "".join(pieces) == stream.text == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.binary(max_size=200))
def test_any_bytes_end_with_every_piece_shown(data: bytes) -> None:
    pieces, stream = run(data)
    assert "".join(pieces) == stream.text
    assert stream.tokens == len(data)


def test_bytes_that_never_form_a_character_are_not_held_for_ever() -> None:
    pieces, _ = run(b"\xff" * 100)
    assert "".join(pieces[:20]) != ""


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_text_ends_exactly_before_the_stop_that_completes_first(text: str, stops: list[str], chunk: int) -> None:
    pieces, stream = run(text.encode(), stops, chunk)
    expected = naive_stop(text, stops)
    assert stream.text == "".join(pieces) == expected
    assert stream.stopped == any(stop in text for stop in stops)


def naive_stop(text: str, stops: list[str]) -> str:
    for end in range(1, len(text) + 1):
        found = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if found:
            return text[: min(found)]
    return text


def test_no_part_of_a_stop_string_is_ever_shown() -> None:
    pieces, stream = run(b"hello STOP world", ["STOP"])
    assert "".join(pieces) == "hello "
    assert stream.stopped and stream.tokens == len("hello STOP")


def test_only_a_beginning_of_a_stop_is_held() -> None:
    assert held_suffix("a </thi", ["</think>"]) == 5
    assert held_suffix("abc", ["xyz"]) == 0
    pieces, _ = run(b"no stop here <", ["</s>"])
    assert "".join(pieces) == "no stop here <"
    assert pieces[0] == "n"


def test_special_tokens_are_invisible_and_do_not_grow_the_window() -> None:
    stream = TextStream(Bytes())
    assert stream.feed([300] * 100) == ""
    assert stream.feed(list(b"x")) == "x"
