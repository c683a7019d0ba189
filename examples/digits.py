"""An image classifier: trained when its worker starts, it then answers up to 64 images with one prediction.

stoker deploy examples/digits.py
python examples/digits.py
"""

import numpy as np

import stoker

app = stoker.App("digits")
TRAINING = 1400


@app.cls(batch=stoker.Batch(max_size=64, max_wait_ms=5))
class ReadDigit:
    @stoker.load
    def train(self) -> None:
        from sklearn.datasets import load_digits
        from sklearn.svm import SVC

        images, labels = load_digits(return_X_y=True)
        self.model = SVC(gamma=0.001, probability=False).fit(images[:TRAINING], labels[:TRAINING])

    @stoker.method
    def predict(self, images: list[np.ndarray]) -> list[int]:
        """Each image: its 64 grey values from 0 to 16, row by row."""
        return self.model.predict(np.array(images)).tolist()


def main() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    with stoker.Client() as client:
        predicted = list(client.map("read-digit", images[TRAINING:]))
    right = np.array(predicted) == labels[TRAINING:]
    print(f"{right.sum()} of {len(right)} unseen digits are read rightly ({right.mean():.1%})")


if __name__ == "__main__":
    main()
