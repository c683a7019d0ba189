"""The zygote of a host: what engine and function processes import before they are asked for."""

import argparse

from stoker.coldstart.zygote import serve
from stoker.runtime.processes import die_with_parent
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
    with_gpu = find_devices() != ["cpu"]
    serve(parser.parse_args().socket_fd, MODULES + (GPU_MODULES if with_gpu else []))


if __name__ == "__main__":
    main()
