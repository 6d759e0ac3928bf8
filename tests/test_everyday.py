"""Everyday tasks, as someone writes them who has only read the documentation.

Each is a program of its own, in an empty directory. A change that breaks one of them breaks the
scripts of users, and the pages that showed how.
"""

import dataclasses
import errno
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tierstore
from tierstore.errors import StoreFullError


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def random(rows, dim):
    return tierstore.TableSpec(rows, dim, init=tierstore.normal(seed=1))


def test_an_array_becomes_a_store():
    vectors = np.random.default_rng(0).normal(size=(1_000, 16)).astype("f4")
    spec = tierstore.TableSpec(*vectors.shape, init=tierstore.from_array(vectors))
    tierstore.create("emb.tier", {"item": spec}).close()
    with tierstore.open("emb.tier") as store:
        assert np.array_equal(store["item"].read([3, 14]), vectors[[3, 14]])


def test_rows_as_a_slice():
    with tierstore.create("emb.tier", {"item": random(100, 4)}) as store:
        item = store["item"]
        assert item[10:20].shape == (10, 4)
        assert np.array_equal(item[10:20], item.read(range(10, 20)))


def test_one_row_or_one_number_is_written_to_many():
    with tierstore.create("emb.tier", {"item": random(100, 4)}) as store:
        item = store["item"]
        item[[7, 9]] = 2.5
        item[20:30] = np.arange(4, dtype="f4")
        assert item[[7, 9]].sum() == 20
        assert item[29].tolist() == [0, 1, 2, 3]
        store.commit()


def test_a_spec_like_another():
    spec = random(100, 4)
    wide = dataclasses.replace(spec, rows=50, dim=20, dtype="float16")
    with tierstore.create("emb.tier", {"item": spec, "wide": wide}) as store:
        assert (store["wide"].shape, store["wide"].dtype) == ((50, 20), np.float16)


def test_a_number_as_first_value():
    with tierstore.create("emb.tier", {"item": tierstore.TableSpec(10, 4, init=0.5)}) as store:
        store.grow("item", 12, init=2)
        assert store["item"][8:].tolist() == [[0.5] * 4, [0.5] * 4, [2] * 4, [2] * 4]


def test_a_whole_table_as_an_array():
    with tierstore.create("emb.tier", {"item": random(100, 4)}) as store:
        whole = np.asarray(store["item"])
        assert whole.shape == store["item"].shape == (100, 4)
        assert np.array_equal(whole, store["item"][:])


def test_an_embedding_of_torch_becomes_a_layer():
    torch = pytest.importorskip("torch")
    plain = torch.nn.Embedding(100, 8)
    store = tierstore.open_or_create("emb.tier", {})
    emb = tierstore.nn.TieredEmbedding.from_pretrained(plain, store, "word", freeze=False)
    ids = torch.tensor([3, 4])
    assert torch.equal(emb(ids), plain(ids))
    opt = tierstore.optim.TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
    emb(ids).square().sum().backward()
    opt.step()
    assert not torch.equal(emb(ids), plain(ids))
    store.commit()
    store.close()


def test_a_store_in_memory_where_a_path_is_left_out():
    spec = {"item": tierstore.TableSpec(10, 4, init=0.5)}
    with tierstore.open_or_create(None, spec, keep=3) as store:
        with tierstore.open_or_create(None, spec) as other:
            assert other is not store
        assert store["item"][3].tolist() == [0.5] * 4


def test_a_store_in_memory_that_has_no_room(monkeypatch, tmp_path):
    monkeypatch.setattr("tierstore._store.opening._MEMORY", str(tmp_path))
    full = mock.patch(
        "tierstore._store.opening._create_store", side_effect=StoreFullError("no space")
    )
    with (
        full,
        pytest.raises(StoreFullError, match="give it a path") as raised,
    ):
        tierstore.create(None, {"item": tierstore.TableSpec(10, 4)})
    assert str(tmp_path) in str(raised.value) and raised.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_method_of_the_store_that_is_asked_of_a_table():
    with tierstore.create(None, {"item": tierstore.TableSpec(10, 4)}) as store:
        for name in ("append", "grow", "set_keys", "rename"):
            with pytest.raises(AttributeError, match=rf"its store has: store\.{name}$"):
                getattr(store["item"], name)
        with pytest.raises(AttributeError, match="no attribute 'apend'"):
            store["item"].apend([1])
        assert not hasattr(store["item"], "_owners")


def test_another_system_is_told_where_to_go():
    code = "import sys; sys.platform = 'win32'; import tierstore"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: tierstore runs on Linux, not on win32" in done.stderr
    assert "WSL 2" in done.stderr


def test_append_rows_with_values_and_keys():
    with tierstore.create("emb.tier", {"item": random(2, 8)}) as store:
        store.set_keys("item", ["a", "b"])
        new = np.ones((3, 8), np.float32)
        rows = store.append("item", new, keys=["c", "d", "e"])
        assert list(rows) == [2, 3, 4]
        assert np.array_equal(store["item"].read(store["item"].lookup(["e"])), new[:1])


def test_drop_and_rename_tables_fields_and_keys():
    spec = tierstore.TableSpec(10, 4)
    with tierstore.create("emb.tier", {"a": spec, "b": spec, "c": spec}) as store:
        store.drop("a")
        store.rename("b", "item")
        store.add_fields("item", {"age": tierstore.Field(1)})
        store.drop_fields("item", ["age"])
        store.set_keys("c", list(range(10)))
        store.set_keys("c", None)
        assert sorted(store) == ["c", "item"]
        assert list(store["item"].fields) == ["weight"]


def test_go_back_to_the_best_version():
    with tierstore.create("emb.tier", {"item": tierstore.TableSpec(10, 4)}) as store:
        item = store["item"]
        item.write([1], np.ones((1, 4), np.float32))
        store.commit(step=1, keep="best")
        for step in range(2, 6):
            item.write([1], np.full((1, 4), step, np.float32))
            store.commit(step=step)
        store.restore("best")
        assert item[1].sum() == 4


def test_is_it_a_store():
    with pytest.raises(FileNotFoundError) as raised:
        tierstore.open("nothing.tier")
    assert raised.value.errno == errno.ENOENT
    assert raised.value.filename.endswith("nothing.tier")
    with tierstore.create(None, {"item": tierstore.TableSpec(10, 4)}) as store:
        assert "item" in store
    with tierstore.open_or_create("emb.tier", {"item": tierstore.TableSpec(10, 4)}) as store:
        assert len(store) == 1


def test_when_was_a_version_made():
    with tierstore.create("emb.tier", {"item": tierstore.TableSpec(10, 4)}) as store:
        before = time.time()
        store.commit(step=1)
        last = store.versions()[-1]
        assert last.time >= before - 1
        assert last.step == 1


def test_the_hit_rate_since_the_last_look():
    spec = tierstore.TableSpec(10_000, 16, init=tierstore.normal(seed=1))
    with tierstore.create("emb.tier", {"item": spec}, budget="200kB") as store:
        item = store["item"]
        item.read(np.arange(5_000))
        before = item.stats()["host"]
        item.read([1, 2, 3])
        item.read([1, 2, 3])
        now = item.stats()["host"] - before
        assert now.requested == 6 and now.hit_rate >= 0.5


def test_keys_that_may_be_missing():
    with tierstore.create("emb.tier", {"item": tierstore.TableSpec(3, 4)}) as store:
        store.set_keys("item", ["a", "b", "c"])
        assert store["item"].lookup(["c", "x"], missing=-1).tolist() == [2, -1]
        assert "a" in store["item"].keys and "x" not in store["item"].keys
        with pytest.raises(KeyError, match="x"):
            store["item"].lookup(["x"])


def test_read_into_a_buffer():
    with tierstore.create("emb.tier", {"item": random(100, 4)}) as store:
        buffer = np.empty((3, 4), np.float32)
        store["item"].read([5, 6, 7], out=buffer)
        assert np.array_equal(buffer, store["item"][5:8])


def test_progress_of_long_calls():
    calls = []
    with tierstore.create("emb.tier", {"item": random(1_000, 4)}) as store:
        store.verify(progress=lambda done, total: calls.append((done, total)))
        store.fold(progress=lambda done, total: calls.append((done, total)))
        store.save("copy.tier", progress=lambda done, total: calls.append((done, total)))
    assert calls and all(done <= total for done, total in calls)


def test_a_budget_and_a_policy_for_each_table():
    spec = tierstore.TableSpec(1_000, 4, init=tierstore.normal(seed=1))
    budget = tierstore.Budget(host={"item": "64KiB", "user": "32KiB"})
    with tierstore.create(
        "emb.tier",
        {"item": spec, "user": spec},
        budget=budget,
        policy={"item": "lfu"},
        device="cpu",
    ) as store:
        text = str(store.info())
    assert "item" in text and "user" in text
    with pytest.raises(KeyError, match="itm"):
        tierstore.open("emb.tier", budget=tierstore.Budget(host={"itm": "64KiB"}))


def test_a_model_of_two_tables_learns():
    torch = pytest.importorskip("torch")
    spec = tierstore.TableSpec(500, 8, init=tierstore.normal(std=0.1))
    store = tierstore.create("shop.tier", {"user": spec, "item": spec}, budget="16KiB")
    users, items = (tierstore.nn.TieredEmbedding(store[name]) for name in ("user", "item"))
    opt = tierstore.optim.TieredOptimizer(torch.optim.Adam, [users, items], lr=0.05)
    losses = []
    for _ in range(60):
        u, i = torch.randint(0, 500, (2, 256))
        target = ((u + i) % 2).float()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            (users(u) * items(i)).sum(1), target
        )
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    store.commit(step=60)
    store.close()
    assert losses[-1] < losses[0]


def test_another_type_with_the_same_values():
    with tierstore.create("emb.tier", {"item": random(100, 16)}) as store:
        before = store["item"][:]
        store.alter_table("item", dtype="float16")
        assert np.allclose(store["item"][:].astype("f4"), before, atol=1e-2)
        assert store["item"].dtype == np.float16


def test_find_damage():
    with tierstore.create("emb.tier", {"item": random(100, 16)}) as store:
        assert store.verify()
    [path] = Path("emb.tier/item").glob("*/rows.npy")
    with path.open("r+b") as file:
        file.seek(4096 + 64 * 7)
        file.write(b"damaged!")
    with tierstore.open("emb.tier") as store:
        report = store.verify()
        assert not report
        assert report.bad_rows == {"item": [7]}
        with pytest.raises(tierstore.errors.CorruptRowError) as raised:
            store["item"].read([7])
        assert list(raised.value.rows) == [7]


def test_damaged_rows_come_back_from_a_copy():
    pair = {"weight": tierstore.Field(4, init=tierstore.normal(seed=1)), "age": tierstore.Field(1)}
    specs = {"item": tierstore.TableSpec(100, fields=pair), "user": random(100, 4)}
    specs["word"] = tierstore.TableSpec(100, 4, keys="text", init=tierstore.normal(seed=2))
    with tierstore.create("emb.tier", specs) as store:
        store["word"].write(["a", "b"], np.ones((2, 4), "f4"))
        store["item"].write([3], np.full((1, 1), 7, "f4"), field="age")
        store.commit()
        store.fold()
        store.save("copy.tier")
        bases = {table.name: table.base for table in store.info().tables}
    damaged = {"item": [3, 40], "user": [0], "word": [1]}
    for name, rows in damaged.items():
        records = np.load(bases[name], mmap_mode="r+")
        for row in rows:
            records[row : row + 1].view("u1")[..., 0] ^= 1
        records.flush()
    report = tierstore.verify("emb.tier")
    assert report.bad_rows == damaged
    with tierstore.open("emb.tier", "r+") as store, tierstore.open("copy.tier") as copy:
        for name, rows in report.bad_rows.items():
            fields = list(store[name].fields)
            store[name].by_row.write(rows, copy[name].by_row.read(rows, fields))
        store.commit()
        store.fold()
        for name in store:
            for field in store[name].fields:
                assert np.array_equal(
                    np.concatenate(list(store[name].by_row.scan(field))),
                    np.concatenate(list(copy[name].by_row.scan(field))),
                )
    assert tierstore.verify("emb.tier")


def test_a_payload_and_back():
    torch = pytest.importorskip("torch")
    head = torch.nn.Linear(4, 1)
    with tierstore.create("emb.tier", {"item": tierstore.TableSpec(10, 4)}) as store:
        store.commit(
            step=3,
            payload={"head": head, "config": {"lr": 0.1, "name": "notes"}, "note": b"anything"},
        )
    with tierstore.open("emb.tier") as store:
        again = torch.nn.Linear(4, 1)
        again.load_state_dict(store.payload["head"].state_dict())
        assert torch.equal(again.weight, head.weight)
        assert store.payload["config"].tree() == {"lr": 0.1, "name": "notes"}
        assert store.payload["note"].read() == b"anything"
        assert store.step == 3


def test_every_row_in_blocks():
    fields = {
        "weight": tierstore.Field(4, "bfloat16", tierstore.constant(1.0)),
        "age": tierstore.Field(1),
    }
    with tierstore.create(
        "emb.tier", {"item": tierstore.TableSpec(10_000, fields=fields)}
    ) as store:
        assert sum(block.sum() for block in store["item"].scan("weight")) == 40_000


def test_some_rows_in_blocks():
    with tierstore.create("emb.tier", {"item": random(700, 12)}) as store:
        item = store["item"]
        assert np.array_equal(np.concatenate([*item.scan(100, 350)]), item[100:350])
        assert np.array_equal(np.concatenate([*item.scan("weight", 100, 350)]), item[100:350])
        assert np.array_equal(np.concatenate([*item.scan("weight", start=100)]), item[100:])


def test_export_with_keys_and_import_again():
    pq = pytest.importorskip("pyarrow.parquet")
    with tierstore.create("emb.tier", {"item": random(3, 4)}) as store:
        store.set_keys("item", ["a", "b", "c"])
        tierstore.export_table(store["item"], "items.parquet")
        rows = store["item"][:]
    print(pq.read_table("items.parquet").column_names)
    tierstore.import_table("again.tier", "items.parquet", table="item")
    with tierstore.open("again.tier") as store:
        assert np.array_equal(store["item"][:], rows)
        assert store["item"].lookup(["b"]).tolist() == [1]


def test_a_copy_beside_a_writer():
    with tierstore.create("emb.tier", {"item": random(100, 4)}) as store:
        store.save("copy.tier")
        store["item"].write([1], np.zeros((1, 4), np.float32))
        store.commit(step=1)
        store.update_copy("copy.tier")
        with tierstore.open("copy.tier") as copy:
            assert np.array_equal(copy["item"][:], store["item"][:])
            assert copy.step == 1


def test_a_server_follows_a_trainer():
    spec = random(100, 4)
    trainer = tierstore.create("emb.tier", {"item": spec})
    server = tierstore.open("emb.tier", budget="1MiB")
    trainer["item"].write([7], np.full((1, 4), 100, np.float32))
    trainer.commit(step=1)
    assert server.refresh()
    ids = server["item"].topk(np.ones((1, 4), np.float32), 10)[1]
    assert ids[0][0] == 7 and ids.shape == (1, 10)
    server.close()
    trainer.close()


def test_size_the_memory_from_a_trace():
    from tierstore.sizing import load_stream, plan, simulate

    rng = np.random.default_rng(0)
    spec = tierstore.TableSpec(10_000, 16, init=tierstore.normal(seed=1))
    with tierstore.create("emb.tier", {"item": spec}, budget="200kB") as store:
        item = store["item"]
        with item.record("run.trace"):
            for _ in range(50):
                item.read(rng.zipf(1.3, 512) % 10_000)
        bytes_ = item.spec.layout.record_bytes
    stream = load_stream("run.trace")
    curves = simulate(stream, policies=("lru", "lfu"), sizes=(0.05, 0.2))
    points = curves.curve("lfu")
    found = plan(10_000, bytes_, host=200_000, stream=stream)
    assert points[0].unique_hit_rate <= points[-1].unique_hit_rate
    assert 0 < found.tiers[0].hit_rate < 1


def run(program, expected=0):
    """Run a program from its file; return what it printed."""
    Path("program.py").write_text(textwrap.dedent(program), encoding="utf-8")
    lazy = "ignore:rows that are not in a batch stay"  # as these programs mean it
    command = [sys.executable, "-W", "error", "-W", lazy, "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == expected, done.stderr
    return done.stdout


@pytest.mark.slow
def test_go_on_after_a_crash(capsys):
    pytest.importorskip("torch")
    program = """
        import os
        import tierstore
        import torch

        spec = tierstore.TableSpec(rows=1_000, dim=8, init=tierstore.normal(std=0.1, seed=1))
        store = tierstore.open_or_create("run.tier", {"item": spec}, budget="64KiB")
        emb = tierstore.nn.TieredEmbedding(store["item"])
        head = torch.nn.Linear(8, 1)
        opt = tierstore.optim.TieredOptimizer(torch.optim.Adam, [emb, head], lr=0.01)
        run = tierstore.Checkpoint(store, head=head, opt=opt)
        start = run.resume()
        print(start, flush=True)
        for step in range(start + 1, 31):
            head(emb(torch.randint(0, 1_000, (32,)))).square().mean().backward()
            opt.step()
            opt.zero_grad()
            if step % 10 == 0:
                run.commit(step)
            if step == 25 and start == 0:
                os._exit(3)
        store.close()
    """
    assert run(program, expected=3) == "0\n"
    exec(compile(textwrap.dedent(program), "program.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "20\n"


@pytest.mark.nightly
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_rows_in_the_workers_of_a_loader(start):
    pytest.importorskip("torch")
    page = Path(tierstore.__file__).parents[1] / "docs/how-to/workers-and-servers.md"
    if not page.exists():
        pytest.skip("the documentation is not here")
    program = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    assert '"fork"' in program
    run(program.replace('"fork"', f'"{start}"'))
