"""The standard output and error of a function process, read by its host: also what native code, sub-processes and a
process that crashes had written. Nobody waits for the log: what is too much is counted and dropped, but for its end."""

import asyncio
import contextlib
import fcntl
import os
import select
from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from itertools import chain

from stoker.runtime.logs.line import LINE_BYTES, Stream, readable
from stoker.runtime.worker.job_output import JOB_ENDS, new_mark
from stoker.runtime.worker.replica_log import MOST_LAST, ReplicaLog, Said

F_SETPIPE_SZ = 1031
PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 16
# A process that writes more than this at once waits a moment: 20 MB a second are read at most, mostly to be dropped.
PAUSE_BYTES, PAUSE_S = 1 << 20, 0.05
# What is kept of a line that has no end yet; the mark of its job and a job's id come on top.
MOST_BEGUN = LINE_BYTES + 512


class Capture:
    """`running` gives the jobs that run in the process now. A line belongs to the job that it is marked with, else to
    the only one that runs, else to none. `drain` before that changes, so that none is taken for another's."""

    def __init__(self, log: ReplicaLog, running: Callable[[], Set[str]]) -> None:
        self.mark = new_mark()
        self._closed = False
        streams: tuple[Stream, Stream] = ("stdout", "stderr")
        self._pipes = [Pipe(stream, log, running, self.mark.encode()) for stream in streams]
        self._readable = select.poll()
        for pipe in self._pipes:
            self._readable.register(pipe.fd, select.POLLIN)

    @property
    def fds(self) -> tuple[int, ...]:
        """The ends to write to, for the process; `started` closes them here."""
        return tuple(pipe.writer for pipe in self._pipes)

    def started(self) -> None:
        for pipe in self._pipes:
            pipe.start()

    def drain(self) -> None:
        """Everything that had been written is in the log, also what had no end of line. Cheap when that is nothing."""
        if self._readable.poll(0):
            for pipe in self._pipes:
                pipe.read()
        for pipe in self._pipes:
            pipe.end_line()

    def close(self) -> None:
        if not self._closed:
            self.drain()
            self._closed = True
            for pipe in self._pipes:
                pipe.close()


class Pipe:
    """One stream of the process."""

    def __init__(self, stream: Stream, log: ReplicaLog, running: Callable[[], Set[str]], mark: bytes) -> None:
        self._stream: Stream = stream
        self._log = log
        self._running = running
        self._mark = mark
        self._begun = b""
        self._paused: asyncio.TimerHandle | None = None
        self.fd, self.writer = os.pipe()
        os.set_blocking(self.fd, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, F_SETPIPE_SZ, PIPE_BYTES)

    def start(self) -> None:
        os.close(self.writer)
        self.writer = -1
        asyncio.get_running_loop().add_reader(self.fd, self._on_readable)

    def close(self) -> None:
        self._stop_reading()
        if self._paused:
            self._paused.cancel()
        for fd in (self.fd, self.writer):
            if fd >= 0:
                os.close(fd)
        self.fd = self.writer = -1

    def read(self) -> int:
        """What is there now: how many bytes. Never more than fit into a pipe, however fast it is filled again."""
        done = 0
        while done < PIPE_BYTES and self.fd >= 0:
            try:
                data = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                return done
            if not data:
                self._stop_reading()
                return done
            done += len(data)
            self._take(data)
        return done

    def end_line(self) -> None:
        begun, self._begun = self._begun, b""
        if begun:
            self._write(begun)

    def _on_readable(self) -> None:
        if self.read() >= PAUSE_BYTES:
            self._stop_reading()
            self._paused = asyncio.get_running_loop().call_later(PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        asyncio.get_running_loop().add_reader(self.fd, self._on_readable)

    def _stop_reading(self) -> None:
        if self.fd >= 0:
            asyncio.get_running_loop().remove_reader(self.fd)

    def _take(self, data: bytes) -> None:
        """Only as many lines are looked at as the log has room for."""
        room = max(0, self._log.room())
        *lines, rest = data.split(b"\n", room)
        if lines:
            self._write(self._begun + lines[0])
            self._begun = b""
            for line in lines[1:]:
                self._write(line)
        skipped, newline, rest = rest.rpartition(b"\n")
        if newline:
            self._skip(self._begun + skipped)
            self._begun = b""
        self._begun = (self._begun + rest)[:MOST_BEGUN]

    def _skip(self, lines: bytes) -> None:
        """The last of them may be wanted after all."""
        running = frozenset(self._running())
        last = lines.rsplit(b"\n", MOST_LAST)[-MOST_LAST:]
        self._log.drop(lines.count(b"\n") + 1, [partial(self._said, line, running) for line in last])

    def _write(self, line: bytes) -> None:
        for said in self._said(line, self._running()):
            self._log.write(*said)

    def _said(self, line: bytes, running: Set[str]) -> Iterator[Said]:
        unmarked, *marked = line.split(self._mark)
        if unmarked or not marked:
            yield self._stream, readable(unmarked), next(iter(running)) if len(running) == 1 else ""
        for part in marked:
            job, _, text = part.partition(JOB_ENDS)
            job_id = job.decode(errors="replace")
            yield self._stream, readable(text), job_id if job_id in running else ""


def jobs_of(batches: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset(chain.from_iterable(batches))
