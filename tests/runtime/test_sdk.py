"""What an app declares: functions, and classes whose methods are functions."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.runtime.client import errors
from stoker.runtime.deployment import Bundle, described
from stoker.runtime.inputs import Inputs
from stoker.runtime.spec import InvalidSpec


def tagger(app: stoker.App, **options: Any) -> Any:
    @app.cls(**options)
    class ImageTagger:
        @stoker.load
        def prepare(self) -> None:
            self.word = "cat"

        @stoker.method
        def tag(self, image: str) -> str:
            return f"{self.word} in {image}"

        def helper(self) -> None: ...

    return ImageTagger


def test_a_class_with_one_method_is_a_function_of_its_name() -> None:
    app = stoker.App("shop")
    kind = tagger(app, gpu="any", concurrency=2, memory_mb=100, env={"A": "b"}, secrets=["hf-token"])
    (spec,) = app.functions.values()
    assert (spec.name, spec.gpu, spec.concurrency, spec.memory_mb) == ("image-tagger", "any", 2, 100)
    assert spec.entry.endswith("ImageTagger.tag") and spec.entry.startswith(f"{__name__}:")
    assert (spec.env, spec.secrets) == ({"A": "b"}, ("hf-token",))
    one = kind()
    one.prepare()
    assert one.tag("picture") == "cat in picture"


def test_several_methods_are_several_functions() -> None:
    app = stoker.App("shop")

    @app.cls(name="math", batch=stoker.Batch(4))
    class Sums:
        @stoker.method
        def add(self, values: list[int]) -> list[int]:
            return values

        @stoker.method
        async def double(self, values: list[float]) -> list[float]:
            return values

    assert list(app.functions) == ["math-add", "math-double"]
    assert all(spec.batch == stoker.Batch(4) for spec in app.functions.values())
    schemas = [described(app, spec, Bundle("0" * 64, b"")).input_schema for spec in app.functions.values()]
    assert [schema and schema["type"] for schema in schemas] == ["integer", "number"]


def test_options_that_do_not_exist_are_named_with_those_that_do() -> None:
    app = stoker.App("shop")
    for declare in (app.function, app.cls):
        with pytest.raises(InvalidSpec, match="no option gpus.*concurrency"):
            declare(gpus=1)(ImageTagger := type("X", (), {"run": stoker.method(lambda self: 1)}))  # type: ignore[arg-type]
        with pytest.raises(InvalidSpec, match="parentheses"):
            declare(ImageTagger)


def test_a_class_must_say_what_to_call() -> None:
    app = stoker.App("shop")
    with pytest.raises(InvalidSpec, match="no method marked with @stoker.method"):
        app.cls()(type("Empty", (), {}))
    both = {name: stoker.load(lambda self: None) for name in ("one", "two")}
    with pytest.raises(InvalidSpec, match="more than one @stoker.load"):
        app.cls()(type("Twice", (), {**both, "run": stoker.method(lambda self: None)}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env": {"STOKER_URL": "x"}}, "stoker's own"),
        ({"env": {"A B": "x"}}, "environment variable"),
        ({"env": {"A": 1}}, "must be text"),
        ({"env": {"HF_TOKEN": "x"}, "secrets": ["hf-token"]}, "set twice"),
        ({"secrets": "hf-token"}, r"secrets=\['hf-token'\]"),
        ({"secrets": ["HF_TOKEN"]}, "name"),
        ({"memory_mb": -1}, "memory_mb"),
    ],
)
def test_wrong_environments_are_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSpec, match=said):
        tagger(stoker.App("shop"), **options)


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
@pytest.mark.parametrize("outside", [True, False])
def test_static_and_class_methods_take_what_a_caller_gives(kind: Any, outside: bool) -> None:
    def price(*given: int) -> int:
        return given[-1] * 2

    def static(count: int) -> int:
        return price(count)

    def of_class(cls: type, count: int) -> int:
        return price(count)

    plain = static if kind is staticmethod else of_class
    marked = stoker.method(kind(plain)) if outside else kind(stoker.method(plain))
    app = stoker.App("shop")
    shop = app.cls()(type("Shop", (), {"price": marked}))
    assert list(app.functions) == ["shop"]
    schema = Inputs(app.bodies["shop"]).schema()
    assert schema and (schema["title"], schema["type"]) == ("count", "integer")
    assert shop().price(4) == 8  # type: ignore[attr-defined]


def test_what_the_readme_names_can_be_imported() -> None:
    readme = (Path(stoker.__file__).parent / "README.md").read_text()
    named = set(re.findall(r"\w+", readme))
    raised = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    wanted = named & raised | set(re.findall(r"stoker\.([A-Z]\w+)", readme))
    assert wanted >= {"App", "Client", "JobFailed", "StokerError", "WaitTimeout"}
    assert [name for name in sorted(wanted) if not hasattr(stoker, name) or name not in stoker.__all__] == []


@pytest.mark.parametrize("option", ["timeout", "retries", "idle_timeout"])
def test_a_wrong_number_is_refused_under_the_name_that_was_written(option: str) -> None:
    app = stoker.App("shop")
    with pytest.raises(InvalidSpec, match=f"^{option} must be 0 to .*, not -1"):
        tagger(app, **{option: -1})
    if option != "retries":
        with pytest.raises(InvalidSpec, match=f"^{option} must be"):
            app.llm("chat", weights="s3://a/b", **{option: -1})  # type: ignore[arg-type]
        with pytest.raises(InvalidSpec, match=f"^{option} must be"):
            app.embed("embed", weights="s3://a/b", **{option: -1})  # type: ignore[arg-type]


def test_limits_go_beside_timeout_and_retries() -> None:
    app = stoker.App("shop")
    limits = stoker.Limits(start_within_s=5, max_running_per_tenant=2)
    tagger(app, limits=limits, timeout=30, retries=0)
    [spec] = app.functions.values()
    assert spec.limits == replace(limits, run_within_s=30, max_attempts=1)
    assert app.llm("chat", weights="s3://a/b", limits=limits).limits == limits
    assert app.embed("embed", weights="s3://a/b", limits=limits, timeout=9).limits.run_within_s == 9


@pytest.mark.parametrize(("field", "option"), [("run_within_s", "timeout"), ("max_attempts", "retries")])
def test_what_has_an_option_is_not_said_in_limits(field: str, option: str) -> None:
    with pytest.raises(InvalidSpec, match=f"^say {option}=... beside limits, not {field} in them"):
        tagger(stoker.App("shop"), limits=stoker.Limits(**{field: 7}))


def test_an_app_s_bad_name_is_called_the_app_s() -> None:
    with pytest.raises(InvalidSpec, match="^app name 'bad name!' must be"):
        stoker.App("bad name!")
