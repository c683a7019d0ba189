from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stoker.runtime.engine.batch import Bucket
from stoker.runtime.engine.graphs import Graphs, buckets, fitting, flops_per_token
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.sizing import activation_bytes, graph_reserve

if TYPE_CHECKING:
    from conftest import TinyModel


def options(tiny: "TinyModel", **values: int) -> EngineOptions:
    return EngineOptions(device="cuda", **values).resolve(tiny.config)


@pytest.mark.parametrize("max_seqs", [1, 3, 8, 64, 100, 256, 512, 1000])
def test_every_decode_step_up_to_512_has_a_bucket_that_can_happen(tiny: "TinyModel", max_seqs: int) -> None:
    choices = buckets(tiny.config, options(tiny, max_seqs=max_seqs))
    assert len(set(choices)) == len(choices)
    assert all(bucket.sequences <= max_seqs for bucket in choices)
    for size in range(1, min(max_seqs, 512) + 1):
        found = fitting(choices, size, size)
        assert found and found.sequences == found.tokens >= size
        assert found.tokens < 2 * size + 8
    assert fitting(choices, 513, 513) is None


def test_mixed_steps_have_buckets_up_to_2048_tokens_with_few_and_all_sequences(tiny: "TinyModel") -> None:
    choices = buckets(tiny.config, options(tiny, max_seqs=256))
    assert fitting(choices, 1, 17) == Bucket(8, 64)
    assert fitting(choices, 9, 60) == Bucket(63, 64)
    assert fitting(choices, 256, 300) == Bucket(256, 512)
    assert fitting(choices, 256, 257) == Bucket(256, 512)
    assert fitting(choices, 8, 2048) == Bucket(8, 2048)
    assert fitting(choices, 1, 8193) is None
    assert all(bucket.sequences < bucket.tokens for bucket in choices if bucket.tokens > 512)


def test_a_small_budget_has_no_larger_bucket(tiny: "TinyModel") -> None:
    assert max(bucket.tokens for bucket in buckets(tiny.config, options(tiny, max_seqs=4, token_budget=128))) == 128


def test_steps_that_hide_their_launches_have_no_bucket(tiny: "TinyModel") -> None:
    wide = replace(tiny.config, num_layers=32, hidden_size=4096, intermediate_size=14336)
    assert flops_per_token(wide) > 1e10
    assert max(bucket.tokens for bucket in buckets(wide, options(tiny))) == 2048
    assert max(bucket.tokens for bucket in buckets(tiny.config, options(tiny))) == 8192


def test_memory_is_reserved_for_the_largest_step_and_for_every_graph(tiny: "TinyModel") -> None:
    wanted = options(tiny, max_seqs=64)
    assert graph_reserve(tiny.config, wanted) > activation_bytes(tiny.config, wanted, 8192, 64)
    without = EngineOptions(device="cuda", cuda_graphs=False).resolve(tiny.config)
    assert graph_reserve(tiny.config, without) == 0


def test_there_are_no_graphs_on_a_cpu(tiny: "TinyModel") -> None:
    graphs = Graphs(tiny.config, EngineOptions().resolve(tiny.config), budget=1 << 30)
    assert (len(graphs), graphs.choices, graphs.next_missing()) == (0, [], None)
    engine = tiny.engine()
    assert not engine.prepare_idle()
