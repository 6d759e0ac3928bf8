""".jsonl: objects with a list of numbers."""

import gzip
import json

import numpy as np
import pytest

import tierstore
from tests.formats.matrices import random_matrix, read_file, read_keys_of
from tierstore._formats import TextOptions, open_source
from tierstore.errors import AmbiguousFileError, FormatError, InvalidInputError

MATRIX = random_matrix(9, 4)


def write(path, matrix=MATRIX, **columns):
    rows = [
        {**{name: values[n] for name, values in columns.items()}, "embedding": row}
        for n, row in enumerate(matrix.tolist())
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("keys", [[f"w{n}" for n in range(9)], list(range(40, 49)), None])
def test_vectors_and_keys(tmp_path, keys):
    write(tmp_path / "f.jsonl", **({"id": keys} if keys else {}))
    assert read_file(tmp_path / "f.jsonl", block_rows=4).tobytes() == MATRIX.tobytes()
    found = read_keys_of(tmp_path / "f.jsonl")
    assert (None if found is None else list(found)) == keys
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress((tmp_path / "f.jsonl").read_bytes()))
    assert read_file(tmp_path / "f.jsonl.gz").tobytes() == MATRIX.tobytes()


@pytest.mark.parametrize("last", [2**63 - 1, 2**63, 2**64 - 1])
def test_unsigned_keys(tmp_path, last):
    write(tmp_path / "f.jsonl", id=[*range(40, 48), last])
    found = read_keys_of(tmp_path / "f.jsonl")
    assert found.tolist() == [*range(40, 48), last]
    assert found.dtype == (np.uint64 if last >= 2**63 else np.int64)


@pytest.mark.parametrize("outer", [(-1, 2**63), (0, 2**64), (0, -(2**63) - 1)])
def test_keys_that_no_type_holds(tmp_path, outer):
    write(tmp_path / "f.jsonl", id=[*range(40, 47), *outer])
    with pytest.raises(FormatError, match="'id': keys must fit into int64, or all of them into"):
        read_keys_of(tmp_path / "f.jsonl")


def test_several_keys_and_vectors(tmp_path):
    path = tmp_path / "f.jsonl"
    words = [f"w{n}" for n in range(9)]
    write(path, number=list(range(9)), text=words, other=(MATRIX + 1).tolist())
    chosen = f"{path}:embedding"
    with pytest.raises(AmbiguousFileError, match="number, text"):
        open_source(chosen)
    with pytest.raises(FormatError, match="contains 2 matrices"):
        open_source(path, text=TextOptions(key_column="text"))
    with open_source(chosen, text=TextOptions(key_column="text")) as source:
        assert source.keys == words
        assert source.read_as == 'keys from "text", 4 numbers from "embedding"'
    with pytest.raises(InvalidInputError, match="nope"):
        open_source(chosen, text=TextOptions(key_column="nope"))
    with pytest.raises(InvalidInputError, match="JSON"):
        open_source(chosen, text=TextOptions(header=True))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[1]", "line 2 is no object"),
        ("{", "line 2 is no JSON"),
        ("[" * 100_000, "line 2 is no JSON"),
        ('{"id": "b"}', "line 2, 'v' is missing"),
        ('{"id": "b", "v": [1]}', "line 2, 'v' is a list of 1; need 2"),
        ('{"id": "b", "v": [1, true]}', "line 2, 'v' is a list of 2"),
        ('{"id": "b", "v": [1, null]}', "line 2, 'v'"),
        ('{"id": "b", "v": [1, 1%s]}' % ("0" * 400), "line 2, 'v' has a whole number"),
        ('{"id": 3, "v": [1, 2]}', "line 2, 'id'"),
        ('{"v": [1, 2]}', "line 2, 'id' is missing"),
    ],
)  # fmt: skip
def test_damage_names_line_and_field(tmp_path, line, why):
    (tmp_path / "f.jsonl").write_text('{"id": "a", "v": [0.5, 2]}\n' + line)
    with pytest.raises(FormatError, match=why):
        read_file(tmp_path / "f.jsonl")
        read_keys_of(tmp_path / "f.jsonl")


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ({"key": None}, "line 1, 'key' is missing or null"),
        ({"key": None, "id": 5}, "line 1, 'key' is missing or null"),
        ({"key": 1.5}, "line 1, 'key' is a number, not of keys"),
        ({}, "line 2, 'key' is missing or null, .* --key-column none"),
    ],
)  # fmt: skip
def test_no_key_is_dropped_after_a_first_line_without_one(tmp_path, first, why):
    path = tmp_path / "f.jsonl"
    more = [first, first, first, {"key": "x"}] if not first else [first, {"key": "x"}]
    rows = [each | {"v": row} for each, row in zip(more, MATRIX.tolist(), strict=False)]
    path.write_text("\n" * (not first) + "".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(FormatError, match=why):
        read_keys_of(path)
    with open_source(path, text=TextOptions(key_column=False)) as source:
        assert source.keys is None
        assert np.concatenate(list(source.blocks(2))).tobytes() == MATRIX[: len(more)].tobytes()


def test_a_vector_may_be_called_key(tmp_path):
    rows = [{"key": row} for row in MATRIX.tolist()]
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_file(tmp_path / "f.jsonl").tobytes() == MATRIX.tobytes()
    assert read_keys_of(tmp_path / "f.jsonl") is None


def test_lines_are_held_against_the_memory(tmp_path):
    write(tmp_path / "f.jsonl", random_matrix(2, 3000))
    with pytest.raises(FormatError, match=r"line 1 .*--memory"):
        open_source(tmp_path / "f.jsonl", memory="64KiB")


def test_large_values_are_counted(tmp_path):
    write(tmp_path / "f.jsonl", np.array([[1.0, 1e300]]))
    with open_source(tmp_path / "f.jsonl") as source:
        assert np.isinf(next(iter(source.blocks()))[0, 1])
        assert source.overflowed == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"cat": [1, 2], "dog": [3, 4], "cat": [5, 6]}'),
        ("a.json", '[{"key": "cat", "vector": [1, 2], "vector": [3, 4]}]'),
        ("a.jsonl", '{"key": "cat", "vector": [1, 2], "key": "dog"}'),
        ("a.jsonl", '{"key": "cat", "v.a": [1, 2], "v": {"a": [3, 4]}}'),
    ],
)
def test_a_name_that_stands_twice_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match="stands twice in an object"):
        tierstore.import_table(tmp_path / "s", tmp_path / name, table="t")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_object_of_vectors_has_a_row_for_each_name(tmp_path, count):
    rows = {f"w{row}": [row + 0.5, -row] for row in range(count)}
    (tmp_path / "a.json").write_text(json.dumps(rows))
    tierstore.import_table(tmp_path / "r", tmp_path / "a.json", table="t")
    with tierstore.open(tmp_path / "r") as store:
        assert store["t"].keys[:].tolist() == list(rows)
        assert store["t"].read(np.arange(count)).tolist() == list(rows.values())
