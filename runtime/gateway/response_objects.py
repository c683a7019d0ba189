"""Bodies of answers of /v1/responses; /openapi.json is made from them."""

from typing import Any, Literal

from typing_extensions import TypedDict

from stoker.runtime.gateway.answers import LogprobEntry

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[LogprobEntry]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseObject(TypedDict):
    """What was asked for stands in it as it was sent; `usage` is null until the end."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    background: Literal[False]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: Literal[True]
    previous_response_id: str | None
    reasoning: dict[str, None]
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(TypedDict):
    """OpenAI's events; what else they have depends on their type."""

    type: str
    sequence_number: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
