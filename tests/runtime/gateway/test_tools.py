"""Tools through the official client: what the model is shown, what is made of its text, streamed and whole."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.runtime.spec import FunctionSpec

from .conftest import RunningGateway
from .peers import Task, worker

pytestmark = pytest.mark.real_model

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> Answer with <tool_call>.\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}\n"
    "{% endfor %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}]
MESSAGES: Any = [{"role": "user", "content": "How is the weather?"}]
ARGUMENTS = '{"city": "Köln"}'
TEXT = f'I look. <tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
async def model(cluster: Cluster, smollm2_dir: Path, tmp_path: Path) -> AsyncIterator[str]:
    """The demo model's tokenizer with a template that knows tools."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(smollm2_dir / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    spec = FunctionSpec(name="tooled", kind="llm", weights=tmp_path.as_uri(), version=tmp_path.name)
    await cluster.put_function("tooled", spec.to_dict())
    yield "tooled"
    await cluster.delete_function("tooled")


seen: list[Any] = []


async def call_tool(task: Task) -> None:
    seen.append(task.payload)
    for place in range(0, len(TEXT), 5) if task.claim.stream else ():
        await task.emit({"text": TEXT[place : place + 5], "ids": [1]})
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "cached_tokens": 0}
    await task.done({"text": TEXT, "finish_reason": "stop", "usage": usage})


async def whole_and_streamed(client: openai.AsyncOpenAI, model: str) -> tuple[Any, list[Any]]:
    whole = await client.chat.completions.create(model=model, messages=MESSAGES, tools=TOOLS)
    stream = await client.chat.completions.create(model=model, messages=MESSAGES, tools=TOOLS, stream=True)
    return whole.choices[0], [chunk.choices[0] async for chunk in stream]


async def test_a_call_whole_and_streamed(client: openai.AsyncOpenAI, broker: Broker, model: str) -> None:
    seen.clear()
    async with worker(broker, model, call_tool):
        choice, chunks = await whole_and_streamed(client, model)
    assert (choice.message.content, choice.finish_reason) == ("I look. ", "tool_calls")
    [call] = choice.message.tool_calls or []
    assert call.type == "function" and (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I look. "
    assert parts[0].id and parts[0].function and parts[0].function.name == "weather"
    assert len(parts) > 2 and {part.index for part in parts} == {0}
    assert "".join(part.function.arguments or "" for part in parts if part.function) == ARGUMENTS
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]


async def test_a_call_that_the_token_limit_cuts_off(client: openai.AsyncOpenAI, broker: Broker, model: str) -> None:
    text = 'I look. <tool_call>\n{"name": "weather", "arg'

    async def cut(task: Task) -> None:
        if task.claim.stream:
            await task.emit({"text": text, "ids": [1]})
        await task.done({"text": text, "finish_reason": "length", "usage": {"prompt_tokens": 3}})

    async with worker(broker, model, cut):
        choice, chunks = await whole_and_streamed(client, model)
    assert (choice.message.content, choice.finish_reason) == ("I look. ", "length")
    [call] = choice.message.tool_calls or []
    assert call.type == "function" and (call.function.name, call.function.arguments) == ("weather", "")
    [part] = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
    assert part.id and part.function and (part.function.name, part.function.arguments) == ("weather", "")
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I look. "
    assert chunks[-1].finish_reason == "length"


async def test_what_the_model_is_shown(
    client: openai.AsyncOpenAI, broker: Broker, model: str, smollm2_dir: Path
) -> None:
    seen.clear()
    said = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    talk: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
    ]
    async with worker(broker, model, call_tool):
        await client.chat.completions.create(model=model, messages=talk, tools=TOOLS)
        plain = await client.chat.completions.create(model=model, messages=talk, tools=TOOLS, tool_choice="none")
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    shown, without = (tokenizer.decode(payload["prompt_ids"], skip_special_tokens=False) for payload in seen)
    assert json.loads(shown.partition("<tools>")[2].partition("</tools>")[0]) == TOOLS
    assert '[weather {"city": "Köln"}]' in shown and shown.rstrip().endswith("tool: rain")
    assert "<tools>" not in without
    assert (plain.choices[0].message.content, plain.choices[0].finish_reason) == (TEXT, "stop")
    assert "grammar" not in seen[0]["params"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_forced_call_is_held_to_its_grammar(
    client: openai.AsyncOpenAI, broker: Broker, model: str, choice: Any
) -> None:
    seen.clear()
    async with worker(broker, model, call_tool):
        await client.chat.completions.create(model=model, messages=MESSAGES, tools=TOOLS, tool_choice=choice)
    assert '"const": "weather"' in seen[0]["params"]["grammar"].replace("\\", "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools.0.function.name"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ],
)
async def test_tools_that_are_refused(client: openai.AsyncOpenAI, model: str, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=model, messages=MESSAGES, **fields)
    assert caught.value.param == param


async def test_a_model_without_tools_in_its_template_says_so(client: openai.AsyncOpenAI, chat_model: str) -> None:
    message = "has no tool calls .those of Qwen2.5, Qwen3 and Llama 3.x have"
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        await client.chat.completions.create(model=chat_model, messages=MESSAGES, tools=TOOLS)
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
