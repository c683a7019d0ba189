"""What goes on beside a measurement, in a thread of its own, until its block ends."""

import threading


class Background:
    """Subclasses say in `_run` what goes on, and look at `_stop`."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError
