import asyncio
from pathlib import Path

import redis
from redis.asyncio import Redis

from stoker.queue import cluster
from stoker.queue.cluster import Cluster, Signal
from stoker.queue.embedded import EmbeddedValkey


async def test_functions_are_kept_by_name(client: Redis) -> None:
    subject = Cluster(client)
    assert await subject.function("f") is None and await subject.functions() == {}
    await subject.put_function("g", {"kind": "python", "scaling": {"max_replicas": 2}})
    await subject.put_function("f", {"kind": "llm"})
    await subject.put_function("f", {"kind": "llm", "version": "2"})
    assert await subject.function("f") == {"kind": "llm", "version": "2"}
    assert list(await subject.functions()) == ["f", "g"]
    assert await subject.delete_function("f") and not await subject.delete_function("f")
    assert list(await subject.functions()) == ["g"]


async def test_an_era_ends_for_all(client: Redis) -> None:
    ours, theirs = Cluster(client), Cluster(client)
    before = await ours.era()
    await theirs.end_era()
    assert await ours.era() == await theirs.era() != before


async def test_functions_are_replaced_in_one_step(client: Redis) -> None:
    subject = Cluster(client)
    await subject.change_functions(
        "shop", lambda *_: cluster.Change({"f": {"version": "1"}, "g": {}}, [], {"1": {"by": "a"}})
    )
    await subject.change_functions(
        "shop", lambda *_: cluster.Change({"f": {"version": "2"}, "h": {}}, ["g"], {"2": {"by": "b"}})
    )
    assert await subject.functions() == {"f": {"version": "2"}, "h": {}}
    assert await subject.releases("shop") == {"1": {"by": "a"}, "2": {"by": "b"}}
    await client.delete(cluster.RELEASES_PREFIX + "shop")


async def test_versions_of_an_app_that_is_gone_are_kept_for_a_while(client: Redis) -> None:
    subject, key = Cluster(client), cluster.RELEASES_PREFIX + "shop"
    await subject.change_functions("shop", lambda *_: cluster.Change({}, [], {"1": {}, "2": {}}))
    await subject.change_functions("shop", lambda *_: cluster.Change({}, dropped=["1"]))
    assert await subject.apps() == ["shop"] and await client.ttl(key) == -1
    await subject.let_releases_go("shop", 50_000)
    await subject.let_releases_go("shop", 90_000)
    assert 0 < await client.pttl(key) <= 50_000
    await subject.change_functions("shop", lambda *_: cluster.Change({}, [], {"2": {}}))
    assert await client.ttl(key) == -1
    await client.delete(key)
    await subject.let_releases_go("shop", 50_000)
    assert await subject.apps() == []


async def test_failing_functions_are_forgotten_after_a_while(client: Redis) -> None:
    subject = Cluster(client)
    assert await subject.failing() == {}
    await subject.report_failing({"f": {"error": "no GPU"}})
    assert await subject.failing() == {"f": {"error": "no GPU"}}
    assert 0 < await client.pttl(cluster.FAILING) <= cluster.FAILING_TTL_MS


async def test_silent_hosts_are_forgotten(client: Redis) -> None:
    subject = Cluster(client)
    for host in ("h1", "h2"):
        await subject.report_host(host, {})
    await client.delete(cluster.HOST_PREFIX + "h1")
    assert list(await subject.hosts()) == ["h2"]
    assert await client.smembers(cluster.HOSTS) == {b"h2"}  # type: ignore[misc]


async def test_host_reports_expire(client: Redis) -> None:
    subject = Cluster(client)
    await subject.report_host("h2", {"devices": ["cuda:0"], "load": b"\xff"})
    await subject.report_host("h1", {"devices": []})
    hosts = await subject.hosts()
    assert list(hosts) == ["h1", "h2"]
    assert hosts["h2"].body == {"devices": ["cuda:0"], "load": b"\xff"}
    assert 0 < await client.pttl(cluster.HOST_PREFIX + "h1") <= cluster.HOST_TTL_MS
    await subject.forget_host("h1")
    assert list(await subject.hosts()) == ["h2"]


async def test_one_leader_at_a_time_with_rising_fences(client: Redis) -> None:
    subject = Cluster(client)
    first = await subject.acquire_leadership("a", 60_000)
    assert first > 0
    assert await subject.acquire_leadership("b", 60_000) == 0
    assert await subject.acquire_leadership("a", 60_000) == first
    await subject.release_leadership("b")
    assert await subject.acquire_leadership("b", 60_000) == 0
    await subject.release_leadership("a")
    assert await subject.acquire_leadership("b", 20) == first + 1
    await asyncio.sleep(0.03)
    assert await subject.acquire_leadership("a", 60_000) == first + 2
    await subject.release_leadership("a")


async def test_only_the_leader_writes_what_is_wanted(client: Redis) -> None:
    subject = Cluster(client)
    assert await subject.wanted() == {}
    assert not await subject.write_wanted("a", {"h1": {}})
    await subject.acquire_leadership("a", 60_000)
    assert await subject.write_wanted("a", {"h1": {"r1": {"function": "f"}}})
    assert not await subject.write_wanted("b", {})
    assert await subject.wanted() == {"h1": {"r1": {"function": "f"}}}
    await subject.release_leadership("a")


async def test_a_lease_is_confirmed_for_its_holder_and_term_alone(client: Redis) -> None:
    subject = Cluster(client)
    fence = await subject.acquire_leadership("a", 1_000)
    assert await subject.confirm_leadership("a", fence, 60_000)
    assert await client.pttl(cluster.LEADER) > 1_000
    assert await subject.acquire_leadership("a", 1_000) == fence
    assert await client.pttl(cluster.LEADER) > 1_000, "renewing never shortens it"
    assert not await subject.confirm_leadership("b", fence, 60_000)
    assert not await subject.confirm_leadership("a", fence + 1, 60_000)
    await subject.release_leadership("a")
    assert not await subject.confirm_leadership("a", fence, 60_000)


async def test_the_fleet_is_remembered_by_the_leader_and_reported_for_a_while(client: Redis) -> None:
    subject = Cluster(client)
    assert await subject.fleet_memory() == {} and await subject.fleet() == {}
    assert not await subject.write_fleet_memory("a", {"pools": {}})
    await subject.acquire_leadership("a", 60_000)
    assert await subject.write_fleet_memory("a", {"pools": {"p": {"failures": 1}}})
    assert await subject.fleet_memory() == {"pools": {"p": {"failures": 1}}}
    await subject.report_fleet({"hosts": []})
    assert await subject.fleet() == {"hosts": []}
    assert 0 < await client.pttl(cluster.FLEET) <= cluster.FLEET_TTL_MS
    await subject.release_leadership("a")


async def test_wanted_hosts(client: Redis) -> None:
    subject = Cluster(client)
    assert await subject.hosts_wanted() is None
    await subject.want_hosts(["h1", "h2"])
    assert await subject.hosts_wanted() == ["h1", "h2"]


async def test_changes_ring_the_controller(client: Redis) -> None:
    subject = Cluster(client)
    async with client.pubsub() as bell:
        await bell.subscribe(cluster.BELL)
        await bell.get_message(timeout=1)
        for change in (subject.put_function("f", {}), subject.delete_function("f"), subject.forget_host("h")):
            await change
            message = await bell.get_message(timeout=1)
            assert message is not None and message["type"] == "message"


async def test_a_signal_wakes_on_a_message_and_after_a_reconnect(
    client: Redis, server_url: str, raw: redis.Redis
) -> None:
    signal = Signal(server_url, cluster.BELL)
    await signal.start()
    assert await signal.wait(5)
    assert not await signal.wait(0.02)
    await Cluster(client).ring()
    assert await signal.wait(5)
    raw.client_kill_filter(_type="pubsub")
    assert await signal.wait(5)
    signal.ring()
    assert await signal.wait(0)
    await signal.close()


async def test_a_signal_does_not_hear_what_does_not_matter(client: Redis, server_url: str) -> None:
    signal = Signal(server_url, cluster.BELL, matters=lambda message: message != b"served")
    await signal.start()
    assert await signal.wait(5)
    await Cluster(client).ring("served")
    assert not await signal.wait(0.1)
    await Cluster(client).ring("asleep")
    assert await signal.wait(5)
    await signal.close()


async def test_a_signal_starts_before_the_server(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    signal = Signal(server.url, cluster.WANTED)
    await signal.start()
    assert not await signal.wait(0.05)
    server.start()
    assert await signal.wait(5)
    await signal.close()
    server.stop()
