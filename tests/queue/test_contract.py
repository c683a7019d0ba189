"""The contract in queue/README.md names its proofs; this checks that they exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROOF = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_promise_names_tests_that_exist() -> None:
    text = (ROOT / "queue" / "README.md").read_text()
    promises = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    assert len(promises) >= 15
    for promise in promises:
        proofs = PROOF.findall(promise)
        assert proofs, promise
        for path, name in proofs:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
