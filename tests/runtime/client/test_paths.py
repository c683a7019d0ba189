import pytest

from stoker.runtime.cli import app
from stoker.runtime.client.paths import app_path, key_path
from stoker.runtime.commands import exits


def test_names_are_quoted() -> None:
    assert app_path("brk?x=1") == "/v1/apps/brk%3Fx%3D1"
    assert key_path("ünit", "k#1") == "/v1/tenants/%C3%BCnit/keys/k%231"


@pytest.mark.parametrize(
    "words",
    [
        ("delete", "--app", "../functions/f"),
        ("delete", ""),
        ("versions", "../functions/f"),
        ("jobs", "get", ""),
        ("invoke", "..", "1"),
        ("secrets", "delete", "a/b"),
        ("tenants", "keys", ""),
        ("logs", "f/.."),
    ],
)
def test_what_would_be_another_path_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(lambda: app([*words, "--url", "http://127.0.0.1:9"], standalone_mode=False)) == exits.FAILED
    assert " is no " in capsys.readouterr().err
