"""Frames between the agent and its processes, over a real socket pair."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from stoker.runtime import wire
from stoker.runtime.wire import MOST_ANSWER, AsyncChannel, Channel, ChannelClosed, FrameTooBig, encode, socket_pair


@pytest.fixture
async def ends() -> AsyncIterator[tuple[AsyncChannel, Channel]]:
    sock, fd = socket_pair()
    ours, theirs = await AsyncChannel.open(sock), Channel.from_fd(fd)
    yield ours, theirs
    theirs.close()
    await ours.close()


async def gathered(channel: AsyncChannel, count: int) -> list[wire.Frame]:
    frames: list[wire.Frame] = []
    while len(frames) < count:
        async with asyncio.timeout(10):
            frames += await channel.frames()
    return frames


async def test_frames_pass_both_ways_in_order(ends: tuple[AsyncChannel, Channel]) -> None:
    ours, theirs = ends
    for number in range(3):
        ours.send({"n": number})
    received = [await asyncio.to_thread(theirs.receive) for _ in range(3)]
    for frame in received:
        theirs.send(frame)
    assert await gathered(ours, 3) == [{"n": 0}, {"n": 1}, {"n": 2}]


async def test_a_frame_may_come_byte_by_byte_and_many_at_once() -> None:
    ours, theirs = socket.socketpair()
    channel = await AsyncChannel.open(ours)
    sent = [{"n": number, "blob": b"x" * number * 1000} for number in range(20)]
    data = b"".join(map(encode, sent))
    for byte in data[:60]:
        theirs.send(bytes([byte]))
        await asyncio.sleep(0)
    await asyncio.to_thread(theirs.sendall, data[60:])
    assert await gathered(channel, 20) == sent
    theirs.close()
    await channel.close()


async def test_what_nobody_takes_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_UNREAD", 100_000)
    ours, theirs = socket.socketpair()
    channel = await AsyncChannel.open(ours)
    sent = [{"n": number, "blob": b"x" * 5000} for number in range(1000)]
    writing = asyncio.create_task(asyncio.to_thread(theirs.sendall, b"".join(map(encode, sent))))
    await asyncio.sleep(0.2)
    assert not writing.done()
    assert await gathered(channel, 1000) == sent
    await writing
    theirs.close()
    await channel.close()


async def test_one_frame_may_be_larger_than_what_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_UNREAD", 1000)
    ours, theirs = socket.socketpair()
    channel = await AsyncChannel.open(ours)
    sent = [{"blob": os.urandom(300_000)}, {"n": 1}]
    await asyncio.to_thread(theirs.sendall, b"".join(map(encode, sent)))
    assert await gathered(channel, 2) == sent
    theirs.close()
    await channel.close()


async def test_the_end_comes_behind_the_last_frame(ends: tuple[AsyncChannel, Channel]) -> None:
    ours, theirs = ends
    theirs.send({"last": True})
    theirs.close()
    await asyncio.sleep(0.05)
    assert await ours.frames() == [{"last": True}]
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            await ours.frames()


async def test_a_waiting_reader_is_told_of_the_end(ends: tuple[AsyncChannel, Channel]) -> None:
    ours, theirs = ends
    reading = asyncio.create_task(ours.frames())
    await asyncio.sleep(0)
    theirs.close()
    with pytest.raises(ChannelClosed):
        await reading
    await ours.close()
    with pytest.raises(ChannelClosed):
        ours.send({})


async def test_what_a_side_that_is_gone_will_not_get_is_known_at_once(ends: tuple[AsyncChannel, Channel]) -> None:
    """Also before its end was read."""
    ours, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.send({})


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1"], ids=["too long", "no msgpack"])
async def test_what_is_no_frame_ends_the_channel(junk: bytes) -> None:
    ours, theirs = socket.socketpair()
    channel = await AsyncChannel.open(ours)
    theirs.sendall(encode({"n": 1}) + junk)
    assert await gathered(channel, 1) == [{"n": 1}]
    with pytest.raises(ChannelClosed, match="no frame"):
        await channel.frames()
    theirs.close()
    await channel.close()


async def test_a_result_has_a_size_and_the_channel_lives_on(ends: tuple[AsyncChannel, Channel]) -> None:
    ours, theirs = ends
    with pytest.raises(FrameTooBig, match="more than the 256 MiB that a result may have"):
        theirs.send({"blob": bytes(MOST_ANSWER)})
    theirs.send({"n": 1})
    assert await gathered(ours, 1) == [{"n": 1}]


async def test_a_process_that_says_it_sends_more_is_not_listened_to() -> None:
    ours, theirs = socket.socketpair()
    channel = await AsyncChannel.open(ours)
    theirs.sendall((MOST_ANSWER + 1).to_bytes(4, "big"))
    with pytest.raises(ChannelClosed, match="over the limit"):
        await asyncio.wait_for(channel.frames(), 10)
    theirs.close()
    await channel.close()


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
def test_a_blocking_reader_gets_every_frame_however_they_come(at_once: int) -> None:
    """Small ones that come together, and ones that are larger than what is read at once."""
    ours, theirs = socket.socketpair()
    sizes = [0, 3, wire.READ_BYTES - 20, wire.READ_BYTES, 3 * wire.READ_BYTES, 1, 2]
    frames = [{"t": "x", "n": n, "data": bytes(size)} for n, size in enumerate(sizes)]
    sent = b"".join(map(encode, frames))

    def write() -> None:
        for start in range(0, len(sent), at_once):
            ours.sendall(sent[start : start + at_once])
        ours.close()

    writer = threading.Thread(target=write)
    writer.start()
    channel = Channel(theirs)
    assert [channel.receive() for _ in frames] == frames
    with pytest.raises(ChannelClosed):
        channel.receive()
    writer.join()
    channel.close()
