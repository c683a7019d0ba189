"""A chat model that sleeps until somebody asks: `stoker deploy examples/chat.py`."""

import os
from pathlib import Path

import stoker

LOCAL = (Path(__file__).parent.parent / ".stoker" / "store" / "models" / "smollm2").as_uri()

app = stoker.App("quickstart")
chat = app.llm(
    "smollm2", weights=os.environ.get("CHAT_WEIGHTS", LOCAL), idle_timeout=float(os.environ.get("IDLE", "60"))
)
