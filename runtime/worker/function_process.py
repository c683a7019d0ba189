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

from stoker.runtime.processes import die_with_parent
from stoker.runtime.sdk import Function, call
from stoker.runtime.wire import Channel, ChannelClosed, Frame, encode

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
    lines = traceback.format_list(own) + traceback.format_exception_only(error)
    return {
        "type": "function_error",
        "message": f"{type(error).__name__}: {error}",
        "code": type(error).__name__,
        "traceback": "".join(lines),
    }


def run_single(body: Callable[..., Any], item: Item, emit: Callable[[str, Any], None]) -> Item:
    job_id, value = item
    try:
        result = call(body, value)
        if inspect.isawaitable(result):
            result = asyncio.run(awaited(result))
        if inspect.isgenerator(result):
            result = exhaust(result, lambda part: emit(job_id, part))
        return [job_id, True, result]
    except Exception as error:
        return [job_id, False, user_error(error)]


async def awaited(result: Any) -> Any:
    return await result


def exhaust(generator: Any, emit: Callable[[Any], None]) -> list[Any]:
    """Streams each value and returns them all, so that a caller who doesn't stream gets the same answer."""
    values = []
    for value in generator:
        emit(value)
        values.append(value)
    return values


def run_batch(body: Callable[..., Any], items: list[Item]) -> list[Item]:
    """One call for all; an exception in a result's place fails that item alone."""
    try:
        results = body([value for _, value in items])
        if inspect.isawaitable(results):
            results = asyncio.run(awaited(results))
        results = list(results)
        if len(results) != len(items):
            raise BatchMismatch(
                f"a batched function must return one result for each input: {len(items)} in, {len(results)} out"
            )
    except Exception as error:
        return [[job_id, False, user_error(error)] for job_id, _ in items]
    return [settle(job_id, result) for (job_id, _), result in zip(items, results, strict=True)]


def settle(job_id: str, result: Any) -> Item:
    return [job_id, False, user_error(result)] if isinstance(result, Exception) else [job_id, True, result]


def answer(channel: Channel, body: Callable[..., Any], frame: Frame) -> None:
    def emit(job_id: str, value: Any) -> None:
        channel.send({"t": "chunk", "id": job_id, "value": value})

    if frame["batched"]:
        results = run_batch(body, frame["items"])
    else:
        results = [run_single(body, item, emit) for item in frame["items"]]
    send_results(channel, results)


def send_results(channel: Channel, results: list[Item]) -> None:
    try:
        channel.send({"t": "results", "items": results})
    except (TypeError, ValueError, OverflowError):
        channel.send({"t": "results", "items": [sendable(item) for item in results]})


def sendable(item: Item) -> Item:
    """A result that msgpack can't carry fails its own job, not its neighbours'."""
    try:
        encode({"item": item})
        return item
    except (TypeError, ValueError, OverflowError) as error:
        hint = f"the result can't be sent ({error}); return numbers, text, bytes, lists, dicts or None"
        return [item[0], False, user_error(TypeError(hint))]


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


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--entry", required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    options = parser.parse_args()
    channel = Channel.from_fd(options.socket_fd)
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
