"""What a batch counts while its lines run, and in the end."""

from stoker.runtime.batches.batch import Batch, advanced, counted, finalizing, new_batch, started


def running() -> Batch:
    return started(new_batch("ann", "/v1/chat/completions", "file-1", {}), 10, 1)


def test_lines_count_before_their_results_are_stored() -> None:
    batch = running()
    assert batch.counts == (0, 0)
    batch = counted(batch, 3, 1)
    assert batch.counts == (3, 1)
    batch = advanced(batch, 5, 1, "")
    assert batch.counts == (5, 1)
    batch = counted(batch, 6, 2)
    assert batch.counts == (6, 2) and (batch.completed, batch.failed, batch.segments_done) == (5, 1, 1)


def test_counts_never_fall_while_lines_run_and_are_those_of_the_files_in_the_end() -> None:
    """A gateway that takes over asks for lines again that were counted, and one of them ends otherwise."""
    batch = counted(running(), 7, 1)
    for ended in ((0, 0), (3, 2), (6, 2)):
        batch = counted(batch, *ended)
        assert batch.counts == (7, 1)
    batch = advanced(batch, 6, 2, "")
    assert batch.counts == (7, 1)
    assert finalizing(batch, 2).counts == (6, 2)
    assert counted(batch, 8, 2).counts == (8, 2)
