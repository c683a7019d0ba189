"""`stoker push`."""

from pathlib import Path
from typing import Annotated

import typer

from stoker.runtime.commands.progress import moving
from stoker.runtime.commands.terminal import AsJson, show


def push(
    source: Annotated[
        Path, typer.Argument(help="A Hugging Face model folder, a .gguf file, or a PEFT adapter folder.")
    ],
    destination: Annotated[str, typer.Argument(help="file:///folder or s3://bucket/prefix")],
    as_json: AsJson = False,
) -> None:
    """Publish a model's weights, tokenizer and manifest, or a LoRA adapter, into an object store."""
    from stoker.runtime.publishing import push_model

    with moving(f"push {source.name}") as moved:
        facts = push_model(source, destination, moved)
    show(facts, as_json, f"pushed {facts['tensors']} tensors, {facts['bytes'] / 1e6:.1f} MB to {facts['url']}")
