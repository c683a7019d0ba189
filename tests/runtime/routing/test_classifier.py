"""The classifier against numbers that are known, and the lessons' place in a store."""

from pathlib import Path

import numpy as np
import pytest

from stoker.coldstart.store import open_store
from stoker.runtime.routing.classifier import Classifier, train
from stoker.runtime.routing.lessons import Lessons, lessons_key


def clusters(per_target: list[int], noise: float, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    """Unit vectors [examples, 384] around one centre per target."""
    random = np.random.default_rng(seed)
    centres = np.linalg.qr(np.random.default_rng(99).normal(size=(384, len(per_target))))[0].T
    rows, targets = [], []
    for number, count in enumerate(per_target):
        rows.append(centres[number] + noise * random.normal(size=(count, 384)) / np.sqrt(384))
        targets += [f"target-{number}"] * count
    vectors = np.concatenate(rows)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), targets


def accuracy(classifier: Classifier, vectors: np.ndarray, targets: list[str]) -> float:
    likeliest = [max(scores := classifier.scores(v), key=scores.__getitem__) for v in vectors]
    return float(np.mean([a == b for a, b in zip(likeliest, targets, strict=True)]))


@pytest.mark.parametrize("per_target", [[5, 5], [3, 40], [4, 4, 4, 4]])
def test_unseen_vectors_find_their_target(per_target: list[int]) -> None:
    classifier = train(*clusters(per_target, noise=1.0))
    unseen = clusters([100] * len(per_target), noise=1.0, seed=1)
    assert accuracy(classifier, *unseen) > 0.97


def test_scores_add_up_and_are_unsure_between_two_targets() -> None:
    vectors, targets = clusters([8, 8], noise=0.3)
    classifier = train(vectors, targets)
    sure = classifier.scores(vectors[0])
    assert sum(sure.values()) == pytest.approx(1) and sure["target-0"] > 0.8
    between = vectors[:8].mean(0) + vectors[8:].mean(0)
    unsure = classifier.scores((between / np.linalg.norm(between)).astype(np.float32))
    assert abs(unsure["target-0"] - 0.5) < 0.1


def test_the_optimum_is_reached() -> None:
    """The gradient of the loss that is minimised is nearly nothing."""
    vectors, targets = clusters([6, 9], noise=1.0)
    classifier = train(vectors, targets)
    wanted = np.array([[t == name for name in classifier.targets] for t in targets], float)
    share = (wanted / wanted.sum(0)).sum(1, keepdims=True) / 2
    got = np.array([list(classifier.scores(v).values()) for v in vectors])
    gradient = (share * (got - wanted)).T @ vectors + 1e-3 * classifier.weights
    assert np.abs(gradient).max() < 1e-3


async def test_lessons_are_found_again_by_what_they_were_learned_from(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    vectors, targets = clusters([3, 3], noise=0.5)
    lessons = [(f"text {n}", target) for n, target in enumerate(targets)]
    key = lessons_key(lessons, "embed", "1")
    assert await Lessons().learned(store, key) is None
    learned = train(vectors, targets)
    await Lessons().put(store, key, learned)
    again = await Lessons().learned(store, key)
    assert again is not None and again.scores(vectors[0]) == learned.scores(vectors[0])
    others = {
        lessons_key(lessons[1:], "embed", "1"),
        lessons_key(lessons, "embed", "2"),
        lessons_key(lessons, "e", "1"),
    }
    assert len(others | {key}) == 4
