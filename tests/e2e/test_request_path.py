"""The whole path with real processes: a request wakes a worker, a real model answers, the worker goes again."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from stoker.runtime.client.client import Client
from stoker.runtime.client.errors import StokerError
from stoker.runtime.local import LocalStack
from tests.e2e.apps import write_chat

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("e2e")]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture
def client(stack: LocalStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(stack: LocalStack, **options: object) -> dict:
    body = {"model": "chat", "messages": QUESTION, "temperature": 0, **options}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def invoke(stack: LocalStack, function: str, value: object) -> object:
    with stack.client() as client:
        return client.invoke(function, value)


def replica_count(stack: LocalStack, function: str) -> int:
    with stack.client() as client:
        return sum(next(row["replicas"] for row in client.functions() if row["name"] == function).values())


def wait_asleep(stack: LocalStack, function: str, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while replica_count(stack, function):
        assert time.monotonic() < deadline, f"{function} did not go to sleep"
        time.sleep(0.1)


def test_ten_requests_at_once_to_a_sleeping_model_start_one_worker(
    stack: LocalStack, smollm2_store_url: str, app_folder: Path
) -> None:
    app = write_chat(app_folder, smollm2_store_url, idle=30)
    app.write_text(app.read_text().replace('"chat"', '"sleeper"'))
    stack.deploy(app)
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda n: ask(stack, model="sleeper", max_tokens=8 + n % 3), range(10)))
    assert all(a["choices"][0]["message"]["content"].startswith("The capital of France is Paris") for a in answers)
    assert replica_count(stack, "sleeper") == 1
    started = set(re.findall(r"\bsleeper-[0-9a-f]+", (stack.data_dir / "logs" / "controller.log").read_text()))
    assert len(started) == 1, started
    with stack.client() as client:
        client.delete("sleeper")


def test_the_official_client_chats_streams_and_lists_models(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="chat", messages=QUESTION, temperature=0)
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens > 5 and whole.usage.prompt_tokens > 20
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="chat", messages=QUESTION, temperature=0, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert "chat" in [model.id for model in client.models.list()]


def test_the_official_client_raises_its_own_error_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nothing", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "word " * 3000}])


def test_completions_and_stop_strings(client: openai.OpenAI) -> None:
    text = client.completions.create(model="chat", prompt="One, two, three, four,", temperature=0, max_tokens=12)
    assert "five" in text.choices[0].text
    cut = client.completions.create(
        model="chat", prompt="One, two, three, four,", temperature=0, max_tokens=12, stop=[" six"]
    )
    assert cut.choices[0].text == text.choices[0].text.partition(" six")[0]
    assert cut.choices[0].finish_reason == "stop"


def test_a_repeated_prompt_is_served_from_the_prefix_cache_with_the_same_answer(stack: LocalStack) -> None:
    system = {"role": "system", "content": "You answer briefly and truthfully. " * 12}
    first = ask(stack, messages=[system, *QUESTION], max_tokens=16)
    second = ask(stack, messages=[system, *QUESTION], max_tokens=16)
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 64


def test_a_seed_makes_a_sampled_answer_repeatable(stack: LocalStack) -> None:
    options = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 12}
    one, same, other = (ask(stack, **options, seed=seed)["choices"][0]["message"]["content"] for seed in (1, 1, 2))
    assert one == same and one != other


def test_the_job_record_has_the_cold_start_timeline(stack: LocalStack) -> None:
    body = {"model": "chat", "messages": QUESTION, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=120) as response:
        list(response.iter_lines())
    with stack.client() as client:
        job = client.job(response.headers["x-job-id"])
    assert job["state"] == "succeeded"
    assert {"queue wait", "run", "first token"} <= {phase["name"] for phase in job["timeline"]}


def test_functions_with_and_without_batching(stack: LocalStack) -> None:
    with stack.client() as client:
        assert client.invoke("add", {"x": 2, "y": 3}) == 5
        assert client.invoke("sentiment", "what a lovely phone")["label"] == "good"
        assert client.invoke("sentiment", "i hate this awful film")["label"] == "bad"
        assert client.invoke("environment")["redis"] == ""
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda n: invoke(stack, "sizes", n), range(8)))
    assert max(sizes) > 1


def test_an_exception_in_user_code_comes_back_with_its_traceback(stack: LocalStack) -> None:
    with stack.client() as client, pytest.raises(StokerError, match="can't work with 3") as caught:
        client.invoke("boom", 3)
    assert caught.value.code == "ValueError"


def test_a_generator_streams_and_also_answers_whole(stack: LocalStack) -> None:
    with stack.client() as client:
        assert client.invoke("count", 3) == [{"i": 0}, {"i": 1}, {"i": 2}]
        assert list(client.stream("count", 3)) == [{"i": 0}, {"i": 1}, {"i": 2}]


def test_a_job_is_submitted_followed_and_cancelled(stack: LocalStack) -> None:
    with stack.client() as client:
        job = client.spawn("slow", 30)
        deadline = time.monotonic() + 30
        while job.status()["state"] != "running":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert job.cancel()["state"] == "cancelled"
        assert client.invoke("slow", 0.01) == 0.01


def test_a_cancelled_answer_is_metered_as_far_as_it_came(stack: LocalStack) -> None:
    """The client leaves in the middle of its stream; the record tells what was computed for it until then."""
    body = {"model": "chat", "messages": [{"role": "user", "content": "Count to a thousand."}], "max_tokens": 400}
    with (
        stack.client() as client,
        client._http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer,
    ):
        job_id = answer.headers["x-job-id"]
        chunks = (line for line in answer.iter_lines() if '"content"' in line)
        shown = [next(chunks) for _ in range(4)]
    with stack.client() as client:
        deadline = time.monotonic() + 20
        while not (usage := client.job(job_id)["usage"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.job(job_id)["state"] == "cancelled"
    assert len(shown) - 1 <= usage["completion_tokens"] < 400 and usage["prompt_tokens"] > 0


def test_a_function_process_that_dies_fails_its_job_and_comes_back(stack: LocalStack) -> None:
    with stack.client() as client:
        with pytest.raises(StokerError, match="exit code 7"):
            client.invoke("die")
        assert client.invoke("add", {"x": 1}) == 2


def test_workers_go_back_to_zero_and_wake_again(stack: LocalStack, smollm2_store_url: str, app_folder: Path) -> None:
    stack.deploy(write_chat(app_folder, smollm2_store_url, idle=0.5))
    ask(stack, max_tokens=2)
    wait_asleep(stack, "chat")
    assert ask(stack)["choices"][0]["message"]["content"] == ANSWER


def write_app(folder: Path, body: str, name: str = "extra") -> Path:
    path = folder / "extra_app.py"
    path.write_text(f"import stoker\n\napp = stoker.App({name!r})\n\n{body}\n")
    return path


ONE = "@app.function()\ndef first(x):\n    return 1\n\n"
TWO = "@app.function()\ndef second(x):\n    return 2\n\n"


def failure(client: Client, function: str) -> StokerError:
    with pytest.raises(StokerError) as caught:
        client.invoke(function)
    return caught.value


def test_an_app_is_deployed_whole_or_not_at_all(stack: LocalStack, app_folder: Path) -> None:
    stack.deploy(write_app(app_folder, ONE + TWO))
    with stack.client() as client:
        assert (client.invoke("first"), client.invoke("second")) == (1, 2)
        with pytest.raises(StokerError, match="nowhere"):
            stack.deploy(write_app(app_folder, ONE.replace("1", "3") + "app.llm('bad', weights='file:///nowhere')\n"))
        assert (client.invoke("first"), client.invoke("second")) == (1, 2)
        stack.deploy(write_app(app_folder, TWO))
        with pytest.raises(StokerError) as caught:
            client.invoke("first")
        assert caught.value.status == 404


def test_an_app_can_not_replace_the_function_of_another(stack: LocalStack, app_folder: Path) -> None:
    with pytest.raises(StokerError, match="belongs to app 'tools'"):
        stack.deploy(write_app(app_folder, "@app.function()\ndef add(x):\n    return 0\n", name="intruder"))


def test_a_function_that_can_not_start_says_so_at_once_and_recovers_with_a_deployment(
    stack: LocalStack, app_folder: Path
) -> None:
    body = "@app.function()\ndef late(x):\n    return {value}\n"
    hidden = "import os\nif 'extra_app' in __name__ and '/code/' in __file__:\n    import not_installed_here\n"
    stack.deploy(write_app(app_folder, hidden + body.format(value=1)))
    with stack.client() as client:
        with pytest.raises(StokerError, match="not_installed_here"):
            client.invoke("late")
        failure(client, "late")
        time.sleep(1.2)
        refused = failure(client, "late")
        assert refused.status == 503 and "in a row" in str(refused) and "not_installed_here" in str(refused)
        stack.deploy(write_app(app_folder, body.format(value=2)))
        assert client.invoke("late") == 2


def test_a_wrong_input_is_refused_before_there_is_a_job(stack: LocalStack) -> None:
    with stack.client() as client, pytest.raises(StokerError, match="x, y .optional.") as caught:
        client.invoke("add", 3)
    assert (caught.value.status, caught.value.code, caught.value.job_id) == (422, "invalid_input", "")


def test_missing_weights_are_refused_at_deployment(stack: LocalStack, tmp_path: Path, app_folder: Path) -> None:
    with pytest.raises(StokerError, match="nowhere/config.json"):
        stack.deploy(write_chat(app_folder, (tmp_path / "nowhere").as_uri()))
