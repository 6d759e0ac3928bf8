"""Files as other programs write them, each with what is read of it, or what the refusal says.

They are those of public reports. Others of their kind are in the tests beside this one.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore.errors import TierStoreError
from tierstore.importing import preview

PAIR = [[0.5, 1.5], [2.5, 3.5]]

Expected = tuple[list[list[float]], list[Any] | None]
"""Rows and keys."""

U = (PAIR, ["u1", "u2"])
ROWS = [("u1", PAIR[0]), ("u2", PAIR[1])]


def lines(*objects: dict[str, Any]) -> str:
    return "".join(json.dumps(each) + "\n" for each in objects)


TEXTS: dict[str, tuple[str, str, dict[str, Any], Expected | str]] = {
    "key and list": ("t.tsv", "u1\t0.5,1.5,2\nu2\t2.5,3.5,4\n", {}, (
        [[0.5, 1.5, 2], [2.5, 3.5, 4]], ["u1", "u2"])),
    "key and list, .csv": ("t.csv", "u1\t0.5,1.5,2\nu2\t2.5,3.5,4\n", {}, (
        [[0.5, 1.5, 2], [2.5, 3.5, 4]], ["u1", "u2"])),
    "key and list, a bar": ("t.csv", "u1|0.5,1.5,2\nu2|2.5,3.5,4\n", {}, (
        [[0.5, 1.5, 2], [2.5, 3.5, 4]], ["u1", "u2"])),
    "a colon may end the key": ("t.csv", "u1:0.5,1.5,2\nu2:2.5,3.5,4\n", {}, "may begin there"),
    "RecBole, text ids": ("t.tsv", "id:token\temb:float_seq\nu1\t0.5 1.5\nu2\t2.5 3.5\n", {}, U),
    "RecBole, whole ids": ("t.tsv", "uid:token\temb:float_seq\n1\t0.5 1.5\n2\t2.5 3.5\n", {},
        "--key-column uid:token: '1' → 0.5 1.5"),
    "NumPy in a cell": ("t.csv", "id,v\nu1,[0.5 1.5]\nu2,[2.5 3.5]\n", {}, U),
    "NumPy in a cell of lines": ("t.csv", 'id,v\nu1,"[ 0.5\n 1.5]"\nu2,"[2.5\n 3.5]"\n', {}, U),
    "torch in a cell": ("t.csv", 'id,v\nu1,"tensor([0.5, 1.5])"\nu2,"tensor([2.5, 3.5])"\n', {}, U),
    "array in a cell": (
        "t.csv", 'id,v\nu1,"array([0.5, 1.5], dtype=float32)"\nu2,"array([2.5, 3.5])"\n', {}, U),
    "PostgreSQL's array": ("t.csv", 'id,v\nu1,"{0.5,1.5}"\nu2,"{2.5,3.5}"\n', {}, U),
    "semicolons in a cell": ("t.csv", "id,v\nu1,0.5;1.5\nu2,2.5;3.5\n", {}, U),
    "a word that is a blank": ("t.vec", "2 2\nu1 0.5 1.5\n  2.5 3.5\n", {}, "line 3 has 2 cells"),
    "a word that is a blank, replaced": ("t.vec", "2 2\nu1 0.5 1.5\n  2.5 3.5\n",
        {"errors": "replace"}, (PAIR, ["u1", " "])),
    "an id twice is an id": ("t.csv", "item_id,a,b\n7,0.5,1.5\n7,2.5,3.5\n", {}, (PAIR, [7, 7])),
    "an id twice without a name": ("t.csv", "7,0.5,1.5\n7,2.5,3.5\n", {}, "keys or values"),
    "savetxt with a header": (
        "t.txt", "# my words\n0.5 1.5 2 3\n2.5 3.5 4 5\n", {}, "--comment '#'"),
    "savetxt, comment left out": ("t.txt", "# my words\n0.5 1.5\n2.5 3.5\n", {"comment": "#"}, (
        PAIR, None)),
    "a comment in .csv": ("t.csv", "# note\nid,x,y\nu1,0.5,1.5\nu2,2.5,3.5\n", {}, "--comment"),
    "a comment in .csv, left out": ("t.csv", "# note\nid,x,y\nu1,0.5,1.5\nu2,2.5,3.5\n",
        {"comment": "#"}, U),
    "label beside a family": ("t.csv", "item_id,x0,x1,label\n7,0.5,1.5,1\n9,2.5,3.5,1\n", {}, (
        PAIR, [7, 9])),
    "three counts": ("t.tsv", "2 2 1\nu1\t0.5\t1.5\nu2\t2.5\t3.5\n", {"skip_lines": 1}, U),
    "a hint for sheets": ("t.csv", "sep=;\nid;x;y\nu1;0.5;1.5\nu2;2.5;3.5\n", {}, "--skip-lines 1"),
    "a hint for sheets, left out": ("t.csv", "sep=;\nid;x;y\nu1;0.5;1.5\nu2;2.5;3.5\n",
        {"skip_lines": 1}, U),
    "COPY's null": ("t.tsv", "u1\t0.5\t\\N\nu2\t2.5\t3.5\n", {"null": ("\\N",)}, (
        [[0.5, float("nan")], [2.5, 3.5]], ["u1", "u2"])),
    "a number in hexadecimal": ("t.csv", "0x1p-3,1.5\n0.5,2.5\n", {}, "0x1p-3"),
    "blanks of other kinds are characters": (
        "t.vec", "2 2\nu\xa0\x85\u2028 0.5 1.5\nu\x0b 2.5 3.5\n", {},
        (PAIR, ["u\xa0\x85\u2028", "u\x0b"])),
    "a comma after the word": ("t.vec", "the, 0.5 1.5\nof, 2.5 3.5\n", {}, "may begin there"),
    "lines of lists": ("t.jsonl", "[0.5, 1.5]\n[2.5, 3.5]\n", {}, (PAIR, None)),
    "wide lines": (
        "t.jsonl", lines({"id": "u1", "x0": 0.5, "x1": 1.5}, {"id": "u2", "x0": 2.5, "x1": 3.5}),
        {}, U),
    "named vectors": (
        "t.jsonl", lines(*({"id": n, "vector": {"image": v}} for n, v in ROWS)), {}, U),
    "answers of OpenAI": (
        "t.jsonl", lines(*({"id": n, "body": {"data": [{"embedding": v}]}} for n, v in ROWS)), {},
        U),
    "ids as floats": (
        "t.jsonl", lines({"id": 7.0, "v": PAIR[0]}, {"id": 9.0, "v": PAIR[1]}), {},
        "--key-column id"),
    "ids as floats, chosen": (
        "t.jsonl", lines({"id": 7.0, "v": PAIR[0]}, {"id": 9.0, "v": PAIR[1]}),
        {"key_column": "id"}, (PAIR, [7, 9])),
    "ids as fractions": (
        "t.jsonl", lines({"id": 7.5, "v": PAIR[0]}, {"id": 9.0, "v": PAIR[1]}),
        {"key_column": "id"}, "line 1, 'id' is a number"),
    "Milvus": ("t.json", json.dumps({"rows": [{"id": "u1", "v": PAIR[0]}, {"id": "u2",
        "v": PAIR[1]}]}), {}, U),
    "a list of objects": ("t.json", json.dumps([{"id": "u1", "v": PAIR[0]}, {"id": "u2",
        "v": PAIR[1]}]), {}, U),
    "what COPY writes for null": ("t.tsv", "u1\t0.5\t1.5\nu2\t\\N\t3.5\n", {},
        "--null '\\N' ("),
    "what COPY writes for null, as NaN": ("t.tsv", "u1\t0.5\t1.5\nu2\t\\N\t3.5\n",
        {"null": ["\\N"]}, ([[0.5, 1.5], [np.nan, 3.5]], ["u1", "u2"])),
    "a tab in quotes": ("t.tsv", 'u\ta\tb\n"x\t1"\t0.5\t1.5\n"x\t2"\t2.5\t3.5\n', {},
        "line 2: a quote opens in one cell and closes in another"),
    "a tab in quotes, without a header": ("t.tsv", '"x\t1"\t0.5\n"x\t2"\t2.5\n', {},
        "line 1: a quote opens in one cell and closes in another"),
    "quotes that are characters": ("t.tsv", '"u1\t0.5\t1.5\nu"2\t2.5\t3.5\n', {},
        (PAIR, ['"u1', 'u"2'])),
    "a pointer of git-lfs": ("t.safetensors", "version https://git-lfs.github.com/spec/v1\n", {},
        "git lfs pull"),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
def test_texts(case: str, tmp_path: Path) -> None:
    name, text, options, expected = TEXTS[case]
    (tmp_path / name).write_text(text)
    check(tmp_path / name, options, expected)


def check(path: Path, options: dict[str, Any], expected: Expected | str) -> None:
    """Check that a file is read as expected, or refused with these words."""
    if isinstance(expected, str):
        with pytest.raises(TierStoreError) as error:
            preview(path, **options)
        assert expected in str(error.value)
        return
    found = preview(path, **options)
    rows, keys = expected
    assert np.array_equal(found.first, np.array(rows, np.float32), equal_nan=True)
    assert (None if found.keys is None else list(found.keys)) == keys


OBJECTS: dict[str, Callable[[], Any]] = {
    "Namespace": lambda: argparse.Namespace(rate=1),
    "a scalar": lambda: np.float64(3),
    "an array": lambda: np.ones(3),
    "a path": lambda: pathlib.PosixPath("/x"),
    "a set": lambda: {1, 2},
    "a counter": lambda: collections.Counter("ab"),
    "a dict with a default": lambda: collections.defaultdict(list),
}


@pytest.mark.parametrize("suffix", [".pt", ".pth.tar", ".ckpt"])
def test_tensors_beside_objects(suffix: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for name, make in OBJECTS.items():
        path = tmp_path / f"m{suffix}"
        torch.save({"state": {"weight": torch.tensor(PAIR)}, "args": make()}, path)
        check(path, {}, (PAIR, None))
        assert any("objects of" in note for note in preview(path).notes), name


def test_tensors_in_tuples_and_lists(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    words = ["u1", "u2"]
    torchtext = (words, {"u1": 0, "u2": 1}, torch.tensor(PAIR), 2)
    torch.save(torchtext, tmp_path / "glove.6B.2d.txt.pt")
    check(tmp_path / "glove.6B.2d.txt.pt", {}, (PAIR, None))
    check(tmp_path / "glove.6B.2d.txt.pt", {"key_column": "0"}, (PAIR, words))
    torch.save([torch.zeros(2, 2), torch.tensor(PAIR)], tmp_path / "two.pt")
    check(tmp_path / "two.pt", {}, "name one, as in two.pt:0")
    check(Path(f"{tmp_path}/two.pt:1"), {}, (PAIR, None))


def test_a_dataset_after_two_colons(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        file["obsm/X_pca"], file["other"] = PAIR, PAIR
    check(Path(f"{tmp_path}/a.h5ad::obsm/X_pca"), {}, (PAIR, None))


def test_a_night_without_rows(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    import tierstore

    store = tmp_path / "s.tier"
    vectors = pa.array([[0.5, 1.5]], pa.list_(pa.float32(), 2))
    pq.write_table(pa.table({"sku": ["u1"], "v": vectors}), tmp_path / "one.parquet")
    nothing = {"sku": pa.array([], pa.null()), "v": pa.array([], vectors.type)}
    pq.write_table(pa.table(nothing), tmp_path / "none.parquet")
    tierstore.import_table(store, tmp_path / "one.parquet", key_column="sku")
    for name in ("none", "one"):
        file = tmp_path / f"{name}.parquet"
        done = tierstore.import_table(store, file, key_column="sku", upsert=True)
        assert (done.rows, done.added) == (int(name == "one"), 0)


def test_other_ways_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"x")
    check(tmp_path / "dcp", {}, "dcp_to_torch_save")
    (tmp_path / "hive" / "split=train").mkdir(parents=True)
    check(tmp_path / "hive", {}, "name a directory in it, such as")
    np.save(tmp_path / "bf16.npy", np.zeros((2, 2), "V2"))
    check(tmp_path / "bf16.npy", {}, "|V2")
    np.array(PAIR, "f4").tofile(tmp_path / "m.dat")
    check(tmp_path / "m.dat", {}, "m.dat:float32:256")
    check(Path(f"{tmp_path}/m.dat:float32:2"), {}, (PAIR, None))
