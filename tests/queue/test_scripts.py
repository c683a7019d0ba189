import re
from pathlib import Path

import pytest
from queue_oracle import Oracle
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

import stoker.queue.broker
from stoker.queue.broker import Broker
from stoker.queue.records import Completion, Emission, Failure, JobState, Settled
from stoker.queue.scripts import Scripts, script

FOLDER = Path(stoker.queue.broker.__file__).parent
ENTRIES = sorted(path.stem for path in FOLDER.glob("*.lua") if path.read_text().startswith("-- uses: "))
PARTS = sorted({path.stem for path in FOLDER.glob("*.lua")} - set(ENTRIES))
FREES_MEMORY = {"aside", "beat", "cancel", "claim", "done", "fail", "meter", "purge", "tick", "tried"}
READS = {"dead", "list", "look", "peek", "stat"}


def test_every_part_is_used() -> None:
    assert ENTRIES and PARTS
    used = {part for name in ENTRIES for part in script(name).source.split("\n") if part.startswith("-- ")}
    for part in PARTS:
        assert (FOLDER / f"{part}.lua").read_text().split("\n")[0] in used


def test_a_part_is_no_script() -> None:
    with pytest.raises(ValueError, match="must start with"):
        script("common")


@pytest.mark.parametrize("name", ENTRIES)
def test_flags(name: str) -> None:
    flags = "allow-oom" if name in FREES_MEMORY else "no-writes" if name in READS else ""
    assert script(name).source.split("\n")[0] == ("#!lua flags=" + flags if flags else "#!lua")


@pytest.mark.parametrize("name", ENTRIES + PARTS)
def test_only_the_server_tells_the_time_and_every_key_has_the_tag(name: str) -> None:
    """Key names are made from the one key given, so that they share its slot."""
    source = (FOLDER / f"{name}.lua").read_text()
    assert "KEYS[" not in source or name == "common"
    assert not re.search(r"stoker:(?!gateway:|worker:|handover:|bell:|hooks'|q:\{function\})", source)
    assert "os.time" not in source and ("'TIME'" in source) == (name == "common")


async def test_a_server_without_the_script_gets_it(broker: Broker, client: Redis, job) -> None:
    await client.script_flush()
    assert (await broker.enqueue(job())).created
    assert await client.script_exists(script("enqueue").sha) == [True]
    await client.script_flush()
    assert list(await broker.backlogs(["f", "g"])) == ["f", "g"]
    assert len(await Scripts(client).run_each("stat", ["f"])) == 1


async def test_a_full_server_takes_no_new_work_but_ends_what_it_has(
    broker: Broker, client: Redis, job, start, oracle: Oracle
) -> None:
    running, failing, lost = [await start(stream=True) for _ in range(3)]
    queued = job()
    await broker.enqueue(queued)
    await client.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            await broker.enqueue(job())
        with pytest.raises(OutOfMemoryError):
            await broker.emit("f", [Emission(running.job_id, running.fence, 1, b"x")])
        held = {claim.job_id: claim.fence for claim in (running, failing, lost)}
        assert await broker.beat("f", "w", held) == {}
        assert await broker.done("f", [Completion(running.job_id, running.fence, b"r", b"u")]) == [Settled.DONE]
        assert await broker.fail("f", [Failure(failing.job_id, failing.fence, b"e", retry=False)]) == [Settled.DONE]
        assert [claim.job_id for claim in await broker.claim("f", "w", 1)] == [queued.id]
        assert await broker.cancel(lost.job_id) is JobState.CANCELLED
        assert await broker.tick("f") == 0
    finally:
        await client.config_set("maxmemory", 0)
    oracle.check("f")
