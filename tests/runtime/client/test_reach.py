import httpx
import pytest

from stoker.runtime.client.errors import Unreachable
from stoker.runtime.client.reach import Reach

NOBODY = [httpx.ConnectError("refused"), httpx.ConnectTimeout("no answer")]
HUNG_UP = [httpx.RemoteProtocolError("Server disconnected"), httpx.ReadError("reset"), httpx.ReadTimeout("silent")]


@pytest.mark.parametrize("error", [*NOBODY, *HUNG_UP], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("reached", [False, True])
def test_only_where_nobody_ever_was_no_further_try_helps(error: httpx.TransportError, reached: bool) -> None:
    reach = Reach()
    reach.url, reach._reached = "http://x", reached
    with pytest.raises(Unreachable) as told, reach._reaching():
        raise error
    assert told.value.final == (error in NOBODY and not reached)
