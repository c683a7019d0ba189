"""What a request says about the form of its answer, as a grammar that compiles."""

import asyncio
from collections.abc import Callable, Sequence

from stoker.runtime.gateway.errors import ApiError, bad_request
from stoker.runtime.gateway.schema import ChatRequest, Sampling, StructuredOutputs
from stoker.runtime.gateway.tool_calls import forced_grammar
from stoker.runtime.grammar import (
    ANY_OBJECT,
    GrammarRefused,
    check_ends,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
    validate,
)

PATIENCE_S = 5.0

Make = Callable[[], str]


async def answer_grammar(request: Sampling, ends: Sequence[int]) -> str:
    """Empty where any answer will do. Raises ApiError 400 for one that is broken, too large or can't be satisfied, or a
    model without end-of-sequence tokens (`ends`)."""
    found = asked(request)
    if found is None:
        return ""
    param, make = found
    try:
        check_ends(ends)
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.to_thread(lambda: validate(make()))
    except GrammarRefused as refusal:
        raise refused(param, str(refusal)) from None
    except TimeoutError:
        raise refused(param, f"it took longer than {PATIENCE_S:g} s to compile") from None


def refused(param: str, reason: str) -> ApiError:
    return bad_request(f"The answer can't be held to this '{param}': {reason}.", param=param, code="invalid_grammar")


def asked(request: Sampling) -> tuple[str, Make] | None:
    """The field that says it, and what makes a grammar of it."""
    wanted, form = request.structured_outputs, request.response_format
    if isinstance(request, ChatRequest) and request.forced_functions:
        style, functions = request.tool_style, request.forced_functions
        return "tools", lambda: lark_grammar(forced_grammar(style, functions))
    if form and form.json_schema and form.type == "json_schema":
        schema = form.json_schema.schema_
        return "response_format", lambda: json_grammar(schema)
    if form and form.type == "json_object":
        return "response_format", lambda: json_grammar(ANY_OBJECT)
    return ("structured_outputs", lambda: of_extension(wanted)) if wanted else None


def of_extension(wanted: StructuredOutputs) -> str:
    if wanted.json_ is not None:
        return json_grammar(wanted.json_)
    if wanted.regex is not None:
        return regex_grammar(wanted.regex)
    if wanted.choice is not None:
        return choice_grammar(wanted.choice)
    return lark_grammar(wanted.grammar or "")
