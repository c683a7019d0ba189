"""The CUDA driver's own start, without torch: most of the time that a context takes, and no Python thread waits."""

import contextlib
import ctypes


def open_context(device: int = 0) -> bool:
    """Creates the primary context that torch will use; False where there is no driver or no such GPU. It lives as long
    as the process."""
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        return driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    return False
