"""Frames between the host agent and its engine and function processes: msgpack dicts over a Unix socket pair.

A frame is a 4-byte big-endian length followed by one msgpack map. `Channel` is the blocking side that lives in the
child process; the agent uses `AsyncChannel`.
"""

import asyncio
import contextlib
import os
import socket
import struct
import threading
from typing import Any

import msgpack

Frame = dict[str, Any]

HEADER = struct.Struct(">I")
MAX_FRAME = 1 << 30


class ChannelClosed(Exception):
    """The other side is gone."""


def encode(frame: Frame) -> bytes:
    body: bytes = msgpack.packb(frame, use_bin_type=True)  # type: ignore[assignment]
    return HEADER.pack(len(body)) + body


def decode(body: bytes | bytearray) -> Frame:
    return msgpack.unpackb(body, raw=False, strict_map_key=False)


def body_length(header: bytes | bytearray) -> int:
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME:
        raise ChannelClosed(f"frame of {length} bytes is over the limit of {MAX_FRAME}")
    return length


class Channel:
    """Blocking side. `send` may be called from several threads; `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._lock = threading.Lock()

    @classmethod
    def from_fd(cls, fd: int) -> "Channel":
        return cls(socket.socket(fileno=fd))

    def send(self, frame: Frame) -> None:
        data = encode(frame)
        try:
            with self._lock:
                self._sock.sendall(data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> Frame:
        return decode(self._read_exactly(body_length(self._read_exactly(HEADER.size))))

    def _read_exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._sock.recv_into(view)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not count:
                raise ChannelClosed("the other side closed the channel")
            view = view[count:]
        return data

    def close(self) -> None:
        self._sock.close()


class AsyncChannel:
    """Event-loop side. Writes are buffered by the transport; `drain` waits when the child reads slowly."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> "AsyncChannel":
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def send(self, frame: Frame) -> None:
        if self._writer.is_closing():
            raise ChannelClosed("the channel is closed")
        self._writer.write(encode(frame))

    async def drain(self) -> None:
        try:
            await self._writer.drain()
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    async def receive(self) -> Frame:
        try:
            length = body_length(await self._reader.readexactly(HEADER.size))
            return decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed("the other side closed the channel") from error
        except (ValueError, TypeError) as error:
            raise ChannelClosed(f"the other side sent what is no frame: {error}") from error

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def socket_pair() -> tuple[socket.socket, int]:
    """Parent's socket and an inheritable descriptor for the child."""
    ours, theirs = socket.socketpair()
    fd = os.dup(theirs.fileno())
    theirs.close()
    os.set_inheritable(fd, True)
    ours.setblocking(False)
    return ours, fd
