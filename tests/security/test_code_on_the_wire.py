"""Rows 5 and 7: nothing that comes from a client, a queue, a store or another process is ever run."""

import ast
import base64
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest

from benchmarks.models import random_model
from stoker.coldstart.failures import ColdStartError
from stoker.coldstart.store import open_store
from stoker.queue.records import VERSION_BYTE, RecordVersionError, unpack
from stoker.runtime.publishing import push_model
from stoker.runtime.wire import decode
from tests.runtime.gateway.peers import error_of

ROOT = Path(__file__).parents[2]
ROOMS = ("kernels", "queue", "coldstart", "runtime")
RUNS_DATA = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
RUNS_TEXT = {"eval", "exec", "compile"}
# torch.load unpickles; numpy.load does when it is asked to.
LOADERS = {("torch", "load"), ("numpy", "load"), ("np", "load"), ("yaml", "load"), ("yaml", "unsafe_load")}


def sources() -> list[Path]:
    return [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]


def breaches(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in RUNS_DATA]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in RUNS_DATA:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNS_TEXT:
            found.append(node.func.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [f"{node.value.id}.{node.attr}"] if (node.value.id, node.attr) in LOADERS else []
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            found += [node.arg] if not (isinstance(node.value, ast.Constant) and node.value.value is False) else []
    return found


def test_no_room_can_unpickle_or_evaluate() -> None:
    assert {str(path): found for path in sources() if (found := breaches(ast.parse(path.read_text())))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "import cloudpickle as c",
        "torch.load(f)",
        "eval(text)",
        "np.load(f, allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)
def test_the_check_sees_what_it_looks_for(code: str) -> None:
    assert breaches(ast.parse(code))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def bomb(tmp_path: Path) -> tuple[bytes, Path]:
    mark = tmp_path / "exploded"
    return pickle.dumps(Bomb(mark)), mark


def test_the_bomb_is_one(bomb: tuple[bytes, Path]) -> None:
    pickle.loads(bomb[0])
    assert bomb[1].exists()


async def test_a_pickle_bomb_is_a_bad_request_on_every_body(http: httpx.AsyncClient, bomb: tuple[bytes, Path]) -> None:
    data, mark = bomb
    routes = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/functions/x", "/v1/batches"]
    for path in routes:
        for kind in ("application/json", "application/octet-stream", "application/python-pickle"):
            response = await http.post(path, content=data, headers={"content-type": kind})
            assert 400 <= response.status_code < 500, (path, response.text)
            error_of(response)
    wrapped = {"spec": {"kind": "python", "code": "0" * 64, "entry": base64.b64encode(data).decode()}}
    assert (await http.put("/v1/functions/x", json=wrapped)).status_code == 400
    assert not mark.exists()


def test_the_queues_records_and_the_engines_frames_are_plain_data(bomb: tuple[bytes, Path]) -> None:
    """Both are msgpack; its extension types stay what they are, bytes with a number."""
    data, mark = bomb
    with pytest.raises(RecordVersionError):
        unpack(data)
    extension = msgpack.packb(msgpack.ExtType(42, data))
    for read in (lambda: unpack(VERSION_BYTE + extension), lambda: decode(extension)):
        assert read() == msgpack.ExtType(42, data)
    with pytest.raises(ValueError):
        decode(data)
    assert not mark.exists()


@pytest.fixture
def coded_model(tmp_path: Path) -> tuple[Path, Path]:
    """A model folder whose configuration points at code beside it, as trust_remote_code would run."""
    folder, mark = random_model("tiny", tmp_path / "model"), tmp_path / "exploded"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "chat_template": "{{ messages[0].content }}"})
    )
    return folder, mark


async def test_a_models_own_code_is_neither_published_nor_run(
    coded_model: tuple[Path, Path], tmp_path: Path, http: httpx.AsyncClient
) -> None:
    folder, mark = coded_model
    url = (tmp_path / "published").as_uri()
    push_model(folder, url)
    assert not [info.key for info in open_store(url).list() if info.key.endswith(".py")]
    for source in (url, folder.as_uri()):
        made = await http.put("/v1/functions/coded", json={"spec": {"kind": "llm", "weights": source}})
        assert made.status_code in (200, 201), made.text
        body = {"model": "coded", "messages": [{"role": "user", "content": "w1"}], "max_tokens": 1}
        job = await http.post("/v1/functions/coded/jobs", json=body)
        assert job.status_code == 202
    assert (await http.delete("/v1/functions/coded")).status_code == 200
    assert not mark.exists()


def test_pickled_weights_are_refused(tmp_path: Path, bomb: tuple[bytes, Path]) -> None:
    """A folder of pytorch_model.bin: there is no such format here, and nobody opens it."""
    folder = random_model("tiny", tmp_path / "model")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(bomb[0])
    with pytest.raises((ColdStartError, ValueError, SystemExit, FileNotFoundError)):
        push_model(folder, (tmp_path / "published").as_uri())
    assert not bomb[1].exists()


def test_a_chat_template_cannot_reach_python(tmp_path: Path) -> None:
    """Templates come with models: they run in jinja's sandbox."""
    code = """
import sys
from stoker.runtime.gateway.chat_template import ChatTemplate
evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages.__init__.__globals__['os'].system('true') }}"
try:
    said = ChatTemplate(evil, {}).render([{"role": "user", "content": "x"}])
except Exception as error:
    print(type(error).__name__)
else:
    print("rendered", said)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "rendered" not in done.stdout and "<class" not in done.stdout, done.stdout
