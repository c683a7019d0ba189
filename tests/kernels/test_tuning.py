from benchmarks.kernels_tune import write
from stoker.kernels import tuning
from stoker.kernels.tuning import MAX_GEMV_ROWS, Gemv, Tile, Tiles, Tuned


def test_a_table_survives_its_file(tmp_path):
    tiles = Tiles(Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3, 128), 2)
    table = Tuned({128: tiles, 64: tiles}, (Gemv(1, 8, 16, 1, 16, 4, 1), Gemv(4, 8, 16, 0, 0, 0, 0)))
    write(tmp_path / "tuned_x.json", table, "NVIDIA X")
    assert tuning.read(tmp_path / "tuned_x.json") == table


def test_an_empty_table_survives_too(tmp_path):
    write(tmp_path / "tuned_x.json", tuning.UNTUNED, "NVIDIA X")
    assert tuning.read(tmp_path / "tuned_x.json") == tuning.UNTUNED


def test_an_unknown_gpu_has_no_table():
    assert tuning.read(tuning.path("NVIDIA GeForce RTX 9999")) == tuning.UNTUNED


def test_file_names():
    assert tuning.path("NVIDIA H200").name == "tuned_h200.json"
    assert tuning.path("NVIDIA A100-SXM4-80GB").name == "tuned_a100.json"


def test_shipped_tables_are_sound():
    files = list(tuning.path("x").parent.glob("tuned_*.json"))
    for table in map(tuning.read, files):
        for entry in table.gemv:
            assert 1 <= entry.rows <= MAX_GEMV_ROWS
            for size in entry[3:6] if entry.block_n else ():
                assert size & (size - 1) == 0
