from typing import Any

import pytest

from stoker.runtime.sdk import call
from stoker.runtime.worker.function_process import run_batch, run_single, sendable


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


def test_an_unsendable_result_fails_alone() -> None:
    assert sendable(["a", True, 1]) == ["a", True, 1]
    assert sendable(["b", True, object()])[1] is False


def test_inputs_are_passed_as_the_parameters_ask() -> None:
    def both(x: int, y: int = 1) -> int:
        return x * y

    assert call(both, {"x": 3, "y": 2}) == 6
    assert call(lambda body: body, {"x": 3}) == {"x": 3}
    assert call(lambda: 7, None) == 7
    with pytest.raises(TypeError, match="x, y"):
        call(both, 3)
