"""From messages or text to token ids, with the tokenizer and chat template that were published with the weights."""

import asyncio
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from tokenizers import Tokenizer

from stoker.coldstart.failures import ManifestInvalid, UnsupportedModel
from stoker.coldstart.headers import read_or_describe
from stoker.coldstart.manifest import read_documents
from stoker.coldstart.repository import ADAPTER_CONFIG
from stoker.coldstart.store import open_store
from stoker.runtime.architecture import CONFIG, TEXT_LIMITS, decoder_family, encoder_family
from stoker.runtime.gateway.chat_template import (
    ChatTemplate,
    Message,
    TemplateRefused,
    named_tokens,
    template_source,
)
from stoker.runtime.gateway.lanes import Lanes
from stoker.runtime.gateway.template_process import IsolatedTemplate
from stoker.runtime.gateway.text_bound import longest_token
from stoker.runtime.gateway.tool_calls import ToolStyle, tool_style
from stoker.runtime.spec import FunctionSpec, Kind, owner_of

Answer = TypeVar("Answer")
Key = tuple[str, str, str]

THREADS = 32
THREADS_PER_TENANT = 2

# A text is tokenised in the thread that asked, not in a pool of the library's, where it would wait behind others'.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
KEPT_MODELS = 32
TOKENS_DIGITS = 16
DOCUMENTS = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    TEXT_LIMITS,
)


class TextTooLong(ValueError):
    """The text can't fit: even in the longest tokens it would be more than the context holds."""

    def __init__(self, characters: int, context: int) -> None:
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, the text has {characters} characters, "
            "which can't be so few tokens. Please shorten it."
        )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What admission needs to know about a model; `defaults` are generation_config.json's sampling parameters, and
    `dimension` is that of an encoder's vectors. `tokens` names what its token ids mean."""

    revision: str
    context: int
    vocabulary: int
    stop_ids: tuple[int, ...]
    defaults: Mapping[str, float]
    dimension: int = 0
    tokens: str = ""


class PromptEncoder:
    """Immutable and thread-safe. Token ids equal those of transformers for the same files. `isolated`: the model is a
    tenant's, whose chat template runs in a process of its own.

    With a `context`, its methods raise TextTooLong for a text that can't fit into so many tokens, untokenised."""

    def __init__(self, documents: Mapping[str, bytes], revision: str, *, isolated: bool = False) -> None:
        """Raises ManifestInvalid when a document that every model has is missing or can't be read, TemplateRefused for
        a chat template that can't be compiled."""
        config = document(documents, CONFIG)
        generation = document(documents, "generation_config.json", required=False)
        settings = document(documents, "tokenizer_config.json", required=False)
        special = document(documents, "special_tokens_map.json", required=False)
        self._tokenizer = read_tokenizer(documents)
        tokens = named_tokens(settings, special)
        facts = model_facts(revision, config, generation, self._tokenizer.token_to_id(tokens.get("eos_token", "")))
        longest = document(documents, TEXT_LIMITS, required=False).get("max_seq_length") or facts.context
        tokens_name = hashlib.sha256(documents["tokenizer.json"]).hexdigest()[:TOKENS_DIGITS]
        self.facts = replace(facts, context=min(longest, facts.context), tokens=tokens_name)
        source = template_source(settings, documents.get("chat_template.jinja"))
        self._longest_token = longest_token(documents["tokenizer.json"])
        template = IsolatedTemplate if isolated else ChatTemplate
        self._template = template(source, tokens) if source else None
        self.tool_style: ToolStyle = tool_style(source or "")

    def chat(self, messages: Sequence[Message], tools: Sequence[Message] = (), context: int | None = None) -> list[int]:
        """Raises TemplateRefused when the model has no template or the template rejects the conversation."""
        if self._template is None:
            raise TemplateRefused("this model has no chat template; use /v1/completions")
        prompt = self._template.render(messages, tools)
        self._check(prompt, context)
        return self._ids([prompt], special=False)[0]

    def text(self, prompt: str, context: int | None = None) -> list[int]:
        """Whether a BOS token comes first is tokenizer.json's decision, as in transformers."""
        return self.texts([prompt], context)[0]

    def texts(self, texts: Sequence[str], context: int | None = None) -> list[list[int]]:
        for text in texts:
            self._check(text, context)
        return self._ids(texts, special=True)

    def _ids(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """The library's `encode`, unlike this, would let no other thread of the process run meanwhile."""
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)]

    def _check(self, text: str, context: int | None) -> None:
        if context and self._longest_token and len(text) > context * self._longest_token:
            raise TextTooLong(len(text), context)


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


def load_encoder(weights: str, kind: Kind = "llm", *, isolated: bool = False) -> PromptEncoder:
    """Blocking; raises ColdStartError, also for a model that functions of this kind can't serve, or ValueError (a bad
    URL or chat template)."""
    store = open_store(weights)
    manifest = read_or_describe(store)
    if ADAPTER_CONFIG in manifest.documents and CONFIG not in manifest.documents:
        raise UnsupportedModel(store.url, None, "this is a LoRA adapter, which belongs into its model's adapters=")
    documents = read_documents(store, manifest, DOCUMENTS)
    check_family = encoder_family if kind == "embed" else decoder_family
    check_family(document(documents, CONFIG))
    return PromptEncoder(documents, manifest.revision, isolated=isolated)


class PromptEncoders:
    """Encoders of the models asked for most recently, one load at a time per deployed version. All work is in threads,
    of which one tenant has only a few, so that nobody waits behind another's long prompts."""

    def __init__(self) -> None:
        self._lanes = Lanes(THREADS, THREADS_PER_TENANT, "prompts")
        self._loads: OrderedDict[Key, asyncio.Future[PromptEncoder]] = OrderedDict()

    async def get(self, spec: FunctionSpec) -> PromptEncoder:
        key = key_of(spec)
        if key not in self._loads or failed(self._loads[key]):
            self._loads[key] = self.load(spec)
        self._loads.move_to_end(key)
        while len(self._loads) > KEPT_MODELS:
            self._loads.popitem(last=False)
        return await asyncio.shield(self._loads[key])

    def keep(self, spec: FunctionSpec, encoder: PromptEncoder) -> None:
        """Spares the first request of a new deployment the load."""
        loaded: asyncio.Future[PromptEncoder] = asyncio.get_running_loop().create_future()
        loaded.set_result(encoder)
        self._loads[key_of(spec)] = loaded

    def load(self, spec: FunctionSpec) -> asyncio.Future[PromptEncoder]:
        owner = owner_of(spec.name)
        work = partial(load_encoder, spec.weights, spec.kind, isolated=bool(owner))
        load = asyncio.ensure_future(self._lanes.run(f"loads of {owner}", work))
        load.add_done_callback(failed)
        return load

    async def run(self, tenant: str, work: Callable[..., Answer], *arguments: Any) -> Answer:
        """Work with an encoder, such as its `chat`."""
        return await self._lanes.run(tenant, work, *arguments)

    def close(self) -> None:
        self._lanes.close()


def key_of(spec: FunctionSpec) -> Key:
    return owner_of(spec.name), spec.weights, spec.version


def failed(load: asyncio.Future[PromptEncoder]) -> bool:
    return load.done() and (load.cancelled() or load.exception() is not None)
