"""What holds of all commands: how they exit, and that a program can read what they print."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from click import unstyle
from typer.testing import CliRunner

from stoker.runtime.cli import app
from stoker.runtime.client.client import Client
from stoker.runtime.client.errors import JobFailed, WaitTimeout
from stoker.runtime.commands import terminal
from stoker.runtime.commands.calls import too_late
from stoker.runtime.commands.exits import CODES, Failed, run
from stoker.runtime.commands.progress import waiting

# They run until they are stopped.
SERVICES = {"up", "gateway", "controller", "worker"}
APP = "import stoker\napp = stoker.App('shop')\n@app.function()\ndef f(x): return x\n"


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, child in command.commands.items():
            yield from leaves(child, (*path, name))
    else:
        yield path, command


COMMANDS = {" ".join(path): command for path, command in leaves(typer.main.get_command(app))}


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing listens, and nothing will while this is held."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def calling(command: Any, folder: Path) -> list[str]:
    """Arguments that fit."""
    file = folder / "shop_app.py"
    file.write_text(APP)
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [p for p in command.params if p.required and p not in arguments]
    values = [str(file) if parameter.name == "file" else "1" for parameter in arguments]
    return [*(text for option in options for text in (option.opts[0], "1")), *(["--", *values] if values else [])]


def has(command: Any, option: str) -> bool:
    return any(option in parameter.opts for parameter in command.params)


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_usage_exits_with_2(name: str) -> None:
    result = CliRunner().invoke(app, [*name.split(), "--no-such-option"])
    assert result.exit_code == 2 and "no-such-option" in unstyle(result.output)


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if has(command, "--url")])
def test_without_a_gateway_it_exits_with_3_and_says_what_to_do(
    name: str, nobody: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("1"))
    arguments = [*name.split(), "--url", nobody, *calling(COMMANDS[name], tmp_path)]
    assert run(lambda: app(arguments, standalone_mode=False)) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert nobody in said and "`stoker up`" in said and "--url" in said


@pytest.mark.parametrize("name", COMMANDS)
def test_what_it_prints_can_be_had_as_json(name: str) -> None:
    assert has(COMMANDS[name], "--json") == (name not in SERVICES)


@pytest.mark.parametrize("name", COMMANDS)
def test_it_says_what_it_is_for(name: str) -> None:
    assert COMMANDS[name].help
    assert all(getattr(parameter, "help", "") for parameter in COMMANDS[name].params), name


def test_the_exit_codes_are_documented() -> None:
    said = unstyle(CliRunner().invoke(app, ["--help"]).output)
    assert " ".join(CODES.split()) in " ".join(said.split()) and "--install-completion" in said


@pytest.mark.parametrize("name", ["gateway", "controller", "worker"])
def test_a_part_without_a_queue_is_wrong_usage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_REDIS", raising=False)
    result = CliRunner().invoke(app, [name])
    assert result.exit_code == 2 and "--redis" in unstyle(result.output)


def test_names_of_functions_are_completed_and_never_waited_for(monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    monkeypatch.setenv("STOKER_URL", nobody)
    assert terminal.deployed_names("a") == []
    monkeypatch.setattr(Client, "functions", lambda self: [{"name": "add"}, {"name": "sub"}])
    assert terminal.deployed_names("a") == ["add"]


def test_down_says_that_nothing_runs_there_and_what_runs_elsewhere(
    nobody: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def down() -> str:
        assert run(lambda: app(["down", "--data", str(tmp_path)], standalone_mode=False)) == 1
        return " ".join(capsys.readouterr().err.split())

    monkeypatch.setenv("STOKER_URL", nobody)
    said = down()
    assert f"nothing runs in {tmp_path}" in said and "--data" in said and nobody not in said
    with answering(b'{"status": "ok"}') as url:
        monkeypatch.setenv("STOKER_URL", url)
        assert f"the one that answers at {url} runs elsewhere" in down()
    with answering(b"<html>") as url:
        monkeypatch.setenv("STOKER_URL", url)
        assert url not in down()


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """A server that says the same to everything."""

    class Same(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Same) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_json_is_all_that_a_noisy_app_leaves_on_standard_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "noisy_shop.py"
    file.write_text(f"import os\nprint('noise')\nos.system('echo noise of a child')\n{APP}")
    record = {"name": "f", "kind": "python", "version": "1"}
    monkeypatch.setattr(
        Client, "request", lambda self, *_, **__: {"functions": [record], "deleted": [], "cancelled_jobs": 0}
    )
    assert run(lambda: app(["deploy", str(file), "--json"], standalone_mode=False)) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == [record] and err == "noise\nnoise of a child\n"


def test_setting_a_secret_says_when_functions_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "request", lambda self, *_, **__: {"name": "hub", "variable": "HUB"})
    monkeypatch.setattr("sys.stdin", StringIO("hush\n"))
    assert run(lambda: app(["secrets", "set", "hub"], standalone_mode=False)) == 0
    said = capsys.readouterr().out
    assert "find it as HUB" in said and "replicas that run keep the value that they have" in said and "hush" not in said


def test_without_a_terminal_what_is_waited_for_is_a_line_for_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("first") as silent, waiting("first", plainly=True) as plain:
        for text in ("a: booting, 20 s left", "a: booting, 9.5 s left", "a: 1 loading", "a: 1 ready", "a: booting"):
            silent(text)
            plain(text)
    assert capsys.readouterr().err.splitlines() == ["a: booting, 20 s left", "a: 1 loading", "a: 1 ready", "a: booting"]


def test_a_url_without_its_scheme_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: app(["functions", "--url", "localhost:8123"], standalone_mode=False)) == 1
    assert "error: the gateway's URL needs http:// or https://: 'localhost:8123'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "ended", "error", "said"),
    [
        ("running", None, WaitTimeout, "job f-1 is still running after 2 s"),
        ("succeeded", 1.0, Failed, "`stoker jobs get f-1` has its result"),
        ("failed", 1.0, JobFailed, "boom"),
    ],
)
def test_a_job_that_is_too_late_is_told_as_it_is(state: str, ended: Any, error: type[Exception], said: str) -> None:
    record = {"id": "f-1", "state": state, "finished_at": ended, "result": 1, "error": {"message": "boom"}}

    class Gateway(Client):
        def insist(self, method: str, path: str, **options: Any) -> Any:
            return record

    with Gateway("http://127.0.0.1:9") as client, pytest.raises(error, match=said):
        raise too_late(client.attach("f-1"), 2.0)
