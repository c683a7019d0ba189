"""The process that runs a user's function: imports the bundle once, then answers batches until told to stop."""

import argparse
import asyncio
import importlib
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stoker.runtime.processes import die_with_parent, parent_mark
from stoker.runtime.sdk import Function, InvalidInput, call
from stoker.runtime.wire import Channel, ChannelClosed, Frame
from stoker.runtime.worker.values import BadValue, check

Item = list[Any]

RUNTIME = Path(__file__).resolve().parents[1]


class BatchMismatch(TypeError):
    """A batched function returned something else than one result for each input."""


def resolve(entry: str) -> Callable[..., Any]:
    """`module:qualified.name` to the undecorated function."""
    module_name, _, path = entry.partition(":")
    target: Any = importlib.import_module(module_name)
    for name in path.split("."):
        target = getattr(target, name)
    return target.body if isinstance(target, Function) else target


def user_error(error: BaseException) -> dict[str, Any]:
    """What the function's owner sees: the traceback begins in their code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).resolve().is_relative_to(RUNTIME)]
    lines = [*traceback.format_list(own), f"{type(error).__name__}: {text_of(error)}\n"]
    return {
        "type": "function_error",
        "message": f"{type(error).__name__}: {text_of(error)}{hint(error)}",
        "code": type(error).__name__,
        "traceback": "".join(lines),
    }


def text_of(error: BaseException) -> str:
    """User exceptions may fail even at saying what they are."""
    try:
        return str(error).encode(errors="replace").decode()
    except BaseException as second:
        return f"(its message raised {type(second).__name__})"


def hint(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f" (install it for the workers, or, if {error.name} lies beside the app, name it in App(include=(...,)))"
    return ""


def run_single(body: Callable[..., Any], item: Item, emit: Callable[[str, Any], None]) -> Item:
    job_id, value = item
    try:
        result = call(body, value)
        if inspect.isawaitable(result):
            result = asyncio.run(awaited(result))
        if inspect.isgenerator(result):
            result = exhaust(result, lambda part: emit(job_id, part))
        check(result)
        return [job_id, True, result]
    except InvalidInput as error:
        return [job_id, False, {"type": "invalid_request_error", "message": str(error), "code": "invalid_input"}]
    except BaseException as error:
        return [job_id, False, user_error(error)]


async def awaited(result: Any) -> Any:
    return await result


def exhaust(generator: Any, emit: Callable[[Any], None]) -> list[Any]:
    """Streams each value and returns them all, so that a caller who doesn't stream gets the same answer."""
    values = []
    for value in generator:
        check(value)
        emit(value)
        values.append(value)
    return values


def run_batch(body: Callable[..., Any], items: list[Item]) -> list[Item]:
    """One call for all; an exception in a result's place fails that item alone."""
    try:
        results = body([value for _, value in items])
        if inspect.isawaitable(results):
            results = asyncio.run(awaited(results))
        if not isinstance(results, list | tuple) and not hasattr(results, "tolist"):
            raise BatchMismatch(f"a batched function must return a list, not a {type(results).__name__}")
        results = list(results)
        if len(results) != len(items):
            raise BatchMismatch(
                f"a batched function must return one result for each input: {len(items)} in, {len(results)} out"
            )
    except BaseException as error:
        return [[job_id, False, user_error(error)] for job_id, _ in items]
    return [settle(job_id, result) for (job_id, _), result in zip(items, results, strict=True)]


def settle(job_id: str, result: Any) -> Item:
    if isinstance(result, Exception):
        return [job_id, False, user_error(result)]
    try:
        check(result)
        return [job_id, True, result]
    except BadValue as error:
        return [job_id, False, user_error(error)]


def answer(channel: Channel, body: Callable[..., Any], frame: Frame) -> None:
    def emit(job_id: str, value: Any) -> None:
        channel.send({"t": "chunk", "id": job_id, "value": value})

    if frame["batched"]:
        results = run_batch(body, frame["items"])
    else:
        results = [run_single(body, item, emit) for item in frame["items"]]
    channel.send({"t": "results", "items": results})


def serve(channel: Channel, body: Callable[..., Any], concurrency: int) -> None:
    with ThreadPoolExecutor(concurrency, thread_name_prefix="call") as pool:
        while True:
            try:
                frame = channel.receive()
            except ChannelClosed:
                return
            if frame["t"] == "stop":
                return
            pool.submit(answer, channel, body, frame)


def follow_in_forks() -> None:
    """What user code forks (os.fork, multiprocessing) ends with this process."""
    os.register_at_fork(before=lambda: os.environ.update(parent_mark(os.getpid())), after_in_child=die_with_parent)


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--entry", required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    options = parser.parse_args()
    channel = Channel.from_fd(options.socket_fd)
    follow_in_forks()
    sys.path.insert(0, options.folder)
    os.chdir(options.folder)
    started = time.monotonic_ns()
    try:
        body = resolve(options.entry)
    except BaseException as error:
        channel.send({"t": "load_error", "error": user_error(error)})
        return
    phase = {"name": "import code", "start_ns": started, "end_ns": time.monotonic_ns()}
    channel.send({"t": "ready", "phases": [phase]})
    serve(channel, body, options.concurrency)


if __name__ == "__main__":
    main()
