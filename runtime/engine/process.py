"""The engine process: one per device, many models. Speaks frames with the host agent over a socket pair.

A reader thread fills the inbox; the main thread alternates between the inbox and one step of every model with work.
"""

import argparse
import gc
import logging
import os
import signal
import sys
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from stoker.coldstart.ring import Ring
from stoker.coldstart.timeline import Timeline
from stoker.runtime.processes import die_with_parent
from stoker.runtime.wire import Channel, ChannelClosed, Frame

if TYPE_CHECKING:
    from stoker.runtime.engine.models import Models

log = logging.getLogger(__name__)

STOP: Frame = {"t": "stop"}
Inbox = SimpleQueue[Frame]
SWITCH_S = 0.0005


def main() -> None:
    die_with_parent()
    # Ctrl-C reaches the whole terminal group; when to stop is the agent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    args = arguments()
    channel = Channel.from_fd(args.socket_fd)
    timeline = Timeline()
    inbox: Inbox = SimpleQueue()
    models = start(channel, Ring.attach(args.ring_fd, args.ring_slots), timeline, inbox, args.device_bytes)
    threading.Thread(target=read, args=(channel, models, inbox), daemon=True, name="engine-reader").start()
    try:
        channel.send({"t": "hello", "pid": os.getpid(), "phases": timeline.take()})
        serve(models, inbox)
    except ChannelClosed:
        log.info("the host agent is gone")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--ring-fd", type=int, required=True)
    parser.add_argument("--ring-slots", type=int, required=True)
    parser.add_argument("--device-bytes", type=int, default=0, help="memory for all models; 0: what is free")
    return parser.parse_args()


def start(channel: Channel, ring: Ring, timeline: Timeline, inbox: Inbox, limit: int) -> "Models":
    """Imports what takes long here, where the timeline sees it."""
    # Threads that wait for each other by spinning burn the cores that the gateway and the agent need, and are several
    # times slower as soon as those are busy. OpenMP reads this once, when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with timeline.phase("import torch"):
        import torch
    with timeline.phase("import engine"):
        from stoker.runtime.engine.models import Models
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    # What the imports made stays for good. Left to the collector, going through it again and again takes tens of
    # milliseconds at a time, between two tokens.
    gc.freeze()
    # Whoever queues copies gives the interpreter's lock up for every piece of memory that it registers. To get it back
    # from a thread that loads kernels would take 5 ms each time, Python's default.
    sys.setswitchinterval(SWITCH_S)
    started = Timeline()
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        threading.Thread(target=open_device, args=(started,), daemon=True, name="cuda-context").start()
    return Models(channel.send, ring, inbox.put, started, limit)


def open_device(timeline: Timeline) -> None:
    """Takes a quarter of a second, in which the first model's files and tables are prepared."""
    import torch

    from stoker.coldstart.driver import open_context

    with timeline.phase("CUDA driver"):
        open_context()
    if torch.cuda.is_available():
        with timeline.phase("CUDA context"):
            torch.zeros(1, device="cuda")
        with timeline.phase("cuBLAS"):
            matrix = torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16)
            torch.nn.functional.linear(matrix, matrix)


def read(channel: Channel, models: "Models", inbox: Inbox) -> None:
    try:
        while True:
            frame = channel.receive()
            if not models.route(frame):
                inbox.put(frame)
    except ChannelClosed:
        pass
    finally:
        inbox.put(STOP)


def serve(models: "Models", inbox: Inbox) -> None:
    """Until a stop frame, or the end of the channel."""
    while True:
        while models.wait_s() is None and inbox.empty() and models.prepare_idle():
            pass
        for frame in waiting_frames(inbox, models.wait_s()):
            if frame["t"] == "stop":
                return
            models.handle(frame)
        models.step()


def waiting_frames(inbox: Inbox, wait_s: float | None) -> list[Frame]:
    """All that are there; the first one is waited for, None: for ever."""
    frames: list[Frame] = []
    try:
        if wait_s != 0:
            frames.append(inbox.get(timeout=wait_s))
        while True:
            frames.append(inbox.get_nowait())
    except Empty:
        return frames


if __name__ == "__main__":
    main()
