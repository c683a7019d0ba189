"""Frames between the host agent and its engine and function processes: msgpack dicts over a Unix socket pair.

A frame is a 4-byte big-endian length followed by one msgpack map. `Channel` is the blocking side that lives in the
child process; the agent uses `AsyncChannel`.
"""

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, cast

import msgpack

Frame = dict[str, Any]
ExtHook = Callable[[int, bytes], Any]

HEADER = struct.Struct(">I")
MAX_FRAME = 1 << 30
# From a child process: a result, or what goes with others in one frame.
MOST_ANSWER = 256 << 20
MOST_UNREAD = 1 << 20
READ_BYTES = 8192


class ChannelClosed(Exception):
    """The other side is gone."""


class FrameTooBig(ValueError):
    """The other side would not take it: a result has a size."""


def encode(frame: Frame) -> bytes:
    body: bytes = msgpack.packb(frame, use_bin_type=True)  # type: ignore[assignment]
    return HEADER.pack(len(body)) + body


def decode(body: bytes | bytearray | memoryview, ext_hook: ExtHook = msgpack.ExtType) -> Frame:
    return msgpack.unpackb(body, raw=False, strict_map_key=False, ext_hook=ext_hook)


def body_length(header: bytes | bytearray | memoryview, most: int) -> int:
    (length,) = HEADER.unpack(header)
    if length > most:
        raise ChannelClosed(f"frame of {length} bytes is over the limit of {most}")
    return length


class Channel:
    """Blocking side. `send` may be called from several threads; `receive` from one. What can't be sent raises and sends
    nothing: FrameTooBig, or what msgpack raises."""

    def __init__(self, sock: socket.socket, ext_hook: ExtHook = msgpack.ExtType) -> None:
        sock.setblocking(True)
        self._ext_hook = ext_hook
        self._sock = sock
        self._lock = threading.Lock()
        self._came = b""

    @classmethod
    def from_fd(cls, fd: int, ext_hook: ExtHook = msgpack.ExtType) -> "Channel":
        """`ext_hook` makes something of msgpack's extension types in received frames."""
        return cls(socket.socket(fileno=fd), ext_hook)

    def send(self, frame: Frame) -> None:
        data = encode(frame)
        if len(data) > HEADER.size + MOST_ANSWER:
            raise FrameTooBig(
                f"{len(data)} bytes are more than the {MOST_ANSWER >> 20} MiB that a result may have; write it to an "
                "object store and return where it is"
            )
        try:
            with self._lock:
                self._sock.sendall(data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> Frame:
        return decode(self._read_exactly(body_length(self._read_exactly(HEADER.size), MAX_FRAME)), self._ext_hook)

    def _read_exactly(self, size: int) -> bytes | bytearray:
        """What has come of the next frames is kept: one read for many small ones."""
        while len(self._came) < size < READ_BYTES:
            self._came += self._received(READ_BYTES)
        if len(self._came) >= size:
            data, self._came = self._came[:size], self._came[size:]
            return data
        whole, begun, self._came = bytearray(size), self._came, b""
        whole[: len(begun)] = begun
        view = memoryview(whole)[len(begun) :]
        while view:
            view = view[self._received_into(view) :]
        return whole

    def _received(self, most: int) -> bytes:
        try:
            data = self._sock.recv(most)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("the other side closed the channel")
        return data

    def _received_into(self, view: memoryview) -> int:
        try:
            count = self._sock.recv_into(view)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not count:
            raise ChannelClosed("the other side closed the channel")
        return count

    def close(self) -> None:
        self._sock.close()


class AsyncChannel(asyncio.Protocol):
    """Event-loop side. Writes are buffered by the transport. What nobody takes is read no further than MOST_UNREAD."""

    def __init__(self) -> None:
        self._part = bytearray()
        self._frames: list[Frame] = []
        self._unread = 0
        self._ended = ""
        self._arrival: asyncio.Future[None] | None = None
        self._lost = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, sock: socket.socket) -> "AsyncChannel":
        _, channel = await asyncio.get_running_loop().create_unix_connection(cls, sock=sock)
        return channel

    def send(self, frame: Frame) -> None:
        """Raises ChannelClosed where it is known that the other side won't get it."""
        if not self._transport.is_closing():
            self._transport.write(encode(frame))
        if self._transport.is_closing():
            raise ChannelClosed("the channel is closed")

    async def frames(self) -> list[Frame]:
        """All that have come and were not taken yet, at least one. Raises ChannelClosed behind the last."""
        while not self._frames:
            if self._ended:
                raise ChannelClosed(self._ended)
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        frames, self._frames = self._frames, []
        if self._unread > MOST_UNREAD:
            self._transport.resume_reading()
        self._unread = 0
        return frames

    async def close(self) -> None:
        self._transport.close()
        await self._lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the other side closed the channel")
        if not self._lost.done():
            self._lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        try:
            taken = self._take(data)
        except (ChannelClosed, ValueError, TypeError) as error:
            self._end(f"the other side sent what is no frame: {error}")
            self._transport.abort()
            return
        if taken:
            paused = self._unread > MOST_UNREAD
            self._unread += taken
            if self._unread > MOST_UNREAD and not paused:
                self._transport.pause_reading()
            self._wake()

    def _take(self, data: bytes) -> int:
        """Decodes the whole frames and keeps the rest; how many bytes the frames had."""
        if self._part:
            self._part += data
        source, done = self._part or data, 0
        with memoryview(source) as view:
            while len(view) - done >= HEADER.size:
                body = done + HEADER.size
                end = body + body_length(view[done:body], MOST_ANSWER)
                if end > len(view):
                    break
                self._frames.append(decode(view[body:end]))
                done = end
        if source is self._part:
            del self._part[:done]
        else:
            self._part += data[done:]
        return done

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


def socket_pair() -> tuple[socket.socket, int]:
    """Parent's socket and an inheritable descriptor for the child."""
    ours, theirs = socket.socketpair()
    fd = os.dup(theirs.fileno())
    theirs.close()
    os.set_inheritable(fd, True)
    ours.setblocking(False)
    return ours, fd
