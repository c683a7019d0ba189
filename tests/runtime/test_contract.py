"""Which versions of a function take each other's jobs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stoker.runtime.contract import contract_of, may_try
from stoker.runtime.inputs import Inputs
from stoker.runtime.spec import FunctionSpec, ModelOptions

MODEL = FunctionSpec(name="m", kind="llm", weights="s3://models/a", takes="tokens 4096")


def python(body: Callable[..., Any], version: str = "1") -> FunctionSpec:
    inputs = Inputs(body)
    return FunctionSpec(
        name="f", kind="python", version=version, input_schema=inputs.schema(), takes=inputs.takes(), code=version
    )


def bare(a, b=1):  # type: ignore[no-untyped-def]
    return a


def longer(a, b=1, c=2):  # type: ignore[no-untyped-def]
    return a


def whole(a):  # type: ignore[no-untyped-def]
    return a


def typed(a: int, b: int = 1) -> int:
    return a


def test_what_an_input_becomes() -> None:
    def every(a, /, *rest, b, c=1, **others):  # type: ignore[no-untyped-def]
        return a

    assert [Inputs(body).takes() for body in (bare, whole, every)] == [
        "{a, b?}",
        "value",
        "{a, *rest, b, c?, **others}",
    ]


def test_other_code_with_the_same_parameters_keeps_the_contract() -> None:
    assert contract_of(python(bare, "1")) == contract_of(python(bare, "2"))
    contracts = [contract_of(python(body)) for body in (bare, longer, whole, typed)]
    assert len(set(contracts)) == 4


def test_code_may_look_at_fields_as_fields_and_at_values_as_values() -> None:
    fields, more, value = (contract_of(python(body)) for body in (bare, longer, whole))
    assert may_try(more, fields) and may_try(fields, more) and may_try("", value)
    assert not may_try(fields, value) and not may_try(value, fields)


def test_models_share_jobs_whose_tokens_and_context_are_the_same() -> None:
    own = contract_of(MODEL)
    assert may_try(contract_of(replace(MODEL, weights="s3://models/b", adapters={"x": "s3://x"})), own)
    for other in (
        replace(MODEL, takes="others 4096"),
        replace(MODEL, model=ModelOptions(max_model_len=8)),
        replace(MODEL, kind="embed"),
        python(bare),
    ):
        assert not may_try(contract_of(other), own)


def test_what_is_known_of_a_version_is_not_taken_for_another_one() -> None:
    first, second = python(bare), python(longer)
    assert contract_of(first) != contract_of(second)
    assert contract_of(first) == contract_of(python(bare))
