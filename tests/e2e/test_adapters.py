"""LoRA adapters from a bucket through the whole stack: published, deployed, named by callers, mixed in one batch."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from benchmarks.models import random_model
from stoker.coldstart.s3_store import S3Store
from stoker.runtime.client.errors import StokerError
from stoker.runtime.local import LocalStack
from stoker.runtime.publishing import push_model
from tests.runtime.adapters.folders import ALL, random_folder

pytestmark = pytest.mark.xdist_group("adapters")

ADAPTERS = ("left", "right", "up-hill")
APP = """
import stoker

app = stoker.App("adapted")
app.llm("chat", weights="s3://models/lora/base", adapters={adapters!r}, adapter_slots=2, adapter_rank={rank})
for name, weights in {merged!r}.items():
    app.llm(name, weights=weights)
"""
ROUTER = """
import stoker

app = stoker.App("routed")
app.router("front", routes=[stoker.Route("chat:left", keywords=("w2",))], default="chat:right")
"""
PROMPT = " ".join(f"w{7 * i % 500}" for i in range(40))


def address(name: str) -> str:
    return f"s3://models/lora/{name}"


def merge(base: Path, adapter: Path, target: Path) -> Path:
    """The base with the adapter in its weights, in float32."""
    target.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((base / name).read_bytes())
    (shard,) = base.glob("model-*.safetensors")
    weights = {name: tensor.float() for name, tensor in load_file(shard).items()}
    matrices = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name in [name for name in matrices if "lora_A" in name]:
        changed = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        product = matrices[name.replace("lora_A", "lora_B")] @ matrices[name]
        weights[changed] = weights[changed] + config["lora_alpha"] / config["r"] * product
    save_file(weights, target / "model.safetensors")
    return target


def app_file(folder: Path, adapters: dict[str, str], merged: dict[str, str], rank: int = 16) -> Path:
    file = folder / "adapted_app.py"
    file.write_text(APP.format(adapters=adapters, merged=merged, rank=rank))
    return file


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("lora")
    base = random_model("tiny", root / "base")
    config = json.loads((base / "config.json").read_text())
    made = {"base": base}
    for seed, name in enumerate(ADAPTERS):
        made[name] = random_folder(root / name, config, seed, ALL, 8)
        made[f"{name}-merged"] = merge(base, made[name], root / f"{name}-merged")
    made["high"] = random_folder(root / "high", config, 9, ("q",), 32)
    return made


@pytest.fixture(scope="module")
def stack(folders: dict[str, Path], s3_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    from tests.conftest import S3_ENVIRONMENT

    environment = {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL_S3": s3_server}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        for name, folder in folders.items():
            push_model(folder, address(name))
        root = tmp_path_factory.mktemp("adapted")
        with LocalStack(root / "data", env=environment) as stack:
            merged = {f"{name}-merged": address(f"{name}-merged") for name in ADAPTERS}
            stack.deploy(app_file(root, {name: address(name) for name in ADAPTERS}, merged))
            yield stack


def post(stack: LocalStack, model: str, prompt: str = PROMPT, path: str = "completions") -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 10, "temperature": 0}
    return httpx.post(f"{stack.url}/v1/{path}", json=body, timeout=120)


def invoke(stack: LocalStack, function: str) -> httpx.Response:
    return httpx.post(f"{stack.url}/v1/functions/{function}", json={"prompt": PROMPT, "max_tokens": 2}, timeout=120)


def text(stack: LocalStack, model: str, prompt: str = PROMPT) -> str:
    response = post(stack, model, prompt)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return response.json()["choices"][0]["text"]


def test_models_with_and_without_adapters_are_listed(stack: LocalStack) -> None:
    listed = httpx.get(f"{stack.url}/v1/models").json()["data"]
    names = {model["id"] for model in listed}
    assert {"chat", "chat:left", "chat:right", "chat:up-hill", "left-merged"} <= names
    assert httpx.get(f"{stack.url}/v1/models/chat:left").json()["id"] == "chat:left"


@pytest.mark.parametrize("model", ["chat:nobody", "chat:", "chat:left:left", "left-merged:left", "none:left"])
def test_an_adapter_that_isnt_there_is_not_found(stack: LocalStack, model: str) -> None:
    answers = post(stack, model), httpx.get(f"{stack.url}/v1/models/{model}"), invoke(stack, model)
    for response in answers:
        assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


def test_one_batch_mixes_adapters_and_each_answers_as_its_merged_model(stack: LocalStack) -> None:
    """Of more adapters than there are slots, asked for all at once."""
    prompts = [" ".join(f"w{(31 * i + 5 * j) % 500}" for j in range(3 + i)) for i in range(8)]
    asked = [(name, prompt) for prompt in prompts for name in ("", *ADAPTERS)]
    with ThreadPoolExecutor(len(asked)) as threads:
        found = list(threads.map(lambda each: text(stack, f"chat:{each[0]}".rstrip(":"), each[1]), asked))
    expected = [text(stack, f"{name}-merged" if name else "chat", prompt) for name, prompt in asked]
    assert found == expected
    assert len(set(expected)) > len(prompts), "adapters matter"
    assert list((stack.data_dir / "adapters").iterdir()), "fetched once, kept on this host"


def test_cached_prompts_are_each_adapters_own(stack: LocalStack) -> None:
    prompt = " ".join(f"w{11 * i % 500}" for i in range(64))

    def cached(model: str) -> int:
        return post(stack, model, prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(model) for model in ("chat", "chat:left", "chat:right")] == [0, 0, 0]
    assert [cached(model) for model in ("chat", "chat:left", "chat:right")] == [48, 48, 48]


def test_chats_streams_and_responses_name_adapters_too(stack: LocalStack) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    body: dict[str, Any] = {"model": "chat:left", "messages": messages, "max_tokens": 10, "temperature": 0}
    whole = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=120).json()
    merged = httpx.post(f"{stack.url}/v1/chat/completions", json=body | {"model": "left-merged"}, timeout=120).json()
    assert whole["choices"][0]["message"] == merged["choices"][0]["message"] and whole["model"] == "chat:left"
    streamed = httpx.post(f"{stack.url}/v1/chat/completions", json=body | {"stream": True}, timeout=120).text
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
    pieces = [choice["delta"].get("content", "") for event in events for choice in json.loads(event)["choices"]]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    job = httpx.post(f"{stack.url}/v1/functions/chat:left", json=body, timeout=120).json()
    assert job["choices"][0]["message"] == merged["choices"][0]["message"]
    asked = {"model": "chat:left", "input": PROMPT, "max_output_tokens": 10, "temperature": 0}
    response = httpx.post(f"{stack.url}/v1/responses", json=asked, timeout=120).json()
    assert response["output"][0]["content"][0]["text"] == whole["choices"][0]["message"]["content"]


def test_a_router_sends_to_adapters_and_each_ones_use_is_on_record(stack: LocalStack, tmp_path: Path) -> None:
    (tmp_path / "routed.py").write_text(ROUTER)
    stack.deploy(tmp_path / "routed.py")
    prompts = {"left": "w2 w3 w4", "right": "w3 w4 w5"}
    before = {name: used(stack, name) for name in prompts}
    for adapter, prompt in prompts.items():
        routed = post(stack, "front", prompt)
        assert routed.headers["x-route"].startswith(f"chat:{adapter}; ")
        assert routed.json()["choices"][0]["text"] == text(stack, f"{adapter}-merged", prompt)
        job = httpx.get(f"{stack.url}/v1/jobs/{routed.headers['x-job-id']}").json()
        assert (job["function"], job["usage"]["adapter"]) == ("chat", adapter)
    while any(used(stack, name) <= count for name, count in before.items()):
        time.sleep(0.05)


def used(stack: LocalStack, adapter: str) -> int:
    rows = httpx.get(f"{stack.url}/v1/usage").json()["data"]
    return sum(row["jobs"] for row in rows if (row["function"], row["adapter"]) == ("chat", adapter))


def test_a_deployment_with_an_adapter_that_doesnt_fit_is_refused(stack: LocalStack, tmp_path: Path) -> None:
    for bad, reason in (("high", "rank 32"), ("base", "no adapter"), ("nothing", "no adapter was published")):
        with pytest.raises(StokerError, match=reason):
            stack.deploy(app_file(tmp_path, {"bad": address(bad)}, {}))
    assert text(stack, "chat:left") == text(stack, "left-merged")


def test_requests_for_a_damaged_adapter_fail_alone_until_it_is_published_again(
    stack: LocalStack, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: str
) -> None:
    from tests.conftest import S3_ENVIRONMENT

    for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL_S3": s3_server}.items():
        monkeypatch.setenv(name, value)
    config = json.loads((folders["base"] / "config.json").read_text())
    fresh = random_folder(tmp_path / "fresh", config, 5)
    push_model(fresh, address("fresh"))
    file = tmp_path / "second_app.py"
    file.write_text(
        "import stoker\napp = stoker.App('second')\n"
        f"app.llm('second', weights='s3://models/lora/base', adapters={{'fresh': '{address('fresh')}'}})\n"
    )
    stack.deploy(file)
    weights = S3Store("models", "lora/fresh")
    data = bytearray(weights.read("adapter_model.safetensors"))
    data[-5] ^= 1
    weights.write("adapter_model.safetensors", bytes(data))
    with ThreadPoolExecutor(4) as threads:
        answers = list(
            threads.map(lambda name: post(stack, name), ["second:fresh", "second", "second:fresh", "second"])
        )
    assert [answer.status_code == 200 for answer in answers] == [False, True, False, True]
    assert answers[0].json()["error"]["code"] == "adapter_failed", answers[0].text
    assert "publish the model again" in answers[0].json()["error"]["message"]
    push_model(fresh, address("fresh"))
    assert text(stack, "second:fresh") == text_of_merged(stack, folders["base"], fresh, tmp_path)


def text_of_merged(stack: LocalStack, base: Path, adapter: Path, folder: Path) -> str:
    push_model(merge(base, adapter, folder / "merged"), address("fresh-merged"))
    file = folder / "third_app.py"
    file.write_text(
        f"import stoker\napp = stoker.App('third')\napp.llm('fresh-merged', weights='{address('fresh-merged')}')\n"
    )
    stack.deploy(file)
    return text(stack, "fresh-merged")


def test_a_copy_that_the_disk_damages_is_fetched_again(stack: LocalStack) -> None:
    """It was right when it was fetched. With two slots, four adapters in turn push each other out."""
    expected = text(stack, "left-merged")
    assert text(stack, "chat:left") == expected
    for copy in (stack.data_dir / "adapters").iterdir():
        copy.write_bytes(b"x" * copy.stat().st_size)
    for name in ("right", "up-hill", "left", "right"):
        assert text(stack, f"chat:{name}") == text(stack, f"{name}-merged")


def test_a_new_adapter_answers_from_the_moment_of_its_deployment(stack: LocalStack, tmp_path: Path) -> None:
    """The replica that is awake doesn't have it; callers of the others don't wait for the one that does."""
    file = tmp_path / "later_app.py"

    def deploy(*adapters: str) -> None:
        named = {name: address(name) for name in adapters}
        file.write_text(
            "import stoker\napp = stoker.App('later')\n"
            f"app.llm('later', weights='s3://models/lora/base', adapters={named!r})\n"
        )
        stack.deploy(file)

    expected = {name: text(stack, f"{name}-merged") for name in ("left", "right")}
    deploy("left")
    assert text(stack, "later:left") == expected["left"]
    deploy("left", "right")
    names = ["right", "left"] * 4
    with ThreadPoolExecutor(len(names)) as threads:
        found = list(threads.map(lambda name: text(stack, f"later:{name}"), names))
    assert found == [expected[name] for name in names]
