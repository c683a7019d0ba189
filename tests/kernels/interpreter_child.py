"""Runs the Triton kernels on CPU tensors, apart from the tests' own process, where Triton must stay uninterpreted.

Reads pickled (operation, arguments) from standard input; answers (result, arguments after the call, traceback).
"""

import os
import pickle
import sys
import traceback
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from stoker.kernels import attention, device, gemv, invariant

# Operations whose blocks the test chooses.
CHOSEN = {
    "attend": lambda chosen, *step: attention.paged_attention(*step, choose=lambda *_: chosen),
    "gemv": gemv.gemv,
}


def exact_dot(self, a, b, sums, *_):
    """The interpreter holds bfloat16 as 16-bit integers and would multiply those: multiply floats instead. In float64,
    because in which order NumPy adds depends on a row's place in its tile; rounded to float32, that doesn't show."""
    if a.dtype.scalar == tl.bfloat16:
        a, b = self.create_fp_ext(a, tl.float32), self.create_fp_ext(b, tl.float32)
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(sums.data.dtype)
    return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)


def convert_exactly(convert):
    """The interpreter truncates float32 to bfloat16; a GPU, and torch, round to the nearest."""

    def converted(data, source, target, rounding):
        if {source, target} != {tl.float32, tl.bfloat16}:
            return convert(data, source, target, rounding)
        if source == tl.bfloat16:
            return (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return torch.from_numpy(np.array(data, np.float32)).bfloat16().view(torch.uint16).numpy()

    return converted


def index_scalars(patch):
    """Triton 3.6 turns a one-element array into an integer in a way that NumPy 2.4 no longer allows."""

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return patched


def main() -> None:
    requests, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    # Fresh tensors are filled with NaN, so an output that is never written shows.
    torch.use_deterministic_algorithms(True)
    interpreter._convert_float = convert_exactly(interpreter._convert_float)
    interpreter._patch_lang_tensor = index_scalars(interpreter._patch_lang_tensor)
    builder: Any = interpreter.InterpreterBuilder
    builder.create_dot = exact_dot
    while True:
        try:
            operation, args = pickle.load(requests)
        except EOFError:
            return
        try:
            name, _, mode = operation.partition(" ")
            call = CHOSEN.get(name) or getattr(invariant if mode == "invariant" else device, name)
            answer = (call(*args), args, None)
        except Exception:
            answer = (None, None, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    sys.exit(main())
