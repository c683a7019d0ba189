"""A model's chat template, rendered in a sandbox with what Hugging Face templates expect to find there."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stoker.runtime.gateway.time_limit import WATCH, TimeUp

Message = Mapping[str, Any]

RENDER_S = 2.0
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateRefused(ValueError):
    """The template can't be compiled, or rejects this conversation; the message is the template's own."""


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; when serving it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return caller()


class ChatTemplate:
    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        try:
            with WATCH.limited(RENDER_S):
                self._template = environment().from_string(source)
        except TimeUp:
            raise TemplateRefused(f"the model's chat template took longer than {RENDER_S:g} s to compile") from None
        except Exception as error:  # such as RecursionError: what a template can do has no list
            raise TemplateRefused(f"the model's chat template is broken: {said(error)}") from error
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """The prompt up to and including the header of the assistant's next turn."""
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        known = {**self._tokens, "documents": None, "add_generation_prompt": True}
        try:
            with WATCH.limited(RENDER_S):
                return self._template.render(messages=plain, tools=list(tools) or None, **known)
        except TimeUp:
            raise TemplateRefused(f"it took longer than {RENDER_S:g} s to render") from None
        except Exception as error:
            raise TemplateRefused(said(error)) from error


def said(error: Exception) -> str:
    """A template's own words as they are; of Python's errors also the kind."""
    if isinstance(error, TemplateError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def environment() -> ImmutableSandboxedEnvironment:
    """Nothing is calculated while it compiles, not even what is constant: there is no optimizer, and a `finalize` that
    needs the conversation."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, loopcontrols],
        optimized=False,
        finalize=as_it_is,
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    return made


@pass_context
def as_it_is(_: Context, value: Any) -> Any:
    return value


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape HTML characters, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def named_tokens(tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like; either file may hold them, as text or as {"content": text}."""
    found = {name: tokenizer_config.get(name) or special_tokens.get(name) for name in NAMED_TOKENS}
    return {name: value["content"] if isinstance(value, dict) else str(value) for name, value in found.items() if value}


def template_source(tokenizer_config: Mapping[str, Any], template_file: bytes | None) -> str | None:
    """`chat_template.jinja` wins; in tokenizer_config.json it is a string or a list of named ones with a "default".
    Raises TemplateRefused for what is neither."""
    try:
        if template_file is not None:
            return template_file.decode()
        found = tokenizer_config.get("chat_template")
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}.get("default")
    except (TypeError, KeyError, UnicodeDecodeError) as error:
        raise TemplateRefused(f"the model's chat template can't be read: {said(error)}") from error
    if found is not None and not isinstance(found, str):
        raise TemplateRefused(f"the model's chat template is a {type(found).__name__}, not a text")
    return found
