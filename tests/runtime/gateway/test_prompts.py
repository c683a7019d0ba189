"""Prompts must be token for token those of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stoker.coldstart.failures import ManifestInvalid, ObjectAltered, ObjectMissing, UnsupportedModel
from stoker.coldstart.manifest import read_manifest
from stoker.coldstart.store import open_store
from stoker.runtime.gateway.chat_template import ChatTemplate, TemplateRefused, named_tokens, template_source
from stoker.runtime.gateway.prompts import (
    PromptEncoder,
    PromptEncoders,
    load_encoder,
    model_facts,
    read_documents,
)
from stoker.runtime.publishing import push_model
from stoker.runtime.spec import FunctionSpec
from tests.runtime.adapters.folders import random_folder

CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "2+2?"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "Sing.\n\nThen  stop. "},
    ],
    [{"role": "user", "content": "Grüße, 世界! 👩‍👩‍👧‍👦 <|im_start|>system\n<html>&amp;"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    [{"role": "user", "content": "long " * 700}],
]
TEXTS = ["Once upon a time", " leading space", "", "tabs\tand\nlines\n", "数字 123 4567", "<|im_end|> inside"]


@pytest.fixture(scope="module")
def encoder(smollm2_store_url: str) -> PromptEncoder:
    return load_encoder(smollm2_store_url)


@pytest.fixture(scope="module")
def published(smollm2_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.mark.real_model
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_chats_are_encoded_as_by_transformers(encoder: PromptEncoder, published: Any, conversation: Any) -> None:
    expected = published.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert encoder.chat(conversation) == expected


@pytest.mark.real_model
@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_encoded_as_by_transformers(encoder: PromptEncoder, published: Any, text: str) -> None:
    assert encoder.text(text) == published(text)["input_ids"]


@pytest.mark.real_model
@pytest.mark.parametrize("post_processor", [None, "bos", "bos and eos"])
def test_marks_around_plain_text_are_those_of_the_tokenizer_file(
    smollm2_dir: Path, tmp_path: Path, post_processor: str | None
) -> None:
    from transformers import AutoTokenizer

    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    for name in names:
        shutil.copy(smollm2_dir / name, tmp_path / name)
    change(tmp_path / "tokenizer.json", post_processor=template(post_processor))
    change(tmp_path / "tokenizer_config.json", add_bos_token=True)
    encoder = PromptEncoder({name: (tmp_path / name).read_bytes() for name in names}, "r")
    expected = AutoTokenizer.from_pretrained(tmp_path)("Hello there")["input_ids"]
    assert encoder.text("Hello there") == expected
    assert len(expected) == 2 + len((post_processor or "").split(" and ")) - (post_processor is None)


def template(marks: str | None) -> dict[str, Any] | None:
    if marks is None:
        return None
    names = {"bos": ("<|im_start|>", 1), "eos": ("<|im_end|>", 2)}
    used = {mark: names[mark] for mark in marks.split(" and ")}
    pieces = {mark: {"SpecialToken": {"id": token, "type_id": 0}} for mark, (token, _) in used.items()}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {token: {"id": token, "ids": [id], "tokens": [token]} for token, id in used.values()}
    single = [pieces["bos"], text, *([pieces["eos"]] if "eos" in pieces else [])]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.real_model
def test_facts_of_the_model(encoder: PromptEncoder) -> None:
    facts = encoder.facts
    assert (facts.vocabulary, facts.stop_ids) == (49152, (2,))
    assert facts.context == 8192
    assert len(facts.revision) == 64


@pytest.mark.real_model
def test_a_missing_and_an_altered_document_are_named(smollm2_store_url: str, tmp_path: Path) -> None:
    source = open_store(smollm2_store_url)
    manifest = read_manifest(source)
    target = open_store(tmp_path.as_uri())
    for name in manifest.documents:
        target.write(name, source.read(name))
    assert read_documents(target, manifest)["config.json"] == source.read("config.json")
    target.write("tokenizer.json", b"{}")
    with pytest.raises(ObjectAltered, match="tokenizer.json"):
        read_documents(target, manifest)
    target.delete("tokenizer.json")
    with pytest.raises(ObjectMissing, match="tokenizer.json"):
        read_documents(target, manifest)


@pytest.mark.real_model
async def test_one_load_serves_all_and_a_failed_one_is_tried_again(smollm2_store_url: str, tmp_path: Path) -> None:
    encoders = PromptEncoders()
    try:
        spec = FunctionSpec(name="chat", kind="llm", weights=smollm2_store_url, version="1")
        first, second = await encoders.get(spec), await encoders.get(spec)
        assert first is second
        missing = FunctionSpec(name="late", kind="llm", weights=(tmp_path / "late").as_uri(), version="1")
        with pytest.raises(ObjectMissing):
            await encoders.get(missing)
        shutil.copytree(smollm2_store_url.removeprefix("file://"), tmp_path / "late")
        assert (await encoders.get(missing)).facts == first.facts
    finally:
        encoders.close()


def test_documents_every_model_has_are_required() -> None:
    with pytest.raises(ManifestInvalid, match=r"config\.json"):
        PromptEncoder({"tokenizer.json": b"{}"}, "r")
    with pytest.raises(ManifestInvalid, match="vocab_size"):
        model_facts("r", {"max_position_embeddings": 8}, {}, None)


def test_an_adapter_in_the_place_of_a_model_is_told_where_it_belongs(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    folder = random_folder(tmp_path / "sql", {**sizes, "num_key_value_heads": 1}, seed=1)
    url = (tmp_path / "store").as_uri()
    push_model(folder, url)
    with pytest.raises(UnsupportedModel, match=f"{url}.* LoRA adapter, which belongs into .* adapters="):
        load_encoder(url)


def test_stop_ids_come_from_everywhere_they_are_declared() -> None:
    config = {"max_position_embeddings": 8, "vocab_size": 10, "eos_token_id": 1}
    facts = model_facts("r", config, {"eos_token_id": [2, 3], "temperature": 0.6, "top_p": 0.9}, 4)
    assert facts.stop_ids == (1, 2, 3, 4)
    assert facts.defaults == {"temperature": 0.6, "top_p": 0.9}


def test_named_tokens_may_be_text_or_objects_in_either_file() -> None:
    tokens = named_tokens({"bos_token": {"content": "<s>"}, "pad_token": None}, {"bos_token": "x", "eos_token": "</s>"})
    assert tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_the_template_file_wins_and_lists_have_a_default() -> None:
    listed = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    assert template_source(listed, None) == "d"
    assert template_source(listed, b"file") == "file"
    assert template_source({}, None) is None


def test_templates_get_what_transformers_gives_them() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}{{ strftime_now('%Y') | length }}{{ tools is none }}"
    )
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": None}, {"role": "x", "content": "y"}]
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render(messages)
    assert rendered == '<s>{"role": "user", "content": "<é>"}{"role": "user"}>4True'


def test_a_template_may_refuse_and_cannot_leave_its_sandbox() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render([])
    with pytest.raises(TemplateRefused):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render([])
    with pytest.raises(TemplateRefused):
        ChatTemplate("{{ messages.append(1) }}", {}).render([])
    with pytest.raises(TemplateRefused, match="broken"):
        ChatTemplate("{% for %}", {})
