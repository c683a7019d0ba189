"""Names of single tokens: the bytes of a text's tokens, put together, are the text's."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from stoker.runtime.worker.pieces import Pieces

TEXT = "Grüße, 世界! 👩‍👩‍👧 a  b\n\t"


@pytest.mark.real_model
def test_byte_level_tokens(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    pieces = Pieces(tokenizer)
    tokens = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert b"".join(pieces.data(token) for token in tokens).decode() == TEXT
    assert len(tokens) > len(TEXT.split())
    special = tokenizer.token_to_id("<|im_end|>")
    assert pieces.data(special) == b"<|im_end|>"


def test_sentencepiece_tokens() -> None:
    vocabulary = {"\u2581Hi": 0, "!": 1, "<0x0A>": 2, "<0xE4>": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])  # type: ignore
    pieces = Pieces(tokenizer)
    assert [pieces.data(token) for token in range(4)] == [b" Hi", b"!", b"\n", b"\xe4"]
    assert pieces.entry(3, -0.5, [1], [-0.7]) == {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xE4],
        "top_logprobs": [{"token": "!", "logprob": -0.7, "bytes": [0x21]}],
    }
