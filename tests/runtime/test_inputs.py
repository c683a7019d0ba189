"""What a function's annotations say of its input."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel
from typing_extensions import TypedDict

from stoker.runtime.inputs import Arguments, Inputs, Misfit
from stoker.runtime.spec import InvalidSpec


class Item(BaseModel):
    sku: str
    count: int = 1


@dataclass
class Point:
    x: float
    y: float = 0.0


class Row(TypedDict):
    name: str
    day: date


def arguments(body: Callable[..., Any], value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = Inputs(body).arguments(value)
    return given.args, dict(given.kwargs)


def test_an_only_parameter_gets_the_whole_input() -> None:
    def plain(x): ...  # type: ignore[no-untyped-def]
    def item(item: Item): ...  # type: ignore[no-untyped-def]
    def point(point: Point): ...  # type: ignore[no-untyped-def]
    def row(row: Row): ...  # type: ignore[no-untyped-def]

    assert arguments(plain, {"x": 3}) == (({"x": 3},), {})
    assert arguments(item, {"sku": "a"}) == ((Item(sku="a"),), {})
    assert arguments(point, {"x": 1}) == ((Point(1.0),), {})
    assert arguments(row, {"name": "a", "day": "2026-01-02"}) == (({"name": "a", "day": date(2026, 1, 2)},), {})


def test_several_parameters_get_the_fields_of_an_object() -> None:
    def both(item: Item, times: int = 2, *, mode: Literal["a", "b"] = "a"): ...  # type: ignore[no-untyped-def]
    def loose(x, y=1): ...  # type: ignore[no-untyped-def]
    def rest(x: int, **rest: Any): ...  # type: ignore[no-untyped-def]
    def positional(x: int, /, y: int = 1): ...  # type: ignore[no-untyped-def]
    def keyword(*, x: int): ...  # type: ignore[no-untyped-def]

    assert arguments(both, {"item": {"sku": "a"}, "mode": "b"}) == ((Item(sku="a"),), {"mode": "b"})
    assert arguments(loose, {"x": 3, "y": 2}) == ((3, 2), {})
    assert arguments(rest, {"x": 3, "rest": 2}) == ((3,), {"rest": 2})
    assert arguments(positional, {"x": 3, "y": 2}) == ((3, 2), {})
    assert arguments(keyword, {"x": 3}) == ((), {"x": 3})


def test_parameters_that_go_by_place_only_are_fields_too() -> None:
    def pair(x, y=1, /, z=2): ...  # type: ignore[no-untyped-def]
    def typed(x: int, y: int = 1, /, *, z: int = 2): ...  # type: ignore[no-untyped-def]
    def spare(x=1, y=2, /): ...  # type: ignore[no-untyped-def]
    def rest(x, /, **rest): ...  # type: ignore[no-untyped-def]

    for body in (pair, typed):
        for wrong in ({}, {"y": 3}, {"x": 1, "other": 2}, None):
            with pytest.raises(Misfit, match="takes an object with the fields x, y"):
                arguments(body, wrong)
    assert arguments(pair, {"x": 3, "z": 4}) == ((3, 1, 4), {})
    assert arguments(typed, {"x": 3, "z": 4}) == ((3, 1), {"z": 4})
    assert arguments(spare, {"y": 3}) == ((1, 3), {})
    assert arguments(spare, {}) == ((1, 2), {})
    assert arguments(rest, {"x": 3, "a": 1}) == ((3,), {"a": 1})


def test_what_takes_any_number_is_no_field_of_its_own() -> None:
    def some(x, *more, y=1, **rest): ...  # type: ignore[no-untyped-def]
    def any_names(**rest): ...  # type: ignore[no-untyped-def]
    def many(x, y, *more): ...  # type: ignore[no-untyped-def]

    for body, said in (
        (some, "the fields x, y (optional), any others, not list"),
        (any_names, "the fields of any names, not list"),
        (many, "the fields x, y, not list"),
    ):
        with pytest.raises(Misfit) as caught:
            arguments(body, [1])
        assert str(caught.value) == f"this function takes an object with {said}"


def test_nothing_sent_means_the_defaults() -> None:
    def half(x: float = 1.0): ...  # type: ignore[no-untyped-def]
    def maybe(x: int | None): ...  # type: ignore[no-untyped-def]
    def none(): ...  # type: ignore[no-untyped-def]

    assert arguments(half, None) == ((), {})
    assert arguments(maybe, None) == ((None,), {})
    assert arguments(none, None) == ((), {})


def test_a_wrong_input_names_the_place_and_what_is_taken() -> None:
    def both(item: Item, times: int = 2): ...  # type: ignore[no-untyped-def]
    def loose(x, y=1): ...  # type: ignore[no-untyped-def]

    for body, value, param, said in (
        (both, {"item": {"sku": "a", "count": "many"}}, "item.count", "integer"),
        (both, {"times": 1}, None, "item, times (optional)"),
        (both, 3, None, "not int"),
        (loose, {"x": 1, "z": 2}, None, "x, y (optional)"),
        (lambda: 7, {"a": 1}, None, "takes no input"),
    ):
        with pytest.raises(Misfit) as caught:
            Inputs(body).arguments(value)
        assert caught.value.param == param and said in str(caught.value)


def test_a_batchs_inputs_are_checked_one_by_one() -> None:
    def many(items: list[Item]): ...  # type: ignore[no-untyped-def]
    def free(items: list): ...  # type: ignore[no-untyped-def,type-arg]

    inputs = Inputs(many, batched=True)
    assert inputs.item({"sku": "a"}) == Item(sku="a")
    with pytest.raises(Misfit):
        inputs.item([{"sku": "a"}])
    assert Inputs(free, batched=True).schema() is None and Inputs(free, batched=True).item({1: 2}) == {1: 2}


def test_a_batched_signature_that_can_not_work_is_refused_and_says_what_to_write() -> None:
    def two(items: list[int], times: int = 1): ...  # type: ignore[no-untyped-def]
    def none(): ...  # type: ignore[no-untyped-def]
    def keyword(*, items: list[int]): ...  # type: ignore[no-untyped-def]
    def one(item: Item): ...  # type: ignore[no-untyped-def]
    def text(text: str): ...  # type: ignore[no-untyped-def]
    def row(row: Row): ...  # type: ignore[no-untyped-def]
    def image(image: np.ndarray): ...  # type: ignore[no-untyped-def]

    for body in (two, none, keyword):
        with pytest.raises(InvalidSpec, match=rf"write `def {body.__name__}\(items: list\[Item\]\)`"):
            Inputs(body, batched=True)
    for body, said in (
        (one, "item: list["),
        (text, "text: list[str]"),
        (row, "row: list["),
        (image, "image: list[numpy.ndarray]"),
    ):
        with pytest.raises(InvalidSpec) as caught:
            Inputs(body, batched=True)
        assert f"write `{said}" in str(caught.value)


@pytest.mark.parametrize(
    "hint", [list, list[int], Sequence[int], Iterable[int], tuple[int, ...], Any, object, Annotated[list[int], 1]]
)
def test_a_batch_fits_what_takes_a_list(hint: Any) -> None:
    def body(items): ...  # type: ignore[no-untyped-def]

    body.__annotations__["items"] = hint
    assert Inputs(body, batched=True).item(3) == 3
    assert Inputs(lambda items: None, batched=True).item(3) == 3


@pytest.mark.parametrize("hint", [np.ndarray, npt.NDArray[np.float32]])
def test_an_array_may_come_as_lists(hint: Any) -> None:
    def image(image): ...  # type: ignore[no-untyped-def]

    image.__annotations__["image"] = hint
    ((array,), _) = arguments(image, [[1, 2], [3, 4]])
    assert isinstance(array, np.ndarray) and array.shape == (2, 2)
    for wrong in ("text", {"a": 1}, [[1], [2, 3]]):
        with pytest.raises(Misfit):
            arguments(image, wrong)


def test_the_schema_says_the_same_as_the_check() -> None:
    def both(item: Item, times: int = 2, when: date | None = None): ...  # type: ignore[no-untyped-def]

    validator = Draft202012Validator(Inputs(both).schema() or {})
    for value in ({"item": {"sku": "a"}}, {"item": {"sku": "a", "count": 2}, "times": 3, "when": None}):
        assert validator.is_valid(value) and isinstance(Inputs(both).arguments(value), Arguments)
    for value in ({}, {"item": {}}, {"item": {"sku": 1}}, {"item": {"sku": "a"}, "other": 1}, [], None):
        assert not validator.is_valid(value)
        with pytest.raises(Misfit):
            Inputs(both).arguments(value)


def test_without_annotations_there_is_no_schema() -> None:
    assert Inputs(lambda x, y: None).schema() is None
    assert Inputs(lambda: None).schema() is None


def test_a_method_has_no_self() -> None:
    class Tagger:
        def tag(self, text: str) -> str:
            return text

    schema = Inputs(Tagger().tag).schema()
    assert schema is not None and (schema["type"], schema["title"]) == ("string", "text")


class Odd:
    """Nothing that an input can be made into."""


def test_an_annotation_that_can_not_be_checked_says_what_to_write() -> None:
    def odd(x: Odd): ...  # type: ignore[no-untyped-def]
    def unknown(x: "NotImported"): ...  # type: ignore[no-untyped-def,name-defined] # noqa: F821
    def calls(x: Callable[[], int]): ...  # type: ignore[no-untyped-def]

    with pytest.raises(InvalidSpec, match="leave the annotation out"):
        Inputs(odd)
    with pytest.raises(InvalidSpec, match="NotImported"):
        Inputs(unknown)
    with pytest.raises(InvalidSpec, match="pydantic model"):
        Inputs(calls).schema()


def test_what_is_returned_may_be_annotated_with_anything() -> None:
    def fine(x: int) -> "NotImported": ...  # type: ignore[name-defined,empty-body] # noqa: F821

    assert arguments(fine, 3) == ((3,), {})


def test_a_schema_without_end_is_refused() -> None:
    def huge(x): ...  # type: ignore[no-untyped-def]

    huge.__annotations__["x"] = Literal[tuple(f"choice number {n}" for n in range(5000))]  # type: ignore[valid-type]
    with pytest.raises(InvalidSpec, match="64 KiB"):
        Inputs(huge).schema()
