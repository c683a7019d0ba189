"""What `stoker up --reload` takes for a change."""

import asyncio
from pathlib import Path

import pytest

from stoker.runtime import reloading
from stoker.runtime.reloading import Watched, keep_deployed


async def test_a_change_while_the_first_deployment_tells_what_it_includes_is_deployed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody had looked at the file before: it is no Python file, and the app had yet to say that it includes it."""
    file, data = tmp_path / "web_app.py", tmp_path / "lib" / "data.json"
    data.parent.mkdir()
    data.write_text("1")
    file.write_text("")
    deployed: list[str] = []
    again = asyncio.Event()

    async def deploy(watched: Watched, environment: dict[str, str]) -> Watched:
        deployed.append(data.read_text())
        if len(deployed) == 1:
            # As long as file systems may round their times.
            await asyncio.sleep(0.05)
            data.write_text("2")
        else:
            again.set()
        return Watched(file, frozenset((data.parent,)), all=False)

    monkeypatch.setattr(reloading, "deploy", deploy)
    task = asyncio.create_task(keep_deployed(file, {}))
    try:
        await asyncio.wait_for(again.wait(), 30)
        assert deployed == ["1", "2"]
        # What nobody changes is not deployed again.
        await asyncio.sleep(2 * reloading.LOOK_MS / 1000)
        assert deployed == ["1", "2"]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
