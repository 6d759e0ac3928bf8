"""Parts of an export, and copies with partitions."""

from unittest import mock

import numpy as np
import pytest

import tierstore
from tests.cli.test_save_verify_fold import rows_of
from tierstore._formats import open_source


def whole_of(path):
    with open_source(path) as source:
        rows = np.concatenate(list(source.blocks()))
        return rows, None if source.keys is None else list(source.keys)


@pytest.mark.variants(1, 4)
@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".parquet"])
@pytest.mark.parametrize("keyed", [None, "key {}".format, {7: 2**63}.get], ids=["", "text", "int"])
def test_parts_of_an_export_make_one_target(run, run_json, pair, tmp_path, suffix, keyed):
    out, plain = tmp_path / f"items{suffix}", tmp_path / f"plain{suffix}"
    options = ["--table", "item", "--range", "1:8"]
    if keyed:
        keys = tmp_path / "keys.txt"
        with tierstore.open(pair) as store:
            keys.write_text("".join(f"{keyed(row, row)}\n" for row in range(store["item"].rows)))
        options += ["--keys", keys]
    for number in (2, 0):
        data = run_json("export", pair, out, *options, "--part", f"{number}/3")
        assert 2 <= data["rows"] <= 3
        assert "parts are missing" in run("export", pair, out, "--finish", code=1).stderr
        assert not out.exists()
    run("export", pair, out, *options, "--part", "1/3")
    run("export", pair, out, *options, "--part", "2/3")  # again, as after a crash
    data = run_json("export", pair, out, "--finish")
    assert data["rows"] == 7 and data["version"] == 3
    run("export", pair, plain, *options)
    rows, found = whole_of(out)
    expected, all_keys = whole_of(plain)
    assert np.array_equal(rows, expected)
    assert found == all_keys
    if suffix == ".npy":
        assert out.read_bytes() == plain.read_bytes()
        if keyed:
            beside = [path.with_name(f"{path.stem}.keys.npy") for path in (out, plain)]
            assert beside[0].read_bytes() == beside[1].read_bytes()
    assert not (tmp_path / f"items{suffix}.parts").exists()
    assert "no parts left" in run("export", pair, out, "--finish", code=10).stderr
    for number in range(2):  # and once more, over the first
        run("export", pair, out, "--table", "item", "--part", f"{number}/2")
    assert "exists" in run("export", pair, out, "--finish", code=1).stderr
    assert np.array_equal(whole_of(out)[0], expected)
    run("export", pair, out, "--finish", "--force")
    assert np.array_equal(whole_of(out)[0], rows_of(pair, "item"))


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".parquet"])
def test_an_end_that_is_killed_is_harmless(run, pair, tmp_path, suffix, monkeypatch):
    out = tmp_path / f"items{suffix}"
    for number in range(3):
        run("export", pair, out, "--table", "item", "--part", f"{number}/3")
    for place in ("tierstore._io.atomic._give_name", "shutil.rmtree"):
        with monkeypatch.context() as patch:
            patch.setattr(place, mock.Mock(side_effect=KeyboardInterrupt))
            run("export", pair, out, "--finish", code=130)
        assert out.exists() == (place == "shutil.rmtree")
    run("export", pair, out, "--finish")
    assert np.array_equal(whole_of(out)[0], rows_of(pair, "item"))
    assert [each.name for each in tmp_path.iterdir() if "items" in each.name] == [out.name]


def test_parts_that_differ_make_no_target(run, pair, tmp_path):
    out, parts = tmp_path / "items.npy", tmp_path / "items.npy.parts"
    assert "has no parts" in run("export", pair, out, "--finish", code=1).stderr
    run("export", pair, out, "--table", "item", "--part", "0/2")
    with tierstore.open(pair, "r+") as store:
        store["item"].write([0], np.ones((1, store["item"].dim), np.float32))
        store.commit()
    run("export", pair, out, "--table", "item", "--part", "1/2")
    shown = run("export", pair, out, "--finish", code=1).stderr
    assert "part 0 has version 3, part 1 has 4" in shown
    run("export", pair, out, "--table", "item", "--part", "0/2")
    run("export", pair, out, "--table", "item", "--part", "0/3")
    assert "2 and in 3 parts" in run("export", pair, out, "--finish", code=1).stderr
    for each in parts.glob("*-of-00003*"):
        each.unlink()
    note = parts / "part-00001-of-00002.json"
    text = note.read_text()
    note.write_text("{}")
    assert "not the note" in run("export", pair, out, "--finish", code=3).stderr
    note.write_text(text)
    part = parts / "part-00001-of-00002.npy"
    np.save(part, np.load(part)[:-1])
    assert "not the rows" in run("export", pair, out, "--finish", code=3).stderr
    part.unlink()
    assert "is missing" in run("export", pair, out, "--finish", code=3).stderr
    assert not out.exists()


def test_parts_that_make_no_target_are_refused(run, pair, tmp_path):
    for name in ("items.vec", "items.csv.gz", "items.zarr"):
        shown = run("export", pair, tmp_path / name, "--table", "item", "--part", "0/2", code=1)
        assert "parts make no" in shown.stderr
    out = tmp_path / "no.npy"
    for part in ("3/3", "1", "-1/2", "0/0"):
        run("export", pair, out, "--table", "item", "--part", part, code=2)
    shown = run("export", pair, out, "--table", "item", "--part", "0/999999", code=1)
    assert "too few" in shown.stderr
    run("export", pair, out, "--table", "item", "--part", "0/2", "--skip-damaged", code=2)
    (tmp_path / "ids.txt").write_text("1\n2\n")
    for some in (["--ids-from", tmp_path / "ids.txt"], ["--since", 2]):
        run("export", pair, out, "--table", "item", "--part", "0/2", *some, code=2)
    run("export", pair, out, "--table", "item", "--finish", code=2)
    run("export", pair, "-", "--format", "npy", "--finish", code=2)
    whole = tmp_path / "whole.tier"
    tierstore.create(whole, {"t": tierstore.TableSpec(10, 4, dtype="int8")}).close()
    for number in range(2):
        run("export", whole, out, "--part", f"{number}/2")
    assert "make no whole" in run("export", whole, out, "--finish", code=1).stderr


def test_save_with_partitions_and_back(run, run_json, pair, tmp_path):
    pytest.importorskip("torch")
    plain, wide, other, back = (tmp_path / f"{name}.tier" for name in "pwob")
    specs = {
        name: tierstore.TableSpec(rows, 4, init=tierstore.normal(seed=rows))
        for name, rows in (("item", 100), ("user", 7))
    }
    tierstore.create(plain, specs).close()
    data = run_json("save", plain, wide, "--partitions", 5)
    assert data == {"store": str(plain), "dest": str(wide), "version": 1, "partitions": 5}
    run_json("save", wide, other, "--partitions", 3)
    run_json("save", other, back)
    for table in specs:
        for path in (wide, other, back):
            assert np.array_equal(rows_of(path, table), rows_of(plain, table))
    assert len(list((wide / "partitions").iterdir())) == 5
    assert len(list((other / "partitions").iterdir())) == 3
    run("verify", wide)
    run("save", plain, tmp_path / "no.tier", "--partitions", 2, "--skip-damaged", code=2)
    run("save", plain, tmp_path / "no.tier", "--partitions", 0, code=2)
    run("save", plain, wide, "--partitions", 2, code=1)
    assert not (tmp_path / "no.tier").exists()


def test_keys_go_into_partitions(run_json, pair, tmp_path):
    run_json("save", pair, tmp_path / "wide.tier", "--partitions", 2)
    with tierstore.open(pair) as one, tierstore.open(tmp_path / "wide.tier") as other:
        assert any(table.keys is not None for table in one.values())
        for name, table in one.items():
            keys = other[name].keys
            assert (keys is None) == (table.keys is None)
            if keys is not None:
                assert list(keys[:]) == list(table.keys[:])
            every = np.arange(table.rows)
            assert np.array_equal(other[name].read(every), table.read(every))


def test_a_part_that_is_written_again_is_none_until_it_is_whole(run, pair, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    out = tmp_path / "item.npy"
    for number in range(2):
        run("export", pair, out, "--table", "item", "--part", f"{number}/2")
    with monkeypatch.context() as full:
        full.setattr("tierstore_cli.commands.export.export_table", fail)
        run("export", pair, out, "--table", "item", "--part", "1/2", code=6)
    assert "parts are missing: 1/2" in run("export", pair, out, "--finish", code=1).stderr


def test_what_overflows_in_any_part_is_counted(run, run_json, tmp_path):
    rows = np.zeros((8, 4), np.float32)
    rows[[1, 6, 7]] = 1e6
    spec = tierstore.TableSpec(8, 4, init=tierstore.from_array(rows))
    tierstore.create(tmp_path / "s.tier", {"t": spec}).close()
    out = tmp_path / "half.npy"
    for number in range(2):
        options = ["--dtype", "float16", "--part", f"{number}/2"]
        run("export", tmp_path / "s.tier", out, *options)
    assert run_json("export", out.parent / "s.tier", out, "--finish")["overflowed"] == 12


def test_a_directory_of_other_files_is_not_replaced_by_parts(run, pair, tmp_path):
    pytest.importorskip("pyarrow")
    out = tmp_path / "item.parquet"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    run("export", pair, out, "--table", "item", "--part", "0/1")
    run("export", pair, out, "--finish", "--force", code=1)
    assert (out / "mine.txt").read_text() == "precious"
