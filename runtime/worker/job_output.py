"""Inside a function process: standard output and error become the host's pipes, and Python's lines are marked with the
job whose code writes them, so that jobs that run at once can be told apart."""

import contextlib
import ctypes
import io
import os
import secrets
import sys
import threading

from stoker.runtime.current_job import current_job

JOB_ENDS = b"\x1f"
LINE_BUFFERED = 1
MOST_BEGUN = 1 << 16


def new_mark() -> str:
    """Nobody's input can hold it, so that no input which is printed can pass for another job's line."""
    return f"\x1e{secrets.token_hex(8)}:"


class speaking_for:
    """What this thread or task, and the tasks that it starts, write meanwhile is the job's."""

    def __init__(self, job_id: str) -> None:
        self._token = current_job.set(job_id)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        for stream in (getattr(sys, "stdout", None), getattr(sys, "stderr", None)):
            if type(stream) is JobText and stream.unfinished:
                with contextlib.suppress(Exception):
                    stream.end_line()
        current_job.reset(self._token)


class JobText(io.TextIOWrapper):
    """Text that goes out line by line, each marked and in one piece, whoever else writes."""

    def __init__(self, fd: int, mark: str) -> None:
        raw = io.FileIO(fd, "wb", closefd=False)
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", write_through=True)  # type: ignore[arg-type]
        self._fd = fd
        self._mark = mark.encode()
        self._begun: dict[str, str] = {}
        self._open: str | None = None
        self._turn = threading.RLock()
        os.register_at_fork(after_in_child=self._renew)

    def write(self, text: str) -> int:  # type: ignore[override]
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        job = current_job.get()
        with self._turn:
            whole, newline, rest = (self._begun.pop(job, "") + text).rpartition("\n")
            if newline:
                self._put(job, whole)
            if len(rest) > MOST_BEGUN:
                self._put(job, rest)
            elif rest:
                self._begun[job] = rest
        return len(text)

    @property
    def unfinished(self) -> bool:
        """Whether some job's line has no end yet."""
        return bool(self._begun) or self._open is not None

    def flush(self) -> None:
        """What this job has begun goes out, so that it is not lost with the process; its line stays open."""
        job = current_job.get()
        with self._turn:
            if rest := self._begun.pop(job, ""):
                self._put(job, rest, end=b"")
                self._open = job

    def end_line(self) -> None:
        job = current_job.get()
        with self._turn:
            if (rest := self._begun.pop(job, "")) or self._open == job:
                self._put(job, rest)

    def _put(self, job: str, text: str, end: bytes = b"\n") -> None:
        head = self._mark + job.encode() + JOB_ENDS if job else b""
        lines = text.encode("utf-8", "backslashreplace").split(b"\n")
        first = b"" if self._open == job else head if self._open is None else b"\n" + head
        self._open = None
        self._write(first + (b"\n" + head).join(lines) + end)

    def _write(self, text: bytes) -> None:
        """Nothing fails for what can't be written any more: the pipe's reader is gone, or user code closed it."""
        data = memoryview(text)
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._fd, data) :]

    def _renew(self) -> None:
        """Another thread may have held it when this process was forked."""
        self._turn = threading.RLock()


def redirect(stdout_fd: int, stderr_fd: int, mark: str) -> None:
    """From here on everything that this process and its children write goes to the host's pipes."""
    for own, standard in ((stdout_fd, 1), (stderr_fd, 2)):
        os.dup2(own, standard)
        os.close(own)
    sys.stdout, sys.stderr = JobText(1, mark), JobText(2, mark)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, LINE_BUFFERED, 0)
