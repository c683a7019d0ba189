"""Bodies of /v1/responses, and the chat request that each of them is."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, ValidationError, field_validator, model_validator

from stoker.runtime.gateway.errors import bad_request, invalid_fields
from stoker.runtime.gateway.field_names import refuse_misspelt
from stoker.runtime.gateway.schema import (
    INT64,
    TOOLS_LIMIT,
    TOP_LOGPROBS_LIMIT,
    Body,
    ChatRequest,
    FunctionDefinition,
    NonEmpty,
    ToolName,
    chat_request,
    refuse_unsupported,
)

Item = dict[str, Any]

TEXT_TYPES = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
METADATA_LIMIT = 16
MOST_ID = 256
NOTHING_TO_SAY = ({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None})
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "reasoning": NOTHING_TO_SAY,
    "truncation": ("disabled",),
    "parallel_tool_calls": (True,),
    "max_tool_calls": (),
    "service_tier": ("auto", "default"),
}


class ContentPart(Body):
    type: str
    text: str = ""

    @field_validator("type")
    @classmethod
    def only_text(cls, value: str) -> str:
        if value not in TEXT_TYPES:
            raise ValueError(f"content of type '{value}' is not supported, only 'input_text' and 'output_text' are")
        return value


Content = str | Annotated[list[ContentPart], Field(min_length=1)]
NEEDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class InputItem(Body):
    """A message, a call that the model made, or what came of it."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: NonEmpty | None = None
    name: NonEmpty | None = None
    arguments: str | None = None
    output: Content | None = None

    @model_validator(mode="after")
    def complete(self) -> Self:
        if missing := [name for name in NEEDS[self.type] if getattr(self, name) is None]:
            raise ValueError(f"an item of type '{self.type}' needs '{missing[0]}'")
        return self


class ResponseTool(FunctionDefinition):
    type: Literal["function"]


class ResponseToolChoice(ToolName):
    type: Literal["function"]


class TextFormat(Body):
    """`strict` or not, the answer is held to the schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def schema_where_one_is_due(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("type 'json_schema' needs a 'schema'")
        return self


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=METADATA_LIMIT)
]


class ResponseRequest(Body):
    """`store` (the default) keeps the response and its conversation for `previous_response_id`, for as long as the
    function keeps results."""

    model: NonEmpty
    input: NonEmpty | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=MOST_ID)] | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=TOOLS_LIMIT)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_LIMIT)] | None = None
    metadata: Metadata | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    user: str | None = None

    @property
    def keeps(self) -> bool:
        return self.store is not False

    @property
    def items(self) -> list[Item]:
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.model_dump(exclude_none=True) for item in self.input]


def response_request(fields: Mapping[str, Any]) -> ResponseRequest:
    """Raises ApiError 400 that names the field."""
    refuse_unsupported(fields, NEUTRAL)
    refuse_misspelt(ResponseRequest, fields)
    try:
        request = ResponseRequest.model_validate(fields)
    except ValidationError as error:
        raise invalid_fields(error) from None
    if request.tools and LOGPROBS in (request.include or []):
        message = f"'{LOGPROBS}' is not supported together with 'tools'."
        raise bad_request(message, param="include", code="unsupported_parameter")
    return request


def as_chat(request: ResponseRequest, conversation: Sequence[Item]) -> ChatRequest:
    """The chat request whose answer the response is; `conversation` ends with the request's own items."""
    told = [{"role": "system", "content": request.instructions}] if request.instructions else []
    fields = {
        "model": request.model,
        "messages": [*told, *messages_of(conversation)],
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "response_format": response_format(request.text),
        "tools": [as_chat_tool(tool) for tool in request.tools or []] or None,
        "tool_choice": as_chat_choice(request.tool_choice),
        "stream": request.stream,
    }
    if LOGPROBS in (request.include or []):
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return chat_request(fields)


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """What the model said and the calls that it made then are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if item["type"] == "function_call_output":
            output = text_of(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        elif item["type"] == "message":
            messages.append({"role": item["role"], "content": text_of(item["content"])})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def response_format(text: TextOptions | None) -> dict[str, Any] | None:
    form = text.format if text else None
    if form is None or form.type != "json_schema":
        return {"type": form.type} if form else None
    return {"type": "json_schema", "json_schema": {"name": form.name or "answer", "schema": form.schema_}}


def as_chat_tool(tool: ResponseTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def as_chat_choice(choice: str | ResponseToolChoice | None) -> Any:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, ResponseToolChoice) else choice
