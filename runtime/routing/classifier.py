"""Tells texts' targets from their embeddings: logistic regression, learned from a few examples of each target."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
import numpy as np

STEPS = 400
RATE = 8.0
DECAY = 1e-3


@dataclass(frozen=True, slots=True)
class Classifier:
    """`weights` [targets, dimensions] and `biases` [targets], float32."""

    targets: tuple[str, ...]
    weights: np.ndarray
    biases: np.ndarray

    def scores(self, vector: np.ndarray) -> dict[str, float]:
        """How likely each target is for a text with this unit vector [dimensions]; they add up to 1."""
        chances = softmax((self.weights @ vector + self.biases)[None])[0]
        return dict(zip(self.targets, chances.tolist(), strict=True))

    def to_bytes(self) -> bytes:
        return bytes(msgpack.packb([self.targets, self.weights.tobytes(), self.biases.tobytes()]) or b"")

    @classmethod
    def from_bytes(cls, data: bytes) -> "Classifier":
        targets, weights, biases = msgpack.unpackb(data)
        matrix = np.frombuffer(weights, np.float32).reshape(len(targets), -1)
        return cls(tuple(targets), matrix, np.frombuffer(biases, np.float32))


def train(vectors: np.ndarray, targets: Sequence[str]) -> Classifier:
    """Unit vectors [examples, dimensions] and the target of each. Every target counts the same, however many examples
    it has. The same examples give the same classifier."""
    names = tuple(sorted(set(targets)))
    wanted = np.array([[name == target for name in names] for target in targets], np.float64)
    share = (wanted / wanted.sum(0)).sum(1, keepdims=True) / len(names)
    weights, biases = np.zeros((len(names), vectors.shape[1])), np.zeros(len(names))
    for _ in range(STEPS):
        errors = share * (softmax(vectors @ weights.T + biases) - wanted)
        weights -= RATE * (errors.T @ vectors + DECAY * weights)
        biases -= RATE * errors.sum(0)
    return Classifier(names, weights.astype(np.float32), biases.astype(np.float32))


def softmax(rows: np.ndarray) -> np.ndarray:
    powers = np.exp(rows - rows.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)
