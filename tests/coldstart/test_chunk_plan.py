"""Chunks tile the tensors, and pieces say where each byte of a chunk belongs."""

from hypothesis import given
from hypothesis import strategies as st

from stoker.coldstart.chunk_plan import execution_rank, pieces_of, plan_chunks
from stoker.coldstart.manifest import TensorEntry


@st.composite
def layouts(draw: st.DrawFn) -> list[TensorEntry]:
    """Up to three files of tensors, sometimes with a gap before one (a dropped tied head leaves such gaps)."""
    tensors = []
    for file in range(draw(st.integers(1, 3))):
        position = draw(st.integers(1, 40))
        for number in range(draw(st.integers(0, 6))):
            length = draw(st.integers(0, 50))
            position += draw(st.sampled_from([0, 0, 0, 5]))
            name = f"model.layers.{draw(st.integers(0, 12))}.{file}.{number}"
            tensors.append(TensorEntry(name, "U8", (length,), file, position, length))
            position += length
    return draw(st.permutations(tensors))


@given(layouts(), st.sampled_from([1, 8, 16, 64]))
def test_every_byte_once_on_the_grid(tensors: list[TensorEntry], chunk_bytes: int):
    spans = plan_chunks(tensors, chunk_bytes)
    covered = [(span.file, span.offset + i) for span in spans for i in range(span.length)]
    wanted = [(tensor.file, tensor.offset + i) for tensor in tensors for i in range(tensor.length)]
    assert len(covered) == len(set(covered)) and set(covered) == set(wanted)
    assert all(span.offset // chunk_bytes == (span.offset + span.length - 1) // chunk_bytes for span in spans)


@given(layouts(), st.sampled_from([1, 8, 16, 64]))
def test_pieces_rebuild_the_tensors(tensors: list[TensorEntry], chunk_bytes: int):
    spans = plan_chunks(tensors, chunk_bytes)
    found = {}
    for span, pieces in zip(spans, pieces_of(tensors, spans), strict=True):
        assert sum(piece.length for piece in pieces) == span.length
        for piece in pieces:
            for i in range(piece.length):
                key = (piece.tensor, piece.tensor_start + i)
                assert key not in found
                found[key] = (span.file, span.offset + piece.chunk_start + i)
    for number, tensor in enumerate(tensors):
        assert [found[number, i] for i in range(tensor.length)] == [
            (tensor.file, tensor.offset + i) for i in range(tensor.length)
        ]


def test_load_order_follows_execution():
    names = [
        "lm_head.weight",
        "model.layers.10.a",
        "model.layers.2.a",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ]
    tensors = [TensorEntry(name, "U8", (8,), 0, 8 * i, 8) for i, name in enumerate(names)]
    order = [tensors[span.offset // 8].name for span in plan_chunks(tensors, 8)]
    assert order == [names[4], names[2], names[1], names[0], names[3]]
    assert execution_rank("transformer.h.3.attn") == (1, 3) and execution_rank("encoder.layer.7.x") == (1, 7)


def test_no_tensors_no_chunks():
    assert plan_chunks([]) == [] and pieces_of([], []) == []
