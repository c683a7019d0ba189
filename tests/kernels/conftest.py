"""`run(operation, *args)` runs one kernel operation, once in plain torch and once in interpreted Triton."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from stoker.kernels import reference


class Outcome(NamedTuple):
    """What an operation returned, and its arguments after the call (some are written in place)."""

    result: Any
    args: tuple[Any, ...]


Run = Callable[..., Outcome]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Run]:
    """Triton's interpreter must be chosen before Triton is imported: it lives in a process of its own."""
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("interpreter_child.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None
    requests, answers = child.stdin, child.stdout

    def run(operation: str, *args: Any) -> Outcome:
        pickle.dump((operation, args), requests)
        requests.flush()
        result, after, failure = pickle.load(answers)
        assert failure is None, failure
        return Outcome(result, after)

    yield run
    requests.close()
    assert child.wait(30) == 0
    answers.close()


@pytest.fixture(params=["reference", "triton"])
def run(request: pytest.FixtureRequest) -> Run:
    return in_torch if request.param == "reference" else request.getfixturevalue("interpreted")


def in_torch(operation: str, *args: Any) -> Outcome:
    args = copy.deepcopy(args)
    return Outcome(getattr(reference, operation)(*args), args)
