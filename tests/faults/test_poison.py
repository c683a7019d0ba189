"""An input that ends its process every time is dead after its attempts; what ran beside it is done."""

from collections import Counter
from collections.abc import Iterator

import pytest

from stoker.runtime.client.errors import StokerError
from stoker.runtime.local import LocalStack

pytestmark = pytest.mark.xdist_group("functions")

APP = """
import asyncio, os, time
import stoker

app = stoker.App("poison")

@app.function(concurrency=16)
async def beside(n):
    await asyncio.sleep(0.2)
    if n in (7, 11):
        os._exit(3)
    await asyncio.sleep(0.2)
    return n

@app.function(batch=stoker.Batch(max_size=16, max_wait_ms=200))
def together(inputs):
    time.sleep(0.1)
    if {7, 11} & set(inputs):
        os._exit(3)
    return inputs
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("poison")
    (folder / "poison_app.py").write_text(APP)
    with LocalStack(folder / "data") as stack:
        stack.deploy(folder / "poison_app.py")
        yield stack


@pytest.mark.parametrize("name", ["beside", "together"])
def test_only_the_guilty_die(stack: LocalStack, name: str) -> None:
    with stack.client() as client:
        jobs = [client.spawn(name, n) for n in range(16)]
        ended: dict[int, object] = {}
        for n, job in enumerate(jobs):
            try:
                ended[n] = job.get(timeout=90)
            except StokerError:
                ended[n] = job.status()["state"]
        assert ended == {n: "dead" if n in (7, 11) else n for n in range(16)}
        attempts = Counter(job.status()["attempt"] for job in jobs)
        assert attempts[1] + attempts[2] >= 6, "most need no attempt of their own"
