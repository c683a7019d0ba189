"""The function that benchmarks call: one language model, configured by the environment."""

import os

import stoker

app = stoker.App("benchmark")
model = app.llm(
    "model",
    weights=os.environ["BENCH_WEIGHTS"],
    idle_timeout=float(os.environ.get("BENCH_IDLE", "600")),
    max_seqs=int(os.environ.get("BENCH_MAX_SEQS", "64")),
    max_model_len=int(os.environ.get("BENCH_MAX_LEN", "0")),
)
