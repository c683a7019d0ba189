import hmac

import pytest

from stoker.runtime.tenancy import api_key
from stoker.runtime.tenancy.api_key import SCOPES, KeyRecord, Keyring, parse

RING = Keyring("the deployment's secret")


def test_a_key_opens_with_its_own_secret_only() -> None:
    text, record = RING.make("acme", ("invoke",))
    key_id, secret = parse(text) or ("", "")
    assert (key_id, record.tenant) == (record.id, "acme")
    assert RING.opens(secret, record)
    other, _ = RING.make("acme", ("invoke",))
    assert not RING.opens((parse(other) or ("", ""))[1], record)
    assert not RING.opens(secret, None)


def test_the_record_is_useless_with_another_pepper() -> None:
    text, record = RING.make("acme", ("invoke",))
    assert not Keyring("another secret").opens((parse(text) or ("", ""))[1], record)


def test_the_record_does_not_hold_the_secret() -> None:
    text, record = RING.make("acme", SCOPES)
    _, secret = parse(text) or ("", "")
    assert secret and secret not in str(record.to_dict())
    assert KeyRecord.from_dict(record.to_dict()) == record


def test_right_wrong_and_unknown_are_compared_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    text, record = RING.make("acme", ("invoke",))
    _, secret = parse(text) or ("", "")
    monkeypatch.setattr(api_key.hmac, "compare_digest", spy)
    assert [RING.opens(secret, record), RING.opens("wrong", record), RING.opens(secret, None)] == [True, False, False]
    assert compared == [(32, 32)] * 3


def test_the_root_key_follows_from_the_secret() -> None:
    text = RING.root_text()
    assert text == Keyring("the deployment's secret").root_text() != Keyring("another").root_text()
    key_id, secret = parse(text) or ("", "")
    assert key_id == "root" and RING.opens(secret, RING.root_record())


@pytest.mark.parametrize(
    "text", ["", "sk-stoker", "sk-stoker-abcd-short", "sk-other-abcdefghijkl-" + "x" * 43, "x" * 9000]
)
def test_what_is_no_key_is_not_parsed(text: str) -> None:
    assert parse(text) is None


def test_keys_expire() -> None:
    _, record = RING.make("acme", ("invoke",), expires_at=100.0)
    assert record.alive(99.0) and not record.alive(100.0)
