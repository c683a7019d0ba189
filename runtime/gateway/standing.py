"""Whether a client that stays on the line may still read what it asked for."""

from stoker.runtime.gateway.endpoint import Incoming

Birth = str | None


class Standing:
    """A caller and a function, by full name, as they were when the request came."""

    def __init__(self, incoming: Incoming, function: str, born: Birth) -> None:
        self._incoming = incoming
        self._function = function
        self._born = born

    async def holds(self) -> bool:
        """False once the function was deleted or made again, by whomever, or the tenant was. A birth never comes back:
        what was read of the function before this says True is of this one.

        Raises ApiError 401 or 403 once the key may not read any more, and RedisError."""
        incoming = self._incoming
        caller = await incoming.gateway.doorkeeper.admit(incoming.headers, "invoke")
        same = caller.account.created_at == incoming.caller.account.created_at
        return same and await birth_of(incoming, self._function) == self._born


async def birth_of(incoming: Incoming, function: str) -> Birth:
    """None of a function that isn't deployed."""
    found = await incoming.gateway.cluster.function(function)
    return None if found is None else found.get("born", "")
