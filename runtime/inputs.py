"""A function's input: what its parameters' annotations say about it, as a JSON Schema and as a check that makes values
of the annotated types."""

import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, Required

import numpy as np
from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict, is_typeddict

from stoker.runtime.client.errors import InvalidInput
from stoker.runtime.client.media import ARRAY, BYTES
from stoker.runtime.spec import InvalidSpec

EMPTY = inspect.Parameter.empty
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
STARS = {VARIADIC[0]: "*", VARIADIC[1]: "**"}
LISTS = (list, Sequence, Iterable, tuple)
MAX_SCHEMA = 64 << 10

Schema = dict[str, Any]


class Misfit(InvalidInput):
    """An input that doesn't fit the function's parameters; `param` is the path of what is wrong, None for the whole."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ArrayInput:
    """A parameter annotated as a numpy array takes an array or nested lists of numbers."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(array_of)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        return {"anyOf": [{"type": "array"}, {"type": ["number", "boolean"]}, tagged(ARRAY, {})]}


class InputSchema(GenerateJsonSchema):
    """JSON has no bytes: they stand in an object, as base64."""

    def bytes_schema(self, schema: core_schema.BytesSchema) -> Schema:
        return tagged(BYTES, {"type": "string", "contentEncoding": "base64"})


def tagged(tag: str, schema: Schema) -> Schema:
    return {"type": "object", "properties": {tag: schema}, "required": [tag], "additionalProperties": False}


def array_of(value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ValueError("not an array of numbers")
    return array


@dataclass(frozen=True, slots=True)
class Arguments:
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Inputs:
    """How one input becomes the arguments of a call. An only parameter gets the whole input; several get the fields of
    an object. A batched function's parameter gets the list of the inputs, each of them as the list's annotation says.

    Raises InvalidSpec for an annotation that can't be read, or that no input can be made into.
    """

    def __init__(self, body: Callable[..., Any], *, batched: bool = False) -> None:
        self._signature = inspect.signature(body)
        self._parameters = {each.name: each for each in self._signature.parameters.values()}
        self._by_name, self._skippable = by_name(self._signature), defaults_by_place(self._signature)
        self._hints = hints_of(body)
        self._name = getattr(body, "__name__", "function")
        first = next(iter(self._parameters.values()), None)
        if batched:
            self._check_batched(first)
        self._only = first if first and (batched or self._takes_whole(first)) else None
        self._adapter = self._item_adapter(first) if batched else self._make_adapter()

    def schema(self) -> Schema | None:
        """What one input must look like as JSON, bytes as {"$bytes": base64}; None when nothing was annotated."""
        if self._adapter is None:
            return None
        try:
            schema = self._adapter.json_schema(schema_generator=InputSchema)
        except PydanticUserError as error:
            raise InvalidSpec(self._unfit(error)) from error
        if self._only:
            schema["title"] = self._only.name
        if len(json.dumps(schema)) > MAX_SCHEMA:
            raise InvalidSpec(f"the annotations of {self._name!r} make a schema of more than {MAX_SCHEMA >> 10} KiB")
        return schema

    def takes(self) -> str:
        """What an input becomes, annotations apart: "value", or {the parameters}, with "?" where one has a default."""
        names = [
            f"{STARS.get(each.kind, '')}{name}{'?' * (each.default is not EMPTY)}"
            for name, each in self._parameters.items()
        ]
        return "value" if self._only else f"{{{', '.join(names)}}}"

    def item(self, value: Any) -> Any:
        """One input of a batched function. Raises Misfit."""
        return self._checked(value)

    def arguments(self, value: Any) -> Arguments:
        """Raises Misfit, before the function runs, for an input that doesn't fit."""
        if self._only is not None:
            defaulted = value is None and (self._only.default is not EMPTY or self._only.kind in VARIADIC)
            return Arguments() if defaulted else Arguments((self._checked(value),))
        return self._from_fields({} if value is None else value)

    def _from_fields(self, fields: Any) -> Arguments:
        if not isinstance(fields, dict):
            raise Misfit(f"{self._takes()}, not {type(fields).__name__}")
        try:
            self._by_name.bind(**fields)
        except TypeError as error:
            raise Misfit(f"{self._takes()}: {error}") from None
        values = self._checked(fields)
        bound = inspect.BoundArguments(self._signature, {})  # type: ignore[arg-type]
        named = {
            name: values[name]
            for name, each in self._parameters.items()
            if name in values and each.kind not in VARIADIC
        }
        extra = {name: value for name, value in values.items() if name not in named}
        bound.arguments.update({**self._skippable, **named})
        return Arguments(bound.args, {**bound.kwargs, **extra})

    def _checked(self, value: Any) -> Any:
        if self._adapter is None:
            return value
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise misfit(error) from None

    def _takes_whole(self, first: inspect.Parameter) -> bool:
        return len(self._parameters) == 1 and first.kind in (*POSITIONAL, inspect.Parameter.VAR_POSITIONAL)

    def _make_adapter(self) -> TypeAdapter[Any] | None:
        if not self._hints:
            return None
        if self._only is None:
            return self._adapter_of(self._fields_type())
        hint = self._hints[self._only.name]
        return self._adapter_of(hint if self._only.default is EMPTY else hint | None)

    def _item_adapter(self, first: inspect.Parameter | None) -> TypeAdapter[Any] | None:
        hint = self._hints.get(first.name) if first else None
        if typing.get_origin(hint) not in LISTS or not typing.get_args(hint):
            return None
        return self._adapter_of(adapted(typing.get_args(hint)[0]))

    def _check_batched(self, first: inspect.Parameter | None) -> None:
        """Raises InvalidSpec for a signature that the list of inputs can't be given to."""
        if len(self._parameters) != 1 or first is None or first.kind not in (*POSITIONAL, *VARIADIC[:1]):
            raise InvalidSpec(
                f"{self._name!r} has batch=, so it gets one argument, the list of the inputs, but it takes "
                f"({', '.join(self._parameters)}); write `def {self._name}(items: list[Item])`, where Item (a "
                "dataclass, a TypedDict or a pydantic model) has the fields of one input"
            )
        hint = self._hints.get(first.name, Any)
        if not takes_lists(hint):
            plain = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
            written = inspect.formatannotation(plain)
            raise InvalidSpec(
                f"{self._name!r} has batch=, so {first.name!r} gets the list of the inputs, but its annotation is "
                f"{written}; write `{first.name}: list[{written}]`"
            )

    def _fields_type(self) -> Any:
        named = {name: each for name, each in self._parameters.items() if each.kind not in VARIADIC}
        fields = {
            name: (Required if each.default is EMPTY else NotRequired)[self._hints.get(name, Any)]
            for name, each in named.items()
        }
        kind = TypedDict("Input", fields)  # type: ignore[operator]
        open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in self._parameters.values())
        kind.__pydantic_config__ = ConfigDict(extra="allow" if open_ended else "forbid")  # type: ignore[attr-defined]
        return kind

    def _adapter_of(self, kind: Any) -> TypeAdapter[Any]:
        try:
            return TypeAdapter(kind)
        except PydanticUserError as error:
            raise InvalidSpec(self._unfit(error)) from error

    def _unfit(self, error: Exception) -> str:
        return (
            f"an annotation of {self._name!r} can't be checked against an input "
            f"({str(error).splitlines()[0]}); write a builtin, a pydantic model, a dataclass, a TypedDict or a numpy "
            "array there, or leave the annotation out"
        )

    def _takes(self) -> str:
        named = {name: each for name, each in self._parameters.items() if each.kind not in VARIADIC}
        names = [name if each.default is EMPTY else f"{name} (optional)" for name, each in named.items()]
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in self._parameters.values()):
            names.append("any others" if names else "of any names")
        return (
            f"this function takes an object with the fields {', '.join(names)}"
            if names
            else "this function takes no input"
        )


def by_name(signature: inspect.Signature) -> inspect.Signature:
    """The same where fields name also the parameters that go by their place only."""
    only, either = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = signature.parameters.values()
    return signature.replace(
        parameters=[each.replace(kind=either) if each.kind is only else each for each in parameters]
    )


def defaults_by_place(signature: inspect.Signature) -> dict[str, Any]:
    """Of the parameters that go by their place only: one that is left out before one that is given needs its value."""
    only = inspect.Parameter.POSITIONAL_ONLY
    return {
        name: each.default
        for name, each in signature.parameters.items()
        if each.kind is only and each.default is not EMPTY
    }


def hints_of(body: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the parameters. Raises InvalidSpec for one that can't be read."""
    plain = inspect.unwrap(getattr(body, "__func__", body))
    own = {name: hint for name, hint in getattr(plain, "__annotations__", {}).items() if name != "return"}
    holder = types.SimpleNamespace(__annotations__=own)
    try:
        hints = typing.get_type_hints(holder, getattr(plain, "__globals__", {}), include_extras=True)
    except (NameError, TypeError, SyntaxError) as error:
        raise InvalidSpec(
            f"an annotation of {getattr(plain, '__name__', plain)!r} can't be read: {error}; import what it names "
            "at run time, or leave the annotation out"
        ) from error
    return {name: adapted(hint) for name, hint in hints.items()}


def takes_lists(hint: Any) -> bool:
    """Whether a list is what the annotation says, as far as one can tell."""
    hint = getattr(hint, "__value__", hint)
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return takes_lists(hint.__origin__)
    if origin in (types.UnionType, typing.Union):
        return any(takes_lists(each) for each in typing.get_args(hint))
    if origin is typing.Literal or is_typeddict(hint):
        return False
    kind = origin or hint
    return kind in (Any, tuple) or not isinstance(kind, type) or issubclass(list, kind)


def adapted(hint: Any) -> Any:
    """Numpy's array types as something that pydantic can check."""
    is_array = hint is np.ndarray or typing.get_origin(hint) is np.ndarray
    return typing.Annotated[np.ndarray, ArrayInput] if is_array else hint


def misfit(error: ValidationError) -> Misfit:
    """Pydantic's most specific complaint."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    problem = max(problems, key=lambda each: len(each["loc"]))
    param = ".".join(str(part) for part in problem["loc"]) or None
    message = problem["msg"].removeprefix("Value error, ")
    return Misfit(f"invalid value for '{param}': {message}" if param else f"invalid input: {message}", param)
