import math

import pytest
import torch

from stoker.kernels import philox

# Known-answer vectors of the Random123 distribution (kat_vectors, philox4x32 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    c0, c1, c2, c3, k0, k1 = map(torch.tensor, (*counter, *key))
    made = philox.philox((c0, c1, c2, c3), (k0, k1))
    assert tuple(map(int, made)) == words


def test_a_tokens_word_depends_on_nothing_but_seed_position_and_id():
    seeds, positions = torch.tensor([7, -3, 2**40 + 1]), torch.tensor([0, 5, 2**33])
    wide = philox.token_words(seeds, positions, 9000)
    assert torch.equal(philox.token_words(seeds, positions, 100), wide[:, :100])
    assert torch.equal(philox.token_words(seeds[1:2], positions[1:2], 9000), wide[1:2])
    for other in (philox.token_words(seeds + 1, positions, 9000), philox.token_words(seeds, positions + 1, 9000)):
        assert int((other == wide).sum()) < 5


def test_words_of_one_position_do_not_repeat():
    words = philox.token_words(torch.tensor([1]), torch.tensor([2]), 20_000)
    assert words.unique().numel() > 19_990
    assert int(words.min()) >= 0 and int(words.max()) < 2**32


def test_gumbel_has_the_right_moments_and_no_infinities():
    noise = philox.gumbel(philox.token_words(torch.arange(50), torch.arange(50), 4096)).double()
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)
    ends = philox.gumbel(torch.tensor([0, 1, 2**26 - 1, 2**26, 2**32 - 1]))
    assert ends.isfinite().all()
    assert float(ends[0]) == pytest.approx(-math.log(2.0**-33), rel=1e-6)
    assert float(ends[2]) == pytest.approx(float(ends[3]), abs=1e-5), "the two branches meet"
