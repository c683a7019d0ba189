"""Lines of a batch's input, and the lines of its two answers."""

import json
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

METHOD = "POST"
UTF8_BOM = b"\xef\xbb\xbf"


class BadLine(ValueError):
    """A line that can't be run; `code` is for programs. `custom_id` is None when the line has none to speak of."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    body: dict[str, Any]


def parse_line(text: bytes, endpoint: str, seen: set[str]) -> BatchRequest:
    """Raises BadLine, also for JSON that no route takes. Adds the line's id to `seen`, where it must not be yet."""
    try:
        line = from_json(text.removeprefix(UTF8_BOM), allow_inf_nan=False)
    except ValueError as error:
        raise BadLine("invalid_json_line", f"The line is not valid JSON: {error}.") from None
    if not isinstance(line, dict):
        raise BadLine("invalid_json_line", "The line is not a JSON object.")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512:
        raise BadLine("missing_custom_id", "The line needs a 'custom_id' of 1 to 512 characters.")
    if custom_id in seen:
        raise BadLine("duplicate_custom_id", f"The custom_id '{custom_id}' was used in an earlier line.", custom_id)
    seen.add(custom_id)
    if line.get("method", METHOD) != METHOD:
        raise BadLine("invalid_method", "The line's 'method' must be 'POST'.", custom_id)
    if line.get("url") != endpoint:
        raise BadLine("mismatched_endpoint", f"The line's 'url' must be the batch's endpoint, '{endpoint}'.", custom_id)
    if not isinstance(line.get("body"), dict):
        raise BadLine("missing_body", "The line needs a 'body' that is a JSON object.", custom_id)
    return BatchRequest(custom_id, line["body"])


@dataclass(frozen=True, slots=True)
class LineResult:
    """`good` lines go to the output file, others to the error file; of those, a batch counts the `failed`."""

    good: bool
    failed: bool
    text: bytes


def answered(batch_id: str, number: int, custom_id: str, status: int, job_id: str, body: Any) -> LineResult:
    """`job_id` is "" for a line that was refused before it became a job: then its own id stands for it."""
    response = {"status_code": status, "request_id": job_id or row_id(batch_id, number), "body": body}
    return LineResult(status == 200, status != 200, row(batch_id, number, custom_id, response, None))


def bad(batch_id: str, number: int, line: BadLine) -> LineResult:
    return LineResult(
        False, True, row(batch_id, number, line.custom_id, None, {"code": line.code, "message": str(line)})
    )


def not_run(batch_id: str, number: int, custom_id: str, code: str, message: str) -> LineResult:
    """Because the batch ended first: it neither succeeded nor failed."""
    return LineResult(False, False, row(batch_id, number, custom_id, None, {"code": code, "message": message}))


def row_id(batch_id: str, number: int) -> str:
    return f"{batch_id}_{number}"


def row(batch_id: str, number: int, custom_id: str | None, response: Any, error: Any) -> bytes:
    record = {"id": row_id(batch_id, number), "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"
