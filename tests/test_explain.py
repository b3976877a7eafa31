"""The picture of a page table, exactly as it is printed."""

import numpy as np
import pytest

from nbattn import ContractError, PagedKV
from nbattn.__main__ import main


def example():
    """Three requests: empty; nine keys, the middle page unmapped; three keys and two reserved pages."""
    cache = np.zeros((8, 2, 4, 1, 16), np.float32)
    table = np.array([[0, 0, 0], [5, -1, 7], [2, 99, 99]], np.int32)
    return PagedKV.from_block_table(cache[:, 0], cache[:, 1], table, np.array([0, 9, 3], np.int32))


def test_summary():
    assert example().explain() == (
        "3 requests, 12 keys in 8 pages of 4 slots\n"
        "  request  keys  pages  unmapped  last page  page ids\n"
        "        0     0      0         -          -  -\n"
        "        1     9      3         1        1/4  5 -1 7\n"
        "        2     3      1         -        3/4  2"
    )


def test_picture_of_a_request():
    assert example().explain(1) == (
        "request 1: 9 keys in 3 pages of 4 slots, kv_indices[3:6]\n"
        "  entry         page  slots  keys\n"
        "      3            5   ####  0..3\n"
        "      4  -1 unmapped   xxxx  4..7 dropped\n"
        "      5            7   #...  8"
    )
    assert example().explain(2) == (
        "request 2: 3 keys in 1 pages of 4 slots, kv_indices[6:9]\n"
        "  entry  page  slots  keys\n"
        "      6     2   ###.  0..2\n"
        "2 more entries are reserved and not read"
    )
    assert example().explain(0) == (
        "request 0: 0 keys in 0 pages of 4 slots, kv_indices[0:3]\n3 more entries are reserved and not read"
    )


def test_long_lists_show_both_ends():
    cache = np.zeros((100, 2, 64, 1, 4), np.float32)
    kv = PagedKV.from_page_table(cache, np.array([0, 100]), np.arange(100)[::-1], np.array([3]))
    lines = kv.explain(0).splitlines()
    assert [line.split()[0] for line in lines[2:]] == [*map(str, range(8)), "...", *map(str, range(92, 100))]
    assert lines[-1].split() == ["99", "0", "3", "of", "64", "6336..6338"]
    assert kv.explain().splitlines()[-1].split()[5:] == ["99", "98", "97", "96", "...", "3", "2", "1", "0"]
    pool = np.zeros((40, 4, 1, 4), np.float32)
    summary = PagedKV.from_slots(pool, pool, np.arange(40) % 5).explain().splitlines()
    assert [line.split()[0] for line in summary[2:]] == [*map(str, range(8)), "...", *map(str, range(32, 40))]


@pytest.mark.parametrize("request_", [-1, 3])
def test_a_request_out_of_range_is_refused(request_):
    with pytest.raises(ContractError, match=rf"^request: must be in 0\.\.2, got {request_}\.$"):
        example().explain(request_)


@pytest.mark.parametrize("request_", ["1", 1.0, True, np.array([True]), np.array([1, 2])])
def test_a_request_that_is_no_integer_is_refused(request_):
    with pytest.raises(ContractError, match=r"^request: must be an integer or a one-element"):
        example().explain(request_)


POOL = np.zeros((6, 4, 2, 3), np.float32)
TABLES = {
    "csr": {"kv_indptr": np.array([0, 2]), "kv_indices": np.array([5, 1]), "kv_last_page_len": np.array([1])},
    "block table": {"block_table": np.array([[5, 1]]), "kv_lens": np.array([5])},
    "slots": {"slot_ids": np.array([5]), "kv_lens": np.array([3])},
}


@pytest.mark.parametrize("form", TABLES)
def test_command_draws_a_file(form, tmp_path, capsys):
    np.savez(tmp_path / "table.npz", page_size=4, num_pages=6, **TABLES[form])
    assert main(["explain", str(tmp_path / "table.npz"), "--request", "0"]) == 0
    first = capsys.readouterr().out.splitlines()[2]
    assert first.split() == (["0", "5", "###.", "0..2"] if form == "slots" else ["0", "5", "####", "0..3"])
    assert main(["explain", str(tmp_path / "table.npz")]) == 0
    assert capsys.readouterr().out.startswith("1 requests, ")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", TABLES)
def test_command_draws_what_validate_reads(form, layout, tmp_path, capsys):
    pages = np.zeros((6, 4, 2, 3) if layout == "NHD" else (6, 2, 4, 3), np.uint8)
    arrays = {"k_cache": pages, "v_cache": pages, "kv_dtype": "float8_e5m2", "kv_layout": layout, "q": 0, "sinks": 0}
    np.savez(tmp_path / "tensors.npz", **arrays, **TABLES[form])
    assert main(["explain", str(tmp_path / "tensors.npz")]) == 0
    np.savez(tmp_path / "table.npz", page_size=4, num_pages=6, **TABLES[form])
    assert main(["explain", str(tmp_path / "table.npz")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]


def test_command_takes_names_of_its_own_beside_a_whole_table(tmp_path, capsys):
    arrays = {"k_cache": POOL, "v_cache": POOL, "slot_ids_before": np.array([5]), "num_heads": 2, "layer": 3}
    np.savez(tmp_path / "tensors.npz", **arrays, **TABLES["slots"])
    assert main(["explain", str(tmp_path / "tensors.npz")]) == 0
    assert capsys.readouterr().out.startswith("1 requests, 3 keys in 6 pages of 4 slots")


@pytest.mark.parametrize(
    ("status", "arrays", "message"),
    [
        (
            1,
            {"page_size": 4, "num_pages": 5} | TABLES["csr"],
            "kv_indices[0]: must be below 5 (pages of the cache), got 5 (request 0, keys from 0 on)."
            " Negative ids mark unmapped pages.",
        ),
        (
            2,
            TABLES["csr"],
            "file: must hold page_size and num_pages, or a cache, and one whole table, got {}. See --help.",
        ),
        (2, {}, "file: must hold page_size and num_pages, or a cache, and one whole table, got nothing. See --help."),
        (
            2,
            {"page_sizes": 4, "num_page": 6, "rows": 0} | TABLES["csr"],
            "file: must hold page_size and num_pages, or a cache, and one whole table, got {}."
            " Did you mean num_pages by num_page? Did you mean page_size by page_sizes? See --help.",
        ),
        (
            2,
            {"page_size": 4, "num_pages": 6, "block_tables": np.array([[5, 1]]), "kv_lens": np.array([5])},
            "file: must hold page_size and num_pages, or a cache, and one whole table, got {}."
            " Did you mean block_table by block_tables? See --help.",
        ),
        (
            2,
            {"k_cache": POOL, "v_cache": POOL, "kv_layuot": "HND"} | TABLES["slots"],
            "kv_layuot: must be a known key of this kind of file. Did you mean kv_layout?",
        ),
        (
            2,
            {"k_cache": POOL, "v_cache": POOL, "slot_id": np.array([5]), "kv_lens": np.array([3])},
            "slot_id: must be a known key of this kind of file. Did you mean slot_ids?",
        ),
    ],
)
def test_command_names_what_is_wrong(status, arrays, message, tmp_path, capsys):
    np.savez(tmp_path / "table.npz", **arrays)
    assert main(["explain", str(tmp_path / "table.npz")]) == status
    assert capsys.readouterr().err == message.format(", ".join(sorted(arrays))) + "\n"


def test_command_names_all_faults(tmp_path, capsys):
    table = np.array([[5, 9], [-1, 7], [1, 1]])
    np.savez(tmp_path / "table.npz", page_size=4, num_pages=6, block_table=table, kv_lens=np.array([8, 9, -1]))
    assert main(["explain", str(tmp_path / "table.npz")]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "kv_lens[1]: must be in 0..8 (2 blocks of 4 in block_table), got 9.",
        "kv_lens[2]: must be in 0..8 (2 blocks of 4 in block_table), got -1.",
        "block_table[0, 1]: must be below 6 (pages of the cache), got 9 (request 0, keys from 4 on)."
        " Negative ids mark unmapped pages.",
        "block_table[1, 1]: must be below 6 (pages of the cache), got 7 (request 1, keys from 4 on)."
        " Negative ids mark unmapped pages.",
    ]


def test_command_without_a_file(tmp_path, capsys):
    path = tmp_path / "none.npz"
    assert main(["explain", str(path)]) == 2  # as validate
    assert capsys.readouterr().err == (
        f"file: must be an .npz file as numpy.savez writes it, got {path}: No such file or directory.\n"
    )


def test_command_with_something_else_than_an_npz_file(tmp_path, capsys):
    np.save(tmp_path / "one.npy", np.zeros(2))
    (tmp_path / "text.npz").write_text("text")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "objects.npz", page_size=np.array([None]))
    whole = (tmp_path / "objects.npz").read_bytes()
    (tmp_path / "torn.npz").write_bytes(whole[:30] + b"?" * 20 + whole[50:])
    for name in ("one.npy", "text.npz", "empty.npz", "objects.npz", "torn.npz"):
        assert main(["explain", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.startswith("file: must be an .npz file as numpy.savez writes it, got ")
