"""What every format promises."""

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tests.formats.matrices import (
    random_integers,
    random_matrix,
    random_uint64,
    random_words,
    read_file,
    read_keys_of,
    rows_of,
    write_file,
)
from tests.pairs import pairwise
from tests.tries import tries
from tierstore._dtypes import ELEMENT_TYPES, convert
from tierstore._formats import (
    SINK_SUFFIXES,
    SOURCE_SUFFIXES,
    format_of,
    open_sink,
    open_source,
    read_keys,
)
from tierstore._formats.base import FORMATS
from tierstore.errors import ExistsError, FormatError, InvalidInputError, InvalidTypeError

TEXT = {".vec", ".txt", ".csv", ".tsv", ".bin"}
KEYED = [
    suffix for suffix in SINK_SUFFIXES if format_of(Path(suffix * 2), write=True).keys != "never"
]
HELD = [
    (suffix, dtype)
    for suffix in SINK_SUFFIXES
    for dtype, kind in ELEMENT_TYPES.items()
    if any(FORMATS[suffix].holds(ELEMENT_TYPES[name]) for name in (dtype, *kind.held_by))
]
FILLED = (".fvecs", ".projector")
"""Formats of at least one row."""
DIRECTORIES = (".zarr", ".projector")
SHAPES = [(0, 3), (1, 1), (1, 300), (2, 5), (13, 1), (64, 7), (257, 16)]

every_sink = pytest.mark.parametrize("suffix", SINK_SUFFIXES)
every_keyed = pytest.mark.parametrize("suffix", KEYED)


SOME = pairwise(
    {"suffix": SINK_SUFFIXES, "dtype": list(ELEMENT_TYPES), "shape": SHAPES},
    lambda case: (
        (case["suffix"], case["dtype"]) in HELD
        and (case["suffix"] not in FILLED or case["shape"][0])
    ),
)


@pytest.mark.variants(33, 56)
@pytest.mark.parametrize(
    ("suffix", "dtype", "shape"), [tuple(case.values()) for case in SOME], ids=str
)
def test_what_is_written_is_read_bit_for_bit(tmp_path, suffix, dtype, shape):
    matrix = random_matrix(*shape, dtype)
    path = tmp_path / f"file{suffix}"
    held = write_file(path, matrix, dtype)
    assert held in (dtype, *ELEMENT_TYPES[dtype].held_by)

    with open_source(path, text_dtype=held) as source:
        found = rows_of(source, 7)
        named = held if not ELEMENT_TYPES[held].integer or suffix == ".zarr" else "float32"
        assert found.tobytes() == convert(matrix, dtype, named).tobytes()
        assert rows_of(source).tobytes() == found.tobytes()
        assert source.keys is None


@pytest.mark.variants(1, 1)
@every_sink
@tries(6)
@given(
    rows=st.integers(0, 70),
    dim=st.integers(1, 9),
    written=st.integers(1, 80),
    read=st.integers(1, 80),
    seed=st.integers(0, 2**32),
)
def test_the_sizes_of_blocks_do_not_matter(
    tmp_path_factory, suffix, rows, dim, written, read, seed
):
    path = tmp_path_factory.mktemp("file") / f"file{suffix}"
    rows = max(rows, int(suffix in FILLED))  # which has no place to say how long no rows are
    matrix = random_matrix(rows, dim, seed=seed)
    write_file(path, matrix, "float32", block_rows=written)
    assert read_file(path, block_rows=read).tobytes() == matrix.tobytes()


@pytest.mark.slow
@every_sink
@pytest.mark.nightly(".tsv", ".txt", ".projector", ".arrow")
def test_more_rows_than_the_writer_takes_at_once(tmp_path, suffix):
    matrix = random_matrix(9_001, 60)
    path = tmp_path / f"file{suffix}"
    write_file(path, matrix, "float32", block_rows=1_234, **keys_for(suffix, 9_001))
    assert read_file(path, block_rows=1_000).tobytes() == matrix.tobytes()
    if suffix in KEYED:
        assert list(read_keys_of(path)) == random_words(9_001)


def keys_for(suffix: str, count: int) -> dict[str, list[str]]:
    return {"keys": random_words(count)} if suffix in KEYED else {}


@every_keyed
@pytest.mark.parametrize("count", [0, 1, 64])
def test_integer_keys(tmp_path, suffix, count):
    if suffix in FILLED and not count:
        pytest.skip("holds at least one row")
    keys, path = random_integers(count), tmp_path / f"file{suffix}"
    write_file(path, random_matrix(count, 3), "float32", keys=keys)
    found = read_keys_of(path)
    if count:
        assert found.dtype == np.int64
    assert list(found if found is not None else []) == list(keys)


@pytest.mark.variants(40, 67)
@every_keyed
@pytest.mark.parametrize("kind", [np.asarray, np.ndarray.tolist], ids=["array", "list"])
@pytest.mark.parametrize("count", [1, 3, 64])
def test_integer_keys_beyond_int64(tmp_path, suffix, count, kind):
    keys, path = random_uint64(count), tmp_path / f"file{suffix}"
    write_file(path, random_matrix(count, 3), "float32", keys=kind(keys))
    found = read_keys_of(path)
    assert found.dtype == np.uint64
    assert found.tolist() == keys.tolist()


@pytest.mark.variants(1, 1)
@every_keyed
@pytest.mark.slow(".csv", ".txt")
def test_the_last_of_many_keys_decides_their_type(tmp_path, suffix):
    keys = [*range(70_000), 2**63]
    write_file(tmp_path / f"file{suffix}", random_matrix(len(keys), 2), "float32", keys=keys)
    found = read_keys_of(tmp_path / f"file{suffix}")
    assert found.dtype == np.uint64
    assert found.tolist() == keys


@every_keyed
def test_keys_that_fit_are_written_as_int64(tmp_path, suffix):
    for name, dtype in [("signed", np.int64), ("listed", object), ("short", np.uint16)]:
        (tmp_path / name).mkdir()
        path = tmp_path / name / f"file{suffix}"
        write_file(path, random_matrix(9, 2), "float32", keys=np.arange(3, 12).astype(dtype))
        assert read_keys_of(path).dtype == np.int64
    if suffix not in DIRECTORIES:
        assert (
            len({(tmp_path / n / f"file{suffix}").read_bytes() for n in os.listdir(tmp_path)}) == 1
        )


KINDS_OF_WORDS = {
    "list": list,
    "array": np.array,
    "objects": lambda words: np.array(words, object),
}
STRINGS = pairwise(
    {"suffix": KEYED, "count": [1, 2, 64], "kind": list(KINDS_OF_WORDS)}, lambda _: True
)


@pytest.mark.parametrize(
    ("suffix", "count", "kind"), [tuple(case.values()) for case in STRINGS], ids=str
)
def test_string_keys(tmp_path, suffix, count, kind):
    keys, path = random_words(count), tmp_path / f"file{suffix}"
    write_file(path, random_matrix(count, 3), "float32", keys=KINDS_OF_WORDS[kind](keys))
    found = read_keys_of(path)
    assert list(found) == keys
    assert all(type(key) is str for key in found)


WITH_CARE = ["", "two words", "a\u00a0b", " lead", "trail ", "\ttab", "new\nline", "nu\0l"]
NUL_UNFIT = (".csv", ".tsv", ".vec", ".txt", ".projector")


@every_keyed
def test_keys_that_need_care_are_kept_or_refused(tmp_path, suffix):
    path, kept = tmp_path / f"file{suffix}", []
    for key in WITH_CARE:
        try:
            write_file(path, random_matrix(3, 2), "float32", keys=["first", key, "last"])
        except InvalidInputError as error:
            assert suffix in {*TEXT, ".projector"}
            assert "row 1" in str(error)
            assert list(tmp_path.iterdir()) == []
        else:
            assert suffix not in ((".vec", ".txt", ".bin") if "\0" not in key else NUL_UNFIT)
            kept.append(key)
            (shutil.rmtree if path.is_dir() else os.unlink)(path)
    keys = ["first", *kept, "last"]
    write_file(path, random_matrix(len(keys), 2), "float32", keys=keys)
    assert list(read_keys_of(path)) == keys


@every_keyed
def test_keys_that_cannot_be(tmp_path, suffix):
    matrix = random_matrix(3, 2)
    for keys, error in [
        (["a", "b"], InvalidInputError),
        (["a", "\ud800", "c"], InvalidInputError),
        (["a", 1, "c"], InvalidTypeError),
        ([1.5, 2.5, 3.5], InvalidTypeError),
        ([True, False, True], InvalidTypeError),
        ([-1, 2, 2**63], InvalidInputError),
        ([1, 2, 2**64], InvalidInputError),
        ([b"a", b"b", b"c"], InvalidTypeError),
    ]:
        with pytest.raises(error):
            write_file(tmp_path / f"file{suffix}", matrix, "float32", keys=keys)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", sorted(set(SINK_SUFFIXES) - set(KEYED)))
@pytest.mark.parametrize(
    "keys", [random_words(9), random_integers(9), random_uint64(9)], ids=["words", "ids", "hashes"]
)
def test_keys_are_beside_a_file_that_has_no_place_for_them(tmp_path, suffix, keys):
    path = tmp_path / f"items.v2{suffix}"
    write_file(path, random_matrix(9, 2), "float32", keys=keys)
    assert sorted(tmp_path.iterdir()) == sorted([path, tmp_path / "items.v2.keys.npy"])
    found = read_keys(tmp_path / "items.v2.keys.npy")
    assert list(found) == list(keys) and type(found[0]) is type(keys[0])
    with pytest.raises(ExistsError):
        write_file(path, random_matrix(9, 2), "float32", keys=keys)
    write_file(path, random_matrix(9, 2), "float32", keys=keys[::-1], force=True)
    assert list(read_keys(tmp_path / "items.v2.keys.npy")) == list(keys[::-1])


@pytest.mark.parametrize("suffix", [".npy", ".fbin"])
def test_zeros_are_holes(tmp_path, suffix):
    matrix = np.zeros((20_000, 64), np.float32)
    matrix[7_000:7_010] = random_matrix(10, 64)
    matrix[-1, -1] = -0.0  # which has a bit
    for last in (matrix[-1, -1], 0.0):
        matrix[-1, -1] = last
        path = tmp_path / f"file{last}{suffix}"
        write_file(path, matrix, "float32", block_rows=4096)
        assert read_file(path).tobytes() == matrix.tobytes()
        assert path.stat().st_blocks * 512 < matrix.nbytes // 4


@pytest.mark.parametrize("suffix", sorted(TEXT))
def test_rows_without_keys_are_numbered(tmp_path, suffix):
    matrix = random_matrix(4, 2)
    write_file(tmp_path / f"file{suffix}", matrix, "float32", first_row=100)
    assert list(read_keys_of(tmp_path / f"file{suffix}")) == [100, 101, 102, 103]


@every_sink
def test_an_existing_file_is_left_alone_unless_forced(tmp_path, suffix):
    path, matrix = tmp_path / f"file{suffix}", random_matrix(3, 2)
    path.write_bytes(b"precious")
    with pytest.raises(ExistsError):
        write_file(path, matrix, "float32")
    assert path.read_bytes() == b"precious"
    if suffix not in DIRECTORIES:
        write_file(path, matrix, "float32", force=True)
        assert read_file(path).tobytes() == matrix.tobytes()
    assert list(tmp_path.iterdir()) == [path]


@every_sink
def test_a_link_is_never_written_through(tmp_path, suffix):
    target, link = tmp_path / "precious", tmp_path / f"file{suffix}"
    target.write_bytes(b"precious")
    link.symlink_to(target)
    with pytest.raises(ExistsError):
        write_file(link, random_matrix(3, 2), "float32")
    write_file(link, random_matrix(3, 2), "float32", force=True)
    assert target.read_bytes() == b"precious"
    assert not link.is_symlink()
    assert read_file(link).tobytes() == random_matrix(3, 2).tobytes()
    assert sorted(tmp_path.iterdir()) == sorted([target, link])


@pytest.mark.parametrize("suffix", DIRECTORIES)
def test_a_directory_is_replaced_if_it_is_of_the_format(tmp_path, suffix):
    path = tmp_path / f"file{suffix}"
    write_file(path, random_matrix(3, 2), "float32", keys=list("abc"))
    with pytest.raises(ExistsError, match="--force"):
        write_file(path, random_matrix(5, 4), "float32")
    write_file(path, random_matrix(5, 4), "float32", force=True)
    assert read_file(path).tobytes() == random_matrix(5, 4).tobytes()
    assert read_keys_of(path) is None
    assert list(tmp_path.iterdir()) == [path]

    with (
        pytest.raises(RuntimeError),
        open_sink(path, rows=9, dim=2, dtype="float32", force=True) as sink,
    ):
        sink.write(random_matrix(9, 2)[:5])
        raise RuntimeError
    assert read_file(path).tobytes() == random_matrix(5, 4).tobytes()

    other = tmp_path / f"other{suffix}"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    with pytest.raises(ExistsError, match="is a directory; choose another name"):
        write_file(other, random_matrix(3, 2), "float32", force=True)
    assert (other / "thesis.txt").read_text() == "precious"
    assert sorted(tmp_path.iterdir()) == [path, other]


def test_a_store_is_not_replaced_by_an_export(tmp_path):
    path = tmp_path / "store.zarr"
    tierstore.create(path, {"item": tierstore.TableSpec(3, 2)}).close()
    for _ in range(2):
        with pytest.raises(ExistsError):
            write_file(path, random_matrix(3, 2), "float32", force=True)
        tierstore.open(path).close()
        (path / "zarr.json").touch()  # as zarr leaves where a group was made of its tables


@every_sink
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_when_the_rows_break_off(tmp_path, suffix, error):
    matrix = random_matrix(9, 2)
    with (
        pytest.raises(error),
        open_sink(tmp_path / f"f{suffix}", rows=9, dim=2, dtype="float32") as sink,
    ):
        sink.write(matrix[:5])
        raise error
    assert list(tmp_path.iterdir()) == []


@every_sink
@pytest.mark.parametrize("rows", [8, 10])
def test_the_number_of_rows_must_be_as_announced(tmp_path, suffix, rows):
    matrix = random_matrix(9, 2)
    with (
        pytest.raises(InvalidInputError, match="announced"),
        open_sink(tmp_path / f"f{suffix}", rows=rows, dim=2, dtype="float32") as sink,
    ):
        sink.write(matrix)
        if rows == 10:
            assert sink.rows_written == 9
    assert list(tmp_path.iterdir()) == []


@every_sink
def test_blocks_must_be_as_announced(tmp_path, suffix):
    matrix = random_matrix(9, 2)
    for block, error in [
        (matrix.astype(np.float64), InvalidTypeError),
        (matrix.astype(">f4"), InvalidTypeError),
        (matrix[:, :1], InvalidInputError),
        (matrix[0], InvalidInputError),
    ]:
        with (
            pytest.raises(error),
            open_sink(tmp_path / f"f{suffix}", rows=9, dim=2, dtype="float32") as sink,
        ):
            sink.write(block)


@every_sink
def test_blocks_need_not_be_contiguous(tmp_path, suffix):
    matrix = random_matrix(40, 12)[::-2, ::3]
    write_file(tmp_path / f"file{suffix}", matrix, "float32")
    assert read_file(tmp_path / f"file{suffix}").tobytes() == matrix.tobytes()


@every_sink
def test_reading_never_changes_the_file(tmp_path, suffix):
    path = tmp_path / f"file{suffix}"
    write_file(path, random_matrix(50, 6), "float32", **keys_for(suffix, 50))
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    before = [fingerprint(file) for file in files]
    for file in files:
        file.chmod(0o555 if file.is_dir() else 0o444)
    with open_source(path) as source:
        for block in source.blocks(7):
            if block.flags.writeable:
                block[:] = 1
        _ = source.keys
    assert [fingerprint(file) for file in files] == before
    for file in files:
        file.chmod(0o755)


def fingerprint(path: Path) -> tuple[int, str]:
    content = b"" if path.is_dir() else path.read_bytes()
    return path.stat().st_mtime_ns, hashlib.sha256(content).hexdigest()


@every_sink
def test_sources_can_be_read_again_and_side_by_side(tmp_path, suffix):
    matrix, path = random_matrix(20, 3), tmp_path / f"file{suffix}"
    write_file(path, matrix, "float32")
    with open_source(path) as source:
        for first, second in zip(source.blocks(6), source.blocks(6), strict=True):
            assert first.tobytes() == second.tobytes()
        assert np.concatenate(list(source.blocks())).tobytes() == matrix.tobytes()
        source.close()


@pytest.mark.parametrize("suffix", SOURCE_SUFFIXES)
def test_paths_that_are_no_files_of_vectors(tmp_path, suffix):
    fifo, directory, empty, missing = (tmp_path / f"{n}{suffix}" for n in "fdem")
    os.mkfifo(fifo)
    directory.mkdir()
    empty.touch()
    loop = tmp_path / f"loop{suffix}"
    loop.symlink_to(loop)
    for path in (fifo, directory, empty, missing, loop, empty / f"below{suffix}"):
        with pytest.raises(FormatError, match=str(tmp_path)):
            open_source(path)


@every_sink
def test_a_name_that_is_not_in_the_file_is_refused(tmp_path, suffix):
    matrix = random_matrix(5, 3)
    write_file(tmp_path / f"file{suffix}", matrix, "float32")
    with pytest.raises((InvalidInputError, FormatError), match="nonsense"):
        open_source(f"{tmp_path / f'file{suffix}'}:nonsense")


@pytest.mark.parametrize("suffix", [s for s in SINK_SUFFIXES if s not in DIRECTORIES])
def test_a_link_to_a_file_is_read(tmp_path, suffix):
    matrix = random_matrix(5, 2)
    write_file(tmp_path / f"file{suffix}", matrix, "float32")
    (tmp_path / f"link{suffix}").symlink_to(tmp_path / f"file{suffix}")
    assert read_file(tmp_path / f"link{suffix}").tobytes() == matrix.tobytes()


@pytest.mark.variants(1, 3)
@pytest.mark.parametrize(
    "suffix", [s for s in SINK_SUFFIXES if s not in (*DIRECTORIES, ".csv", ".tsv", ".fvecs")]
)
def test_truncated_files_are_refused_wherever_they_end(tmp_path, suffix):
    path = tmp_path / f"file{suffix}"
    matrix = random_matrix(6, 3)
    matrix[-1, -1] = 1.23456789e-20
    write_file(path, matrix, "float32")
    content = path.read_bytes()
    # Text can lose digits of its last number unseen, and the binary form its last newline.
    spared = {".vec": len("1.23456789e-20"), ".txt": len("1.23456789e-20"), ".bin": 1}
    for length in range(len(content) - spared.get(suffix, 0)):
        path.write_bytes(content[:length])
        with pytest.raises(FormatError):
            read_file(path)


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_truncated_table_has_fewer_rows_but_no_torn_one(tmp_path, suffix):
    """It does not say how many rows there are; only the last number can lose digits unseen."""
    path, matrix = tmp_path / f"file{suffix}", random_matrix(6, 3)
    write_file(path, matrix, "float32")
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with contextlib.suppress(FormatError):
            found = read_file(path)
            assert (
                found.ravel()[:-1].tobytes() == matrix.ravel()[: max(0, found.size - 1)].tobytes()
            )


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".bin", ".fvecs", ".fbin"])
def test_nothing_may_follow_the_rows(tmp_path, suffix):
    path = tmp_path / f"file{suffix}"
    write_file(path, random_matrix(6, 3), "float32")
    with path.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(FormatError):
        read_file(path)
