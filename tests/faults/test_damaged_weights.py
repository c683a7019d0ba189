"""Weights that are damaged after they were deployed: each damage is its own typed error to the client, naming the
object, and nobody waits for ever. The same model loads from file:// and from s3://."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.models import random_model
from stoker.runtime.local import LocalStack
from stoker.runtime.publishing import push_model
from tests.e2e.apps import write_chat

pytestmark = pytest.mark.xdist_group("damaged")

DAMAGES = ("flipped", "short", "missing")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model("tiny", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def stack(tmp_path: Path, s3_endpoint: str) -> Iterator[LocalStack]:
    with LocalStack(tmp_path / "data") as stack:
        yield stack


def deploy(stack: LocalStack, folder: Path, name: str, weights: str) -> None:
    app = write_chat(folder, weights, name=f"{name}_app.py")
    app.write_text(app.read_text().replace('"chat"', f'"{name}"'))
    stack.deploy(app)


def ask(stack: LocalStack, name: str) -> httpx.Response:
    body = {"model": name, "prompt": "w1 w2 w3", "max_tokens": 6, "temperature": 0}
    return httpx.post(f"{stack.url}/v1/completions", json=body, timeout=120)


def damage(kind: str, shard: Path) -> None:
    if kind == "missing":
        shard.unlink()
    elif kind == "short":
        shard.write_bytes(shard.read_bytes()[:-1000])
    else:
        data = bytearray(shard.read_bytes())
        data[-500] ^= 1
        shard.write_bytes(data)


def test_damaged_weights_fail_with_their_own_errors(stack: LocalStack, model: Path, tmp_path: Path) -> None:
    for kind in DAMAGES:
        store = tmp_path / "store" / kind
        push_model(model, store.as_uri())
        deploy(stack, tmp_path, kind, store.as_uri())
        damage(kind, next(store.glob("*.safetensors")))
    with ThreadPoolExecutor(len(DAMAGES)) as pool:
        answers = dict(zip(DAMAGES, pool.map(lambda kind: ask(stack, kind), DAMAGES), strict=True))
    codes = {kind: answer.json()["error"]["code"] for kind, answer in answers.items()}
    assert codes["missing"] == "ObjectMissing"
    assert codes["short"] in ("ObjectTruncated", "ObjectChanged")
    assert codes["flipped"] in ("ObjectAltered", "ObjectChanged")
    for kind, answer in answers.items():
        error = answer.json()["error"]
        assert answer.status_code >= 500 and error["type"] == "cold_start_error"
        assert f"{kind}/model-00001" in error["message"], error


def test_the_same_weights_answer_the_same_from_files_and_from_s3(
    stack: LocalStack, model: Path, tmp_path: Path
) -> None:
    urls = {"files": (tmp_path / "store" / "files").as_uri(), "objects": "s3://models/tiny"}
    for name, url in urls.items():
        push_model(model, url)
        deploy(stack, tmp_path, name, url)
    answers = {name: ask(stack, name) for name in urls}
    assert all(answer.status_code == 200 for answer in answers.values()), answers["objects"].text
    texts = {answer.json()["choices"][0]["text"] for answer in answers.values()}
    assert len(texts) == 1 and texts != {""}
