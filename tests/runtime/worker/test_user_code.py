import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from pydantic import BaseModel, field_validator, model_serializer

from stoker.runtime.arrays import from_ext
from stoker.runtime.worker.user_code import UserCode, resolve


def run_single(body: Callable[..., Any], item: list[Any], emit: Callable[[str, Any], None]) -> list[Any]:
    return UserCode(body).single(item, emit)


def run_batch(body: Callable[..., Any], items: list[list[Any]]) -> list[list[Any]]:
    return UserCode(body, batched=True).batch(items)


def silent(job_id: str, value: Any) -> None:
    raise AssertionError("nothing was to be streamed")


def test_a_result_and_an_exception_of_a_single_call() -> None:
    assert run_single(lambda x: x + 1, ["a", 1], silent) == ["a", True, 2]
    job, succeeded, error = run_single(lambda x: 1 / x, ["b", 0], silent)
    assert (job, succeeded, error["type"], error["code"]) == ("b", False, "function_error", "ZeroDivisionError")
    assert "1 / x" in error["traceback"] and "worker/function_process.py" not in error["traceback"]


def test_an_async_function_is_awaited() -> None:
    async def double(x: int) -> int:
        return 2 * x

    assert run_single(double, ["a", 4], silent) == ["a", True, 8]


def test_a_generator_streams_and_its_result_is_the_list() -> None:
    seen: list[Any] = []

    def count(n: int) -> Any:
        yield from range(n)

    assert run_single(count, ["a", 3], lambda job, value: seen.append((job, value))) == ["a", True, [0, 1, 2]]
    assert seen == [("a", 0), ("a", 1), ("a", 2)]


def test_a_batch_fails_item_by_item() -> None:
    def invert(values: list[float]) -> list[Any]:
        return [1 / v if v else ValueError("zero") for v in values]

    (_, ok, value), (_, bad, error) = run_batch(invert, [["a", 2.0], ["b", 0.0]])
    assert (ok, value, bad, error["code"]) == (True, 0.5, False, "ValueError")


def test_a_batch_of_the_wrong_length_says_so_to_all() -> None:
    results = run_batch(lambda values: values[:1], [["a", 1], ["b", 2]])
    assert [item[1] for item in results] == [False, False]
    assert "2 in, 1 out" in results[0][2]["message"]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (object(), "object"),
        ({(1, 2): 3}, "tuple"),
        ({1, 2}, "set"),
        ({b"w": 1}, "a key of the result is a bytes"),
        ({float("nan"): 1}, "a key of the result is nan"),
        ({1: {float("-inf"): 1}}, "a key of the result is -inf"),
        (1 << 70, "64 bits"),
        ("\ud800", "surrogate"),
        ({"\ud800": 1}, "surrogate"),
        ({1 << 70: 1}, "64 bits"),
        (msgpack.ExtType(78, b"junk"), "no array"),
        (msgpack.ExtType(78, msgpack.packb(["<f8", [0, 1 << 31, 1 << 31, 1 << 31]])), "no array"),
        (datetime(2026, 1, 1), "datetime"),
        (msgpack.Timestamp(1), "Timestamp"),
    ],
)
def test_a_result_that_can_not_be_sent_fails_alone_and_says_why(value: Any, problem: str) -> None:
    good, bad = run_batch(lambda values: values, [["a", 1], ["b", value]])
    assert good == ["a", True, 1] and bad[1] is False and problem in bad[2]["message"]
    assert problem in run_single(lambda x: [x], ["c", value], silent)[2]["message"]


def test_a_result_may_be_deep_but_not_endless() -> None:
    def nested(levels: int) -> list[Any]:
        value: list[Any] = []
        for _ in range(levels - 1):
            value = [value]
        return value

    assert run_single(nested, ["a", 100], silent)[1] is True
    assert "nested" in run_single(nested, ["a", 102], silent)[2]["message"]
    endless: list[Any] = []
    endless.append(endless)
    assert "nested" in run_single(lambda x: endless, ["a", 1], silent)[2]["message"]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(), Unspeakable()]
)
def test_nothing_that_is_thrown_is_lost(error: BaseException) -> None:
    def throw(x: Any) -> Any:
        raise error

    assert run_single(throw, ["a", 1], silent)[2]["code"] == type(error).__name__
    assert run_batch(throw, [["a", 1]])[0][2]["code"] == type(error).__name__


@pytest.mark.parametrize("result", ["ab", {"a": 1, "b": 2}])
def test_a_batch_returns_a_list_not_something_as_long(result: Any) -> None:
    assert "must return a list" in run_batch(lambda values: result, [["a", 1], ["b", 2]])[0][2]["message"]


class Shape(BaseModel):
    sides: list[int]
    drawn: date
    tags: set[str] = set()


@dataclass
class Drawing:
    shape: Shape
    image: Any


def test_models_dataclasses_and_arrays_are_sent_as_what_they_hold() -> None:
    drawing = Drawing(Shape(sides=[3], drawn=date(2026, 1, 2), tags={"a"}), np.ones(2, np.float32))
    _, succeeded, value = run_single(lambda x: [drawing, np.float32(0.5), np.int64(3)], ["a", 1], silent)
    assert succeeded, value
    assert value[0]["shape"] == {"sides": [3], "drawn": "2026-01-02", "tags": ["a"]} and value[1:] == [0.5, 3]
    np.testing.assert_array_equal(from_ext(value[0]["image"].data), np.ones(2))
    assert "can't be sent" in run_single(lambda x: np.array([object()]), ["a", 1], silent)[2]["message"]


def test_an_async_generator_streams_in_one_task() -> None:
    seen: list[Any] = []

    async def count(n: int) -> Any:
        async with asyncio.timeout(5):
            for number in range(n):
                await asyncio.sleep(0)
                yield number

    assert run_single(count, ["a", 3], lambda job, value: seen.append(value)) == ["a", True, [0, 1, 2]]
    assert seen == [0, 1, 2]


def test_coroutines_of_all_calls_share_a_loop_that_outlives_an_exit() -> None:
    async def where(leave: bool) -> int:
        if leave:
            raise SystemExit(3)
        return id(asyncio.get_running_loop())

    code = UserCode(where)
    first = code.single(["a", False], silent)
    assert code.single(["b", True], silent)[2]["code"] == "SystemExit"
    assert code.single(["c", False], silent)[2] == first[2]


def test_misfits_of_a_batch_fail_alone_and_the_function_never_sees_them() -> None:
    seen: list[Any] = []

    def double(values: list[int]) -> list[int]:
        seen.extend(values)
        return [2 * value for value in values]

    answers = {item[0]: item[1:] for item in run_batch(double, [["a", 1], ["b", "x"], ["c", 3]])}
    assert answers["a"] == [True, 2] and answers["c"] == [True, 6] and seen == [1, 3]
    assert answers["b"][0] is False and answers["b"][1]["code"] == "invalid_input"
    assert run_batch(double, [["d", "x"]])[0][1] is False and seen == [1, 3]


def test_a_returned_exception_has_its_own_traceback() -> None:
    def careful(values: list[int]) -> list[Any]:
        def one(value: int) -> Any:
            try:
                return 1 // value
            except ZeroDivisionError as error:
                return error

        return [one(value) for value in values]

    good, bad = run_batch(careful, [["a", 1], ["b", 0]])
    assert good == ["a", True, 1]
    assert "return 1 // value" in bad[2]["traceback"] and bad[2]["code"] == "ZeroDivisionError"


CLASSES = """
import stoker
app = stoker.App("classes")

@app.cls()
class Tagger:
    def __init__(self): self.steps = ["made"]
    @stoker.load
    def prepare(self): self.steps.append("loaded")
    @stoker.method
    def tag(self, text: str): return [*self.steps, text]

class Special(Tagger):
    pass

@app.cls()
class Price:
    @stoker.method
    @staticmethod
    def twice(count: int): return 2 * count
"""


def test_a_method_is_found_with_its_load_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "classes_app.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(tmp_path)
    for entry in ("classes_app:Tagger.tag", "classes_app:Special.tag"):
        body, step = resolve(entry)
        assert step is not None
        step()
        assert UserCode(body).single(["a", "x"], silent) == ["a", True, ["made", "loaded", "x"]]
    body, step = resolve("classes_app:Price.twice")
    assert step is None and UserCode(body).single(["a", 2], silent) == ["a", True, 4]


class Vague(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")


class Nameless(Exception, metaclass=Vague):
    pass


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Nameless("x"), "Nameless"),
        (ModuleNotFoundError("x", name=5), "ModuleNotFoundError"),  # type: ignore[arg-type]
        (ModuleNotFoundError("x", name="\ud800"), "ModuleNotFoundError"),
        (ValueError("\ud800" * 3), "ValueError"),
    ],
)
def test_every_error_has_a_record_that_can_be_sent(error: Exception, code: str) -> None:
    def throw(x: Any) -> Any:
        raise error

    for item in (run_single(throw, ["a", 1], silent), run_batch(throw, [["a", 1]])[0]):
        assert item[1] is False and item[2]["code"] == code
        assert msgpack.packb(item)


def test_a_traceback_of_odd_places_can_be_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of code whose file's name is half a surrogate pair, in a working folder that is gone."""
    odd: dict[str, Any] = {}
    exec(compile("def throw(x):\n    raise ValueError(x)", "\ud800.py", "exec"), odd)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    error = run_single(odd["throw"], ["a", 1], silent)[2]
    assert error["message"] == "ValueError: 1" and error["traceback"].endswith("ValueError: 1\n")
    assert msgpack.packb(error)


def test_an_input_whose_check_breaks_fails_alone() -> None:
    class Strange(BaseModel):
        sku: str

        @field_validator("sku")
        @classmethod
        def known(cls, sku: str) -> str:
            return {"a": "A"}[sku]

    def names(values: list[Strange]) -> list[str]:
        return [value.sku for value in values]

    names.__annotations__["values"] = list[Strange]
    answers = {item[0]: item[1:] for item in run_batch(names, [["a", {"sku": "a"}], ["b", {"sku": "b"}]])}
    assert answers["a"] == [True, "A"] and answers["b"][0] is False and answers["b"][1]["code"] == "KeyError"


@dataclass
class Guarded:
    value: Any


class Refusing(BaseModel):
    @model_serializer
    def never(self) -> dict[str, Any]:
        raise KeyError("no")


@pytest.mark.parametrize(
    ("value", "problem"), [(Guarded(threading.Lock()), "lock"), (Refusing(), "no"), (Guarded(Refusing()), "no")]
)
def test_a_result_that_breaks_when_it_is_looked_at_fails_alone(value: Any, problem: str) -> None:
    good, bad = run_batch(lambda values: values, [["a", 1], ["b", value]])
    assert good == ["a", True, 1] and bad[1] is False and problem in bad[2]["message"]
    assert problem in run_single(lambda x: value, ["c", 1], silent)[2]["message"]


def test_a_dataclass_of_models_is_sent_without_being_copied() -> None:
    guarded = Guarded([Guarded(Shape(sides=[1], drawn=date(2026, 1, 2))), np.int8(3)])
    _, succeeded, value = run_single(lambda x: guarded, ["a", 1], silent)
    assert succeeded and value == {"value": [{"value": {"sides": [1], "drawn": "2026-01-02", "tags": []}}, 3]}
