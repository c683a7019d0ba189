"""What requests may ask of their answers, and embeddings, through the whole path with real models."""

import base64
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest

from stoker.runtime.local import LocalStack

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("e2e")]

QUESTION: Any = [{"role": "user", "content": "Name a colour and a number."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["colour", "number"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "pick", "schema": SCHEMA, "strict": True}}

EMBED = """
import stoker

app = stoker.App("vectors")
minilm = app.embed("minilm", weights={weights!r}, idle_timeout=60)
"""


@pytest.fixture
def client(stack: LocalStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def streamed(client: openai.OpenAI, **options: Any) -> list[Any]:
    """The choices of a streamed answer: text, finish reason, tokens' log-probabilities."""
    made: dict[int, list[Any]] = {}
    for chunk in client.chat.completions.create(model="chat", stream=True, **options):
        for choice in chunk.choices:
            told = made.setdefault(choice.index, ["", None, []])
            told[0] += choice.delta.content or ""
            told[1] = choice.finish_reason or told[1]
            told[2] += (choice.logprobs.content or []) if choice.logprobs else []
    return [made[index] for index in sorted(made)]


def whole(client: openai.OpenAI, **options: Any) -> list[Any]:
    answer = client.chat.completions.create(model="chat", **options)
    return [
        [choice.message.content, choice.finish_reason, (choice.logprobs.content if choice.logprobs else None) or []]
        for choice in answer.choices
    ]


CASES: dict[str, dict[str, Any]] = {
    "n": {"n": 3, "seed": 4, "temperature": 1.0},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "temperature": 0},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 1.0, "seed": 1, "logit_bias": {"260": -100}},
    "json schema": {"response_format": FORMAT, "seed": 2, "logprobs": True},
    "regex": {"extra_body": {"structured_outputs": {"regex": "[A-Z][a-z]{2,8}"}}, "seed": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI, case: str) -> None:
    """Log-probabilities to rounding: the second request's prompt may come from the cache, computed in other parts."""
    options = {"messages": QUESTION, "max_tokens": 12, **CASES[case]}
    ours, theirs = streamed(client, **options), whole(client, **options)
    assert [choice[:2] for choice in ours] == [choice[:2] for choice in theirs]
    assert words(ours) == words(theirs)
    assert numbers(ours) == pytest.approx(numbers(theirs), abs=1e-3)


def words(choices: list[Any]) -> list[Any]:
    return [[(entry.token, entry.bytes, len(entry.top_logprobs)) for entry in choice[2]] for choice in choices]


def numbers(choices: list[Any]) -> list[float]:
    entries = [entry for choice in choices for entry in choice[2]]
    return [value.logprob for entry in entries for value in (entry, *entry.top_logprobs)]


def test_choices_are_those_of_seeds_that_follow_each_other(client: openai.OpenAI) -> None:
    options: Any = {"model": "chat", "messages": QUESTION, "max_tokens": 8, "temperature": 1.0}
    several = client.chat.completions.create(**options, n=3, seed=7)
    alone = [client.chat.completions.create(**options, seed=7 + index) for index in range(3)]
    assert [c.message.content for c in several.choices] == [a.choices[0].message.content for a in alone]
    assert several.usage and alone[0].usage
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert several.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone if a.usage)


def test_logprobs_are_a_distributions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="chat", prompt="One, two, three,", max_tokens=4, temperature=0, logprobs=5)
    choice = answer.choices[0]
    assert (
        choice.logprobs and choice.logprobs.tokens and choice.logprobs.token_logprobs and choice.logprobs.top_logprobs
    )
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == [sum(map(len, choice.logprobs.tokens[:i])) for i in range(4)]
    for token, logprob, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values()) and len(top) == 5
        assert 0 < sum(map(math.exp, top.values())) <= 1


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_json_answers_are_valid(client: openai.OpenAI, temperature: float) -> None:
    [[text, reason, _]] = whole(client, messages=QUESTION, response_format=FORMAT, temperature=temperature)
    assert reason == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)


def test_any_json_object(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "Answer with a small JSON object."}]
    [[text, reason, _]] = whole(
        client, messages=asked, response_format={"type": "json_object"}, temperature=0, max_tokens=40
    )
    assert isinstance(json.loads(text), dict) if reason == "stop" else text.startswith("{")


def test_choices_of_texts_and_regular_expressions(client: openai.OpenAI) -> None:
    said = [
        whole(client, messages=QUESTION, seed=5, extra_body={"structured_outputs": form})[0][0]
        for form in ({"choice": ["yes", "no"]}, {"regex": "[0-9]{3}"}, {"grammar": 'start: "<" /[a-z]+/ ">"'})
    ]
    assert said[0] in ("yes", "no") and re.fullmatch("[0-9]{3}", said[1]) and re.fullmatch("<[a-z]+>", said[2])


@pytest.mark.parametrize(
    ("form", "param", "named"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "[a-z"}}}, "structured_outputs", "regex"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: x"}}}, "structured_outputs", "unknown name"),
    ],
)
def test_grammars_that_do_not_compile_are_refused_with_the_reason(
    client: openai.OpenAI, form: Any, param: str, named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named) as caught:
        whole(client, messages=QUESTION, **form)
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", param)


@pytest.fixture(scope="module")
def minilm(stack: LocalStack, minilm_store_url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("embed") / "embed_app.py"
    path.write_text(EMBED.format(weights=minilm_store_url))
    stack.deploy(path)
    return "minilm"


TEXTS = ["A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby.", "word " * 100]

# The first values of sentence-transformers 6.2's vectors: SentenceTransformer(folder, device="cpu").encode(TEXTS).
PUBLISHED = [
    [0.033242, 0.004406, -0.006277, 0.048379],
    [0.052518, 0.055241, -0.011188, -0.005745],
    [-0.036309, -0.035653, -0.027223, 0.03832],
    [0.014505, -0.064441, -0.026881, 0.016138],
]


def test_embeddings_equal_sentence_transformers(client: openai.OpenAI, minilm: str) -> None:
    answer = client.embeddings.create(model=minilm, input=TEXTS)
    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    assert np.abs(np.array([item.embedding[:4] for item in answer.data]) - PUBLISHED).max() < 1e-5
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 100
    assert minilm in [model.id for model in client.models.list()]


def test_forms_of_input_and_answer(client: openai.OpenAI, minilm: str) -> None:
    create = client.embeddings.create
    one = create(model=minilm, input="x", encoding_format="float").data[0].embedding
    assert create(model=minilm, input=["x"], dimensions=384, encoding_format="float").data[0].embedding == one
    ids = create(model=minilm, input=[101, 1060, 102], encoding_format="float")
    assert ids.usage.prompt_tokens == 3
    np.testing.assert_allclose(ids.data[0].embedding, one, atol=1e-6)
    assert len(create(model=minilm, input=[[101, 1060, 102], [101, 102]]).data) == 2
    raw: Any = client.post(
        "/embeddings", body={"model": minilm, "input": "x", "encoding_format": "base64"}, cast_to=object
    )
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), np.float32), one, atol=1e-6)
    assert math.isclose(sum(value * value for value in one), 1, rel_tol=1e-5)


def test_many_texts_in_one_request(client: openai.OpenAI, minilm: str) -> None:
    """More bytes than the queue carries itself, texts and vectors alike."""
    texts = [f"{word} {number}" for number in range(150) for word in ("red", "blue")]
    vectors = [item.embedding for item in client.embeddings.create(model=minilm, input=texts).data]
    assert len(vectors) == 300 and all(len(vector) == 384 for vector in vectors)
    alone = client.embeddings.create(model=minilm, input=[texts[0], texts[299]]).data
    np.testing.assert_allclose([vectors[0], vectors[299]], [item.embedding for item in alone], atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", None),
        ({"input": []}, "input", None),
        ({"input": ["a", ""]}, "input.1", None),
        ({"input": [[]]}, "input.0", None),
        ({"input": [30522]}, "input", None),
        ({"input": "word " * 300}, "input", "context_length_exceeded"),
        ({"input": "x", "dimensions": 100}, "dimensions", "unsupported_parameter"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", None),
    ],
)
def test_embedding_requests_that_are_refused(
    client: openai.OpenAI, minilm: str, fields: Any, param: str, code: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(**{"model": minilm, **fields})
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", code)
    assert caught.value.param and caught.value.param.startswith(param.split(".")[0])


def test_models_are_asked_for_what_they_do(client: openai.OpenAI, stack: LocalStack, minilm: str) -> None:
    with pytest.raises(openai.NotFoundError, match="not an embedding model"):
        client.embeddings.create(model="chat", input="x")
    with pytest.raises(openai.NotFoundError, match="not a language model"):
        client.chat.completions.create(model=minilm, messages=QUESTION)
    with stack.client() as own:
        answer: Any = own.invoke(minilm, {"input": ["a", "b"]})
    assert [item["index"] for item in answer["data"]] == [0, 1]
