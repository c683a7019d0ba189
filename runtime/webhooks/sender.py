"""Sends one webhook over HTTP/1.1: the connection goes to an address that was checked, and no redirect is followed."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from socket import SOCK_STREAM, gaierror, getaddrinfo
from typing import Any

import certifi
import httpcore

from stoker.runtime.webhooks.address import Network, is_allowed, may_receive
from stoker.runtime.webhooks.target import Target

TIMEOUT_S = 15.0
CONNECT_S = 5.0
MOST_ADDRESSES = 4

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Refused(Exception):
    """The URL leads where webhooks may not go. Says nothing about the addresses behind the name."""


class NoAnswer(Exception):
    """There was no HTTP answer, for the reason given."""


# Threads of their own: names that nobody answers for hold up no other work.
RESOLVERS = ThreadPoolExecutor(16, "resolve")


async def resolve(host: str, port: int) -> Sequence[str]:
    """Every address of a name, in the system's order."""
    ask = partial(getaddrinfo, host, port, type=SOCK_STREAM)
    rows = await asyncio.get_running_loop().run_in_executor(RESOLVERS, ask)
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects only if every address of the host may be connected to, and then to exactly those. TLS still asks for the
    host's own name."""

    def __init__(self, target: Target, allowed: Sequence[Network], resolve: Resolve) -> None:
        self._target = target
        self._allowed = allowed
        self._resolve = resolve
        self._backend: Any = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        failure: Exception = NoAnswer("the host's name has no address")
        for address in (await self._addresses(host, port))[:MOST_ADDRESSES]:
            try:
                return await self._backend.connect_tcp(address, port, CONNECT_S)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        raise Refused("a webhook goes over TCP")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _addresses(self, host: str, port: int) -> Sequence[str]:
        try:
            addresses = await self._resolve(host, port)
        except (gaierror, UnicodeError):
            raise NoAnswer("the host's name can't be resolved") from None
        if not all(may_receive(address, self._allowed) for address in addresses):
            raise Refused("the host has an address that is not public (see STOKER_WEBHOOK_ALLOW)")
        if self._target.scheme == "http" and not all(is_allowed(address, self._allowed) for address in addresses):
            raise Refused("outside of STOKER_WEBHOOK_ALLOW's networks, webhooks go over https only")
        return addresses


class Sender:
    """`trust` is the TLS context; by default the certificates that browsers trust."""

    def __init__(
        self, allowed: Sequence[Network], resolve: Resolve = resolve, trust: ssl.SSLContext | None = None
    ) -> None:
        self._allowed = allowed
        self._resolve = resolve
        self._trust = trust or ssl.create_default_context(cafile=certifi.where())

    async def post(self, target: Target, headers: Mapping[str, str], body: bytes) -> int:
        """The answer's status, as it is. Raises Refused or NoAnswer, the latter also after TIMEOUT_S in all."""
        network = CheckedNetwork(target, self._allowed, self._resolve)
        url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
        own = {"host": target.host_header, "content-length": str(len(body)), "connection": "close"}
        sent = [*headers.items(), *own.items()]
        pool = httpcore.AsyncConnectionPool(self._trust, max_connections=1, network_backend=network)
        try:
            async with asyncio.timeout(TIMEOUT_S), pool, pool.stream("POST", url, headers=sent, content=body) as answer:
                return answer.status
        except TimeoutError:
            raise NoAnswer(f"no answer within {TIMEOUT_S:g} s") from None
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError) as error:
            raise NoAnswer(f"{type(error).__name__}: {error}"[:200]) from None
