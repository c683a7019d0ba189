from dataclasses import fields
from typing import Any

import pytest

from stoker.runtime.routing.router import Route, Router
from stoker.runtime.sdk import App
from stoker.runtime.spec import (
    SLO,
    Batch,
    FunctionSpec,
    InvalidSpec,
    Limits,
    ModelOptions,
    Scaling,
    full_name,
    owner_of,
    readable,
    short_name,
)


def test_a_spec_survives_the_wire() -> None:
    spec = FunctionSpec(name="f", kind="python", batch=Batch(4, 2.0), scaling=Scaling(1, 3, 9.0), entry="m:f")
    assert FunctionSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize("name", ["", "Upper", "-x", "x-", "a b", "a" * 64, "A.b", "a.b.c", "1a", "a--b"])
def test_names_that_would_not_make_a_key_or_a_path_are_refused(name: str) -> None:
    with pytest.raises(InvalidSpec, match="function name|owner"):
        FunctionSpec(name=name, kind="python")


@pytest.mark.parametrize("version", ["../../etc", "a b", "\0", "x" * 65, "1/2"])
def test_versions_that_are_no_plain_name_are_refused(version: str) -> None:
    with pytest.raises(InvalidSpec, match="version"):
        FunctionSpec(name="f", kind="python", version=version)


def test_an_app_names_its_functions_without_an_owner() -> None:
    with pytest.raises(InvalidSpec, match="function name"):
        App("shop").llm("acme.chat", weights="file:///x")
    assert (owner_of("acme.chat"), short_name("acme.chat"), full_name("acme", "chat")) == ("acme", "chat", "acme.chat")
    assert (owner_of("chat"), short_name("chat"), full_name("", "chat")) == ("", "chat", "chat")


@pytest.mark.parametrize("data", [{"nonsense": 1}, {"scaling": {"nonsense": 1}}, {"batch": {"max_size": 0}}])
def test_wrong_fields_are_named(data: dict) -> None:
    with pytest.raises(InvalidSpec, match="nonsense|max_size"):
        FunctionSpec.from_dict({"name": "f", "kind": "python", **data})


@pytest.mark.parametrize("data", [{"name": "f"}, {"kind": "python"}, {"name": "f", "kind": "other"}])
def test_missing_or_unknown_kinds_are_refused(data: dict) -> None:
    with pytest.raises(InvalidSpec):
        FunctionSpec.from_dict(data)


def test_one_unreadable_record_does_not_hide_the_others_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    good = FunctionSpec(name="f", kind="python")
    for _ in range(3):
        assert readable({"bad": {"name": "bad", "kind": "python", "future": 1}, "f": good.to_dict()}) == {"f": good}
    readable({"bad": {"name": "bad", "kind": "python", "slo": {"ttft_ms": -1}}})
    assert [("future" in each.message, "ttft_ms" in each.message) for each in caplog.records] == [
        (True, False),
        (False, True),
    ]


def test_a_model_needs_weights() -> None:
    with pytest.raises(InvalidSpec, match="weights"):
        FunctionSpec(name="chat", kind="llm")


def test_replica_bounds_must_make_sense() -> None:
    with pytest.raises(InvalidSpec, match="max_replicas"):
        Scaling(min_replicas=3, max_replicas=2)


def test_an_app_refuses_the_same_name_twice() -> None:
    app = App("shop")
    app.llm("chat", weights="file:///x")
    with pytest.raises(InvalidSpec, match="twice"):
        app.llm("chat", weights="file:///y")


def test_misuse_of_the_decorator_and_of_include_says_what_to_write() -> None:
    with pytest.raises(InvalidSpec, match="parentheses"):
        App("shop").function(lambda x: x)
    with pytest.raises(InvalidSpec, match="tuple"):
        App("shop", include="helpers")  # type: ignore[arg-type]


def test_a_decorated_function_still_runs_here() -> None:
    app = App("shop")

    @app.function()
    def double(x: int) -> int:
        return 2 * x

    assert double(4) == 8 and app.functions["double"].entry.endswith("double")


@pytest.mark.parametrize("name", ["max_running", "max_queued_per_tenant", "requests_per_minute", "cost_per_minute"])
@pytest.mark.parametrize("value", [-1, 2e9, float("nan")])
def test_limits_that_are_none(name: str, value: float) -> None:
    with pytest.raises(InvalidSpec, match=name):
        Limits(**{name: value})


def test_adapters_survive_the_wire_and_take_no_more_slots_than_there_are() -> None:
    spec = FunctionSpec(
        name="chat", kind="llm", weights="s3://a/b", adapters={"sql": "s3://a/sql", "law": "s3://a/law"}
    )
    assert FunctionSpec.from_dict(spec.to_dict()) == spec
    assert spec.engine_options.adapter_slots == 2
    assert FunctionSpec(name="chat", kind="llm", weights="s3://a/b").engine_options.adapter_slots == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"adapters": {"Sql": "s3://a/b"}}, "adapter name 'Sql'"),
        ({"adapters": {"a:b": "s3://a/b"}}, "adapter name 'a:b'"),
        ({"adapters": {"a": "elsewhere"}}, "needs the URL of its store"),
        ({"adapters": {"a": "s3://a/b"}, "kind": "embed"}, "of kind 'embed' can't have adapters"),
        ({"adapters": {"a": "s3://a/b"}, "model": ModelOptions(adapter_slots=0)}, "adapter_slots of 1 or more"),
        ({"adapters": {f"a{number}": "s3://a/b" for number in range(1001)}}, "1000 adapters, not 1001"),
    ],
)
def test_adapters_that_cant_be(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSpec, match=reason):
        FunctionSpec(**{"name": "chat", "kind": "llm", "weights": "s3://a/b", **fields})


def test_an_app_names_a_models_adapters() -> None:
    adapters = {"sql": "s3://a/sql"}
    spec = App("shop").llm("chat", weights="s3://a/b", adapters=adapters, adapter_slots=3, adapter_rank=32)
    assert (spec.adapters, spec.model.adapter_slots, spec.model.adapter_rank) == (adapters, 3, 32)


def test_an_app_asks_for_batch_invariance_of_language_models_alone() -> None:
    spec = App("shop").llm("chat", weights="s3://a/b", batch_invariant=True)
    assert FunctionSpec.from_dict(spec.to_dict()).engine_options.batch_invariant
    assert not App("shop").llm("chat", weights="s3://a/b").model.batch_invariant
    with pytest.raises(InvalidSpec, match="batch_invariant is for language models: leave it out .* 'embed'"):
        FunctionSpec(name="e", kind="embed", weights="s3://a/b", model=ModelOptions(batch_invariant=True))
    with pytest.raises(InvalidSpec, match="batch_invariant must be true or false, not 'yes'"):
        ModelOptions(batch_invariant="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [{"adapter_rank": 65}, {"adapter_rank": 0}, {"adapter_slots": 257}])
def test_room_for_adapters_is_bounded(values: dict[str, int]) -> None:
    with pytest.raises(InvalidSpec, match=next(iter(values))):
        ModelOptions(**values)


PARTS: dict[Any, dict[str, Any]] = {
    Batch: {},
    SLO: {},
    Scaling: {},
    ModelOptions: {},
    Limits: {},
    FunctionSpec: {"name": "f", "kind": "python"},
    Router: {"routes": (Route("a", min_chars=1),), "default": "a"},
    Route: {"target": "a", "keywords": ("x",)},
}
NUMBERS = [
    pytest.param(part, given, each.name, id=f"{part.__name__}.{each.name}")
    for part, given in PARTS.items()
    for each in fields(part)
    if {"int", "float"} & set(str(getattr(each.type, "__name__", each.type)).replace("|", " ").split())
]


@pytest.mark.parametrize(("part", "given", "name"), NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1, -1e9, 10**30])
def test_every_number_of_a_spec_has_bounds(part: Any, given: dict[str, Any], name: str, value: float) -> None:
    with pytest.raises(InvalidSpec, match=name):
        part(**{**given, name: value})


def test_all_numbers_were_found() -> None:
    assert len(NUMBERS) == 36


@pytest.mark.parametrize("value", [0, 0.99, 1e13])
def test_a_latency_goal_is_a_time_that_can_be_kept(value: float) -> None:
    with pytest.raises(InvalidSpec, match=f"ttft_ms must be 1 to 1e.12 milliseconds .* not {value}"):
        SLO(value)
    assert SLO(1).ttft_ms == 1 and SLO(1e12) and SLO(None) == SLO()


@pytest.mark.parametrize("value", [0, 0.05, 9.9])
def test_a_result_is_kept_for_long_enough_to_be_read(value: float) -> None:
    with pytest.raises(InvalidSpec, match=f"retention_s must be 10 to 1e.09 seconds, not {value}"):
        Limits(retention_s=value)
    assert Limits(retention_s=10).retention_s == 10
