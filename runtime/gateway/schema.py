"""Bodies of requests (validated) and of answers (typed), in OpenAI's shapes; /openapi.json is made from them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator, model_validator
from typing_extensions import TypedDict

from stoker.runtime.gateway.errors import bad_request, invalid_fields

INT64 = 1 << 63
STOP_LIMIT = 4
BIAS_LIMIT = 1024
CHOICES_LIMIT = 32
TOP_LOGPROBS_LIMIT = 20

NonEmpty = Annotated[str, Field(min_length=1)]
BIASES = Field(max_length=BIAS_LIMIT)


class Body(BaseModel):
    """Types are strict ("1" is no number); fields that nobody here knows are ignored, as OpenAI clients send many."""

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


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None

    def as_template_input(self) -> dict[str, str]:
        """Parts are joined by line breaks; `developer` is OpenAI's newer name of `system`."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content or []]
        return {"role": "system" if self.role == "developer" else self.role, "content": "\n".join(parts)}


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
    stop: NonEmpty | Annotated[list[NonEmpty], Field(max_length=STOP_LIMIT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
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
    "tools": ([],),
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
    return request


def completion_request(fields: Mapping[str, Any]) -> CompletionRequest:
    request = validated(CompletionRequest, fields, COMPLETION_NEUTRAL)
    if request.best_of not in (None, request.choices):
        message = "'best_of' other than 'n' is not supported: ask for 'n' answers with 'logprobs' and choose."
        raise bad_request(message, param="best_of", code="unsupported_parameter")
    return request


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(TypedDict):
    """`bytes` are the token's own; `token` shows what of them is no whole character as U+FFFD."""

    token: str
    logprob: float
    bytes: list[int]


class LogprobEntry(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[LogprobEntry]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatCompletionChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]


class ModelObject(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelObject]
