"""Two hosts of one deployment: the second gets from the first what it can, through a real Redis and real sockets."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from redis.asyncio import Redis
from safetensors.torch import save_file

from stoker.coldstart.fetch import Fetcher
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.publish import publish
from stoker.coldstart.ring import Ring
from stoker.coldstart.s3_store import S3Store
from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.holders import PREFIX
from stoker.runtime.settings import Settings, from_environment, to_environment
from stoker.runtime.worker.weight_sources import TTL_MS, WeightSources, own_address

SECRET = "a secret of this deployment"


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[Redis]:
    server = EmbeddedValkey(tmp_path / "valkey", tmp_path / "s")
    server.start()
    client = connect(server.url)
    yield client
    await client.aclose()
    server.stop()


@pytest.fixture
def model(s3_endpoint: str, tmp_path: Path) -> tuple[S3Store, Manifest]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    save_file({"a": torch.randn(200, 256)}, tmp_path / "model" / "model.safetensors")
    store = S3Store("models", f"peers/{tmp_path.name}")
    return store, publish(tmp_path / "model", store, chunk_bytes=16384)


@pytest.fixture
async def host(redis: Redis, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    started: list[WeightSources] = []

    async def start(name: str, port: int, secret: str = SECRET, **settings: Any) -> WeightSources:
        chosen = Settings(tmp_path / name, secret=secret, peer_port=port, **settings)
        sources = WeightSources(chosen, redis)
        await sources.start()
        started.append(sources)
        return sources

    yield start
    for sources in started:
        await sources.close()


async def load(sources: WeightSources, store: Any, manifest: Manifest) -> dict[str, int]:
    """How many chunks came from where."""
    ring = Ring.create(4, 16384)
    peers = await sources.peers(store, manifest)
    fetcher = Fetcher(store, manifest, ring, cache=sources.cache(store), peers=peers)
    fetcher.start()
    while ready := fetcher.next(20):
        fetcher.release(ready.slot)
    fetcher.cancel()
    ring.close()
    if peers:
        peers.close()
    await sources.loaded(store, manifest)
    return {name: source["chunks"] for name, source in fetcher.summary()["sources"].items()}


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


async def test_a_second_host_loads_from_the_first(host: Any, model: Any, redis: Redis) -> None:
    store, manifest = model
    count = len(manifest.chunks)
    first, second = await host("one", free_port()), await host("two", free_port())
    assert await load(first, store, manifest) == {"store": count}
    assert 0 < await redis.pttl(PREFIX + manifest.revision) <= TTL_MS
    found = await load(second, store, manifest)
    assert found["peer"] >= count // 2 and sum(found.values()) == count
    assert await load(second, store, manifest) == {"cache": count}
    await first.close()
    assert await redis.zrange(PREFIX + manifest.revision, 0, -1) == [second.address.encode()]  # type: ignore[misc]


async def test_a_host_that_is_gone_or_of_another_deployment_costs_nothing(host: Any, model: Any) -> None:
    store, manifest = model
    count = len(manifest.chunks)
    stranger, mine = await host("one", free_port(), "another deployment's"), await host("two", free_port())
    await load(stranger, store, manifest)
    assert await load(mine, store, manifest) == {"store": count}


async def test_without_a_port_there_are_no_peers_and_without_a_size_no_cache(
    host: Any, model: Any, redis: Redis
) -> None:
    store, manifest = model
    alone = await host("one", 0, cache_gb=0.0)
    assert alone.cache(store) is None and await alone.peers(store, manifest) is None
    await load(alone, store, manifest)
    assert await redis.exists(PREFIX + manifest.revision) == 0
    assert not (alone._settings.cache_folder).exists()


async def test_a_folder_is_not_cached_again(host: Any, model: Any, tmp_path: Path) -> None:
    sources = await host("one", free_port())
    local = FileStore(tmp_path / "model")
    assert sources.cache(local) is None and await sources.peers(local, model[1]) is None


async def test_peers_need_a_secret(host: Any) -> None:
    with pytest.raises(ValueError, match="secret"):
        await host("one", free_port(), "short")


async def test_a_second_agent_of_a_machine_leaves_the_port_to_the_first(
    host: Any, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store, manifest = model
    port = free_port()
    first, second = await host("one", port), await host("one", port)
    assert first.address and not second.address and "not offered" in caplog.text
    await load(second, store, manifest)
    assert await load(first, store, manifest) == {"cache": len(manifest.chunks)}


async def test_a_silent_queue_server_is_not_waited_for(model: Any, tmp_path: Path) -> None:
    store, manifest = model
    client = connect("redis://127.0.0.1:1")
    sources = WeightSources(Settings(tmp_path, secret=SECRET, peer_port=free_port()), client)
    assert await sources.peers(store, manifest) is None
    await client.aclose()


def test_settings_reach_child_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(tmp_path, cache_dir=tmp_path / "c", cache_gb=1.5, peer_port=7411, ring_mb=640)
    for name, value in to_environment(settings).items():
        monkeypatch.setenv(name, value)
    found = from_environment()
    assert (found.cache_dir, found.cache_gb, found.peer_port, found.ring_mb) == (tmp_path / "c", 1.5, 7411, 640)
    assert Settings(tmp_path).cache_folder == tmp_path / "chunks"


def test_the_own_address_is_the_one_towards_the_queue() -> None:
    assert own_address("redis://127.0.0.1:6379") == "127.0.0.1"
    assert own_address("unix:///run/valkey.sock") == "127.0.0.1"


def test_a_gpu_takes_the_checksums_of_what_it_gets_as_published_until_they_are_wrong(
    model: tuple[S3Store, Manifest],
) -> None:
    sources, manifest = WeightSources(Settings(Path("nowhere"))), model[1]
    stored = {tensor.dtype for tensor in manifest.tensors}
    assert sources.verifies(manifest, "cpu", "auto")
    assert sources.verifies(manifest, "cuda:0", "float32")
    assert sources.verifies(manifest, "cuda:0", "auto") is (stored != {"BF16"})
    raw = replace(manifest, tensors=[tensor._replace(dtype="BF16") for tensor in manifest.tensors])
    assert not sources.verifies(raw, "cuda:0", "auto")
    sources.distrust(raw)
    assert sources.verifies(raw, "cuda:0", "auto")
