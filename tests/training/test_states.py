"""States of layers, optimizers and stores: what loads them restores the store, or raises."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import tierstore
from tests import inside
from tierstore.errors import ClosedError, InvalidInputError, InvalidTypeError, LockedError
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

ROWS, DIM = 200, 8
SPEC = tierstore.TableSpec(20, 4, init=tierstore.normal(std=1, seed=4))


class Model(torch.nn.Module):
    """Rows of two tables, and a dense head."""

    def __init__(self, store: tierstore.Store) -> None:
        super().__init__()
        self.user, self.item = TieredEmbedding(store["user"]), TieredEmbedding(store["item"])
        self.head = torch.nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.user(ids[:, 0]) * self.item(ids[:, 1])).squeeze(-1)


class Run:
    """A model of a click's odds with its optimizer, and a validation loss."""

    def __init__(self, path: Path, **options: Any) -> None:
        init = tierstore.normal(std=0.5, seed=3)
        specs = {name: tierstore.TableSpec(ROWS, DIM, init=init) for name in ("user", "item")}
        self.store = tierstore.create(path, specs, budget=tierstore.Budget(host_rows=50), **options)
        torch.manual_seed(1)
        self.model = Model(self.store)
        self.opt = TieredOptimizer(torch.optim.Adam, self.model, lr=0.05)
        self.rng = torch.Generator().manual_seed(2)

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            ids = torch.randint(0, ROWS, (32, 2), generator=self.rng)
            target = ((ids[:, 0] + ids[:, 1]) % 2).float()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(ids), target)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    def loss(self) -> float:
        with torch.no_grad():
            ids = torch.stack([torch.arange(ROWS), torch.arange(ROWS).flip(0)], 1)
            target = (torch.arange(ROWS) % 3 == 0).float()
            return float(
                torch.nn.functional.binary_cross_entropy_with_logits(self.model(ids), target)
            )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "s")
    yield made
    if not inside.door(made.store).closed:
        made.store.rollback()
        made.store.close()


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_safetensors(state: Any) -> Any:
    safetensors = pytest.importorskip("safetensors.torch")
    return safetensors.load(safetensors.save(dict(state)))


def in_memory(state: Any) -> Any:
    assert sum(value.numel() for value in state.values()) > 0
    return {name: value.clone().cpu() for name, value in state.items()}


SAVERS: dict[str, Callable[[Any], Any]] = {
    "torch.save": through_torch,
    "safetensors": through_safetensors,
    "a copy in memory": in_memory,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.variants(1, 3)
@pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS)
def test_loading_the_best_state_restores_rows_and_head(run: Run, save: Callable[..., Any]) -> None:
    run.train()
    run.store.commit(keep="best")
    best, loss = save(run.model.state_dict()), run.loss()
    for _ in range(4):
        run.train()
        run.store.commit()
    run.train()
    assert run.loss() != loss
    assert str(run.model.load_state_dict(best)) == "<All keys matched successfully>"
    assert run.loss() == loss
    assert run.store.uncommitted_rows() == 0


def test_training_goes_on_from_the_best_as_if_nothing_had_come_after(run: Run) -> None:
    run.train()
    run.store.commit(keep="best")
    state = through_torch({"model": run.model.state_dict(), "opt": run.opt.state_dict()})
    at = run.rng.get_state()
    run.train()
    expected = run.loss()
    steps = run.store["item"].scalars["step"]
    run.store.commit()
    run.train()
    run.store.commit()
    run.model.load_state_dict(state["model"])
    run.opt.load_state_dict(state["opt"])
    run.rng.set_state(at)
    run.train()
    assert run.loss() == expected
    assert run.store["item"].scalars["step"] == steps == 6


def test_a_state_one_version_old_is_not_taken_for_the_newest(run: Run) -> None:
    run.train()
    run.store.commit()
    state, loss = copy.deepcopy(run.model.state_dict()), run.loss()
    run.train()
    run.store.commit()
    run.model.load_state_dict(state)
    assert run.loss() == loss


def test_a_version_that_is_gone_raises_and_says_how_to_keep_it(run: Run) -> None:
    state, pointer = through_safetensors(run.model.state_dict()), {**run.store.state_dict()}
    for _ in range(4):
        run.train()
        run.store.commit()
    loss = run.loss()
    for load in (run.model.load_state_dict, lambda _: run.store.load_state_dict(pointer)):
        with pytest.raises(InvalidInputError, match=r'no longer kept.*commit\(keep="best"\)'):
            load(state)
    assert run.loss() == loss


def test_a_copy_counts_as_the_store_until_it_is_trained(run: Run, tmp_path: Path) -> None:
    run.train()
    run.store.commit()
    state, loss = copy.deepcopy(run.model.state_dict()), run.loss()
    run.store.save(tmp_path / "copy")
    run.store.save(tmp_path / "for good")
    run.store.close()
    for name, keep in (("copy", 9), ("for good", 2)):
        with tierstore.open(tmp_path / name, "r+", keep=keep) as store:
            run.model = Model(store)
            run.opt = TieredOptimizer(torch.optim.Adam, run.model, lr=0.05)
            run.model.load_state_dict(state)
            assert run.loss() == loss
            for _ in range(5):
                run.train()
                store.commit()
            if keep == 9:
                run.model.load_state_dict(state)
                assert run.loss() == loss
            else:
                with pytest.raises(InvalidInputError, match="the copy does not have"):
                    run.model.load_state_dict(state)


def test_a_copy_of_the_files_that_went_its_own_way_is_another(run: Run, tmp_path: Path) -> None:
    run.store.close()
    shutil.copytree(run.store.path, tmp_path / "twin")
    states = []
    for path in (run.store.path, tmp_path / "twin"):
        with tierstore.open(path, "r+") as store:
            store["item"].write([1], np.full((1, DIM), len(states), np.float32))
            store.commit()
            states.append(store.state_dict())
    with tierstore.open(tmp_path / "twin") as reader:
        reader.load_state_dict(states[1])
        with pytest.raises(InvalidInputError, match="of another copy"):
            reader.load_state_dict(states[0])


def test_a_pointer_is_as_long_for_any_version(run: Run) -> None:
    sizes = set()
    for _ in range(12):
        run.train(1)
        run.store.commit()
        sizes.add(run.model.state_dict()["user._extra_state"].shape)
    assert sizes == {torch.Size([1024])}


def test_a_state_of_another_table_or_field_is_refused(run: Run) -> None:
    with pytest.raises(InvalidInputError, match=r"field 'weight' of table 'user'.*table 'item'"):
        run.model.item.load_state_dict(run.model.user.state_dict())
    run.store.add_fields("item", {"bias": tierstore.Field(DIM)})
    bias = TieredEmbedding(run.store["item"], "bias")
    with pytest.raises(InvalidInputError, match=r"field 'weight'.*field 'bias'"):
        bias.load_state_dict(TieredEmbedding(run.store["item"]).state_dict())
    for junk in (torch.tensor([1, 2], dtype=torch.uint8), {"table": "item", "field": "weight"}):
        with pytest.raises(InvalidInputError, match="not a pointer"):
            run.model.item.set_extra_state(junk)


def test_a_state_with_uncommitted_rows_says_how_many_and_what_to_call(run: Run) -> None:
    run.train()
    rows = run.store.uncommitted_rows()
    for part in (run.model, run.opt, run.store):
        with pytest.raises(
            InvalidInputError,
            match=rf"^{rows} rows are not committed in .*store\.commit\(\) before",
        ):
            part.state_dict()
    run.store.rollback()
    assert run.model.state_dict()


def test_a_module_in_a_payload_points_to_the_version_it_is_committed_with(run: Run) -> None:
    run.train()
    version = run.store.commit(step=3, payload={"model": run.model, "opt": run.opt}, keep="best")
    loss = run.loss()
    saved = run.store.payload["model"].state_dict()
    run.train()
    run.store.commit(payload={})
    run.train()
    run.model.load_state_dict(saved)
    assert run.loss() == loss
    assert run.store.restore("best") == run.store.version
    run.train()
    behind = run.store.commit_async(step=9, payload={"model": run.model}).result()
    assert behind == run.store.version > version
    run.model.load_state_dict(run.store.payload["model"].state_dict())
    assert run.store.version == behind


def test_a_payload_that_later_versions_keep_is_of_each_of_them(run: Run) -> None:
    run.train()
    run.store.commit(step=3, payload={"model": run.model})
    for _ in range(4):  # more than are kept
        run.train()
        run.store.commit()
    run.store.add_fields("item", {"age": tierstore.Field(1)})
    loss, version = run.loss(), run.store.version
    run.model.load_state_dict(run.store.payload["model"].state_dict())
    assert (run.loss(), run.store.version) != (loss, version - 1)
    assert run.store.version == version


def test_a_reader_is_brought_to_the_version_too(run: Run) -> None:
    run.train()
    run.store.commit()
    state, loss = copy.deepcopy(run.model.state_dict()), run.loss()
    run.train()
    run.store.commit()
    with tierstore.open(run.store.path) as reader:
        evaluated = Model(reader)
        evaluated.load_state_dict(state)
        run.model = evaluated
        assert run.loss() == loss


def test_gradients_that_wait_are_dropped_when_a_state_is_loaded(run: Run) -> None:
    run.train()
    run.store.commit()
    state, loss = copy.deepcopy(run.model.state_dict()), run.loss()
    run.train()
    run.store.commit()
    run.model(torch.tensor([[1, 2], [3, 4]])).sum().backward()
    for parameter in run.model.head.parameters():
        parameter.grad = None
    run.model.load_state_dict(state)
    run.opt.step()
    assert run.loss() == loss


# -- optimizers


def test_another_class_does_not_go_on_with_the_state_of_the_first(tmp_path: Path) -> None:
    with tierstore.create(tmp_path / "s", {"t": SPEC}) as store:
        emb = TieredEmbedding(store["t"], padding_idx=0)

        def train(opt: TieredOptimizer, steps: int) -> None:
            for _ in range(steps):
                emb(torch.tensor([1, 2, 3])).sum().backward()
                opt.step()
                opt.zero_grad()
            store.commit()

        first = TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
        other = TieredOptimizer(torch.optim.Adagrad, [emb], lr=0.1)
        train(first, 5)
        with pytest.raises(InvalidInputError, match=r"torch.optim.Adam after 5 steps.*reset=True"):
            TieredOptimizer(torch.optim.RMSprop, [emb])
        emb(torch.tensor([1])).sum().backward()
        with pytest.raises(InvalidInputError, match=r"which torch.optim.Adagrad cannot go on from"):
            other.step()
        other.zero_grad()
        del other
        train(TieredOptimizer(torch.optim.Adam, [emb], lr=0.1, state="continue"), 1)
        assert store["t"].scalars["step"] == 6
        weights = store["t"].read(np.arange(20))
        fresh = TieredOptimizer(torch.optim.Adam, [emb], lr=0.1, reset=True)
        assert "step" not in store["t"].scalars
        assert not store["t"].read(np.arange(20), "exp_avg").any()
        assert np.array_equal(store["t"].read(np.arange(20)), weights)
        train(fresh, 2)
        assert store["t"].scalars["step"] == 2
        TieredOptimizer(torch.optim.Adagrad, [emb], lr=0.1, reset=True)
        assert list(store["t"].fields) == ["weight", "sum"]


def test_a_state_of_another_class_of_optimizer_is_refused(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "other")
    with other.store:
        opt = TieredOptimizer(torch.optim.Adagrad, other.model, lr=0.1)
        with pytest.raises(
            InvalidInputError, match=r"the optimizer torch.optim.Adam with .* torch.optim.Adag"
        ):
            opt.load_state_dict(run.opt.state_dict())
        assert opt.param_groups[0].get("eps") == 1e-10


SHAPING = [
    (torch.optim.Adam, {}, {"amsgrad": True}),
    (torch.optim.RMSprop, {"momentum": 0.5}, {"momentum": 0.5, "centered": True}),
    (torch.optim.SGD, {}, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}, {"ema": 0.9}),
]


@pytest.mark.variants(3)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("kind", "fewer", "more"), SHAPING, ids=lambda each: str(each))
def test_options_that_decide_what_a_row_keeps_must_agree(
    tmp_path: Path, kind: Any, fewer: Any, more: Any, reverse: bool
) -> None:
    made, given = (more, fewer) if reverse else (fewer, more)
    with tierstore.create(tmp_path / "s", {"t": SPEC}) as store:
        model = torch.nn.ModuleList([TieredEmbedding(store["t"]), torch.nn.Linear(4, 1)])

        def optimizer(options: Any, lr: float = 0.1) -> TieredOptimizer:
            return TieredOptimizer(kind, model, state="continue", **{"lr": lr, **options})

        def train(opt: TieredOptimizer) -> None:
            model[1](model[0](torch.arange(9))).sum().backward()
            opt.step()
            opt.zero_grad()

        first = optimizer(made)
        train(first)
        store.commit()
        state = through_torch(first.state_dict())
        same = optimizer(made, lr=0.5)  # options that only weigh are those of the state
        same.load_state_dict(state)
        assert same.param_groups[0]["lr"] == 0.1
        other = optimizer(given, lr=0.5)
        train(other)
        version, groups = store.commit(), other.state_dict()["param_groups"]
        rows = store["t"].read(np.arange(20))
        with pytest.raises(
            InvalidInputError, match=r"this state is of the optimizer .* with .* and not of"
        ):
            other.load_state_dict(state)
        assert other.state_dict()["param_groups"] == groups
        assert store.version == version
        assert np.array_equal(store["t"].read(np.arange(20)), rows)
        train(other)
        store.rollback()


def test_a_state_of_other_groups_changes_nothing(run: Run) -> None:
    run.train()
    run.store.commit()
    state = run.opt.state_dict()
    run.train()
    version = run.store.commit()
    groups = [{"params": [run.model.user, run.model.item]}, {"params": run.model.head}]
    other = TieredOptimizer(torch.optim.Adam, groups, lr=0.05)
    with pytest.raises(InvalidInputError, match="over other parameters"):
        other.load_state_dict(state)
    assert run.store.version == version


@pytest.mark.parametrize("combine", ["mean", "sum", "moved", "scaled"])
def test_states_that_were_computed_from_others_say_what_to_do(run: Run, combine: str) -> None:
    """Soups, averages and steps between two states, which would need the rows of both."""
    states = []
    for _ in range(2):
        run.train()
        run.store.commit(keep=f"state {run.store.version}")
        states.append(run.model.state_dict())
    version = run.store.version
    one, other = states
    made = {
        "mean": {name: (one[name] + other[name]) / 2.0 for name in one},
        "sum": {name: 0.9 * one[name] + 0.1 * other[name] for name in one},
        "moved": {name: one[name] + 0.3 * (other[name].float() - one[name]) for name in one},
        "scaled": {name: 0.99 * one[name] for name in one},
    }
    with pytest.raises(InvalidInputError, match=r"not a pointer.*computed.*ema=.*version=\.\.\."):
        run.model.load_state_dict(made[combine])
    assert run.store.version == version
    run.model.load_state_dict({name: value.float() for name, value in one.items()})


def test_layers_and_optimizers_are_copied_right_or_refused(run: Run) -> None:
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidTypeError, match=r"Save opt\.state_dict\(\)"):
            attempt(run.opt)
    with pytest.raises(InvalidTypeError, match="cannot be pickled"):
        pickle.dumps(run.model)
    run.model.owner = run.store
    again = copy.deepcopy(run.model)
    assert again.owner is run.store
    assert again.user.table is run.store["user"]
    assert copy.deepcopy(run.store["user"]) is run.store["user"]
    ids = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(again(ids), run.model(ids))


def test_a_copy_of_a_model_says_once_that_it_shares_rows() -> None:
    specs = {name: tierstore.TableSpec(9, 8, init=1.0) for name in ("a", "b")}
    with tierstore.create(None, specs) as store:
        one, two = TieredEmbedding(store["a"]), TieredEmbedding(store["b"])
        optimizer = TieredOptimizer(torch.optim.SGD, [one], lr=0.1, ema=0.9)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            one(torch.arange(3)).sum().backward()
            optimizer.step()
            one.averaged()  # wants the copy
            assert not seen
            model = torch.nn.Sequential(one, two, TieredEmbedding(store["a"]))
            copy.deepcopy(copy.deepcopy(model)).eval()
        said = [str(each.message) for each in seen]
        assert [("table 'a'" in each, "table 'b'" in each) for each in said] == [
            (True, False),
            (False, True),
        ]
        for way in ("averaged()", "store.save(", "FrozenEmbedding(tierstore.open(path, version="):
            assert way in said[0]
        store.rollback()


# -- torch.distributed.checkpoint


def test_dcp_saves_and_loads_model_and_optimizer(run: Run, tmp_path: Path) -> None:
    run.train()
    run.store.commit(keep="best")
    model, opt = get_state_dict(run.model, run.opt)
    loss, steps = run.loss(), run.store["item"].scalars["step"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model, "opt": opt}, checkpoint_id=tmp_path / "dcp")
        run.train()
        run.store.commit()
        run.opt.param_groups[0]["lr"] = 7.0
        model, opt = get_state_dict(run.model, run.opt)
        dcp.load({"model": model, "opt": opt}, checkpoint_id=tmp_path / "dcp")
    set_state_dict(run.model, run.opt, model_state_dict=model, optim_state_dict=opt)
    assert run.loss() == loss
    assert run.store["item"].scalars["step"] == steps
    assert run.opt.param_groups[0]["lr"] == 0.05
    run.train()
    assert run.store["item"].scalars["step"] == steps + 3


def test_dcp_takes_a_model_or_an_optimizer_of_layers_alone(tmp_path: Path) -> None:
    with tierstore.create(tmp_path / "s", {"t": SPEC}) as store:
        model = torch.nn.Sequential(TieredEmbedding(store["t"], padding_idx=0))
        opt = TieredOptimizer(torch.optim.SGD, model, lr=0.1)
        before = store.version
        state = get_model_state_dict(model)
        options = get_optimizer_state_dict(model, opt)
        assert options["param_groups"][0]["params"] == ["0.rows"]
        rows = store["t"].read([1])
        store["t"].write([1], np.ones((1, 4), np.float32))
        store.commit()
        set_model_state_dict(model, state)
        assert np.array_equal(store["t"].read([1]), rows)
        assert store.version == before + 2


# -- programs


@pytest.mark.nightly
@pytest.mark.slow
def test_an_exported_program_reads_the_store_it_was_made_for(run: Run, tmp_path: Path) -> None:
    emb, ids = run.model.item, torch.tensor([1, 2, 3])
    with torch.no_grad():
        program = torch.export.export(emb, (ids,))
    file = tmp_path / "x.pt2"
    torch.export.save(program, file)
    rows, path = emb(ids).detach(), run.store.path
    tierstore.create(tmp_path / "b", {"item": tierstore.TableSpec(ROWS, DIM)}).close()
    run.store.close()
    code = f"""
        import sys, torch, tierstore
        from tierstore.nn import TieredEmbedding
        from tierstore.errors import ClosedError
        program = torch.export.load({str(file)!r}).module()
        ids = torch.tensor([1, 2, 3])
        other = [TieredEmbedding(tierstore.open({str(tmp_path / "b")!r})["item"]) for _ in range(9)]
        try:
            program(ids)
            sys.exit("read a stranger's rows")
        except ClosedError as error:
            assert "field 'weight' of table 'item'" in str(error), error
        emb = TieredEmbedding(tierstore.open({str(path)!r})["item"])
        assert program(ids).tolist() == {rows.tolist()!r}
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True)


def test_a_trace_that_would_bake_rows_in_is_refused(run: Run) -> None:
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(InvalidInputError, match=r"torch\.export"),
    ):
        torch.jit.trace(run.model.item, (torch.tensor([1, 2]),), check_trace=False)


def test_what_takes_a_module_apart_says_what_to_do(run: Run) -> None:
    item = run.model.item
    before = item(torch.tensor([1, 2]))
    with pytest.warns(DeprecationWarning), pytest.raises(InvalidInputError, match=r"torch\.export"):
        torch.jit.script(run.model)
    with pytest.raises(InvalidTypeError, match="is_leaf_module"):
        torch.fx.symbolic_trace(item)
    with pytest.raises(InvalidInputError, match="table 'item' are not on the device meta"):
        item.to("meta")
    with pytest.raises(InvalidInputError, match="are not on the device meta"):
        item.to_empty(device="meta")
    item.to_empty(device="cpu")
    assert torch.equal(item(torch.tensor([1, 2])), before)


# -- several ranks


def test_a_step_in_a_group_of_ranks_says_what_to_do(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.train()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    found = r"2 ranks train.*replicated=True"
    with monkeypatch.context() as patch:
        patch.setattr("tierstore.nn.rows.in_group", lambda: True)
        with pytest.raises(InvalidInputError, match=found):
            run.train(1)  # at the lookup
    run.train(1)
    monkeypatch.setattr("tierstore.optim.optimizer.in_group", lambda: True)
    with pytest.raises(InvalidInputError, match=found):
        run.train(1)  # at the step, where a compiled graph looked up
    run.opt = TieredOptimizer(torch.optim.Adam, run.model.head.parameters(), lr=0.1)
    run.opt.step()


def test_closed_stores_still_say_where_they_were(run: Run) -> None:
    run.train()
    run.store.commit()
    pointer = run.store.state_dict()
    run.store.close()
    assert run.store.state_dict() == pointer
    with pytest.raises(ClosedError):
        run.store.load_state_dict(pointer)
    with tierstore.open(run.store.path, "r+"), pytest.raises(LockedError):
        tierstore.open(run.store.path, "r+")
