"""Tables at 80 columns and in a pipe: ids, names and money are whole."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click import unstyle
from typer.testing import CliRunner

from stoker.runtime.cli import app
from stoker.runtime.client.client import Client
from stoker.runtime.commands.rollout import progress

TENANT, FUNCTION = "acme-research-and-development", "transcribe-long-recordings"
JOB_ID = f"{TENANT}.{FUNCTION}~9~01hzy3k6w8q4v9f2m7c5x1b0ta"
PROSE = "the worker was lost: " + "its host went away, " * 10
USAGE = {
    "day": "2026-11-30",
    "tenant": TENANT,
    "function": FUNCTION,
    "jobs": 1234567,
    "failed": 12,
    "run_seconds": 98765.4,
    "cold_start_seconds": 1.5,
    "prompt_tokens": 123456789,
    "cached_tokens": 100,
    "completion_tokens": 0,
    "cost_usd": 12345.678901,
}
DEAD = {"id": JOB_ID, "attempt": 3, "finished_at": 1_800_000_000.0, "error": {"message": PROSE.strip()}}
AT, SHOWN = 1_800_000_000.0, "2027-01-15 08:00:00"
JOB: dict[str, Any] = {
    "id": "f~9~01hzy3k6w8q4",
    "function": "f",
    "tenant": "acme",
    "state": "failed",
    "wait_reason": None,
    "queue_position": None,
    "eta_s": None,
    "attempt": 2,
    "max_attempts": 4,
    "enqueued_at": AT,
    "started_at": AT + 1,
    "finished_at": AT + 3.5,
    "isolation": "own-process",
    "usage": None,
    "cost_usd": 0.25,
    "webhook_url": None,
    "route": None,
    "result": None,
    "error": {
        "message": "ValueError: [boom]",
        "traceback": '  File "/x/shop.py", line 7, in f\n    raise ValueError("[boom]")\nValueError: [boom]\n',
    },
    "attempts": [
        {"number": 1, "worker": "w1", "started_at": AT, "ended_at": AT + 1, "ended": "lost", "error": "its host died"},
        {"number": 2, "worker": "w2", "started_at": AT + 1, "ended_at": AT + 3.5, "ended": "failed", "error": "boom"},
    ],
    "timeline": [{"name": "run", "start_s": 0.0, "seconds": 1.0, "bytes": 0, "facts": {}}],
}
VERSION = {"version": "v1", "current": True, "state": "proven", "deployed_at": AT, "by": "default", "functions": []}
TENANT_ROW = {"name": TENANT, "weight": 1, "limits": {}, "created_at": AT}
KEY = {"id": "abc", "scopes": ["invoke"], "created_at": AT, "expires_at": AT}
TRY = {"at": AT, "status": 200, "seconds": 0.5, "error": None}
DELIVERY = {"id": "d", "type": "job.succeeded", "status": "delivered", "url": "https://x", "tries": [TRY]}
ENTRY = {"number": 1, "at": AT, "tenant": "t", "key_id": "k", "action": "deploy", "target": {}, "status": 200}
TIMES: dict[str, tuple[str, dict[str, Any], str]] = {
    "jobs list": ("/v1/jobs", {"data": [JOB], "has_more": False}, "queued (UTC)"),
    "jobs dead f": ("/v1/functions/f/dead", {"data": [DEAD], "has_more": False}, "ended (UTC)"),
    "versions shop": ("/v1/apps/shop/versions", {"data": [VERSION]}, "deployed (UTC)"),
    "secrets list": ("/v1/secrets", {"data": [{"name": "a", "variable": "A", "set_at": AT}]}, "set (UTC)"),
    "tenants list": ("/v1/tenants", {"data": [TENANT_ROW]}, "created (UTC)"),
    "tenants keys t": ("/v1/tenants/t/keys", {"data": [KEY]}, "expires (UTC)"),
    "webhooks deliveries j": ("/v1/jobs/j/webhook-deliveries", {"data": [DELIVERY]}, "at (UTC)"),
    "audit": ("/v1/audit", {"data": [ENTRY], "first_broken": None}, "at (UTC)"),
    "jobs get j": ("/v1/jobs/j", JOB, "queued (UTC)"),
}
PAGES: dict[str, Any] = {"/v1/usage": {"data": [USAGE]}, "/v1/functions/f/dead": {"data": [DEAD], "has_more": True}}
TERMINAL = {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "request", lambda self, method, path, **options: json.loads(json.dumps(PAGES[path])))


def printed(*arguments: str, terminal: bool) -> str:
    result = CliRunner().invoke(app, arguments, env=TERMINAL if terminal else {"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return unstyle(result.output)


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_usage_shows_names_and_money_whole(terminal: bool) -> None:
    output = printed("usage", "--tenant", "*", "--by", "tenant,function", terminal=terminal)
    assert all(text in output for text in (TENANT, FUNCTION, "12345.678901", "123456789", "USD/1M", "100.0000"))
    assert "…" not in output
    assert not terminal or max(map(len, output.splitlines())) <= 80


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("command", TIMES)
@pytest.mark.usefixtures("tokyo")
def test_times_are_in_utc_and_say_so(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, page, header = TIMES[command]
    monkeypatch.setitem(PAGES, path, page)
    output = printed(*command.split(), terminal=False)
    assert header in output and SHOWN in output


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_a_jobs_record_is_lines_and_its_traceback_too(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAGES, "/v1/jobs/j", JOB)
    output = printed("jobs", "get", "j", terminal=terminal)
    fields = [line.split("  ", 1) for line in output.split("\n\n")[0].splitlines()]
    assert {name: text.strip() for name, text in fields} == {
        "job": JOB["id"],
        "function": "f",
        "state": "failed",
        "attempt": "2 of 4",
        "queued (UTC)": SHOWN,
        "started (UTC)": "2027-01-15 08:00:01",
        "ended (UTC)": "2027-01-15 08:00:03",
        "ran s": "2.500",
        "isolation": "own-process",
        "cost USD": "0.250000",
        "error": "ValueError: [boom]",
    }
    assert f"\n\n{JOB['error']['traceback']}\n" in output
    assert "its host died" in output and f"stoker jobs timeline {JOB['id']}" in output
    assert json.loads(printed("jobs", "get", "j", "--json", terminal=terminal)) == JOB


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_dead_jobs_show_their_ids_whole(terminal: bool) -> None:
    output = printed("jobs", "dead", "f", terminal=terminal)
    assert JOB_ID in output.replace("\n", "") and f"more with --after {JOB_ID}" in output
    assert "…" not in output
    assert terminal or DEAD["error"]["message"] in output


def test_a_table_that_fits_is_a_table_whose_prose_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {**DEAD, "id": "f~9~01hzy3k6w8q4"}
    monkeypatch.setitem(PAGES, "/v1/functions/f/dead", {"data": [short], "has_more": False})
    output = printed("jobs", "dead", "f", terminal=True)
    row = next(line for line in output.splitlines() if "f~9~01hzy3k6w8q4" in line)
    assert row.split()[:2] == ["f~9~01hzy3k6w8q4", "3"] and "the worker was" in row
    assert max(map(len, output.splitlines())) <= 80


def test_usage_of_short_names_is_a_table_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {**USAGE, "function": "greet", "jobs": 3, "run_seconds": 12.34, "prompt_tokens": 1000, "cost_usd": 0.01}
    monkeypatch.setitem(PAGES, "/v1/usage", {"data": [row]})
    header, _, line = printed("usage", terminal=True).splitlines()
    assert " ".join(header.split()) == "function jobs no result run s cold s in cached out USD USD/1M"
    assert line.split() == ["greet", "3", "12", "12.3", "1.5", "1000", "100", "0", "0.010000", "10.0000"]
    assert len(header.rstrip()) <= 80


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_versions_of_many_functions_stay_readable(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [{"name": f"function-{n}", "version": f"{n:012}", "state": "proven", "error": None} for n in range(20)]
    few = {**VERSION, "version": "v0", "current": False, "functions": parts[:3]}
    monkeypatch.setitem(PAGES, "/v1/apps/shop/versions", {"data": [{**VERSION, "functions": parts}, few]})
    output = printed("versions", "shop", terminal=terminal)
    assert max(map(len, output.splitlines())) < (81 if terminal else 160)
    said = " ".join(output.split())
    assert "and 17 more" in said and said.count("more") == 1 and "function-2" in said and "function-3" not in said


def test_what_a_deployment_waits_for_is_short() -> None:
    def row(name: str) -> dict[str, Any]:
        return {"name": name, "replicas": {"loading": 1} if name == "f0" else {}, "wait_reason": None}

    functions = [row(f"f{n}") for n in range(20)]
    some = "f0: 1 loading; f1: waits for a replica; f2: waits for a replica"
    assert progress(functions, [f"f{n}" for n in range(20)], 20) == f"0 of 20 ready; {some} and 17 more"
    assert progress(functions, ["f0", "f1", "f2"], 20) == f"17 of 20 ready; {some}"
    assert progress(functions, ["f0"], 1) == "f0: 1 loading"


def test_usage_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what programs read."""
    one = {
        **USAGE,
        "function": "a",
        "jobs": 3,
        "failed": 1,
        "prompt_tokens": 10,
        "completion_tokens": 0,
        "cost_usd": 0.5,
    }
    two = {**one, "function": "b", "jobs": 4, "run_seconds": 1.0, "cost_usd": 0.25}
    monkeypatch.setitem(PAGES, "/v1/usage", {"data": [one, two]})
    *_, last = printed("usage", "--by", "function,day", terminal=False).splitlines()
    assert last.split() == ["total", "7", "2", "98766.4", "3.0", "20", "200", "0", "0.750000", "37500.0000"]
    assert [row["function"] for row in json.loads(printed("usage", "--json", terminal=False))] == ["a", "b"]
    assert len(printed("usage", "--csv", terminal=False).splitlines()) == 3
