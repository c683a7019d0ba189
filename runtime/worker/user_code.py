"""A deployed function as its process runs it: found in its bundle, loaded once, called with one input or a batch."""

import contextlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from stoker.runtime.inputs import Inputs, Misfit
from stoker.runtime.sdk import LOAD, Function, marked
from stoker.runtime.worker.event_loop import EventLoop
from stoker.runtime.worker.interrupt import Interrupt
from stoker.runtime.worker.user_errors import input_error, user_error
from stoker.runtime.worker.values import plain

Item = list[Any]
Emit = Callable[[str, Any], None]
VALUES = frozenset((dict, list, str, int, float, bool, type(None)))


class BatchMismatch(TypeError):
    """A batched function returned something else than one result for each input."""


class UserCode:
    """Results come as [job id, succeeded, value or error record]. Threads may call it at the same time."""

    def __init__(self, body: Callable[..., Any], *, batched: bool = False, loop: EventLoop | None = None) -> None:
        self._body = body
        self._inputs = Inputs(body, batched=batched)
        self._loop = loop or EventLoop()

    def single(self, item: Item, emit: Emit, interrupt: Interrupt | None = None) -> Item:
        job_id, value = item
        interrupt = interrupt or Interrupt()
        try:
            given = self._inputs.arguments(value)
            interrupt.check()
            made = self._body(*given.args, **given.kwargs)
            result = self._finished(made, lambda part: emit(job_id, part), interrupt)
            return [job_id, True, plain(result)]
        except Misfit as error:
            return [job_id, False, input_error(error)]
        except BaseException as error:
            return [job_id, False, user_error(error)]

    def batch(self, items: list[Item], interrupt: Interrupt | None = None) -> list[Item]:
        """One call for all whose input fits; an exception in a result's place fails that item alone."""
        fitting: list[Item] = []
        misfits: list[Item] = []
        for job_id, value in items:
            try:
                fitting.append([job_id, self._inputs.item(value)])
            except Misfit as error:
                misfits.append([job_id, False, input_error(error)])
            except BaseException as error:
                misfits.append([job_id, False, user_error(error)])
        return misfits + (self._call(fitting, interrupt or Interrupt()) if fitting else [])

    def _call(self, items: list[Item], interrupt: Interrupt) -> list[Item]:
        try:
            interrupt.check()
            results = self._body([value for _, value in items])
            if inspect.isawaitable(results):
                results = self._loop.result(results, interrupt)
            results = listed(results, len(items))
        except BaseException as error:
            return [[job_id, False, user_error(error)] for job_id, _ in items]
        return [settled(job_id, result) for (job_id, _), result in zip(items, results, strict=True)]

    def _finished(self, result: Any, emit: Callable[[Any], None], interrupt: Interrupt) -> Any:
        """What a coroutine returns; a generator's values are streamed, and returned as a list, so that a caller who
        doesn't stream gets the same answer. A generator is closed when it is interrupted or its value can't be sent."""

        def take(value: Any) -> Any:
            interrupt.check()
            value = plain(value)
            emit(value)
            return value

        if type(result) in VALUES:
            return result
        if inspect.isawaitable(result):
            return self._loop.result(result, interrupt)
        if inspect.isasyncgen(result):
            return self._loop.exhaust(result, take, interrupt)
        if not inspect.isgenerator(result):
            return result
        with contextlib.closing(result):
            return [take(value) for value in result]


def listed(results: Any, expected: int) -> list[Any]:
    if not isinstance(results, list | tuple) and not hasattr(results, "tolist"):
        raise BatchMismatch(f"a batched function must return a list, not a {type(results).__name__}")
    results = list(results)
    if len(results) != expected:
        raise BatchMismatch(
            f"a batched function must return one result for each input: {expected} in, {len(results)} out"
        )
    return results


def settled(job_id: str, result: Any) -> Item:
    if isinstance(result, Exception):
        return [job_id, False, user_error(result)]
    try:
        return [job_id, True, plain(result)]
    except BaseException as error:
        return [job_id, False, user_error(error)]


def resolve(entry: str) -> tuple[Callable[..., Any], Callable[[], Any] | None]:
    """`module:qualified.name` as what is called and, of a method of a class, its load step."""
    module_name, _, path = entry.partition(":")
    target: Any = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        target = getattr(target, part)
    if not inspect.isclass(target):
        body = getattr(target, name)
        return (body.body if isinstance(body, Function) else body), None
    instance = target()
    steps = marked(target, LOAD)
    return getattr(instance, name), getattr(instance, steps[0]) if steps else None
