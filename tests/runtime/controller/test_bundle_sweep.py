"""Which code bundles are deleted, on a real server and a real store."""

from pathlib import Path

import pytest
from redis.asyncio import Redis

from stoker.coldstart.store import ObjectStore, open_store
from stoker.queue.cluster import LEADER, RELEASES_PREFIX, Change, Cluster
from stoker.runtime.controller.bundle_sweep import GRACE_S, BundleSweep


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store((tmp_path / "store").as_uri())


def kept(store: ObjectStore) -> set[str]:
    return {info.key.removeprefix("bundles/").removesuffix(".zip") for info in store.list()}


def spec(code: str, app: str = "shop") -> dict[str, str]:
    return {"code": code, "app": app}


async def test_only_what_no_version_needs_goes_and_not_at_once(
    cluster: Cluster, redis: Redis, store: ObjectStore, clock: Clock
) -> None:
    for name in ("deployed", "old", "proven", "wanted", "nobody", "new"):
        store.write(f"bundles/{name}.zip", b"zip")
    store.write("models/weights", b"w")
    release = {"specs": {"a.f": spec("old")}}
    await cluster.change_functions("a.shop", lambda *_: Change({"a.f": spec("deployed")}, [], {"1": release}))
    await redis.set(LEADER, "me")
    await cluster.write_proven("me", {"a.f": spec("proven")})
    await cluster.write_wanted("me", {"h": {"f-1": {"spec": spec("wanted")}}})
    sweep = BundleSweep(store, cluster, clock)
    assert await sweep.sweep() == 0
    clock.now = GRACE_S - 1
    assert await sweep.sweep() == 0
    store.write("bundles/new.zip", b"zip, written again")
    clock.now = GRACE_S
    assert await sweep.sweep() == 1
    assert kept(store) == {"deployed", "old", "proven", "wanted", "new", "models/weights"}
    clock.now = 3 * GRACE_S
    assert await sweep.sweep() == 1
    assert "new" not in kept(store)


async def test_a_version_that_is_dropped_lets_its_code_go(cluster: Cluster, store: ObjectStore, clock: Clock) -> None:
    store.write("bundles/old.zip", b"zip")
    await cluster.change_functions(
        "shop", lambda *_: Change({"f": spec("deployed")}, [], {"1": {"specs": {"f": spec("old")}}})
    )
    sweep = BundleSweep(store, cluster, clock)
    await sweep.sweep()
    await cluster.change_functions("shop", lambda *_: Change({}, dropped=["1"]))
    clock.now = GRACE_S
    await sweep.sweep()
    assert kept(store) == {"old"}
    clock.now = 2 * GRACE_S
    await sweep.sweep()
    assert kept(store) == set()


async def test_what_is_needed_at_the_last_moment_stays(cluster: Cluster, store: ObjectStore, clock: Clock) -> None:
    """Deployed between the two looks of a sweep."""
    store.write("bundles/back.zip", b"zip")
    sweep = BundleSweep(store, cluster, clock)
    await sweep.sweep()
    clock.now = GRACE_S
    looked, used = [], sweep._used

    async def slow_look() -> set[str]:
        found = await used()
        if not looked:
            await cluster.put_function("f", spec("back"))
        looked.append(1)
        return found

    sweep._used = slow_look  # type: ignore[method-assign]
    assert await sweep.sweep() == 0 and kept(store) == {"back"}


async def test_the_versions_of_an_app_that_is_not_deployed_go_later(
    cluster: Cluster, redis: Redis, store: ObjectStore, clock: Clock
) -> None:
    for app in ("a.shop", "shop"):
        await cluster.change_functions(app, lambda *_: Change({}, [], {"1": {"specs": {}}}))
    await cluster.put_function("a.f", spec("x"))
    await BundleSweep(store, cluster, clock).sweep()
    assert await redis.ttl(RELEASES_PREFIX + "a.shop") == -1
    assert await redis.ttl(RELEASES_PREFIX + "shop") > 6 * 86_400
    await cluster.forget_apps(["a.shop", "shop"])
    assert await cluster.apps() == [] and await redis.exists(RELEASES_PREFIX + "shop") == 0
