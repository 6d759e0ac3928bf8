"""tierstore put, near, keys, add-field and drop-field: rows and fields from the shell."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

import tierstore
from tests.every import every
from tests.gpu.emulator import EmulatedDevice
from tierstore.errors import DeviceError
from tierstore_cli.main import cli


def rows_of(path, name, field="weight"):
    with tierstore.open(path) as store:
        return store[name].read(np.arange(store[name].rows), field=field)


def test_put_writes_one_row_of_one_field(run, run_json, pair):
    before, moments = rows_of(pair, "item"), rows_of(pair, "item", "exp_avg")
    values = np.random.default_rng(1).normal(size=8).astype("f4")
    data = run_json("put", pair, "--table", "item", "--id", 17, *map(repr, values.tolist()))
    assert (data["id"], data["field"]) == (17, "weight")
    before[17] = values
    assert rows_of(pair, "item").tobytes() == before.tobytes()
    assert rows_of(pair, "item", "exp_avg").tobytes() == moments.tobytes()
    text = ",".join(["-1", *["0.5"] * 7])
    run("put", pair, "--table", "item", "--field", "exp_avg", "--id", 3, text)
    assert rows_of(pair, "item", "exp_avg")[3].tolist() == [-1, *[0.5] * 7]


@pytest.mark.parametrize("command", ["get 3", "put --id 3 1", "near --id 3", "inspect --range 0:2"])
def test_a_field_that_is_not_there_is_named(run, pair, command):
    name, *arguments = command.split()
    done = run(name, pair, *arguments, "--table", "item", "--field", "nope", code=1)
    assert "table 'item' has no field 'nope', only weight, exp_avg" in done.stderr


def test_put_by_key_and_from_a_pipe(run, pair):
    run("put", pair, "--table", "user", "--key", "name_7", "1", "-2", "nan")
    assert rows_of(pair, "user")[7][:2].tolist() == [1, -2]
    line = run("get", pair, 3, "--table", "item").stdout.partition("\t")[2]
    arguments = ["put", str(pair), "--table", "item", "--id", "4", "-"]
    assert CliRunner().invoke(cli, arguments, input=line).exit_code == 0
    rows = rows_of(pair, "item")
    assert rows[4].tobytes() == rows[3].tobytes()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--id", 3, 1, 2], 2),
        (["--id", 3, *"abcdefgh"], 2),
        (["--id", 300, *range(8)], 1),
        ([*range(8)], 2),
        (["--id", 3, "--key", "x", *range(8)], 2),
        (["--key", "x", *range(8)], 1),
        (["--id", 3, "1e300", *range(7)], 2),
    ],
)
def test_put_refuses_what_is_no_row(run, pair, files, arguments, code):
    before = rows_of(pair, "item")
    run("put", pair, "--table", "item", *arguments, code=code)
    assert rows_of(pair, "item").tobytes() == before.tobytes()


UNFIT = [
    ("int8", 300),
    ("int8", -129),
    ("int8", 0.5),
    ("int8", "nan"),
    ("uint8", -1),
    ("uint8", "inf"),
    ("float8_e4m3fn", 500),
    ("float8_e4m3fn", "inf"),
    ("float8_e5m2", 65000),
    ("float16", 65520),
    ("bfloat16", "3.4e38"),
    ("float64", "1e999"),
    ("float32", "1_000"),
    ("float32", "\u0663"),
]


@every(unfit=UNFIT)
def test_put_refuses_what_the_type_cannot_hold(run, tmp_path, unfit):
    dtype, value = unfit
    path = tmp_path / f"{dtype} {value}.tier"
    run("init", path, "--rows", 3, "--dim", 2, "--dtype", dtype)
    run("put", path, "--id", 1, 2, 0)
    run("put", path, "--id", 1, 1, value, code=2)
    with tierstore.open(path) as store:
        assert (store.version, store["embeddings"].read([1])[0].tolist()) == (2, [2, 0])


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int8", [-128, 127]),
        ("uint8", [255, 0]),
        ("float8_e4m3fn", [448, 464]),
        ("float16", [65519, 0]),
    ],
)
def test_put_rounds_as_every_write(run, tmp_path, dtype, values):
    run("init", tmp_path / "s.tier", "--rows", 3, "--dim", 2, "--dtype", dtype)
    run("put", tmp_path / "s.tier", "--id", 1, *values)
    with tierstore.open(tmp_path / "s.tier", "r+") as store:
        table = store["embeddings"]
        number = np.asarray(values, table.read([0]).dtype)
        table.write([2], number[None])
        assert table.read([1]).tobytes() == table.read([2]).tobytes()
        store.rollback()


@pytest.mark.parametrize("by", ["dot", "cosine"])
def test_near_is_exact(run_json, pair, by):
    rows = rows_of(pair, "item").astype(np.float64)
    if by == "cosine":
        rows /= np.linalg.norm(rows, axis=1)[:, None]
    scores = rows @ rows[17]
    scores[17] = -np.inf
    expected = np.argsort(-scores)[:5]
    near = run_json("near", pair, "--table", "item", "--id", 17, "-k", 5, "--by", by)["near"]
    assert [each["id"] for each in near] == expected.tolist()
    np.testing.assert_allclose([each["score"] for each in near], scores[expected], rtol=1e-5)


@pytest.mark.variants(1)
@pytest.mark.parametrize("by", ["dot", "cosine"])
@pytest.mark.parametrize("kind", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_near_on_a_gpu_finds_what_the_cpu_finds(run_json, pair, tmp_path, by, kind, monkeypatch):
    """In blocks of a few rows, so that the table need not fit; also in a file of numpy."""
    if kind == "emulated":
        if shutil.which("g++") is None:
            pytest.skip("the emulator needs g++")
        device = EmulatedDevice(seed=1)
        device.torch_name = "emulated"
        monkeypatch.setattr("tierstore._tiers.placement.CudaDevice", lambda number: device)
    monkeypatch.setattr("tierstore._table.topk._MOST_SCORES", 7)
    np.save(tmp_path / "rows.npy", rows_of(pair, "item"))
    for place in ([pair, "--table", "item"], [tmp_path / "rows.npy"]):
        given = ["near", *place, "--id", 17, "-k", 5, "--by", by]
        expected = run_json(*given, "--device", "cpu")
        found = run_json(*given, "--device", "cuda")
        assert expected["device"] == "cpu"
        assert found["device"] == {"cuda": "cuda:0"}.get(kind, kind)
        assert [each["id"] for each in found["near"]] == [each["id"] for each in expected["near"]]
        scores = [[each["score"] for each in each["near"]] for each in (found, expected)]
        np.testing.assert_allclose(*scores, rtol=1e-5)


def test_near_without_a_gpu(run, run_json, pair, monkeypatch):
    """By itself it takes the CPU, also where CuPy is installed and does not work."""
    given = ["near", pair, "--table", "item", "--id", 3]

    def none(number):
        raise DeviceError(f"there is no GPU {number}")

    monkeypatch.setattr("tierstore._tiers.placement.CudaDevice", none)
    find = importlib.util.find_spec
    for installed in (find("numpy"), None):

        def spec(name, *args, found=installed):
            return found if name == "cupy" else find(name, *args)

        monkeypatch.setattr("importlib.util.find_spec", spec)
        assert run_json(*given)["device"] == "cpu"
    assert "there is no GPU 1" in run(*given, "--device", "cuda:1", code=1).stderr
    assert "not a device: 'tpu'" in run(*given, "--device", "tpu", code=1).stderr


def test_near_by_key(run, run_json, pair):
    near = run_json("near", pair, "--table", "user", "--key", "name_7", "-k", 100)["near"]
    assert len(near) == 19
    assert all(each["key"] == f"name_{each['id']}" for each in near)
    lines = run("near", pair, "--table", "user", "--key", "name_7", "-k", 3).stdout.splitlines()
    assert lines[0].split() == ["ROW", "KEY", "COSINE"] and len(lines) == 4
    run("near", pair, "--table", "user", "--key", "nope", code=1)
    run("near", pair, "--table", "user", code=2)


def test_cosine_of_rows_of_zeros_is_zero(tmp_path):
    rows = np.array([[0, 0], [3, 4], [-3, 4]], np.float32)
    spec = tierstore.TableSpec(3, 2, init=tierstore.from_array(rows))
    with tierstore.create(tmp_path / "z.tier", {"t": spec}) as store:
        scores, ids = store["t"].topk(np.array([[6, 8], [0, 0]], "f4"), 3, metric="cosine")
        assert ids[0].tolist() == [1, 2, 0]
        np.testing.assert_allclose(scores[0], [1, 7 / 25, 0], rtol=1e-6)
        assert scores[1].tolist() == [0, 0, 0]
        with pytest.raises(tierstore.errors.InvalidInputError, match="metric"):
            store["t"].topk(rows, 1, metric="l2")


def test_cosines_of_very_large_and_small_rows(tmp_path):
    rows = np.array([[3e25, 4e25], [3e-25, 4e-25], [3, 4], [np.nan, 1], [np.inf, 1]], np.float32)
    spec = tierstore.TableSpec(5, 2, init=tierstore.from_array(rows))
    with tierstore.create(tmp_path / "z.tier", {"t": spec}) as store:
        scores, ids = store["t"].topk(np.array([[3, 4]], "f4"), 3, metric="cosine")
        np.testing.assert_allclose(scores, 1, rtol=1e-5)
        assert sorted(ids[0].tolist()) == [0, 1, 2]


def test_keys_are_set_and_forgotten(run, run_json, single, tmp_path):
    (tmp_path / "keys.txt").write_text("\n".join(f"k{n}" for n in range(50)) + "\n")
    assert run_json("keys", "set", single, tmp_path / "keys.txt")["keys"] == 50
    assert run("get", single, "--key", "k9").stdout.startswith("9\tk9\t")
    run("keys", "set", single, code=2)
    run("keys", "forget", single, tmp_path / "keys.txt", code=2)
    run("keys", "forget", single)
    with tierstore.open(single) as store:
        assert store["embeddings"].keys is None
    (tmp_path / "keys.txt").write_text("a\nb\n")
    run("keys", "set", single, tmp_path / "keys.txt", code=1)


def test_fields_are_added(run, run_json, pair):
    before = rows_of(pair, "item")
    data = run_json("add-field", pair, "age", "--table", "item", "--dim", 1)
    assert (data["dim"], data["dtype"]) == (1, "float32")
    run("add-field", pair, "b", "--table", "item", "--init", "normal(0,1)", "--seed", 3)
    assert not rows_of(pair, "item", "age").any()
    assert rows_of(pair, "item", "b").any(axis=1).all()
    assert rows_of(pair, "item").tobytes() == before.tobytes()
    run("add-field", pair, "age", "--table", "item", code=1)
    run("add-field", pair, "c", "--table", "item", "--seed", 3, code=2)


def test_fields_are_dropped(run, run_json, pair):
    before = rows_of(pair, "item")
    for name in ("age", "b", "c"):
        run("add-field", pair, name, "--table", "item", "--dim", 2)
    data = run_json("drop-field", pair, "age", "c", "--table", "item")
    assert (data["dropped"], data["fields"]) == (["age", "c"], ["weight", "exp_avg", "b"])
    with tierstore.open(pair) as store:
        assert list(store["item"].fields) == data["fields"]
        assert store.version == data["version"]
    assert rows_of(pair, "item").tobytes() == before.tobytes()
    assert (
        "dropped b of item, which has weight, exp_avg; "
        in run("drop-field", pair, "b", "--table", "item").stdout
    )
    assert "no field 'b'" in run("drop-field", pair, "b", "--table", "item", code=1).output
    assert (
        "drop the table"
        in run("drop-field", pair, "weight", "exp_avg", "--table", "item", code=1).output
    )
    run("drop-field", pair, "--table", "item", code=2)
    assert rows_of(pair, "item").tobytes() == before.tobytes()


# -- rows chosen for an export


@pytest.fixture
def changed(pair):
    with tierstore.open(pair, "r+", keep=5) as store:
        rows = np.random.default_rng(3).normal(size=(3, 8)).astype("f4")
        store["item"].write([200, 7, 90], rows)
        store.commit()
    return pair


def test_an_export_of_rows_that_changed(run, run_json, changed, tmp_path):
    out = tmp_path / "some.npz"
    assert run_json("export", changed, out, "--table", "item", "--since", 3)["rows"] == 3
    with np.load(out) as found:
        assert found["keys"].tolist() == [7, 90, 200]
        expected = rows_of(changed, "item")[[7, 90, 200]]
        assert found["weight"].tobytes() == expected.tobytes()
    nothing = run_json(
        "export", changed, tmp_path / "u.npz", "--table", "user", "--since", 3, code=10
    )
    assert nothing["error"]["exit_code"] == 10
    assert not (tmp_path / "u.npz").exists()


def test_an_export_only_if_something_changed(run, changed, tmp_path):
    out = tmp_path / "all.npy"
    run("export", changed, out, "--table", "user", "--if-changed", 3, code=10)
    assert not out.exists()
    run("export", changed, out, "--table", "item", "--if-changed", 3)
    assert np.load(out).tobytes() == rows_of(changed, "item").tobytes()
    run("export", changed, out, "--table", "item", "--if-changed", 99, "--force", code=1)


def test_an_export_of_ids_and_keys_in_their_order(run, changed, tmp_path):
    ids = [9, 3, 3, 150]
    np.save(tmp_path / "ids.npy", np.array(ids))
    run(
        "export", changed, tmp_path / "a.npy", "--table", "item", "--ids-from", tmp_path / "ids.npy"
    )
    expected = rows_of(changed, "item")[ids]
    assert np.load(tmp_path / "a.npy").tobytes() == expected.tobytes()
    (tmp_path / "keys.txt").write_text("name_7\nname_2\n")
    out = tmp_path / "u.vec"
    run("export", changed, out, "--table", "user", "--keys-from", tmp_path / "keys.txt")
    lines = out.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["2", "name_7", "name_2"]
    (tmp_path / "keys.txt").write_text("name_7\nnope\n")
    run("export", changed, out, "--table", "user", "--keys-from", tmp_path / "keys.txt", code=1)
    with tierstore.open(changed, "r+") as store:  # texts, though those of a file look like numbers
        store.set_keys("user", [str(100 + row) for row in range(20)])
    (tmp_path / "keys.txt").write_text("107\n102\n")
    options = ["--table", "user", "--keys-from", tmp_path / "keys.txt", "--force"]
    run("export", changed, out, *options)
    assert [line.split()[0] for line in out.read_text().splitlines()] == ["2", "107", "102"]
    both = ["--ids-from", tmp_path / "ids.npy", "--range", "0:3"]
    run("export", changed, tmp_path / "b.npy", "--table", "item", *both, code=2)
    np.save(tmp_path / "ids.npy", np.array([300]))
    run(
        "export",
        changed,
        tmp_path / "b.npy",
        "--table",
        "item",
        "--ids-from",
        tmp_path / "ids.npy",
        code=1,
    )
    assert not (tmp_path / "b.npy").exists()


def test_a_list_of_ids_is_exported_as_it_is_stored(changed, tmp_path):
    with tierstore.open(changed) as store:
        tierstore.export_table(store["user"], tmp_path / "u.safetensors", rows=[5, 1])
        tierstore.export_table(store["user"], tmp_path / "all.safetensors")
        with pytest.raises(tierstore.errors.InvalidTypeError):
            tierstore.export_table(store["user"], tmp_path / "x.npy", rows=[0.5])
        with pytest.raises(tierstore.errors.InvalidInputError):
            tierstore.export_table(store["user"], tmp_path / "x.npy", rows=[1], damaged="skip")
    head = json.loads((tmp_path / "u.safetensors").read_bytes()[8:].partition(b"}}")[0] + b"}}")
    assert head["weight"]["shape"] == [2, 3]
