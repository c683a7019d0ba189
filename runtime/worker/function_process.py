"""The process that runs a user's function: loads it once, then answers calls until told to stop."""

import argparse
import contextlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from stoker.runtime.arrays import opened
from stoker.runtime.current_job import this_process
from stoker.runtime.processes import die_with_parent, parent_mark
from stoker.runtime.wire import Channel, ChannelClosed, Frame
from stoker.runtime.worker.call_threads import Call, CallThreads
from stoker.runtime.worker.confinement import confine
from stoker.runtime.worker.event_loop import EventLoop
from stoker.runtime.worker.interrupt import Interrupt, Interrupts
from stoker.runtime.worker.job_output import redirect, speaking_for
from stoker.runtime.worker.user_code import Item, UserCode, resolve
from stoker.runtime.worker.user_errors import Allowance, user_error

Phase = dict[str, Any]
Work = Callable[[list[Item], Interrupt], list[Item]]
NO_ANSWER = 70


class Answers:
    """What calls have come to. Those that end while a frame is written leave together in the next."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ready: list[Item] = []
        self._turn = threading.Lock()
        self._sending = False

    def chunk(self, job_id: str, value: Any) -> None:
        self._channel.send({"t": "chunk", "id": job_id, "value": value})

    def put(self, items: list[Item]) -> None:
        with self._turn:
            self._ready += items
            if self._sending:
                return
            self._sending = True
            items, self._ready = self._ready, []
        while items:
            self._send(items)
            items = self._taken()

    def _send(self, items: list[Item]) -> None:
        """Those that can't be sent become errors that say why."""
        try:
            self._channel.send({"t": "results", "items": items})
        except ChannelClosed:
            raise
        except Exception as error:
            if len(items) > 1:
                for item in items:
                    self._send([item])
            else:
                self._channel.send({"t": "results", "items": [unsent(items[0][0], error)]})

    def _taken(self) -> list[Item]:
        with self._turn:
            items, self._ready = self._ready, []
            self._sending = bool(items)
            return items


def unsent(job_id: str, error: BaseException) -> Item:
    record = user_error(error)
    return [job_id, False, {**record, "message": f"the result can't be sent: {record['message']}"}]


def calls_of(code: UserCode, answers: Answers, interrupts: Interrupts, frame: Frame) -> list[Call]:
    calls = [frame["items"]] if frame["batched"] else [[item] for item in frame["items"]]
    work = call_batch if frame["batched"] else call_single
    opened = [(items, interrupts.open([item[0] for item in items])) for items in calls]
    return [partial(call, partial(work, code, answers), answers, interrupts, *each) for each in opened]


def call(work: Work, answers: Answers, interrupts: Interrupts, items: list[Item], interrupt: Interrupt) -> None:
    """Every job gets its answer, whatever goes wrong; where that is not possible, the process ends for all to see."""
    job_ids = [item[0] for item in items]
    try:
        try:
            results = work(items, interrupt)
        except BaseException as error:
            record = user_error(error)
            results = [[job_id, False, record] for job_id in job_ids]
        interrupts.close(job_ids, interrupt)
        answers.put(results)
    except BaseException as error:
        give_up(error)


def call_batch(code: UserCode, answers: Answers, items: list[Item], interrupt: Interrupt) -> list[Item]:
    return code.batch(items, interrupt)


def call_single(code: UserCode, answers: Answers, items: list[Item], interrupt: Interrupt) -> list[Item]:
    with speaking_for(items[0][0]):
        return [code.single(items[0], answers.chunk, interrupt)]


def give_up(error: BaseException) -> NoReturn:
    """Nothing that user code left behind, also no other call, may keep the process."""
    with contextlib.suppress(BaseException):
        os.write(2, f"stoker: this process can't answer any more: {type(error).__name__}: {error}\n".encode())
    os._exit(NO_ANSWER)


def serve(channel: Channel, code: UserCode, concurrency: int) -> None:
    threads, answers, interrupts = CallThreads(concurrency), Answers(channel), Interrupts()
    this_process.only_call = interrupts.only_call
    try:
        while (frame := channel.receive())["t"] != "stop":
            if frame["t"] == "cancel":
                interrupts.set(frame["id"])
            else:
                threads.submit(calls_of(code, answers, interrupts, frame))
    except BaseException as error:
        give_up(error)
    threads.close()


def load(start: Frame, phases: list[Phase], channel: Channel) -> UserCode:
    """Imports the code and runs its load step, if it has one, and says so. Raises whatever user code raises."""
    loop = EventLoop()
    channel.send({"t": "step", "name": "import code"})
    body, step = timed(phases, "import code", lambda: resolve(start["entry"]))
    if step is not None:
        channel.send({"t": "step", "name": "load step"})
        timed(phases, "load step", lambda: settle(loop, step()))
    return UserCode(body, batched=start["batched"], loop=loop)


def settle(loop: EventLoop, result: Any) -> None:
    if inspect.isawaitable(result):
        loop.result(result)


def timed(phases: list[Phase], name: str, work: Callable[[], Any]) -> Any:
    started = time.monotonic_ns()
    result = work()
    phases.append({"name": name, "start_ns": started, "end_ns": time.monotonic_ns()})
    return result


def follow_in_forks() -> None:
    """What user code forks (os.fork, multiprocessing) ends with this process."""
    os.register_at_fork(before=lambda: os.environ.update(parent_mark(os.getpid())), after_in_child=die_with_parent)


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--output-fds", type=int, nargs=2, required=True)
    parser.add_argument("--mark", required=True)
    options = parser.parse_args()
    stdout, stderr = options.output_fds
    redirect(stdout, stderr, options.mark)
    channel = Channel.from_fd(options.socket_fd, ext_hook=opened)
    try:
        start = channel.receive()
    except ChannelClosed:
        return
    confine(start)
    Allowance.memory_mb = start["memory_mb"]
    follow_in_forks()
    sys.path.insert(0, start["folder"])
    os.chdir(start["folder"])
    phases: list[Phase] = []
    try:
        code = load(start, phases, channel)
    except BaseException as error:
        channel.send({"t": "load_error", "error": user_error(error)})
        return
    channel.send({"t": "ready", "phases": phases})
    serve(channel, code, start["concurrency"])


if __name__ == "__main__":
    main()
