"""Models that don't fit on one device together are all awake there, behind one endpoint."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.models import random_model
from stoker.runtime.local import LocalStack
from stoker.runtime.publishing import push_model

pytestmark = pytest.mark.xdist_group("shared-device")

NAMES = ("first", "second", "third")
ONE_AT_A_TIME_GB = "0.002"
APP = """
import stoker

app = stoker.App("several")
for name, weights in {models!r}.items():
    app.llm(name, weights=weights, min_replicas=1, max_model_len=1024)
"""


def ask(stack: LocalStack, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    response = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def answers(folder: Path, app: Path, environment: dict[str, str]) -> tuple[dict[Any, str], list[dict[str, Any]]]:
    """Of all models to some prompts, asked at once; and the functions' rows while all of them are awake."""
    asked = [(name, f"w{number} w{number + 1} w2") for number in range(8) for name in NAMES]
    with LocalStack(folder, env=environment) as stack:
        stack.deploy(app)
        with ThreadPoolExecutor(len(asked)) as threads:
            found = list(threads.map(lambda each: ask(stack, *each), asked))
        with stack.client() as client:
            return dict(zip(asked, found, strict=True)), client.functions()


def test_models_that_do_not_fit_together_are_all_awake_and_answer_as_ever(tmp_path: Path) -> None:
    models = {}
    for seed, name in enumerate(NAMES):
        models[name] = (tmp_path / "store" / name).as_uri()
        push_model(random_model("tiny", tmp_path / name, seed), models[name])
    app = tmp_path / "several.py"
    app.write_text(APP.format(models=models))
    alike, _ = answers(tmp_path / "wide", app, {})
    tight, rows = answers(tmp_path / "tight", app, {"STOKER_DEVICE_MEMORY_GB": ONE_AT_A_TIME_GB})
    assert tight == alike
    assert len(set(alike.values())) > len(NAMES)
    assert all(row["replicas"] for row in rows)
