"""Programs that others wrote, unchanged, against a running stoker: `llm` (a command line for chats) and GuideLLM, a
load generator of the vLLM project."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.runtime.local import LocalStack

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("e2e")]

Run = Callable[..., str]

MODELS = """
- model_id: asleep
  model_name: chat
  api_base: {url}/v1
  supports_schema: true
"""
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@pytest.fixture
def llm(stack: LocalStack, tmp_path: Path) -> Run:
    """Runs `llm` with its own file of further models of OpenAI's kind. Other plugins stay out of it."""
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=stack.url))
    program = Path(sys.executable).with_name("llm")
    env = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "none"}

    def run(*arguments: str) -> str:
        command = [str(program), *arguments]
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


SHORT = ("-m", "asleep", "-o", "temperature", "0", "-o", "max_tokens", "20")


def test_llm_streams_and_waits(llm: Run) -> None:
    assert llm(*SHORT, QUESTION) == ANSWER
    assert llm(*SHORT, "--no-stream", QUESTION) == ANSWER


def test_llm_goes_on_with_a_conversation_and_logs_its_usage(llm: Run) -> None:
    llm(*SHORT, "-s", "Be short.", QUESTION)
    llm("-c", "-o", "temperature", "0", "-o", "max_tokens", "8", "And of Italy?")
    first, second = json.loads(llm("logs", "--json"))
    assert first["conversation_id"] == second["conversation_id"]
    assert first["system"] == "Be short." and first["response"]
    assert second["input_tokens"] > first["input_tokens"] > 0 and second["output_tokens"] <= 8


def test_llm_is_answered_in_its_schema(llm: Run) -> None:
    said = llm("-m", "asleep", "-o", "max_tokens", "60", "--schema", "colour str, number int", "A colour and a number")
    answer = json.loads(said)
    assert isinstance(answer["colour"], str) and isinstance(answer["number"], int)


def test_guidellm_measures_without_an_error(stack: LocalStack, smollm2_dir: Path, tmp_path: Path) -> None:
    """What it asked for is counted here: it can leave before it has counted its last answer itself."""
    program = str(Path(sys.executable).with_name("guidellm"))
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={stack.url},model=chat",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=4",
        "tokenizer": f"kind=hf_auto,model={smollm2_dir}",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "output": f"kind=json,path={report}",
    }
    command = [program, "run", "--disable-console", *(part for key in options for part in (f"--{key}", options[key]))]
    env, began = {**os.environ, "HF_HUB_OFFLINE": "1"}, time.time()
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] and not totals["errored"] and not totals["incomplete"]
    with stack.client() as client:
        jobs = client.request("GET", "/v1/jobs", params={"function": "chat"})["data"]
    assert [job["state"] for job in jobs if job["enqueued_at"] > began] == ["succeeded"] * 4
