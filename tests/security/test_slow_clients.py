"""Clients that send too slowly, too much, or don't read: their connections end, the gateway's memory stays small."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from stoker.coldstart.store import open_store
from stoker.queue.broker import Broker
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import Completion, pack
from stoker.runtime import payloads
from tests.connections import connected
from tests.runtime.gateway.peers import Deploy, Task, worker

from .gateway_process import GatewayProcess, gateway_process

MB = 1 << 20
LIMITS = {"HEAD_S": 1.0, "TAIL_S": 1.0, "STUCK_S": 3.0}
SOON_S = 6


@pytest.fixture(scope="module")
def process(valkey: EmbeddedValkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    store = tmp_path_factory.mktemp("slow-store").as_uri()
    with gateway_process(valkey.url, store, LIMITS) as gateway:
        yield gateway


async def drip(gateway: GatewayProcess, first: bytes, drop: Callable[[int], bytes]) -> tuple[bytes, float]:
    """Sends `first`, then drops, until the gateway ends the connection. The answer, and after how many seconds."""
    started = time.monotonic()
    async with gateway.connected() as (reader, writer):
        writer.write(first)
        answer = asyncio.create_task(reader.read())
        number = 0
        while not answer.done() and time.monotonic() - started < SOON_S:
            await asyncio.wait((answer,), timeout=0.1)
            writer.write(drop(number))
            number += 1
        took = time.monotonic() - started
        assert answer.done(), "still open"
        try:
            return answer.result(), took
        except ConnectionResetError:
            return b"", took


HEAD = b"POST /v1/functions/f HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize("first", [b"", b"P", HEAD], ids=["nothing", "one byte", "headers without an end"])
async def test_a_head_that_does_not_come_closes_the_connection(process: GatewayProcess, first: bytes) -> None:
    _, took = await drip(process, first, lambda number: b"x: %d\r\n" % number if first is HEAD else b"")
    assert 0.8 <= took < 4


async def test_a_head_byte_by_byte_closes_the_connection(process: GatewayProcess) -> None:
    _, took = await drip(process, b"G", lambda number: b"ET /healthz HTTP/1.1\r\n"[number : number + 1])
    assert 0.8 <= took < 4


async def test_the_second_request_of_a_connection_has_the_same_deadline(process: GatewayProcess) -> None:
    first = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /heal"
    answer, took = await drip(process, first, lambda number: b"t")
    assert answer.startswith(b"HTTP/1.1 200 ") and 0.8 <= took < 4


async def test_blank_lines_are_no_request(process: GatewayProcess) -> None:
    answer, took = await drip(process, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", lambda number: b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and 0.8 <= took < 4


async def test_a_body_byte_by_byte_is_refused_at_its_deadline(process: GatewayProcess) -> None:
    answer, took = await drip(process, HEAD + b"content-length: 1000\r\n\r\n", lambda number: b" ")
    assert answer.startswith(b"HTTP/1.1 408 ") and b"request_timeout" in answer and 0.8 <= took < 4


async def test_a_body_that_goes_on_behind_its_answer_is_not_listened_to_for_ever(process: GatewayProcess) -> None:
    """The path is unknown, so it is answered before its body is read."""
    head = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
    answer, took = await drip(process, head, lambda number: b" ")
    assert answer.startswith(b"HTTP/1.1 404 ") and 0.8 <= took < 4


async def test_a_request_in_time_may_take_its_time(process: GatewayProcess) -> None:
    """Deadlines end with the bytes that they are for: an idle connection is kept."""
    async with process.connected() as (reader, writer):
        for _ in range(3):
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
            await asyncio.sleep(1.2)


@pytest.mark.parametrize(
    "lines",
    [
        b"".join(b"x-%d: y\r\n" % number for number in range(10_000)),
        b"x: " + b"y" * 200_000 + b"\r\n",
        b"".join(b"x: %s\r\n" % (b"y" * 2000) for _ in range(50)),
    ],
    ids=["10,000 headers", "one long header", "50 long headers"],
)
async def test_a_head_that_is_too_large_is_a_431(process: GatewayProcess, lines: bytes) -> None:
    async with process.connected() as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + lines + b"\r\n")
        answer = await reader.read(500)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"request_head_too_large" in answer


async def test_a_long_url_is_a_431(process: GatewayProcess) -> None:
    async with process.connected() as (reader, writer):
        writer.write(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.read(500)).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
async def test_a_body_that_is_too_large_is_a_413_and_costs_no_memory(process: GatewayProcess, chunked: bool) -> None:
    size, block = 200 * MB, b" " * MB
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % size
    before = process.rss
    async with process.connected() as (reader, writer):
        writer.write(HEAD + framing + b"\r\n\r\n")
        answer = asyncio.create_task(reader.read(500))
        for _ in range(size // MB):
            writer.write(b"%x\r\n%s\r\n" % (MB, block) if chunked else block)
            try:
                await asyncio.wait_for(writer.drain(), 5)
            except ConnectionError:
                break
        assert (await answer).startswith(b"HTTP/1.1 413 ")
    assert process.rss - before < 30 * MB
    assert process.healthy()


CHUNK = "x" * 50_000
CHUNKS = 1200


async def flood(task: Task) -> None:
    for number in range(CHUNKS):
        if not await task.emit({"value": [number, CHUNK]}):
            return
    await task.done({"value": "end"})


def streaming(name: str) -> bytes:
    head = f"POST /v1/functions/{name} HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\nidempotency-key: {name}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: 1\r\n\r\n1".encode()


@pytest.fixture
async def flooded(broker: Broker, deploy: Deploy) -> AsyncIterator[str]:
    name = await deploy()
    async with worker(broker, name, flood):
        yield name


async def test_a_client_that_does_not_read_costs_little_and_is_cut_off(process: GatewayProcess, flooded: str) -> None:
    """60 MB are told to it; the gateway holds the most of a mebibyte, and after STUCK_S nothing."""
    before = process.rss
    async with process.connected() as (reader, writer):
        writer.transport.pause_reading()
        writer.write(streaming(flooded))
        started, most = time.monotonic(), 0
        while len(process.process.net_connections()) and time.monotonic() - started < SOON_S + 3:
            most = max(most, process.rss - before)
            assert process.healthy()
            await asyncio.sleep(0.1)
        writer.transport.resume_reading()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(CHUNKS * len(CHUNK)), 10)
    assert most < 25 * MB


async def test_a_client_that_reads_late_gets_everything(process: GatewayProcess, flooded: str) -> None:
    async with process.connected() as (reader, writer):
        writer.write(streaming(flooded))
        numbers: list[int] = []
        while len(numbers) < CHUNKS:
            line = await asyncio.wait_for(reader.readline(), 20)
            if line.startswith(b"data: ["):
                numbers.append(int(line.removeprefix(b"data: [").split(b",")[0]))
                if len(numbers) % 400 == 100:
                    await asyncio.sleep(0.7)
    assert numbers == list(range(CHUNKS))


async def test_a_large_answer_may_take_long_while_it_is_read(
    process: GatewayProcess, broker: Broker, deploy: Deploy
) -> None:
    """8 MB in one piece, at little more than 1 MB a second, are on their way for longer than STUCK_S."""
    store = open_store(process.store_url)

    async def large(task: Task) -> None:
        claim = task.claim
        carried = payloads.put_result(store, claim.job_id, claim.fence, pack({"value": "x" * 8 * MB}))
        await broker.done(claim.function, [Completion(claim.job_id, claim.fence, carried, pack({}), pack({}))])

    name = await deploy()
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    plain.connect(("127.0.0.1", process.port))
    plain.setblocking(False)
    async with worker(broker, name, large), connected(sock=plain, limit=1 << 16) as (reader, writer):
        writer.write(HEAD.replace(b"functions/f", f"functions/{name}".encode()) + b"content-length: 1\r\n\r\n1")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        started, total = time.monotonic(), 0
        while total < 8 * MB:
            part = await reader.read(1 << 17)
            assert part, f"cut off after {total} bytes"
            total += len(part)
            await asyncio.sleep(len(part) / (1.2 * MB))
    assert time.monotonic() - started > LIMITS["STUCK_S"]


async def test_a_client_that_takes_little_but_goes_on_is_left_alone(process: GatewayProcess, flooded: str) -> None:
    """20 kB a second free room in the kernel's buffers too seldom for it to say so within STUCK_S."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.connect(("127.0.0.1", process.port))
    plain.setblocking(False)
    loop, total = asyncio.get_running_loop(), 0
    with plain:
        await loop.sock_sendall(plain, streaming(flooded))
        started = time.monotonic()
        while (spent := time.monotonic() - started) < 3 * LIMITS["STUCK_S"]:
            if total < 20_000 * spent:
                total += len(await asyncio.wait_for(loop.sock_recv(plain, 4096), 5))
            await asyncio.sleep(0.05)
        assert [
            each for each in process.process.net_connections() if each.raddr and each.raddr[1] == plain.getsockname()[1]
        ]
