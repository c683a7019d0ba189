"""Whether an input fits a function's schema, and what to say when it doesn't; and what such a check may cost. Pure."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import msgpack
from jsonschema_rs import Draft202012Validator, RegexOptions, ValidationError, ValidationErrorKind

from stoker.runtime.client.media import ARRAY, BYTES
from stoker.runtime.gateway.formats import FORMATS
from stoker.runtime.requirement import InvalidSpec

MOST_COMPLAINTS = 20
MESSAGE_CHARACTERS = 300
# Stand in for numbers that no JSON has: no integers, and as great as such numbers get.
INFINITE, NOT_A_NUMBER = 2.0**52 - 0.5, 2.0**52 - 1.5
SAID = {str(INFINITE): "Infinity", str(NOT_A_NUMBER): "NaN"}
ENDLESS = 20_000
# Collecting complaints takes up to 20 us for each part of the work; whether there is any, or the first, about 50 ns.
MOST_COMPLAINED_ABOUT = 50_000
DEAR = {"uniqueItems": 10, "multipleOf": 500}
UNBOUNDED = {"$dynamicRef", "$anchor", "$dynamicAnchor", "$id", "unevaluatedProperties", "unevaluatedItems"}
COUNTS = re.compile(r"\d{1,6}")
BYTES_LIKE_A_PART = 50


class Complaint(NamedTuple):
    message: str
    param: str | None


class Endless(Exception):
    """A schema's weight has no end, or none that is easily told."""


def compiled(schema: dict[str, Any]) -> Draft202012Validator:
    """A tenant wrote it: it fetches nothing, and its patterns take linear time. Raises InvalidSpec."""
    try:
        return Draft202012Validator(
            schema,
            retriever=refuse,
            pattern_options=RegexOptions(),
            validate_formats=True,
            formats=dict(FORMATS),
        )
    except (ValidationError, ValueError) as error:
        raise InvalidSpec(f"input_schema is no JSON Schema (2020-12): {str(error).splitlines()[0]}") from None


def refuse(url: str) -> Any:
    raise ValueError(f"it refers to {url}; define everything under $defs")


def complaint_about(schema: Mapping[str, Any], fits: Draft202012Validator, value: Any, work: int) -> Complaint | None:
    """None: it fits. `value` is as JSON has it; `work` says whether there is time for the best complaint."""
    if fits.is_valid(value):
        return None
    # The validator takes 1e999 for null.
    value = as_json(value)
    if work > MOST_COMPLAINED_ABOUT:
        try:
            fits.validate(value)
        except ValidationError as first:
            return best_of(schema, value, [first])
        return None
    complaints = list(islice(fits.iter_errors(value), MOST_COMPLAINTS))
    return best_of(schema, value, complaints) if complaints else None


def best_of(schema: Mapping[str, Any], value: Any, complaints: list[ValidationError]) -> Complaint:
    """The most specific complaint: the one that lies deepest."""
    complaint = max(specific(complaints), key=lambda each: len(each.instance_path))
    path = [str(part) for part in complaint.instance_path]
    if isinstance(complaint.kind, ValidationErrorKind.Required):
        path.append(str(complaint.kind.property))
    message = as_sent(complaint.message)
    if len(message) > MESSAGE_CHARACTERS:
        message = f"{message[: MESSAGE_CHARACTERS // 2]} … {message[-MESSAGE_CHARACTERS // 2 :]}"
    param = ".".join(path) or None
    where = f"Invalid value for '{param}': " if param else "Invalid input: "
    return Complaint(f"{where}{message}{advice(schema, value)}.", param)


def parts_in(body: bytes) -> int:
    """At least as many as there are values in a JSON text; long texts count for several."""
    return 1 + sum(map(body.count, (b",", b":", b"[", b"{"))) + len(body) // BYTES_LIKE_A_PART


def weight_of(schema: Mapping[str, Any]) -> int:
    """How much of the schema may be looked at for one part of an input: its size, with everything that it refers to
    written out where it does. ENDLESS when that is too much, or can't be said: a check may then take any time."""
    weight = 0
    try:
        for each in weights(schema, {name: part for name, part in schema.items() if name != "$defs"}, ()):
            weight += each
            if weight >= ENDLESS:
                return ENDLESS
    except (Endless, RecursionError):
        return ENDLESS
    return weight


def weights(root: Mapping[str, Any], part: Any, within: tuple[str, ...]) -> Iterator[int]:
    yield 1
    if isinstance(part, list):
        for each in part:
            yield from weights(root, each, within)
    if not isinstance(part, dict):
        return
    for name, value in part.items():
        yield DEAR.get(name, 1)
        if name in UNBOUNDED:
            raise Endless
        if name == "$ref" and isinstance(value, str):
            if value in within:
                raise Endless
            yield from weights(root, referred(root, value), (*within, value))
            continue
        for pattern in patterns_of(name, value):
            yield len(pattern) * math.prod(max(1, int(count)) for count in COUNTS.findall(pattern))
        yield from weights(root, value, within)


def patterns_of(name: str, value: Any) -> Iterable[str]:
    if name == "pattern" and isinstance(value, str):
        return (value,)
    return value if name == "patternProperties" and isinstance(value, dict) else ()


def referred(root: Mapping[str, Any], pointer: str) -> Any:
    """Raises Endless for what isn't found in this simple way."""
    part: Any = root
    if not pointer.startswith("#/"):
        raise Endless
    for name in pointer[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(part, dict) or name not in part:
            raise Endless
        part = part[name]
    return part


def specific(complaints: Iterable[ValidationError]) -> Iterator[ValidationError]:
    """Of an alternative that doesn't fit, what its branches say."""
    for complaint in complaints:
        branches = getattr(complaint.kind, "context", None)
        if branches:
            yield from specific(each for branch in branches for each in branch)
        else:
            yield complaint


def advice(schema: Mapping[str, Any], value: Any) -> str:
    """For who sends {"n": 1} to a function whose only parameter is the number n, or 1 to one that takes fields."""
    name, fields = schema.get("title"), schema.get("properties")
    if isinstance(fields, dict) and not isinstance(value, dict):
        required = schema.get("required") or ()
        names = (field if field in required else f"{field} (optional)" for field in fields)
        return f" (it takes an object with the fields {', '.join(names)})"
    if fields is not None or not isinstance(value, dict) or value.keys() != {name}:
        return ""
    return f" (the only parameter '{name}' gets the whole body: send {as_sent(json.dumps(value[name]))[:100]})"


def as_json(value: Any) -> Any:
    """How JSON would say it, without the contents of bytes and arrays, and with a number for one that isn't finite."""
    if isinstance(value, dict):
        return {name: as_json(part) for name, part in value.items()}
    if isinstance(value, msgpack.ExtType):
        return {ARRAY: None}
    if isinstance(value, list):
        return [as_json(part) for part in value]
    if isinstance(value, bytes):
        return {BYTES: ""}
    return finite(value) if isinstance(value, float) else value


def finite(number: float) -> float:
    if math.isinf(number):
        return math.copysign(INFINITE, number)
    return NOT_A_NUMBER if math.isnan(number) else number


def as_sent(message: str) -> str:
    for number, said in SAID.items():
        message = message.replace(number, said)
    return message
