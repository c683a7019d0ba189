import os
from pathlib import Path

from stoker.coldstart.page_cache import resident_share


def test_what_was_read_is_resident_and_what_was_dropped_is_not(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(bytes(8 << 20))
    places = [(path, offset) for offset in range(0, 8 << 20, 1 << 20)]
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        file.read()
        full = resident_share(places)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert (full, resident_share(places)) in ((1.0, 0.0), (0.0, 0.0)), "the latter where the file system can't tell"


def test_no_file_and_no_places_are_not_resident(tmp_path: Path):
    assert resident_share([(tmp_path / "none", 0)]) == resident_share([]) == 0.0
