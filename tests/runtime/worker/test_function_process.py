import asyncio
from datetime import datetime
from typing import Any

import msgpack
import pytest

from stoker.runtime.sdk import InvalidInput, call
from stoker.runtime.worker.function_process import run_batch, run_single, user_error


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
        (1 << 70, "64 bits"),
        ("\ud800", "surrogate"),
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


def test_inputs_are_passed_as_the_parameters_ask() -> None:
    def both(x: int, y: int = 1) -> int:
        return x * y

    assert call(both, {"x": 3, "y": 2}) == 6
    assert call(lambda body: body, {"x": 3}) == {"x": 3}
    assert call(lambda: 7, None) == 7
    for wrong in (3, {}, {"x": 1, "z": 2}):
        with pytest.raises(InvalidInput, match=r"x, y \(optional\)"):
            call(both, wrong)
    with pytest.raises(InvalidInput, match="takes no input"):
        call(lambda: 7, {"a": 1})


def test_a_wrong_input_is_the_callers_error_not_the_functions() -> None:
    error = run_single(lambda x, y: x, ["a", 3], silent)[2]
    assert error["type"] == "invalid_request_error"


def test_a_missing_module_says_what_to_do() -> None:
    assert "App(include=" in user_error(ModuleNotFoundError("No module named 'helper'", name="helper"))["message"]


def seconds_of(seconds: int) -> int:
    return seconds


def text_of(text: "str") -> str:
    return text


@pytest.mark.parametrize(
    ("body", "value", "advice"),
    [
        (seconds_of, {"seconds": 1}, 'send 1, not {"seconds": 1}'),
        (seconds_of, {"minutes": 1}, "not dict"),
        (seconds_of, "1", "not str"),
        (text_of, {"text": "a"}, 'send "a", not {"text": "a"}'),
        (text_of, None, "not NoneType"),
    ],
)
def test_an_only_parameter_gets_the_whole_body_and_says_so(body: Any, value: Any, advice: str) -> None:
    _, succeeded, error = run_single(body, ["a", value], silent)
    assert (succeeded, error["type"], error["code"]) == (False, "invalid_request_error", "invalid_input")
    assert error["message"].startswith("this function's only parameter ") and error["message"].endswith(advice)


def test_an_only_parameter_that_fits_gets_its_value() -> None:
    def half(x: float = 1.0) -> float:
        return x

    def anything(x: dict[str, int] | int) -> Any:
        return x

    assert [call(seconds_of, 2), call(seconds_of, 2.5), call(half, 3), call(half, None)] == [2, 2.5, 3, None]
    assert [call(anything, 1), call(anything, {"x": 1}), call(lambda x: x, {"x": 1})] == [1, {"x": 1}, {"x": 1}]
