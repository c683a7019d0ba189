"""Tokenizers of models that were awake here. Reading one takes up to a second of a processor, in which the library lets
no other thread of the process run: a model that wakes again makes nobody's tokens wait for that."""

import hashlib
import threading
from collections import OrderedDict

from tokenizers import Tokenizer

# A vocabulary of 128,000 takes about 50 MB.
KEPT = 8


class TokenizerShelf:
    """Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Tokenizer] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, text: bytes) -> Tokenizer:
        """Of a tokenizer.json. Others have it too: don't change it. Blocking; raises the library's Exceptions."""
        name = hashlib.sha256(text).digest()
        with self._lock:
            found = self._kept.pop(name, None) or Tokenizer.from_buffer(text)
            self._kept[name] = found
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return found
