from pathlib import Path

import pytest

from stoker.runtime.settings import Settings
from stoker.runtime.supervisor import banner

USUAL = "http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("STOKER_DATA", "STOKER_URL"):
        monkeypatch.delenv(name, raising=False)


def test_the_banner_of_the_usual_folder_and_address_is_short(tmp_path: Path) -> None:
    folder = tmp_path / ".stoker"
    assert banner(Settings(folder), USUAL, 7).splitlines() == [
        f"stoker is up at {USUAL}  (pid 7, data in {folder})",
        "stop it with: stoker down",
    ]


def test_the_banner_names_another_folder_and_address_in_its_commands(tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    lines = banner(Settings(folder, auth="keys"), "http://127.0.0.1:8001", 7).splitlines()
    assert lines[1] == "other commands find it with: export STOKER_URL=http://127.0.0.1:8001"
    assert f"yours: stoker tenants root-key --data '{folder}', others': " in lines[2]
    assert lines[3] == f"stop it with: stoker down --data '{folder}'"


def test_what_the_environment_says_needs_no_saying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_DATA", str(tmp_path / "d"))
    monkeypatch.setenv("STOKER_URL", "http://127.0.0.1:8001/")
    lines = banner(Settings(tmp_path / "d"), "http://127.0.0.1:8001", 7).splitlines()
    assert lines[1:] == ["stop it with: stoker down"]


def test_that_functions_run_as_root_is_said(tmp_path: Path) -> None:
    lines = banner(Settings(tmp_path), USUAL, 7, "other users can't enter /root").splitlines()
    assert "functions run as root, and can read what root can: other users can't enter /root" in lines
