"""Tokens as clients see them one by one: their text and their exact bytes, which needn't be whole characters."""

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer

SPACE = "\u2581"


class Pieces:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str()).get("decoder"))
        self._added = {id for id in tokenizer.get_added_tokens_decoder()}

    def entry(self, token: int, logprob: float, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        """OpenAI's record of one token and of the likeliest ones in its place."""
        top = [self._named(other, value) for other, value in zip(ids, logprobs, strict=True)]
        return {**self._named(token, logprob), "top_logprobs": top}

    def data(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token) or ""
        if token in self._added:
            return piece.encode()
        if self._byte_level:
            codes = byte_codes()
            return bytes(codes[letter] for letter in piece) if all(c in codes for c in piece) else piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.data(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


@cache
def byte_codes() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable ones stand for themselves, the others follow 255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [code for code in range(256) if code not in plain]
    return {chr(code): code for code in plain} | {chr(256 + place): code for place, code in enumerate(others)}
