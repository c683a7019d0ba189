"""Slots and chunks are never lost or handed out twice, whatever ends first."""

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import data, integers

from stoker.coldstart.fetch_board import Board, Read

LENGTH = 16_000_000


def take(board: Board, now: float = 0.0, limit: int = 8) -> Read:
    read = board.take(now, limit)
    assert read is not None
    return read


def take_brisk(board: Board, now: float) -> Read:
    """A read that gets on well, so that nobody doubts it."""
    read = take(board, now)
    read.watch.received = LENGTH - 1000
    return read


def win(board: Board, read: Read, now: float, holders: int = 1) -> bool:
    read.watch.received = read.length
    return board.win(read, now, holders, remote=True)


def test_chunks_come_in_order_within_slots_and_limit():
    board = Board([LENGTH] * 5, slots=3)
    assert [take(board).chunk for _ in range(3)] == [0, 1, 2]
    assert board.take(0.0, 8) is None
    limited = Board([LENGTH] * 5, slots=3)
    take(limited, limit=1)
    assert limited.take(0.0, 1) is None


def test_a_slot_returns_when_its_last_holder_is_done():
    board = Board([LENGTH] * 2, slots=1)
    read = take(board)
    assert win(board, read, 1.0, holders=2)
    board.release(read.slot)
    assert board.take(1.0, 8) is None
    board.release(read.slot)
    assert take(board, 1.0).chunk == 1
    with pytest.raises(KeyError):
        board.release(5)


def slow_board() -> tuple[Board, Read]:
    """Chunk 3 crawls, the others took 0.2 s each."""
    board = Board([LENGTH] * 40, slots=8)
    reads = [take(board) for _ in range(4)]
    for read in reads[:3]:
        assert win(board, read, 0.2)
        board.release(read.slot)
    reads[3].watch.received = 10_000
    return board, reads[3]


def test_a_slow_read_gets_a_rival_and_the_first_to_end_wins():
    board, slow = slow_board()
    assert take_brisk(board, 0.4).chunk == 4
    hedge = take(board, 1.2)
    assert (hedge.chunk, hedge.hedge, board.hedges) == (3, True, 1) and hedge.slot != slow.slot
    assert board.has_rival(hedge) and board.has_rival(slow)
    assert win(board, hedge, 1.4) and slow.watch.stop.is_set()
    board.lose(slow)
    assert board.extra_bytes == 10_000


def test_the_slow_read_may_win_after_all():
    board, slow = slow_board()
    take_brisk(board, 0.4)
    hedge = take(board, 1.2)
    assert win(board, slow, 1.3) and hedge.watch.stop.is_set()
    assert not win(board, hedge, 1.35) and board.extra_bytes == LENGTH


def test_two_slow_reads_of_a_chunk_are_not_the_end():
    board, slow = slow_board()
    for _ in range(2):
        take_brisk(board, 0.4)
    hedge = take(board, 1.2)
    hedge.watch.received = 10_000
    assert not slow.watch.stop.is_set()
    board.take(3.0, 1)
    assert slow.watch.stop.is_set()
    board.lose(slow)
    third = take(board, 3.1, limit=1)
    assert third.chunk == 3 and third.hedge


def test_a_deferred_chunk_waits_its_time():
    board = Board([LENGTH] * 2, slots=2)
    first = take(board)
    board.defer(first, until=5.0)
    assert take_brisk(board, 0.0).chunk == 1 and board.take(1.0, 8) is None
    assert take(board, 5.0).chunk == 0


def test_a_read_that_was_given_up_may_win_while_its_chunk_waits():
    board, slow = slow_board()
    for _ in range(2):
        take_brisk(board, 0.4)
    hedge = take(board, 1.2)
    hedge.watch.received = 10_000
    board.take(3.0, 1)
    assert slow.watch.stop.is_set() and not board.has_rival(hedge)
    board.defer(hedge, until=9.0)
    assert board.has_rival(slow)
    assert win(board, slow, 3.1)
    while read := board.take(10.0, 8):
        assert read.chunk != 3
        win(board, read, 10.1)
        board.release(read.slot)


def test_waiting_for_slots_is_measured():
    board = Board([LENGTH] * 3, slots=1)
    read = take(board, 0.0)
    win(board, read, 1.0)
    assert board.take(1.0, 8) is None and board.take(4.0, 8) is None
    board.release(read.slot)
    take(board, 4.5)
    assert board.starved_s == pytest.approx(3.5)


class BoardMachine(RuleBasedStateMachine):
    """Random ends of random reads: no slot and no chunk is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.chunks = 4, 12
        self.board = Board([LENGTH] * self.chunks, self.slots)
        self.now = 0.0
        self.held: list[int] = []
        self.won: list[int] = []

    @rule(pause=integers(0, 30), limit=integers(1, 4))
    def take(self, pause: int, limit: int) -> None:
        self.now += pause / 10
        read = self.board.take(self.now, limit)
        assert read is None or read.chunk not in self.won

    @precondition(lambda self: self.board.reads)
    @rule(data=data(), how=integers(0, 3))
    def end(self, data: object, how: int) -> None:
        read = self.board.reads[data.draw(integers(0, len(self.board.reads) - 1))]  # type: ignore[attr-defined]
        read.watch.received += 1000
        if how == 0 and not self.board.has_rival(read):
            self.board.defer(read, self.now + 1)
        elif how == 1 and self.board.has_rival(read):
            self.board.lose(read)
        elif how > 1 and self.board.win(read, self.now, 1, remote=True):
            self.won.append(read.chunk)
            self.held.append(read.slot)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.board.release(self.held.pop(0))

    @invariant()
    def slots_are_in_one_place(self) -> None:
        places = [*self.board._free, *self.held, *(read.slot for read in self.board.reads)]
        assert sorted(places) == list(range(self.slots))

    @invariant()
    def chunks_are_in_one_place(self) -> None:
        assert len(set(self.won)) == len(self.won)
        waiting = [chunk for chunk, _ in self.board._waiting]
        # A read that was given up may not have ended yet when its chunk waits again.
        reading = {read.chunk for read in self.board.reads} - {*self.won, *waiting}
        assert sorted([*self.won, *reading, *waiting]) == list(range(self.chunks))
        given_up = [read for read in self.board.reads if read.chunk in waiting]
        assert all(read.watch.stop.is_set() for read in given_up)
        assert self.board.complete == (len(self.won) == self.chunks)


TestBoardMachine = BoardMachine.TestCase
TestBoardMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
