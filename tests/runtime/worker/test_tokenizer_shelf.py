import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from stoker.runtime.worker import tokenizer_shelf
from stoker.runtime.worker.tokenizer_shelf import TokenizerShelf


def document(word: str) -> bytes:
    model = {"type": "WordLevel", "vocab": {word: 0, "?": 1}, "unk_token": "?"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model}).encode()


def test_one_document_is_read_once() -> None:
    shelf = TokenizerShelf()
    with ThreadPoolExecutor(4) as pool:
        found = set(map(id, pool.map(shelf.read, [document("a")] * 8)))
    assert len(found) == 1
    assert shelf.read(document("b")).token_to_id("b") == 0 and shelf.read(document("a")).token_to_id("b") is None


def test_the_last_ones_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_shelf, "KEPT", 2)
    shelf = TokenizerShelf()
    first, second = shelf.read(document("a")), shelf.read(document("b"))
    assert shelf.read(document("a")) is first
    shelf.read(document("c"))
    assert shelf.read(document("a")) is first and shelf.read(document("b")) is not second


def test_what_is_no_tokenizer_is_not_kept() -> None:
    shelf = TokenizerShelf()
    for _ in range(2):
        with pytest.raises(Exception, match="line 1"):
            shelf.read(b"{}")
