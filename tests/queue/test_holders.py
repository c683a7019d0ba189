import asyncio

from redis.asyncio import Redis

from stoker.queue.holders import PREFIX, Holders


async def test_holders_are_found_until_their_time_is_over(client: Redis) -> None:
    subject = Holders(client)
    assert await subject.find("m") == []
    await subject.announce("a:1", ["m", "n"], 60_000)
    await subject.announce("b:1", ["m"], 60_000)
    await subject.announce("c:1", ["m"], 100)
    await asyncio.sleep(0.15)
    assert await subject.find("m") == ["a:1", "b:1"]
    assert await subject.find("n") == ["a:1"]
    await subject.withdraw("a:1", ["m", "n"])
    assert await subject.find("m") == ["b:1"] and await subject.find("n") == []


async def test_a_repeated_announcement_renews_it_and_keys_expire(client: Redis) -> None:
    subject = Holders(client)
    await subject.announce("a:1", ["m"], 100)
    await subject.announce("a:1", ["m"], 60_000)
    await asyncio.sleep(0.15)
    assert await subject.find("m") == ["a:1"]
    assert 0 < await client.pttl(PREFIX + "m") <= 60_000
    await subject.announce("b:1", [], 60_000)
