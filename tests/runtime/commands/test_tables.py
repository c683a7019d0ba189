"""Tables at 80 columns and in a pipe: ids, names and money are whole."""

import json

import pytest
from click import unstyle
from typer.testing import CliRunner

from stoker.runtime.cli import app
from stoker.runtime.client.client import Client

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
PAGES = {"/v1/usage": {"data": [USAGE]}, "/v1/functions/f/dead": {"data": [DEAD], "has_more": True}}
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
    assert " ".join(header.split()) == "function jobs failed run s cold s in cached out USD USD/1M"
    assert line.split() == ["greet", "3", "12", "12.3", "1.5", "1000", "100", "0", "0.010000", "10.0000"]
    assert len(header.rstrip()) <= 80
