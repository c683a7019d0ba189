"""redis-py's connections, except that a cancelled call ends."""

import asyncio
from collections.abc import Iterable

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError


class PromptWrites(AbstractConnection):
    """redis-py 8 writes under asyncio.wait_for, which before Python 3.12 can swallow a cancellation (CPython issue
    81839), and which costs a task for every command. The bytes are the same, and so are the errors.
    """

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if check_health:
            await self.check_health()
        parts = command.encode() if isinstance(command, str) else command
        try:
            async with asyncio.timeout(self.socket_timeout):
                await self._send_packed_command([parts] if isinstance(parts, bytes) else parts)
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise RedisTimeoutError("Timeout writing to socket") from None
        except OSError as error:
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"Error while writing to socket: {error}") from error
        except BaseException:
            await self.disconnect(nowait=True)
            raise


class PromptConnection(PromptWrites, Connection):
    pass


class PromptTLSConnection(PromptWrites, SSLConnection):
    pass


class PromptUnixConnection(PromptWrites, UnixDomainSocketConnection):
    pass


CLASSES: dict[str, type[AbstractConnection]] = {
    "redis": PromptConnection,
    "rediss": PromptTLSConnection,
    "unix": PromptUnixConnection,
}
