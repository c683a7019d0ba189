"""Instance metadata, against a server that answers as EC2's does."""

import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from stoker.runtime.worker.agent import DRAIN_S, drain_s
from stoker.runtime.worker.instance import Identity, InstanceMetadata, NoMetadata, Notice, seconds

TOKEN = "a-token"
IDENTITY = {
    "/latest/meta-data/instance-id": "i-1",
    "/latest/meta-data/instance-type": "g6e.xlarge",
    "/latest/meta-data/placement/availability-zone": "us-east-1a",
}
SPOT = "/latest/meta-data/spot/instance-action"
HOOK = "/latest/meta-data/autoscaling/target-lifecycle-state"
HINT = "/latest/meta-data/events/recommendations/rebalance"
AT = 1_767_225_600.0


@pytest.fixture
def pages() -> dict[str, str]:
    return dict(IDENTITY)


@pytest.fixture
def url(pages: dict[str, str]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            assert self.path == "/latest/api/token" and int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
            self.answer(200, TOKEN)

        def do_GET(self) -> None:
            if self.headers["X-aws-ec2-metadata-token"] != TOKEN:
                self.answer(401, "")
            else:
                self.answer(200 if self.path in pages else 404, pages.get(self.path, "<html>not found</html>"))

        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
async def metadata(url: str) -> AsyncIterator[InstanceMetadata]:
    metadata = InstanceMetadata(url)
    yield metadata
    await metadata.close()


async def test_an_instance_knows_who_it_is(metadata: InstanceMetadata, pages: dict[str, str]) -> None:
    assert await metadata.identity() == Identity("i-1", "g6e.xlarge", "us-east-1a", spot=False)
    pages["/latest/meta-data/instance-life-cycle"] = "spot"
    assert (await metadata.identity()).spot


async def test_the_most_final_notice_counts(metadata: InstanceMetadata, pages: dict[str, str]) -> None:
    assert await metadata.notice() is None
    pages[HINT] = '{"noticeTime": "2026-01-01T00:00:00Z"}'
    assert await metadata.notice() == Notice("rebalance", AT)
    pages[HOOK] = "InService"
    assert await metadata.notice() == Notice("rebalance", AT)
    pages[HOOK] = "Terminated"
    assert await metadata.notice() == Notice("termination")
    pages[SPOT] = '{"action": "terminate", "time": "2026-01-01T00:00:00Z"}'
    assert await metadata.notice() == Notice("interruption", AT)


async def test_elsewhere_there_is_no_metadata(metadata: InstanceMetadata, pages: dict[str, str]) -> None:
    pages.clear()
    with pytest.raises(NoMetadata, match="instance-id"):
        await metadata.identity()
    closed = InstanceMetadata("http://127.0.0.1:9")
    with pytest.raises(NoMetadata, match="127.0.0.1:9"):
        await closed.notice()
    await closed.close()


@pytest.mark.parametrize(
    ("stamp", "value"), [("2026-01-01T00:00:00Z", AT), ("2026-01-01T00:00:00+00:00", AT), (None, 0), ("soon", 0)]
)
def test_times(stamp: str | None, value: float) -> None:
    assert seconds(stamp) == value


@pytest.mark.parametrize(
    ("notice", "grace_s"),
    [
        (None, DRAIN_S),
        (Notice("interruption", AT + 120), DRAIN_S),
        (Notice("interruption", AT + 25), 10),
        (Notice("interruption", AT - 5), 0),
        (Notice("termination"), DRAIN_S),
        (Notice("rebalance", AT - 5), DRAIN_S),
    ],
)
def test_running_work_gets_what_time_the_host_has(notice: Notice | None, grace_s: float) -> None:
    assert drain_s(notice, AT) == grace_s
