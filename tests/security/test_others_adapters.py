"""A tenant's adapters are its own: others can't name them, see them, or find what was computed with them."""

import json
from typing import TYPE_CHECKING

import httpx
import pytest

from stoker.coldstart.store import open_store
from stoker.runtime.publishing import push_model
from tests.runtime.adapters.folders import random_folder

if TYPE_CHECKING:
    from .conftest import KeyedStack

PROMPT = " ".join(f"w{13 * i % 500}" for i in range(64))


def ask(client: httpx.Client, model: str) -> httpx.Response:
    return client.post("/v1/completions", json={"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0})


@pytest.fixture(scope="module")
def tenants(
    keyed_stack: "KeyedStack", tiny_store_url: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, httpx.Client]:
    """Both call their function "own" and its adapter "tone"; ann has another one besides."""
    folder = tmp_path_factory.mktemp("tones")
    config = json.loads(open_store(tiny_store_url).read("config.json"))
    clients = {}
    for seed, name in enumerate(("ann", "bob")):
        clients[name] = keyed_stack.tenant(f"{name}-adapts")
        url = (folder / f"{name}-store").as_uri()
        push_model(random_folder(folder / name, config, seed), url)
        spec = {"kind": "llm", "weights": tiny_store_url, "adapters": {"tone": url, f"of-{name}": url}}
        made = clients[name].put("/v1/functions/own", json={"spec": spec})
        assert made.status_code == 201, made.text
    return clients


def test_the_same_names_mean_each_tenants_own(tenants: dict[str, httpx.Client]) -> None:
    texts = {}
    for name, client in tenants.items():
        for model in ("own", "own:tone", f"own:of-{name}"):
            answer = ask(client, model)
            assert answer.status_code == 200, answer.text
            texts[name, model] = answer.json()["choices"][0]["text"]
    assert texts["ann", "own"] == texts["bob", "own"]
    assert texts["ann", "own:tone"] == texts["ann", "own:of-ann"] != texts["bob", "own:tone"]


@pytest.mark.parametrize("model", ["own:of-ann", "ann-adapts.own:tone", "chat:tone", "own:ann-adapts.tone"])
def test_anothers_adapter_cant_be_named(tenants: dict[str, httpx.Client], model: str) -> None:
    for response in (ask(tenants["bob"], model), tenants["bob"].get(f"/v1/models/{model}")):
        assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


def test_anothers_adapter_isnt_listed(tenants: dict[str, httpx.Client]) -> None:
    listed = {model["id"] for model in tenants["bob"].get("/v1/models").json()["data"]}
    assert {"own", "own:tone", "own:of-bob", "chat"} <= listed and not any("ann" in name for name in listed)
    assert "ann-store" not in tenants["bob"].get("/v1/functions").text


def test_no_adapters_prompts_are_found_by_another(tenants: dict[str, httpx.Client]) -> None:
    """An adapter's two names are one adapter; everything else was computed with other weights, or for another."""
    prompt = " ".join(f"w{17 * i % 500}" for i in range(64))

    def cached(name: str, model: str) -> int:
        body = {"model": model, "prompt": prompt, "max_tokens": 1}
        usage = tenants[name].post("/v1/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached("ann", model) for model in ("own:tone", "own", "chat")] == [0, 0, 0]
    assert [cached("bob", model) for model in ("own:tone", "own", "chat")] == [0, 0, 0]
    assert [cached("ann", model) for model in ("own:tone", "own:of-ann", "own")] == [48, 48, 48]
