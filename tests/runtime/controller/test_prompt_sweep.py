"""Which kept prompts are deleted, on a real server and a real store."""

from pathlib import Path

from stoker.coldstart.store import open_store
from stoker.queue.cluster import Cluster
from stoker.runtime.controller.prompt_sweep import sweep_prompts
from stoker.runtime.stored_prompts import PREFIX, object_key


async def test_prompts_go_with_their_function(cluster: Cluster, tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    assert await sweep_prompts(store, cluster) == 0
    for name in ("chat", "ann.chat", "bob.chat"):
        store.write(object_key(name), b"prompts")
    store.write("models/weights", b"w")
    for name in ("chat", "ann.chat"):
        await cluster.put_function(name, {})
    assert await sweep_prompts(store, cluster) == 1
    assert [found.key for found in store.list(PREFIX)] == ["prompt-cache/ann.chat", "prompt-cache/chat"]
    await cluster.delete_function("chat")
    assert await sweep_prompts(store, cluster) == 1
    assert [found.key for found in store.list()] == ["models/weights", "prompt-cache/ann.chat"]
