"""Names of KV blocks by content: a salted SHA-256 chain over full blocks of tokens."""

import hashlib
from array import array

BLOCK_TOKENS = 16
# No tenant's salt.
PUBLIC = b"\0public"


def root_key(model: bytes, dtype: bytes, salt: bytes, adapter: bytes = b"") -> bytes:
    """Start of a chain; `adapter` is its revision. Each field is tagged and length-prefixed, so no two sets of fields
    can run together."""
    digest = hashlib.sha256(b"stoker.kv.root")
    for tag, value in ((b"model", model), (b"dtype", dtype), (b"salt", salt), (b"adapter", adapter)):
        digest.update(tag + len(value).to_bytes(8, "little") + value)
    return digest.digest()


def block_key(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(b"stoker.kv.block" + parent + tokens).digest()


class HashChain:
    """Keys and contents (the tokens as int32 bytes) of the full blocks of a growing list of tokens. The first
    `public_blocks` are found by whoever has `public_root`; those behind them also follow from `root`."""

    __slots__ = ("_contents", "_keys", "_public_root", "_root", "_tokens", "public_blocks")

    def __init__(self, root: bytes, tokens: "array[int]", public_root: bytes = b"", public_blocks: int = 0) -> None:
        self._root = root
        self._public_root = public_root
        self.public_blocks = public_blocks
        self._tokens = tokens
        self._keys: list[bytes] = []
        self._contents: list[bytes] = []

    def key(self, index: int) -> bytes:
        self._extend(index)
        return self._keys[index]

    def content(self, index: int) -> bytes:
        self._extend(index)
        return self._contents[index]

    def _extend(self, index: int) -> None:
        while len(self._keys) <= index:
            start = len(self._keys) * BLOCK_TOKENS
            content = self._tokens[start : start + BLOCK_TOKENS].tobytes()
            self._keys.append(block_key(self._parent(), content))
            self._contents.append(content)

    def _parent(self) -> bytes:
        root, blocks = self._public_root, self.public_blocks
        if not self._keys:
            return root if blocks else self._root
        return block_key(self._keys[-1], self._root) if len(self._keys) == blocks else self._keys[-1]
