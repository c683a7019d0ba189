"""The zygote of a host: what engine and function processes import before they are asked for."""

import argparse
import os
import signal

from stoker.coldstart.driver import keep_open
from stoker.coldstart.zygote import serve, show_name
from stoker.runtime.processes import die_with_parent, parent_mark
from stoker.runtime.worker.devices import find_devices

MODULES = [
    "torch",
    "stoker.runtime.engine.models",
    "stoker.runtime.engine.process",
    "stoker.runtime.worker.function_process",
]
GPU_MODULES = ["stoker.runtime.worker.primed"]


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket-fd", type=int, required=True)
    socket_fd, with_gpu = parser.parse_args().socket_fd, find_devices() != ["cpu"]
    if with_gpu:
        fork_keeper(socket_fd)
    serve(socket_fd, MODULES + (GPU_MODULES if with_gpu else []))


def fork_keeper(socket_fd: int) -> None:
    """A process that keeps the CUDA driver open for those that the zygote forks later, as long as it lives."""
    os.environ |= parent_mark(os.getpid())
    if os.fork() == 0:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.close(socket_fd)
        show_name("stoker-driver")
        keep_open()


if __name__ == "__main__":
    main()
