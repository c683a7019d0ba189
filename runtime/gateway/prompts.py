"""From messages or text to token ids, with the tokenizer and chat template that were published with the weights."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from stoker.coldstart.failures import ManifestInvalid
from stoker.coldstart.headers import read_or_describe
from stoker.coldstart.manifest import read_documents
from stoker.coldstart.store import open_store
from stoker.runtime.architecture import CONFIG, TEXT_LIMITS, decoder_family, encoder_family
from stoker.runtime.gateway.chat_template import (
    ChatTemplate,
    Message,
    TemplateRefused,
    named_tokens,
    template_source,
)
from stoker.runtime.gateway.tool_calls import ToolStyle, tool_style
from stoker.runtime.spec import FunctionSpec, Kind

THREADS = 4
KEPT_MODELS = 32
DOCUMENTS = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    TEXT_LIMITS,
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What admission needs to know about a model; `defaults` are generation_config.json's sampling parameters, and
    `dimension` is that of an encoder's vectors."""

    revision: str
    context: int
    vocabulary: int
    stop_ids: tuple[int, ...]
    defaults: Mapping[str, float]
    dimension: int = 0


class PromptEncoder:
    """Immutable and thread-safe. Token ids equal those of transformers for the same files."""

    def __init__(self, documents: Mapping[str, bytes], revision: str) -> None:
        """Raises ManifestInvalid when a document that every model has is missing or can't be read."""
        config = document(documents, CONFIG)
        generation = document(documents, "generation_config.json", required=False)
        settings = document(documents, "tokenizer_config.json", required=False)
        special = document(documents, "special_tokens_map.json", required=False)
        self._tokenizer = read_tokenizer(documents)
        tokens = named_tokens(settings, special)
        facts = model_facts(revision, config, generation, self._tokenizer.token_to_id(tokens.get("eos_token", "")))
        longest = document(documents, TEXT_LIMITS, required=False).get("max_seq_length") or facts.context
        self.facts = replace(facts, context=min(longest, facts.context))
        source = template_source(settings, documents.get("chat_template.jinja"))
        self._template = ChatTemplate(source, tokens) if source else None
        self.tool_style: ToolStyle = tool_style(source or "")

    def chat(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Raises TemplateRefused when the model has no template or the template rejects the conversation."""
        if self._template is None:
            raise TemplateRefused("this model has no chat template; use /v1/completions")
        return self._tokenizer.encode(self._template.render(messages, tools), add_special_tokens=False).ids

    def text(self, prompt: str) -> list[int]:
        """Whether a BOS token comes first is tokenizer.json's decision, as in transformers."""
        return self._tokenizer.encode(prompt, add_special_tokens=True).ids

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Several at once, on all cores."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=True)]


def read_tokenizer(documents: Mapping[str, bytes]) -> Tokenizer:
    if "tokenizer.json" not in documents:
        raise ManifestInvalid("tokenizer.json", None, "the published model has no such document")
    try:
        tokenizer = Tokenizer.from_buffer(documents["tokenizer.json"])
    except Exception as error:  # the library raises bare Exceptions
        raise ManifestInvalid("tokenizer.json", None, f"not a tokenizer ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def document(documents: Mapping[str, bytes], name: str, *, required: bool = True) -> dict[str, Any]:
    if name not in documents and not required:
        return {}
    try:
        value = json.loads(documents[name])
        return value if isinstance(value, dict) else {}
    except KeyError:
        raise ManifestInvalid(name, None, "the published model has no such document") from None
    except ValueError as error:
        raise ManifestInvalid(name, None, f"not JSON ({error})") from error


def model_facts(
    revision: str, config: Mapping[str, Any], generation: Mapping[str, Any], eos_id: int | None
) -> ModelFacts:
    for name in ("max_position_embeddings", "vocab_size"):
        if not isinstance(config.get(name), int):
            raise ManifestInvalid("config.json", None, f"{name} is missing or not a number")
    stop_ids = {*id_list(config.get("eos_token_id")), *id_list(generation.get("eos_token_id")), *id_list(eos_id)}
    sampling = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return ModelFacts(
        revision=revision,
        context=config["max_position_embeddings"],
        vocabulary=config["vocab_size"],
        stop_ids=tuple(sorted(stop_ids)),
        defaults={name: generation[name] for name in sampling if generation.get(name) is not None},
        dimension=config.get("hidden_size") or 0,
    )


def id_list(value: int | Sequence[int] | None) -> Sequence[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value


def load_encoder(weights: str, kind: Kind = "llm") -> PromptEncoder:
    """Blocking; raises ColdStartError, also for a model that functions of this kind can't serve, or ValueError (a bad
    URL)."""
    store = open_store(weights)
    manifest = read_or_describe(store)
    documents = read_documents(store, manifest, DOCUMENTS)
    check_family = encoder_family if kind == "embed" else decoder_family
    check_family(document(documents, CONFIG))
    return PromptEncoder(documents, manifest.revision)


class PromptEncoders:
    """Encoders of the models asked for most recently, one load at a time per deployed version, all work in threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="prompts")
        self._loads: OrderedDict[tuple[str, str], asyncio.Future[PromptEncoder]] = OrderedDict()

    async def get(self, spec: FunctionSpec) -> PromptEncoder:
        key = (spec.weights, spec.version)
        if key not in self._loads or failed(self._loads[key]):
            self._loads[key] = self.load(spec.weights, spec.kind)
        self._loads.move_to_end(key)
        while len(self._loads) > KEPT_MODELS:
            self._loads.popitem(last=False)
        return await asyncio.shield(self._loads[key])

    def keep(self, spec: FunctionSpec, encoder: PromptEncoder) -> None:
        """Spares the first request of a new deployment the load."""
        loaded: asyncio.Future[PromptEncoder] = asyncio.get_running_loop().create_future()
        loaded.set_result(encoder)
        self._loads[spec.weights, spec.version] = loaded

    def load(self, weights: str, kind: Kind) -> asyncio.Future[PromptEncoder]:
        load = asyncio.get_running_loop().run_in_executor(self._pool, load_encoder, weights, kind)
        load.add_done_callback(failed)
        return load

    async def chat(
        self, encoder: PromptEncoder, messages: Sequence[Message], tools: Sequence[Message] = ()
    ) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, encoder.chat, messages, tools)

    async def text(self, encoder: PromptEncoder, prompt: str) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, encoder.text, prompt)

    async def texts(self, encoder: PromptEncoder, texts: Sequence[str]) -> list[list[int]]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, encoder.texts, texts)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def failed(load: asyncio.Future[PromptEncoder]) -> bool:
    return load.done() and (load.cancelled() or load.exception() is not None)
