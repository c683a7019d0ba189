"""Embedding requests and answers in OpenAI's shapes, and the job between them. Pure."""

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from typing_extensions import TypedDict

from stoker.runtime.gateway.errors import bad_request, invalid_fields
from stoker.runtime.gateway.field_names import refuse_misspelt
from stoker.runtime.gateway.generation import OVERFLOW
from stoker.runtime.gateway.prompts import ModelFacts
from stoker.runtime.gateway.schema import Body, NonEmpty

MAX_TEXTS = 2048
FLOAT_BYTES = 4

Ids = list[int]
Texts = Annotated[list[NonEmpty], Field(min_length=1, max_length=MAX_TEXTS)]
Tokens = Annotated[Ids, Field(min_length=1)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, max_length=MAX_TEXTS)]


class EmbeddingRequest(Body):
    """One text or many, each as a string or as token ids."""

    model: NonEmpty
    input: NonEmpty | Texts | Tokens | TokenLists
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def strings(self) -> list[str]:
        """Empty when the texts are given as token ids."""
        given = [self.input] if isinstance(self.input, str) else self.input
        return [text for text in given if isinstance(text, str)]

    @property
    def token_lists(self) -> list[Ids]:
        if isinstance(self.input, str) or isinstance(self.input[0], str):
            return []
        return [self.input] if isinstance(self.input[0], int) else self.input  # type: ignore[list-item,return-value]


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(TypedDict):
    """A unit vector; in base64: of its little-endian float32 values."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


def embedding_request(fields: Mapping[str, Any]) -> EmbeddingRequest:
    """Raises ApiError 400 that names the field."""
    refuse_misspelt(EmbeddingRequest, fields)
    try:
        return EmbeddingRequest.model_validate(fields)
    except ValidationError as error:
        raise invalid_fields(error) from None


def embedding_payload(
    request: EmbeddingRequest, texts: Sequence[Ids], facts: ModelFacts, context: int
) -> dict[str, Any]:
    """Raises ApiError 400 for what the model can't do; nothing is cut silently."""
    if request.dimensions not in (None, facts.dimension):
        message = f"This model's embeddings have {facts.dimension} dimensions; other 'dimensions' are not supported."
        raise bad_request(message, param="dimensions", code="unsupported_parameter")
    for place, ids in enumerate(texts):
        if min(ids) < 0 or max(ids) >= facts.vocabulary:
            raise bad_request(f"Token ids must be from 0 to {facts.vocabulary - 1}.", param="input")
        if len(ids) > context:
            message = (
                f"This model's maximum context length is {context} tokens, but input {place} has {len(ids)} tokens."
            )
            raise bad_request(message, param="input", code=OVERFLOW)
    return {"kind": "embed", "texts": list(texts)}


def embedding_list(request: EmbeddingRequest, result: Mapping[str, Any]) -> EmbeddingList:
    size = result["dimension"] * FLOAT_BYTES
    vectors = memoryview(result["vectors"])
    tokens = int(result["usage"]["prompt_tokens"])
    data: list[EmbeddingObject] = [
        {"object": "embedding", "index": index, "embedding": shown(vectors[start : start + size], request)}
        for index, start in enumerate(range(0, len(vectors), size))
    ]
    usage: EmbeddingUsage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": request.model, "usage": usage}


def shown(vector: memoryview, request: EmbeddingRequest) -> list[float] | str:
    return base64.b64encode(vector).decode() if request.encoding_format == "base64" else list(vector.cast("f"))
