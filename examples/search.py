"""Semantic search: an encoder turns texts into vectors, and the nearest to the question are its answers.

stoker deploy examples/search.py
python examples/search.py "how do I get my money back?"
"""

import os
import sys
from pathlib import Path

import numpy as np

import stoker

MODELS = os.environ.get("MODELS", (Path(__file__).parent.parent / ".stoker" / "store" / "models").as_uri())

app = stoker.App("search")
app.embed("minilm", weights=f"{MODELS}/minilm")

ARTICLES = [
    "Refunds are paid within five days after the parcel has come back to us.",
    "You can change the delivery address until the order leaves our warehouse.",
    "A password is reset with the link on the login page.",
    "Our shop in Lisbon is open from nine to six, except on Sundays.",
    "Batteries must not be thrown away with household waste.",
    "Gift cards are valid for three years from the day they were bought.",
]


def embed(client: stoker.Client, texts: list[str]) -> np.ndarray:
    """Unit vectors [texts, 384], so that a product is a cosine."""
    answer = client.request("POST", "/v1/embeddings", json={"model": "minilm", "input": texts})
    return np.array([row["embedding"] for row in answer["data"]], np.float32)


def main(question: str) -> None:
    with stoker.Client() as client:
        likeness = embed(client, ARTICLES) @ embed(client, [question])[0]
    for place in np.argsort(-likeness)[:3]:
        print(f"{likeness[place]:.2f}  {ARTICLES[place]}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "how do I get my money back?")
