import json

import pytest

from stoker.runtime.batches.batch_lines import BadLine, answered, bad, not_run, parse_line

URL = "/v1/chat/completions"
GOOD = {"custom_id": "a", "method": "POST", "url": URL, "body": {"model": "m"}}


def test_a_good_line() -> None:
    request = parse_line(json.dumps(GOOD).encode(), URL, set())
    assert (request.custom_id, request.body) == ("a", {"model": "m"})
    assert parse_line(b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), URL, set()) == request


@pytest.mark.parametrize(
    ("line", "code", "custom_id"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b'{"custom_id": NaN}', "invalid_json_line", None),
        (json.dumps({**GOOD, "body": {"user": "\ud800"}}).encode(), "invalid_json_line", None),
        (json.dumps({**GOOD, "url": []}).encode(), "mismatched_endpoint", "a"),
        (b"{}", "missing_custom_id", None),
        (json.dumps({**GOOD, "custom_id": 5}).encode(), "missing_custom_id", None),
        (json.dumps({**GOOD, "custom_id": "x" * 513}).encode(), "missing_custom_id", None),
        (json.dumps({**GOOD, "custom_id": "taken"}).encode(), "duplicate_custom_id", "taken"),
        (json.dumps({**GOOD, "method": "GET"}).encode(), "invalid_method", "a"),
        (json.dumps({**GOOD, "url": "/v1/other"}).encode(), "mismatched_endpoint", "a"),
        (json.dumps({**GOOD, "body": "text"}).encode(), "missing_body", "a"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_lines(line: bytes, code: str, custom_id: str | None) -> None:
    with pytest.raises(BadLine) as caught:
        parse_line(line, URL, {"taken"})
    assert (caught.value.code, caught.value.custom_id) == (code, custom_id)


def test_answers_are_lines_of_their_own() -> None:
    good = answered("batch_1", 7, "a", 200, "job", {"text": "zwei\nZeilen \u2028"})
    refused = answered("batch_1", 8, "b", 400, "", {"error": {"message": "no"}})
    skipped = not_run("batch_1", 9, "c", "batch_expired", "too late")
    broken = bad("batch_1", 10, BadLine("invalid_json_line", "what?"))
    results = (good, refused, skipped, broken)
    assert [result.good for result in results] == [True, False, False, False]
    assert [result.failed for result in results] == [False, True, False, True]
    for result in results:
        assert result.text.endswith(b"\n") and result.text.count(b"\n") == 1
    assert json.loads(good.text) == {
        "id": "batch_1_7",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "job", "body": {"text": "zwei\nZeilen \u2028"}},
        "error": None,
    }
    assert json.loads(refused.text)["response"]["request_id"] == "batch_1_8"
    error = {"code": "invalid_json_line", "message": "what?"}
    assert json.loads(broken.text) == {"id": "batch_1_10", "custom_id": None, "response": None, "error": error}
    assert json.loads(skipped.text)["error"] == {"code": "batch_expired", "message": "too late"}
