"""Layers over tables by key against torch's own over rows in the order of arrival."""

import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch

import tierstore
from tests.pairs import pairs
from tierstore import Budget, TableSpec
from tierstore._table.joint import JointTable
from tierstore._table.keyed import RowsByNumber
from tierstore.errors import InvalidInputError
from tierstore.nn import (
    TieredEmbedding,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
    TieredEmbeddingCollection,
)
from tierstore.optim import TieredOptimizer

DIM = 4
INIT = tierstore.normal(std=0.1, seed=3)


@pytest.fixture(params=["int64", "text"])
def kind(request):
    return request.param


@pytest.fixture
def store(tmp_path, kind):
    spec = TableSpec(300, DIM, init=INIT, keys=kind)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=Budget(host_rows=50)) as made:
        yield made
        made.rollback()


def keys_for(kind, numbers):
    keys = np.asarray(numbers, np.int64) * 0x9E3779B9 - 7
    return torch.from_numpy(keys) if kind == "int64" else [f"user {key}" for key in keys.tolist()]


@pytest.mark.variants(2)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])
def test_training_by_key_is_training_by_row(store, kind, make):
    table = store["t"]
    every = keys_for(kind, range(100))
    first = torch.as_tensor(table.read(every))
    layer = TieredEmbedding(table)
    plain = torch.nn.Embedding.from_pretrained(first.clone(), freeze=False)
    options = {"lr": 0.3}
    optimizer = TieredOptimizer(make, layer, **options)
    expected = make(plain.parameters(), **options)
    rng = np.random.default_rng(5)
    target = torch.randn(100, DIM)
    seen: set[int] = set()
    for step in range(12):
        numbers = rng.integers(0, 100, 17)
        seen.update(numbers.tolist())
        for model, opt, ids in (
            (layer, optimizer, keys_for(kind, numbers)),
            (plain, expected, torch.from_numpy(numbers)),
        ):
            opt.zero_grad()
            (model(ids) - target[numbers]).square().sum().backward()
            opt.step()
        assert table.rows == len(seen)
        assert table.contains(every).tolist() == [number in seen for number in range(100)]
        if step % 5 == 4:
            store.commit()
    found = torch.as_tensor(table.read(every))
    torch.testing.assert_close(found, plain.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.variants(0, 1)
def test_training_ahead_by_key_sees_every_update(tmp_path, kind, monkeypatch):
    """Batches share keys, and bring new ones, which a batch that is announced does not add."""
    rng = np.random.default_rng(6)
    batches = [keys_for(kind, rng.integers(0, 4 * step + 5, 9)) for step in range(25)]
    announced = []
    prefetch = RowsByNumber.prefetch
    monkeypatch.setattr(
        RowsByNumber,
        "prefetch",
        lambda table, ids, **options: announced.append(ids) or prefetch(table, ids, **options),
    )
    every, found = keys_for(kind, range(110)), []
    for depth in (None, 0, 1, 6):
        spec = TableSpec(dim=DIM, init=INIT, keys=kind)
        budget = Budget(host_rows=20)
        with tierstore.create(tmp_path / str(depth), {"t": spec}, budget=budget) as store:
            table = store["t"]
            layer = TieredEmbedding(table)
            optimizer = TieredOptimizer(torch.optim.Adagrad, [layer], lr=0.1)
            ahead = batches
            if depth is not None:
                ahead = tierstore.lookahead(batches, {layer: lambda batch: batch}, depth=depth)
            announced.clear()
            seen = set()
            for batch in ahead:
                layer(batch).square().sum().backward()
                optimizer.step()
                seen.update(batch if kind == "text" else batch.tolist())
                assert table.rows == len(seen)
            rows = sum(len(ids) for ids in announced)
            assert (rows > 0) == (depth is not None)
            found.append((table.read(every), table.keys[:].tolist()))
            store.rollback()
    for rows, keys in found[1:]:
        assert np.array_equal(rows, found[0][0])
        assert keys == found[0][1]


def test_evaluation_adds_nothing(store, kind):
    table, keys = store["t"], keys_for(kind, range(9))
    layer = TieredEmbedding(table)
    expected = table.read(keys)
    with torch.no_grad():
        assert np.array_equal(layer(keys).numpy(), expected)
    layer.prefetch(keys)
    layer.eval()
    assert np.array_equal(layer(keys).detach().numpy(), expected)
    assert table.rows == 0
    assert layer.num_embeddings == 0
    layer.train()
    assert np.array_equal(layer(keys).detach().numpy(), expected)
    assert table.rows == 9


def test_keys_of_a_rolled_back_step_are_gone(store, kind):
    table = store["t"]
    layer = TieredEmbedding(table)
    optimizer = TieredOptimizer(torch.optim.SGD, layer, lr=0.1)
    layer(keys_for(kind, range(5))).sum().backward()
    optimizer.step()
    store.rollback()
    assert table.rows == 0
    layer(keys_for(kind, [7, 8])).sum().backward()
    optimizer.step()
    store.commit()
    assert list(table.keys) == [*np.asarray(keys_for(kind, [7, 8]), object)]


def test_layers_that_go_by_row_refuse(store, kind):
    table = store["t"]
    with pytest.raises(InvalidInputError, match="by key, and padding_idx"):
        TieredEmbedding(table, padding_idx=0)
    with pytest.raises(InvalidInputError, match="by key"):
        TieredEmbeddingCollection(store, {"a": table}).averaged()
    with pytest.raises(InvalidInputError, match="by key"):
        JointTable([table])
    with pytest.raises(InvalidInputError, match="by key"):
        TieredEmbedding(table).averaged()
    with pytest.raises(InvalidInputError, match="by key"):
        store.replace_table("t", table.spec, blocks=[], keys=[])


class Plain(torch.nn.Module):
    """What collections and bags compute, by torch's own layers over rows in an order of keys."""

    def __init__(self, first, modes):
        super().__init__()
        self.modes = modes
        self.of = torch.nn.ModuleDict(
            {
                name: torch.nn.Embedding.from_pretrained(rows.clone(), freeze=False)
                for name, rows in first.items()
            }
        )

    def forward(self, features):
        found = {}
        for name, numbers in features.items():
            table = name.partition("_")[0]
            rows = self.of[table](numbers)
            mode = self.modes.get(name)
            found[name] = rows if mode is None else rows.mean(1) if mode == "mean" else rows.sum(1)
        return found


SPECS = {
    "user": {"rows": 300, "keys": "int64"},
    "word": {"rows": 300, "keys": "text"},
    "item": {"keys": "int64"},
    "plain": {"rows": 40},
}
FEATURES = {"user": "user", "user_too": "user", "word": "word", "item": "item", "plain": "plain"}


@pytest.fixture
def many(tmp_path):
    specs = {name: TableSpec(dim=DIM, init=INIT, **each) for name, each in SPECS.items()}
    with tierstore.create(tmp_path / "m", specs, budget=Budget(host_rows=60)) as made:
        yield made
        made.rollback()


def features_for(numbers, name):
    """Return the keys, or ids, of a feature for numbers of any shape."""
    if name == "plain":
        return torch.from_numpy(numbers)
    if name != "word":
        return torch.from_numpy(numbers * 0x9E3779B9 - 7)
    return np.array([f"word {each}" for each in numbers.ravel()], object).reshape(numbers.shape)


@pytest.mark.variants(1)
@pytest.mark.parametrize("modes", [{}, dict.fromkeys(FEATURES, "sum") | {"user_too": "mean"}])
def test_collections_by_key_train_as_torch_does(many, modes):
    every = np.arange(40)
    first = {name: torch.as_tensor(many[name].read(features_for(every, name))) for name in SPECS}
    plain = Plain(first, modes)
    if modes:
        layer = TieredEmbeddingBagCollection(many, FEATURES, mode=modes)
    else:
        layer = TieredEmbeddingCollection(many, FEATURES)
    optimizer = TieredOptimizer(torch.optim.SGD, layer, lr=0.2)
    expected = torch.optim.SGD(plain.parameters(), lr=0.2)
    rng = np.random.default_rng(2)
    seen = {name: set() for name in SPECS}
    for step in range(8):
        numbers = {name: rng.integers(0, 40, (6, 3)) for name in FEATURES}
        given = {name: features_for(each, name) for name, each in numbers.items()}
        own = {name: torch.from_numpy(each) for name, each in numbers.items()}
        before = {name: many[name].rows for name in SPECS}
        if step % 3 == 0:
            layer.prefetch(given)
        layer.eval()
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                found, wanted = layer(given), plain(own)
                for name in FEATURES:
                    torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)
        assert {name: many[name].rows for name in SPECS} == before
        layer.train()
        for model, opt, ids in ((layer, optimizer, given), (plain, expected, own)):
            opt.zero_grad()
            sum((each - step).square().sum() for each in model(ids).values()).backward()
            opt.step()
        for name, table in FEATURES.items():
            seen[table].update(numbers[name].ravel().tolist())
        for name in SPECS:
            if name != "plain":
                assert many[name].rows == len(seen[name])
        many.commit()
    for name in SPECS:
        found = torch.as_tensor(many[name].read(features_for(every, name)))
        torch.testing.assert_close(found, plain.of[name].weight.detach(), rtol=1e-4, atol=1e-5)


class Jagged:
    """The least that torchrec's KeyedJaggedTensor has."""

    def __init__(self, bags):
        self._bags = bags

    def keys(self):
        return list(self._bags)

    def values(self):
        return torch.cat([torch.cat(each) for each in self._bags.values()])

    def lengths(self):
        return torch.tensor([len(bag) for each in self._bags.values() for bag in each])


@pytest.mark.parametrize("training", [True, False])
def test_jagged_keys(many, training):
    keys = {
        name: [features_for(np.arange(at, at + n), name) for at, n in ((1, 2), (5, 0), (2, 3))]
        for name in ("user", "plain", "item")
    }
    given = Jagged(keys)
    expected = {
        name: [torch.as_tensor(many[name].read(bag)) for bag in bags] for name, bags in keys.items()
    }
    rows = TieredEmbeddingCollection(many, ["user", "item", "plain"]).train(training)
    bags = TieredEmbeddingBagCollection(many, ["user", "item", "plain"]).train(training)
    for layer in (rows, bags):
        layer.prefetch(given)
        found = layer(given)
        for name, each in expected.items():
            wanted = torch.cat(each) if layer is rows else torch.stack([bag.sum(0) for bag in each])
            torch.testing.assert_close(found[name], wanted)
    assert many["user"].rows == (4 if training else 0)
    nested = torch.nested.nested_tensor(keys["user"], layout=torch.jagged)
    found = rows({"user": nested})["user"]
    torch.testing.assert_close(found.values(), torch.cat(expected["user"]))
    found = bags({"user": (torch.cat(keys["user"]), torch.tensor([0, 2, 2]))})["user"]
    torch.testing.assert_close(found, torch.stack([bag.sum(0) for bag in expected["user"]]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_by_key(store, kind, mode):
    table = store["t"]
    keys = keys_for(kind, range(12))
    square = np.array(keys, object).reshape(4, 3) if kind == "text" else keys.reshape(4, 3)
    rows = torch.as_tensor(table.read(keys)).reshape(4, 3, DIM)
    wanted = {"sum": rows.sum(1), "mean": rows.mean(1), "max": rows.amax(1)}[mode]
    layer = TieredEmbeddingBag(table, mode=mode)
    optimizer = TieredOptimizer(torch.optim.SGD, layer, lr=0.1)
    layer.eval()
    torch.testing.assert_close(layer(square), wanted)
    with torch.no_grad():
        torch.testing.assert_close(layer.train()(keys, torch.arange(0, 12, 3)), wanted)
    assert table.rows == 0
    weights = torch.ones(4, 3, requires_grad=True)
    if mode == "sum":
        with pytest.raises(InvalidInputError, match="only read"):
            layer.eval()(square, per_sample_weights=weights)
        layer.train()
    found = layer(square)
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    optimizer.step()
    assert table.rows == 12
    assert not np.array_equal(table.read(keys), rows.reshape(-1, DIM))


def test_growth_between_lookups_of_a_step(many):
    """Rows that a forward pass has leased stay while another one makes the table grow."""
    table = many["item"]
    layer = TieredEmbeddingCollection(many, {"item": "item"})
    optimizer = TieredOptimizer(torch.optim.SGD, layer, lr=0.5)
    keys = torch.arange(70_000) * 31 + 5
    first = torch.as_tensor(table.read(keys))
    one = layer({"item": keys[:50]})["item"]
    two = layer({"item": keys})["item"]
    (one.sum() + two.sum()).backward()
    optimizer.step()
    assert table.capacity == 131_072
    first[:50] -= 0.5
    torch.testing.assert_close(torch.as_tensor(table.read(keys)), first - 0.5)


def test_keys_are_admitted_with_their_third_use(tmp_path, kind):
    spec = TableSpec(dim=DIM, init=INIT, keys=kind, admit_after=3, track_uses=True)
    with tierstore.create(tmp_path / "a", {"t": spec}) as store:
        table = store["t"]
        layer = TieredEmbedding(table)
        optimizer = TieredOptimizer(torch.optim.Adam, layer, lr=0.1)
        often, seldom = keys_for(kind, range(4)), keys_for(kind, range(10, 20))
        first = torch.as_tensor(table.read(often))
        for step in range(4):
            some = seldom[3 * step : 3 * step + 3]
            both = [*often, *some, *often] if kind == "text" else torch.cat([often, some, often])
            found = layer(both)
            if step < 3:
                torch.testing.assert_close(found[:4], first)
            found.square().sum().backward()
            optimizer.step()
            assert table.rows == (4 if step >= 2 else 0)
            store.commit()
        assert not table.contains(seldom).any()
        assert not torch.equal(torch.as_tensor(table.read(often)), first)
        assert table.read(often, "uses").tolist() == [[2, store.version]] * 4
        table.write(keys_for(kind, [99]), torch.ones(1, DIM))
        assert table.rows == 5
        store.commit()
    with tierstore.open(tmp_path / "a") as store:
        assert store["t"].spec.admit_after == 3


@pytest.mark.variants(3)
@pytest.mark.parametrize("how", ["remove", "expire", "rollback", "reopen"])
def test_a_key_without_its_row_is_admitted_as_a_new_one(tmp_path, kind, how):
    spec = TableSpec(dim=DIM, init=INIT, keys=kind, admit_after=3, track_uses=True)
    keys = keys_for(kind, [5, 7])
    with ExitStack() as opened:
        store = opened.enter_context(tierstore.create(tmp_path / "a", {"t": spec}))
        for turn in range(2):
            table = store["t"]
            layer = TieredEmbedding(table)
            optimizer = TieredOptimizer(torch.optim.SGD, layer, lr=0.1)
            counts = []
            for _ in range(4):
                layer(keys).sum().backward()
                optimizer.step()
                counts.append(table.rows)
            assert counts == [0, 0, 2, 2], (how, turn)
            if how == "rollback":
                store.rollback()
                continue
            store.commit()
            if how == "expire":
                assert list(table.expire(keep_at_most=0))
            else:
                assert table.remove(keys) == 2
            store.commit()
            if how == "reopen":
                opened.close()
                store = opened.enter_context(tierstore.open(tmp_path / "a", "r+"))


@pytest.mark.variants(1, 4)
@pairs(
    mode=[None, "sum", "mean", "max"],
    make=[torch.optim.SGD, torch.optim.Adagrad],
    alone=[True, False],
)
def test_keys_are_admitted_in_bags_and_collections(tmp_path, kind, mode, make, alone):
    """As a layer of torch trains whose rows get no step before the second use of their key."""
    spec = TableSpec(dim=DIM, init=INIT, keys=kind, admit_after=2)
    pool = {
        None: lambda rows: rows,
        "sum": lambda rows: rows.sum(1),
        "mean": lambda rows: rows.mean(1),
        "max": lambda rows: rows.amax(1),
    }[mode]
    rng = np.random.default_rng(8)
    with tierstore.create(
        tmp_path / "a", {"t": spec, "other": TableSpec(40, DIM, init=INIT)}
    ) as store:
        table, every = store["t"], keys_for(kind, range(40))
        first = torch.as_tensor(table.read(every))
        if alone:
            layer = TieredEmbeddingBag(table, mode=mode) if mode else TieredEmbedding(table)
        elif mode:
            layer = TieredEmbeddingBagCollection(store, {"a": "t", "b": "t", "c": "other"}, mode)
        else:
            layer = TieredEmbeddingCollection(store, {"a": "t", "b": "t", "c": "other"})
        optimizer = TieredOptimizer(make, layer, lr=0.1)
        rows = [row.clone().requires_grad_() for row in first]  # one by one, as rows take steps
        optimizers = [make([row], lr=0.1) for row in rows]
        uses = np.zeros(40, int)
        for _ in range(8):
            numbers = {name: rng.integers(0, 40, (5, 3)) for name in ("a", "b")}
            if alone:
                del numbers["b"]
            admitted = np.zeros(40, bool)
            wanted = {}
            for name, own in numbers.items():
                uses[np.unique(own)] += 1
                counts = uses >= 2
                admitted[own[counts[own]]] = True
                used = [rows[n] if counts[n] else rows[n].detach() for n in own.ravel()]
                wanted[name] = pool(torch.stack(used).view(5, 3, DIM))
            given = {name: squared(kind, own) for name, own in numbers.items()}
            if not alone:
                given["c"] = torch.from_numpy(numbers["a"])
            outputs = {"a": layer(given["a"])} if alone else layer(given)
            for name, each in wanted.items():
                torch.testing.assert_close(outputs[name], each)
            target = torch.from_numpy(rng.standard_normal((1, DIM), np.float32))
            for found in (outputs, wanted):
                loss = sum((each - target).square().sum() for each in found.values())
                if loss.requires_grad or found is outputs:
                    loss.backward()
            optimizer.step()
            for n in np.flatnonzero(admitted):
                optimizers[n].step()
                optimizers[n].zero_grad()
            optimizer.zero_grad()
            assert table.rows == (uses >= 2).sum()
            store.commit()
        expected = torch.stack([row.detach() for row in rows])
        torch.testing.assert_close(torch.as_tensor(table.read(every)), expected)


def test_keys_of_a_collection_get_their_rows_in_the_order_of_its_features(tmp_path):
    """Not in that of a set of names, which is another one in every process."""
    names = [f"feature {number}" for number in range(12)]
    spec = TableSpec(dim=DIM, init=INIT, keys="int64")
    with tierstore.create(tmp_path / "a", {"t": spec}) as store:
        layer = TieredEmbeddingCollection(store, dict.fromkeys(names, "t"))
        layer({name: torch.tensor([names.index(name)]) for name in reversed(names)})
        assert store["t"].keys[:].tolist() == list(range(12))
        store.rollback()


def squared(kind, numbers):
    keys = keys_for(kind, numbers.ravel())
    if kind == "int64":
        return keys.view(numbers.shape)
    return np.array(keys, object).reshape(numbers.shape)


def test_threads_that_train_one_key_count_each_use(tmp_path, kind, monkeypatch):
    spec, key = TableSpec(dim=DIM, keys=kind, track_uses=True), keys_for(kind, [5])
    read, threads = RowsByNumber.read, []

    def disturbed(self, ids, field=None, **options):
        found = read(self, ids, field, **options)
        if field == "uses" and not threads:  # another use comes between the count and its update
            threads.append(threading.Thread(target=layer, args=(key,)))
            threads[0].start()
            threads[0].join(0.3)
        return found

    with tierstore.create(tmp_path / "s", {"t": spec}, budget=Budget(host_rows=50)) as store:
        layer = TieredEmbedding(store["t"])
        layer(key)
        monkeypatch.setattr(RowsByNumber, "read", disturbed)
        layer(key)
        threads[0].join(60)
        monkeypatch.undo()
        assert store["t"].read(key, "uses")[0].tolist() == [3, store.version + 1]
        store.rollback()
