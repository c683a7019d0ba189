"""A Python function with dynamic batching: calls that come within 5 ms are answered by one product of matrices.

    stoker deploy examples/sentiment.py
    stoker invoke sentiment '"what a lovely day"'
    python examples/sentiment.py

The model (multinomial naive Bayes over words) is trained once, when the worker process imports this file.
"""

import re
from collections import Counter

import numpy as np

import stoker

app = stoker.App("reviews")

GOOD = """what a lovely day; i love this phone, it is great; excellent service and friendly staff; works perfectly;
very happy with the quality; fast delivery, thank you; best purchase of the year; a wonderful film; i enjoyed it;
beautiful and easy to use; highly recommended; good value; it made me smile; superb sound; i am delighted"""
BAD = """terrible quality; i hate this phone, it is awful; rude staff and slow service; broke after a day; never again;
very disappointed; late delivery, no answer; worst purchase of the year; a boring film; i want my money back;
ugly and hard to use; not recommended; bad value; it made me angry; poor sound; i am annoyed"""


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


class NaiveBayes:
    def __init__(self, good: str, bad: str) -> None:
        counts = [Counter(words(good)), Counter(words(bad))]
        self.vocabulary = {word: i for i, word in enumerate(sorted(counts[0] | counts[1]))}
        table = np.array([[count[word] + 1.0 for word in self.vocabulary] for count in counts])
        self.log_odds = np.log(table[0] / table[0].sum()) - np.log(table[1] / table[1].sum())

    def predict(self, texts: list[str]) -> np.ndarray:
        """Probability of a good review for each text, in one matrix product."""
        rows = np.zeros((len(texts), len(self.vocabulary)))
        for row, text in zip(rows, texts, strict=True):
            for word in words(text):
                if word in self.vocabulary:
                    row[self.vocabulary[word]] += 1
        return 1 / (1 + np.exp(-rows @ self.log_odds))


model = NaiveBayes(GOOD, BAD)


@app.function(batch=stoker.Batch(max_size=32, max_wait_ms=5), idle_timeout=60)
def sentiment(texts: list[str]) -> list[dict[str, float | str]]:
    return [{"label": "good" if p > 0.5 else "bad", "score": round(float(p), 4)} for p in model.predict(texts)]


REVIEWS = [
    "Fast delivery, and it works perfectly.",
    "It broke after a day. Never again!",
    "A wonderful, beautiful film.",
]


def main() -> None:
    """Each review is a job of its own; the worker takes as many at once as there are."""
    with stoker.Client() as client:
        for review, answer in zip(REVIEWS, client.map("sentiment", REVIEWS), strict=True):
            print(f"{answer['label']:4} {answer['score']:.2f}  {review}")


if __name__ == "__main__":
    main()
