import pytest

from stoker.runtime.sdk import App
from stoker.runtime.spec import (
    Batch,
    FunctionSpec,
    InvalidSpec,
    Limits,
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


def test_one_unreadable_record_does_not_hide_the_others() -> None:
    good = FunctionSpec(name="f", kind="python")
    assert readable({"bad": {"name": "bad", "kind": "python", "future": 1}, "f": good.to_dict()}) == {"f": good}


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
