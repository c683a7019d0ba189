"""Bodies of requests (validated) and of answers (typed), in OpenAI's shapes; /openapi.json is made from them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator
from typing_extensions import TypedDict

from stoker.runtime.gateway.errors import bad_request, invalid_fields

INT64 = 1 << 63
STOP_LIMIT = 4

NonEmpty = Annotated[str, Field(min_length=1)]


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


class Sampling(Body):
    """What chat and plain completions have in common. `top_k`, `min_p` and the last two are vLLM's extensions."""

    model: NonEmpty
    max_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], Field(max_length=STOP_LIMIT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Sampling):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Sampling):
    prompt: str | list[int] | list[str] | list[list[int]]

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


COMMON_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
}
CHAT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **COMMON_NEUTRAL,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
}
COMPLETION_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **COMMON_NEUTRAL,
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
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
    return validated(ChatRequest, fields, CHAT_NEUTRAL)


def completion_request(fields: Mapping[str, Any]) -> CompletionRequest:
    return validated(CompletionRequest, fields, COMPLETION_NEUTRAL)


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: None
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
    logprobs: None
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
    logprobs: None
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
