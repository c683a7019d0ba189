"""/v1/files, as OpenAI's clients use it."""

import asyncio
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import TypedDict

from stoker.coldstart.failures import ColdStartError
from stoker.runtime.batches.file_shelf import FILE_ID, FileRecord, new_file_id
from stoker.runtime.gateway.body import body_parts
from stoker.runtime.gateway.endpoint import Endpoint, Incoming, Json
from stoker.runtime.gateway.errors import NO_RETRY, ApiError, bad_request, not_found, store_unavailable

Purpose = Literal["batch", "user_data", "assistants", "fine-tune", "vision", "evals"]
PURPOSES = get_args(Purpose)
UPLOAD_S = 600.0
PAGE, MOST_PER_PAGE = 1000, 10_000


class FileUpload(TypedDict):
    """A form of multipart/form-data."""

    file: bytes
    purpose: Purpose


class FileObject(TypedDict):
    """OpenAI's record of a file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(TypedDict):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


async def post_file(incoming: Incoming) -> Response:
    """multipart/form-data with `file` and `purpose`."""
    with tempfile.TemporaryDirectory(prefix="stoker-file-") as folder:
        path = Path(folder) / "content"
        async with form_of(incoming) as form:
            upload, purpose = fields_of(form)
            await asyncio.to_thread(copy, upload, path)
        name = Path(upload.filename or "file").name[:255] or "file"
        record = FileRecord(new_file_id(), path.stat().st_size, int(time.time()), name, purpose)
        await stored(incoming.gateway.files.put, incoming.caller.tenant, record, path)
    return Json(file_object(record))


@asynccontextmanager
async def form_of(incoming: Incoming) -> AsyncIterator[FormData]:
    """Raises ApiError 400, 408 and 413. Other forms than this one would be read into memory whole."""
    if not incoming.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise no_form()
    parts = body_parts(incoming.scope, incoming.receive, incoming.gateway.settings.max_file_bytes, UPLOAD_S)
    request = Request(incoming.scope, receiver(parts))
    try:
        form = await request.form(max_files=1, max_fields=8)
    except HTTPException as error:
        raise bad_request(f"The form can't be read: {error.detail}", code="invalid_form") from None
    try:
        yield form
    finally:
        await form.close()


def fields_of(form: FormData) -> tuple[UploadFile, str]:
    """Raises ApiError 400."""
    upload, purpose = form.get("file"), form.get("purpose")
    if not isinstance(upload, UploadFile):
        raise no_form()
    if purpose not in PURPOSES:
        raise bad_request(f"'purpose' must be one of {', '.join(PURPOSES)}.", param="purpose")
    return upload, str(purpose)


def no_form() -> ApiError:
    return bad_request("The form needs a 'file' (send it as multipart/form-data).", param="file")


def receiver(parts: AsyncIterator[bytes]) -> Any:
    async def receive() -> Message:
        try:
            return {"type": "http.request", "body": await anext(parts), "more_body": True}
        except StopAsyncIteration:
            return {"type": "http.request", "body": b"", "more_body": False}

    return receive


def copy(upload: UploadFile, path: Path) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(upload.file, file)


async def stored(action: Any, *arguments: Any) -> Any:
    """Raises ApiError 503 when the store fails."""
    try:
        return await asyncio.to_thread(action, *arguments)
    except ColdStartError as error:
        raise store_unavailable(f"The object store failed: {error}.") from error


async def list_files(incoming: Incoming) -> Response:
    shelf, tenant, purpose = incoming.gateway.files, incoming.caller.tenant, incoming.query("purpose")
    limit, ids = incoming.limit(PAGE, MOST_PER_PAGE), await stored(shelf.all, tenant)
    found: list[FileRecord] = []
    for name in behind(incoming, ids, FILE_ID):
        record = await stored(shelf.get, tenant, name)
        if record and purpose in ("", record.purpose):
            found.append(record)
        if len(found) > limit:
            break
    return Json(list_object([file_object(record) for record in found[:limit]], len(found) > limit))


def behind(incoming: Incoming, ids: list[str], form: re.Pattern[str]) -> list[str]:
    """Those behind the query's `after`, which may be gone: ids rise with time, and `ids` are the newest first. Raises
    ApiError 400 for what has not the `form` of an id."""
    oldest_first, after = incoming.query("order") == "asc", incoming.query("after")
    ids = sorted(ids, reverse=not oldest_first)
    if not after:
        return ids
    if not form.fullmatch(after):
        raise bad_request("'after' is the id of the last one of the page before.", param="after")
    return [each for each in ids if (each > after if oldest_first else each < after)]


def list_object(rows: list[Any], more: bool) -> dict[str, Any]:
    ends = (rows[0]["id"], rows[-1]["id"]) if rows else (None, None)
    return {"object": "list", "data": rows, "first_id": ends[0], "last_id": ends[1], "has_more": more}


async def own_file(incoming: Incoming) -> FileRecord:
    """The caller's file of this path. Raises ApiError 404."""
    file_id = incoming.path("id")
    found = None
    if FILE_ID.fullmatch(file_id):
        found = await stored(incoming.gateway.files.get, incoming.caller.tenant, file_id)
    if found is None:
        raise file_not_found(file_id)
    return found


def file_not_found(file_id: str, param: str = "id") -> ApiError:
    return not_found(f"There is no file '{file_id}'.", code="file_not_found", param=param)


async def get_file(incoming: Incoming) -> Response:
    return Json(file_object(await own_file(incoming)))


async def file_content(incoming: Incoming) -> Response:
    record = await own_file(incoming)
    return Download(incoming.gateway.files.parts(incoming.caller.tenant, record), record.bytes)


class Download(Response):
    """Bytes as they come from the store; whoever runs the handler watches for the client's leaving."""

    media_type = "application/octet-stream"

    def __init__(self, parts: Iterator[bytes], length: int) -> None:
        super().__init__(headers={"content-length": str(length)})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while part := await asyncio.to_thread(next, self._parts, b""):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def delete_file(incoming: Incoming) -> Response:
    record = await own_file(incoming)
    if batch_id := await incoming.gateway.batches.reader_of(incoming.caller.tenant, record.id):
        message = f"Batch '{batch_id}' reads file '{record.id}'. Cancel the batch, or wait for its end, and try again."
        raise ApiError(409, message, code="file_in_use", param="id", headers=NO_RETRY)
    await stored(incoming.gateway.files.remove, incoming.caller.tenant, record.id)
    return Json({"id": record.id, "object": "file", "deleted": True})


def file_object(record: FileRecord) -> FileObject:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": record.created_at,
        "expires_at": None,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }


NO_FILE = {404: "There is no such file."}
PAGES = {"limit": "At most so many.", "after": "Go on behind the one of this id.", "order": "asc: the oldest first."}

FILE_ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/files",
        post_file,
        "invoke",
        "Upload a file (multipart/form-data: `file`, `purpose`).",
        "OpenAI",
        request=FileUpload,
        answer=FileObject,
        streams_body=True,
    ),
    Endpoint(
        "GET",
        "/v1/files",
        list_files,
        "invoke",
        "The caller's files.",
        "OpenAI",
        answer=FileList,
        asks={**PAGES, "purpose": "Only files of this purpose."},
    ),
    Endpoint(
        "GET", "/v1/files/{id}", get_file, "invoke", "One file's record.", "OpenAI", answer=FileObject, problems=NO_FILE
    ),
    Endpoint(
        "GET",
        "/v1/files/{id}/content",
        file_content,
        "invoke",
        "A file's bytes.",
        "OpenAI",
        problems=NO_FILE,
        media="application/octet-stream",
    ),
    Endpoint(
        "DELETE",
        "/v1/files/{id}",
        delete_file,
        "invoke",
        "Delete a file.",
        "OpenAI",
        answer=DeletedFile,
        problems={**NO_FILE, 409: "A batch that isn't over reads it."},
    ),
]
