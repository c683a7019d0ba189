import pytest

from stoker.queue import keys


@pytest.mark.parametrize("name", [keys.FUNCTIONS, keys.meta("f"), keys.key("f", "v"), keys.key("f", "use")])
def test_permanent_keys(name: str) -> None:
    assert keys.is_permanent(name)


@pytest.mark.parametrize("name", [keys.key("f", "j:m"), keys.key("f", "q"), keys.key("f", "c:w"), "m", "else:{f}:m"])
def test_keys_that_must_end(name: str) -> None:
    assert not keys.is_permanent(name)


def test_all_keys_of_a_function_share_its_tag() -> None:
    assert keys.meta("text-to-image").partition("}")[0].partition("{")[2] == "text-to-image"
    assert keys.chunks("f", "f-1").startswith(keys.function_prefix("f"))


def test_idempotency_digests() -> None:
    assert keys.idempotency_digest("a", "") == ""
    digests = {keys.idempotency_digest(*pair) for pair in [("a", "bc"), ("ab", "c"), ("a", "b"), ("ä", "bc")]}
    assert len(digests) == 4
    assert {len(digest) for digest in digests} == {32}
    assert len(keys.idempotency_digest("a", "x" * 10_000)) == 32
