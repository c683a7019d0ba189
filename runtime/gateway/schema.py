"""Bodies of requests in OpenAI's shapes, validated; /openapi.json is made from them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from stoker.runtime.gateway.errors import bad_request, invalid_fields
from stoker.runtime.gateway.field_names import refuse_misspelt
from stoker.runtime.gateway.tool_calls import ToolStyle

INT64 = 1 << 63
STOP_LIMIT, STOP_LENGTH = 4, 1000
BIAS_LIMIT = 1024
CHOICES_LIMIT = 32
TOOLS_LIMIT = 128
TOP_LOGPROBS_LIMIT = 20

NonEmpty = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]
BIASES = Field(max_length=BIAS_LIMIT)


class Body(BaseModel):
    """Types are strict ("1" is no number); of fields that nobody here knows, `field_names` says what becomes."""

    model_config = ConfigDict(strict=True, extra="ignore")


class TextPart(Body):
    type: str
    text: str = ""

    @field_validator("type")
    @classmethod
    def only_text(cls, value: str) -> str:
        if value != "text":
            raise ValueError(f"content of type '{value}' is not supported, only 'text' is")
        return value


class FunctionCall(Body):
    name: NonEmpty
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def as_template_input(self) -> dict[str, Any]:
        """Templates print the arguments themselves, so they get them as a value where that is possible."""
        try:
            arguments = from_json(self.function.arguments)
        except ValueError:
            arguments = self.function.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def as_template_input(self) -> dict[str, Any]:
        """Parts are joined by line breaks; `developer` is OpenAI's newer name of `system`."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content or []]
        said: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": "\n".join(parts),
        }
        if self.tool_calls:
            said["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
        return said | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})


class FunctionDefinition(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class ToolName(Body):
    name: NonEmpty


class ToolChoice(Body):
    type: Literal["function"]
    function: ToolName


class StreamOptions(Body):
    include_usage: bool = False


class JsonSchema(Body):
    """`strict` or not, the answer is held to the schema."""

    name: str = "answer"
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def schema_where_one_is_due(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type 'json_schema' needs a 'json_schema'")
        return self


class StructuredOutputs(Body):
    """vLLM's extension: exactly one of these."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: NonEmpty | None = None
    grammar: NonEmpty | None = None
    choice: Annotated[list[NonEmpty], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def exactly_one(self) -> Self:
        if sum(value is not None for value in (self.json_, self.regex, self.grammar, self.choice)) != 1:
            raise ValueError("exactly one of 'json', 'regex', 'grammar' and 'choice' is needed")
        return self


class Sampling(Body):
    """What chat and plain completions have in common. `top_k`, `min_p`, `repetition_penalty`, `structured_outputs` and
    the last two are vLLM's extensions."""

    model: NonEmpty
    max_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES_LIMIT)] | None = None
    presence_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[FiniteFloat, Field(ge=-100, le=100)]], BIASES] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=STOP_LIMIT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False

    @model_validator(mode="after")
    def one_form_of_answer(self) -> Self:
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            raise ValueError("'structured_outputs' and 'response_format' exclude each other")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def tool_style(self) -> ToolStyle:
        """How tool calls stand in the answer's text; "" when none are looked for."""
        return ""

    @property
    def logprobs_count(self) -> int | None:
        """How many of the likeliest tokens are named beside each token's own log-probability; None: no such thing."""
        return None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Sampling):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_LIMIT)] | None = None
    tools: Annotated[list[Tool], Field(max_length=TOOLS_LIMIT)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    _tool_style: ToolStyle = PrivateAttr("")

    @property
    def tool_style(self) -> ToolStyle:
        """The model's, once `use_tools` has told it."""
        return self._tool_style

    def use_tools(self, style: ToolStyle) -> None:
        self._tool_style = style

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """What the template shows the model."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []]

    @property
    def forced_functions(self) -> list[dict[str, Any]]:
        """The functions of which one has to be called; empty when the model may also just talk."""
        functions = [tool["function"] for tool in self.offered_tools]
        if isinstance(self.tool_choice, ToolChoice):
            return [function for function in functions if function["name"] == self.tool_choice.function.name]
        return functions if self.tool_choice == "required" else []

    @property
    def logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Sampling):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_LIMIT)] | None = None
    best_of: int | None = None

    @property
    def logprobs_count(self) -> int | None:
        return self.logprobs

    @property
    def single_prompt(self) -> str | list[int]:
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1 and not isinstance(self.prompt[0], int):
            return self.prompt[0]
        if self.prompt and not isinstance(self.prompt[0], int):
            raise bad_request(
                "Several prompts in one request are not supported; send one request each.", param="prompt"
            )
        return self.prompt  # type: ignore[return-value]


CHAT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "modalities": (["text"],),
    "audio": (),
}
COMPLETION_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
}


def refuse_unsupported(fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """These fields would change the answer, so only null and the values that ask for nothing are let through."""
    for name, values in neutral.items():
        given = fields.get(name)
        if given is None or any(same(given, value) for value in values):
            continue
        hint = " or ".join(repr(value) for value in values)
        only = f"; leave it out{f' or send {hint}' if hint else ''}"
        raise bad_request(f"'{name}' is not supported{only}.", param=name, code="unsupported_parameter")


def same(given: Any, value: Any) -> bool:
    return given == value and isinstance(given, bool) == isinstance(value, bool)


Request = TypeVar("Request", bound=Sampling)


def validated(kind: type[Request], fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> Request:
    """Raises ApiError 400 that names the field."""
    refuse_unsupported(fields, neutral)
    refuse_misspelt(kind, fields)
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise invalid_fields(error) from None
    if request.stream_options is not None and not request.stream:
        raise bad_request("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    return request


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    request = validated(ChatRequest, fields, CHAT_NEUTRAL)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
    check_tool_choice(request)
    return request


def check_tool_choice(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools or []]
    if len(set(names)) < len(names):
        raise bad_request("Two tools have the same name.", param="tools")
    if request.tool_choice not in (None, "none", "auto") and not request.forced_functions:
        raise bad_request("'tool_choice' names a function that is not among the 'tools'.", param="tool_choice")
    if request.forced_functions and (request.response_format or request.structured_outputs):
        message = "A forced tool call and another form of answer exclude each other."
        raise bad_request(message, param="tool_choice")


def completion_request(fields: Mapping[str, Any]) -> CompletionRequest:
    request = validated(CompletionRequest, fields, COMPLETION_NEUTRAL)
    if request.best_of not in (None, request.choices):
        message = "'best_of' other than 'n' is not supported: ask for 'n' answers with 'logprobs' and choose."
        raise bad_request(message, param="best_of", code="unsupported_parameter")
    return request
