"""tierstore save, tierstore verify and tierstore fold."""

import json
import re

import numpy as np
import pytest

import tierstore
from tierstore_cli.bars import Progress


def rows_of(path, name, version=None):
    with tierstore.open(path, version=version) as store:
        return store[name].read(np.arange(store[name].rows))


def flip(path, offset):
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def base_of(path, table):
    return next((path / table).glob("*/rows.npy"))


def test_save(run, run_json, pair, tmp_path):
    copy = tmp_path / "copy.tier"
    data = run_json("save", pair, copy)
    backends = {"item": "memmap", "user": "zarr"}
    assert data == {"store": str(pair), "dest": str(copy), "version": 3, "backends": backends}
    for table in ("item", "user"):
        assert np.array_equal(rows_of(copy, table), rows_of(pair, table))
    with tierstore.open(copy) as store, tierstore.open(pair) as origin:
        assert store.uuid != origin.uuid and store.parent == (origin.uuid, 3) and store.step == 7
    run("verify", copy)


def test_save_of_a_version(run_json, pair, tmp_path):
    assert run_json("save", pair, tmp_path / "old.tier", "--version", 2)["version"] == 2
    assert np.array_equal(rows_of(tmp_path / "old.tier", "item"), rows_of(pair, "item", 2))
    assert not np.array_equal(rows_of(pair, "item", 2), rows_of(pair, "item"))


@pytest.mark.fault(70)
def test_save_refuses(run, pair, tmp_path, files):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    before = files(tmp_path)
    for name in ("there", "link", "pair.tier", "no/copy.tier"):
        run("save", pair, tmp_path / name, code=1)
    run("save", pair, tmp_path / "new.tier", "--version", 77, code=1)
    run("save", tmp_path / "there", tmp_path / "new.tier", code=3)
    assert files(tmp_path) == before and not (tmp_path / "new.tier").exists()


@pytest.mark.fault(67, 70)
def test_save_and_verify_while_a_trainer_writes(run_json, pair, tmp_path):
    random = np.random.default_rng(4)
    with tierstore.open(pair, "r+") as trainer:
        committed = rows_of(pair, "item")
        trainer["item"].write(range(50), random.normal(size=(50, 8)).astype("f4"))
        assert run_json("verify", pair)["ok"]
        assert run_json("save", pair, tmp_path / "copy.tier")["version"] == 3
        assert np.array_equal(rows_of(tmp_path / "copy.tier", "item"), committed)
        trainer.commit(step=8)
        assert run_json("verify", pair)["version"] == 4


def test_save_never_copies_damage(run, pair, tmp_path):
    flip(base_of(pair, "item"), 4096 + 200 * 64)
    run("save", pair, tmp_path / "copy.tier", code=4)
    assert not (tmp_path / "copy.tier").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["pair.tier"]


def test_verify(run, run_json, pair):
    data = run_json("verify", pair)
    assert data == {
        "store": str(pair),
        "version": 3,
        "ok": True,
        "rows_checked": 320,
        "bad_rows": {},
        "bad_files": [],
        "whole": [2, 3],
        "newer": [],
        "notes": [],
    }
    assert "320 rows checked, no damage" in run("verify", pair).stdout
    assert run_json("verify", pair, "--sample", 10)["rows_checked"] == 20


@pytest.mark.fault(67)
def test_verify_lists_all_damage_and_goes_on(run, run_json, pair):
    for row in (0, 17, 299):
        flip(base_of(pair, "item"), 4096 + row * 64 + 5)
    data = run_json("verify", pair, code=4)
    assert data["ok"] is False and data["rows_checked"] == 320
    assert data["bad_rows"]["item"] == [0, 17, 299]
    result = run("verify", pair, code=4)
    assert "0 17 299" in result.stdout and "3 rows" in result.stderr


def test_damage_of_older_versions_alone_is_said_to_be_theirs(run, pair):
    run("keep", pair, "before")
    flip(base_of(pair, "item"), 4096 + 17 * 64 + 5)
    said = run("verify", pair, code=4).stderr
    assert "damage in 1 row and 0 files; intact versions: none" in said
    with tierstore.open(pair, "r+", keep=1) as store:
        values = np.ones((1, 8), np.float32)
        store["item"].write([17], {"weight": values, "exp_avg": values})
        newest = store.commit()
    said = run("verify", pair, code=4).stderr
    assert f"1 row and 0 files of older versions, and none in version {newest}" in said
    run("release", pair, "before")
    run("fold", pair)
    run("verify", pair)


def test_save_says_which_keys_and_payload_the_copy_lacks(run, run_json, pair, tmp_path):
    with tierstore.open(pair, "r+") as store:
        store.commit(payload={"note": b"x"})
    for file in (next(pair.glob("payload-*")), next((pair / "user").rglob("keys.*.utf8"))):
        flip(file, 0)
    said = run("save", pair, tmp_path / "copy.tier", "--skip-damaged").stderr
    assert "keys damaged and omitted: user" in said
    assert "payload damaged and omitted: note" in said
    found = run_json("save", pair, tmp_path / "more.tier", "--skip-damaged")["skipped"]
    assert (found["keys"], found["payload"]) == (["user"], ["note"])


def test_a_sample_does_not_say_which_versions_are_intact(run, pair):
    """Rows that were not read may be damaged."""
    for row in range(300):
        flip(base_of(pair, "item"), 4096 + row * 64)
    assert "intact versions" not in run("verify", pair, "--sample", 100, code=4).stderr
    assert "intact versions: none" in run("verify", pair, code=4).stderr


def test_verify_does_not_list_endless_ids(run, run_json, pair):
    for row in range(100, 150):
        flip(base_of(pair, "item"), 4096 + row * 64)
    assert "… and 30 more" in run("verify", pair, code=4).stdout
    assert len(run_json("verify", pair, code=4)["bad_rows"]["item"]) == 50


def test_verify_of_a_store_with_a_damaged_manifest(run, run_json, pair):
    newest = max(pair.glob("manifest-*.json"))
    flip(newest, newest.stat().st_size // 2)
    result = run("verify", pair, code=4)
    assert newest.name in result.stdout and "intact versions: 2;" in result.stderr
    data = run_json("verify", pair, code=4)
    assert (data["version"], data["whole"]) == (2, [2]) and newest.name in data["bad_files"][0]


def test_verify_of_a_version(run, run_json, pair):
    delta = next((pair / "item").rglob("delta-*"))
    flip(delta, delta.stat().st_size - 1)
    assert run_json("verify", pair, "--version", 2)["whole"] == [2]
    data = run_json("verify", pair, "--version", 3, code=4)
    assert data["whole"] == [] and delta.name in data["bad_files"][0]
    run("verify", pair, "--version", 9, code=1)


def test_inspect_shows_what_is_damaged(run, run_json, pair):
    delta = next((pair / "item").rglob("delta-*"))
    flip(delta, delta.stat().st_size - 1)
    data = run_json("inspect", pair, code=4)
    assert [table["name"] for table in data["tables"]] == ["user"]
    assert delta.name in data["damaged"]["item"]
    result = run("inspect", pair, "--versions", code=4)
    assert "user" in result.stdout and "table 'item' is damaged" in result.stderr
    assert run_json("inspect", pair, "--table", "user")["version"] == 3
    run("export", pair, pair.parent / "user.npy", "--table", "user")


def test_save_and_export_skip_damage_when_asked(run, run_json, pair, tmp_path):
    rows = rows_of(pair, "item")
    flip(base_of(pair, "item"), 4096 + 200 * 64)
    run("export", pair, tmp_path / "item.npy", "--table", "item", code=4)
    result = run("export", pair, tmp_path / "item.npy", "--table", "item", "--skip-damaged")
    assert "1 row is damaged in table item (200) and NaN" in result.stderr
    exported = np.load(tmp_path / "item.npy")
    assert np.isnan(exported[200]).all()
    said = run("save", pair, tmp_path / "said.tier", "--skip-damaged").stderr
    assert "1 row is damaged in table item (200) and zeros in the copy" in said
    data = run_json("save", pair, tmp_path / "copy.tier", "--skip-damaged")
    nothing = {"tables": [], "keys": [], "payload": []}
    assert data["skipped"] == {"rows": {"item": [200]}, **nothing}
    rows[200] = 0
    exported[200] = 0
    assert np.array_equal(exported, rows)
    assert np.array_equal(rows_of(tmp_path / "copy.tier", "item"), rows)
    whole = run_json("save", tmp_path / "copy.tier", tmp_path / "again.tier", "--skip-damaged")
    assert whole["skipped"] == {"rows": {}, **nothing}


def test_repair(run, run_json, pair, tmp_path, files):
    rows, first = rows_of(pair, "item"), rows_of(pair, "item", 2)
    flip(base_of(pair, "item"), 4096 + 200 * 64)
    delta = next((pair / "item").rglob("delta-*"))
    flip(delta, 0)
    before = files(pair)
    data = run_json("repair", pair, tmp_path / "whole.tier", "--fill", "nan")
    assert data["tables"]["item"] == {"rows": 300, "older": 0, "filled": 2, "unknown": 0}
    assert data["tables"]["user"] == {"rows": 20, "older": 0, "filled": 0, "unknown": 0}
    assert (data["version"], data["complete"], data["left_out"]) == (3, False, [])
    assert data["list"] == str(tmp_path / "whole.tier.rows.csv")
    found = rows_of(tmp_path / "whole.tier", "item")
    lost = np.isnan(found).any(axis=1)
    assert lost.sum() == 2 and np.array_equal(found[~lost], rows[~lost])
    result = run(
        *("repair", pair, tmp_path / "other.tier", "--list", tmp_path / "list.csv"),
        *("--fill", "version", "--fill", "normal(0,0.01)", "--seed", 3),
    )
    assert "of the rows 1 older, 1 filled; " in result.stderr and "300" in result.stdout
    assert "no intact value" not in result.stderr
    found = rows_of(tmp_path / "other.tier", "item")
    lost[200] = False
    assert np.array_equal(found[lost], first[lost]) and found[200].any()
    assert (tmp_path / "list.csv").read_text().count("\n") == 3
    assert files(pair) == before
    run("verify", tmp_path / "other.tier")
    run("repair", pair, tmp_path / "other.tier", code=1)
    run("repair", pair, tmp_path / "third.tier", "--fill", "ones", code=2)
    run("repair", tmp_path / "nothing", tmp_path / "third.tier", code=3)


@pytest.mark.parametrize("cut", [1, 4096])
@pytest.mark.fault(35)
def test_a_truncated_base_is_damage(run, pair, cut):
    base = base_of(pair, "item")
    size = base.stat().st_size
    base.write_bytes(base.read_bytes()[:-cut])
    for command in ("inspect", "verify", "fold"):
        said = run(command, pair, code=4).stderr
        assert str(size) in said or "damage" in said
    assert base.stat().st_size == size - cut


def test_fold(run, run_json, pair):
    expected = rows_of(pair, "item")
    data = run_json("fold", pair)
    assert data == {"store": str(pair), "version": 3, "dropped": [2]}
    assert run_json("inspect", pair)["folded"] is True
    assert np.array_equal(np.load(base_of(pair, "item"), mmap_mode="r")["weight"], expected)
    assert run_json("fold", pair)["dropped"] == []
    assert "version 3" in run("fold", pair).stdout


def test_fold_waits_for_a_writer_and_for_readers_of_older_versions(run, pair):
    with tierstore.open(pair, "r+"):
        assert "Error" in run("fold", pair, code=5).stderr
    with tierstore.open(pair, version=2):
        assert "read" in run("fold", pair, code=5).stderr
    with tierstore.open(pair):  # the newest version stays what it is
        run("fold", pair)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.fault(72)
def test_many_commands_at_once_beside_a_writer(program, pair, tmp_path):
    """Readers of one version neither wait for a writer nor for one another."""
    from concurrent.futures import ThreadPoolExecutor

    commands = [
        ("verify", pair, "--json"),
        ("inspect", pair, "--stats", "--json"),
        ("export", pair, tmp_path / "a.npy", "--table", "item", "--json"),
        ("save", pair, tmp_path / "copy.tier", "--json"),
    ]
    random = np.random.default_rng(4)
    with tierstore.open(pair, "r+") as trainer, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(program, *command) for command in commands]
        while not all(each.done() for each in running):
            trainer["item"].write(range(50), random.normal(size=(50, 8)).astype("f4"))
            trainer.commit()
    for each in running:
        done = each.result()
        assert done.returncode == 0, done.stderr
        assert isinstance(json.loads(done.stdout), dict)


def test_a_store_that_is_missing_is_not_made_by_folding_it(run, tmp_path):
    result = run("fold", tmp_path / "none.tier", code=3)
    assert "check the path" in result.stderr


def write(path, count=9, **options):
    random = np.random.default_rng(6)
    with tierstore.open(path, "r+") as store:
        ids = random.choice(300, count, replace=False)
        store["item"].write(ids, random.normal(size=(count, 8)).astype("f4"))
        return store.commit(**options)


def test_save_of_what_a_copy_lacks(run, run_json, pair, tmp_path, files):
    copy = tmp_path / "copy.tier"
    made = run_json("save", pair, copy, "--incremental")
    assert (made["from"], made["version"], made["whole"]) == (None, 3, ["item", "user"])
    assert "version 3" in run("save", pair, copy, "--incremental").stdout
    write(pair, step=8)
    before = files(copy)
    planned = run_json("save", pair, copy, "--incremental", "--dry-run")
    assert files(copy) == before
    text = run("save", pair, copy, "--incremental", "--dry-run").stdout
    assert "item" in text and "9" in text and "would bring" in text
    done = run_json("save", pair, copy, "--incremental")
    assert done == {**planned, "dry_run": False}
    assert (done["from"], done["version"], done["rows"]) == (3, 4, {"item": 9})
    assert done["bytes"] == 9 * 64
    assert np.array_equal(rows_of(copy, "item"), rows_of(pair, "item"))
    run("verify", copy)


def test_save_of_what_a_copy_lacks_of_a_named_version(run_json, pair, tmp_path):
    copy = tmp_path / "copy.tier"
    run_json("save", pair, copy, "--version", 2)
    write(pair, keep="tonight")
    write(pair, 20)
    done = run_json("save", pair, copy, "--incremental", "--version", "tonight")
    assert (done["from"], done["version"]) == (2, 4)
    assert np.array_equal(rows_of(copy, "item"), rows_of(pair, "item", "tonight"))


def test_save_incremental_refuses(run, run_json, pair, single, tmp_path, files):
    copy = tmp_path / "copy.tier"
    run("save", single, copy)
    before = files(copy)
    failed = run_json("save", pair, copy, "--incremental", code=1)
    assert "not a copy of the store" in failed["error"]["message"]
    run("save", single, copy, "--incremental", "--partitions", 2, code=2)
    run("save", single, copy, "--incremental", "--skip-damaged", code=2)
    run("save", single, copy, "--dry-run", code=2)
    run("save", single, "memory://bucket/copy.tier", "--incremental", code=1)
    assert files(copy) == before
    with tierstore.open(copy, "r+") as store:
        store["embeddings"].write([0], np.ones((1, 16), "f4"))
        store.commit()
    failed = run_json("save", single, copy, "--incremental", code=1)
    assert failed["error"]["type"] == "VersionError"
    run("save", single, tmp_path / "second.tier")
    with tierstore.open(single, "r+") as store:
        store.commit()
    with tierstore.open(tmp_path / "second.tier", "r+"):
        run("save", single, tmp_path / "second.tier", "--incremental", code=5)


def test_a_fold_says_how_far_it_is(run, pair, monkeypatch):
    seen = []

    class Told(Progress):
        def __call__(self, done, total):
            seen.append((self.label, done, total))

    monkeypatch.setattr("tierstore_cli.stores.Progress", Told)
    run("fold", pair)
    assert seen and {label for label, _, _ in seen} == {"folding"}
    assert 0 < seen[-1][1] == seen[-1][2]


def test_what_is_there_is_said_and_never_replaced(run, pair, tmp_path):
    run("save", pair, tmp_path / "copy.tier")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("nowhere")
    for name, kind in {
        "copy.tier": "a store; choose another name, or bring a copy up to date .*--incremental",
        "folder": "a directory; choose another name$",
        "file": "a file; choose another name$",
        "link": "a symbolic link; choose another name$",
    }.items():
        for command in ("save", "repair"):
            found = run(command, pair, tmp_path / name, code=1).stderr.strip()
            expected = kind if command == "save" else kind.partition(", or")[0] + "$"
            assert re.search(f"^Error: {tmp_path / name} exists and is {expected}", found)
    assert (tmp_path / "file").read_bytes() == b"x"


def test_a_store_is_not_created_over_another(pair):
    with pytest.raises(
        tierstore.errors.ExistsError, match=r"is a store; .*open it: tierstore.open"
    ):
        tierstore.create(pair, {"t": tierstore.TableSpec(1, 1)})
