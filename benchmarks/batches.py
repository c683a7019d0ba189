"""A batch beside interactive requests, through the HTTP gateway: lines per second, and what the batch costs the others.

    python -m benchmarks.batches [--lines 10000] [--model tiny]

First interactive requests alone, one after the other (a stream of 32 tokens each), then the same while a batch of
`--lines` lines runs, one of a hundred of them bad. The batch must end with every line's answer in one of its two files,
in order. Yielding: p99 of the interactive requests' whole time, and of their time to the first token, with the batch
divided by without.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.models import published
from benchmarks.report import percentile, print_table, save
from stoker.runtime.local import LocalStack

DATA = Path(".stoker").resolve()
APP = Path(__file__).with_name("app.py")
CHAT = "/v1/chat/completions"
TOKENS, WORDS = 32, 40
ONE_BAD_OF = 100
LONGEST_S = 3600.0


def words(seed: int, count: int = WORDS) -> str:
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(1, 500)}" for _ in range(count))


def body(model: str, seed: int, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": words(seed)}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}


def good_line(model: str, number: int, tokens: int) -> str:
    asked = body(model, number, tokens)
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": asked})


def bad_line(model: str, number: int) -> tuple[str, str | None, str]:
    """The line, and of its row in the error file the custom_id and the error's code."""
    spoilt: list[tuple[Callable[[dict[str, Any]], Any], str | None, str]] = [
        (lambda line: json.dumps(line)[:-1], None, "invalid_json_line"),
        (lambda line: json.dumps({**line, "url": "/v1/other"}), line_id(number), "mismatched_endpoint"),
        (lambda line: json.dumps({**line, "custom_id": line_id(0)}), line_id(0), "duplicate_custom_id"),
        (lambda line: json.dumps({**line, "body": {**line["body"], "model": "nobody"}}), line_id(number), "no model"),
    ]
    spoil, custom_id, code = spoilt[number // ONE_BAD_OF % len(spoilt)]
    code = "model_not_found" if code == "no model" else code
    return spoil(json.loads(good_line(model, number, 1))), custom_id, code


def line_id(number: int) -> str:
    return f"line-{number}"


def is_bad(number: int) -> bool:
    return number % ONE_BAD_OF == ONE_BAD_OF // 2


@dataclass
class BatchRun:
    """A batch of `lines` lines, one of ONE_BAD_OF of them bad, and what has to come of it."""

    client: httpx.Client
    model: str
    lines: int
    tokens: int = 4
    id: str = ""
    answer: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        numbers = range(self.lines)
        made = (bad_line(self.model, n)[0] if is_bad(n) else good_line(self.model, n, self.tokens) for n in numbers)
        content = "\n".join(made).encode()
        sent = self.client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
        asked = {"endpoint": CHAT, "input_file_id": sent.raise_for_status().json()["id"], "completion_window": "24h"}
        self.id = self.client.post("/v1/batches", json=asked).raise_for_status().json()["id"]

    def look(self) -> bool:
        """Whether it is over. A gateway that is just being replaced has nothing to say."""
        try:
            self.answer = self.client.get(f"/v1/batches/{self.id}").raise_for_status().json()
        except httpx.HTTPError:
            return False
        return self.answer["status"] in ("completed", "failed", "expired", "cancelled")

    def wait(self) -> dict[str, Any]:
        deadline = time.monotonic() + LONGEST_S
        while not self.look():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the batch isn't over: {self.answer}")
            time.sleep(0.1)
        return self.answer

    def rows(self, which: str) -> list[dict[str, Any]]:
        text = self.client.get(f"/v1/files/{self.answer[which]}/content").raise_for_status().text
        return [json.loads(line) for line in text.splitlines()]

    def check(self) -> list[dict[str, Any]]:
        """The rows of the output file. Raises AssertionError unless every line has its one row, in its place."""
        bad = [number for number in range(self.lines) if is_bad(number)]
        good = [line_id(number) for number in range(self.lines) if not is_bad(number)]
        counts = {"total": self.lines, "completed": len(good), "failed": len(bad)}
        assert (self.answer["status"], self.answer["request_counts"]) == ("completed", counts), self.answer
        output, errors = self.rows("output_file_id"), self.rows("error_file_id")
        assert [row["custom_id"] for row in output] == good
        for row in output:
            response = row["response"]
            assert (response["status_code"], row["error"]) == (200, None)
            assert response["body"]["usage"]["completion_tokens"] == self.tokens
        assert [told(row) for row in errors] == [bad_line(self.model, number)[1:] for number in bad]
        return output


def told(row: dict[str, Any]) -> tuple[str | None, str]:
    error = row["error"] or row["response"]["body"]["error"]
    return row["custom_id"], error["code"]


def ask(client: httpx.Client, model: str, seed: int) -> tuple[float, float]:
    """Seconds to the first token and to the end of one streamed answer."""
    began, first = time.perf_counter(), 0.0
    asked = {**body(model, seed, TOKENS), "stream": True}
    with client.stream("POST", CHAT, json=asked) as response:
        for line in response.iter_lines():
            if not first and '"content"' in line:
                first = time.perf_counter() - began
        assert response.status_code == 200 and first, "no token came"
    return first, time.perf_counter() - began


def interactive(client: httpx.Client, model: str, seeds: Iterator[int], until: Callable[[], bool]) -> list[Any]:
    times = []
    while not until():
        times.append(ask(client, model, next(seeds)))
    return times


def summary(name: str, times: list[tuple[float, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"interactive": name, "requests": len(times)}
    for what, values in (("ttft", [first for first, _ in times]), ("whole", [whole for _, whole in times])):
        row |= {f"{what}_p{share}_ms": 1000 * percentile(values, share / 100) for share in (50, 99)}
    return row


def counted(requests: int) -> Callable[[], bool]:
    left = iter(range(requests))
    return lambda: next(left, None) is None


def measure(client: httpx.Client, model: str, lines: int, alone: int) -> list[dict[str, Any]]:
    """Interactive requests alone, then the same beside a batch for as long as it runs, but not for ever."""
    seeds = iter(range(10**6, 2 * 10**6))
    interactive(client, model, seeds, counted(20))
    before = interactive(client, model, seeds, counted(alone))
    batch = BatchRun(client, model, lines)
    batch.start()
    while not batch.look() and batch.answer["status"] == "validating":
        time.sleep(0.02)
    beside = interactive(client, model, seeds, counted(alone))
    finished = batch.look()
    began, done = time.perf_counter(), batch.answer["request_counts"]["completed"]
    batch.wait()
    rest = batch.answer["request_counts"]["completed"] - done
    batch.check()
    rows = [summary("alone", before), summary("beside a batch", beside)]
    rows[1] |= {"batch_was_over": finished, "lines": lines}
    rows[1]["lines_per_s_alone"] = rest / (time.perf_counter() - began) if rest else None
    rows[1]["lines_beside"] = done
    for what in ("ttft", "whole"):
        rows[1][f"{what}_p99_ratio"] = rows[1][f"{what}_p99_ms"] / rows[0][f"{what}_p99_ms"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--alone", type=int, default=400, help="interactive requests with and without the batch")
    options = parser.parse_args()
    os.environ["BENCH_WEIGHTS"] = published(options.model, DATA)
    with LocalStack(DATA / "batches") as stack:
        stack.deploy(APP)
        with httpx.Client(base_url=stack.url, timeout=120) as client:
            rows = measure(client, "model", options.lines, options.alone)
    header = list(rows[1])
    print_table("a batch beside interactive requests", ["", "alone", "beside a batch"], [
        [name, *(row.get(name, "") for row in rows)] for name in header
    ])  # fmt: skip
    print("saved", save("batches", vars(options), rows))


if __name__ == "__main__":
    main()
