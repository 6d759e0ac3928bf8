"""What people write is taken, and nothing that is given is ignored."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tierstore.errors import InvalidInputError, UnknownNameError

SPEC = {"t": tierstore.TableSpec(20, 4, init=tierstore.normal(seed=1))}


class AsPath:
    """A path that is no pathlib.Path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def slots(store: tierstore.Store) -> int:
    return sum(tier.slots for table in store.info().tables for tier in table.tiers)


def test_a_budget_may_be_a_size(tmp_path):
    path = AsPath(tmp_path / "emb.tier")
    assert isinstance(path, os.PathLike)
    with tierstore.create(path, SPEC, budget="8MiB") as store:
        assert slots(store) == 20
    for nothing in (0, "0"):
        with tierstore.open(path, budget=nothing) as store:
            assert slots(store) == 0
            assert store["t"].read([3]).any()


@pytest.mark.parametrize(
    "given",
    [
        {"budget": tierstore.Budget(host={"itm": "1MiB"})},
        {"budget": tierstore.Budget(host_rows={"t": 3, "itm": 3})},
        {"policy": {"itm": "lru"}},
    ],
)
def test_a_table_that_is_not_there_is_not_ignored(tmp_path, given):
    path = tmp_path / "emb.tier"
    with pytest.raises(UnknownNameError, match="names a table 'itm'; there are: t"):
        tierstore.create(path, SPEC, **given)
    assert not path.exists()
    tierstore.create(path, SPEC).close()
    with pytest.raises(UnknownNameError, match="'itm'"):
        tierstore.open(path, "r+", **given)
    tierstore.open(path, "r+").close()  # it was given back


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_errors_list_tables_in_the_order_of_the_store(tmp_path, seed):
    program = (
        "import sys, tierstore\n"
        "names = ['tag', 'album', 'song', 'artist', 'year']\n"
        "specs = dict.fromkeys(names, tierstore.TableSpec(9, 2))\n"
        "typos = dict.fromkeys(['sogn', 'tga', 'albm'], '1MiB')\n"
        "for given in ({'budget': tierstore.Budget(host=typos)}, {'policy': typos}):\n"
        "    try: tierstore.create(sys.argv[1], specs, **given)\n"
        "    except tierstore.errors.UnknownNameError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "emb.tier"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.splitlines() == [
        f"the {what} names a table 'sogn'; there are: tag, album, song, artist, year"
        for what in ("budget", "policy")
    ], done.stderr


def test_arguments_that_would_do_nothing_are_refused(tmp_path):
    path = tmp_path / "emb.tier"
    tierstore.create(path, SPEC).close()
    for wrong in (
        {"mode": "r", "keep": 3},
        {"mode": "r+", "discard_newer": True},
        {"mode": "r", "version": 1, "discard_newer": True},
    ):
        with pytest.raises(InvalidInputError):
            tierstore.open(path, **wrong)


def test_devices_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    with tierstore.create(tmp_path / "emb.tier", SPEC, device=torch.device("cpu")) as store:
        assert store["t"].device == "cpu"


def test_rows_from_parameters_and_lists(tmp_path):
    torch = pytest.importorskip("torch")
    weight = torch.nn.Embedding(20, 4).weight
    made = {
        "parameter": tierstore.TableSpec(20, 4, init=tierstore.from_array(weight)),
        "half": tierstore.TableSpec(20, 4, init=tierstore.from_array(weight.bfloat16())),
        "lists": tierstore.TableSpec(2, 2, init=tierstore.from_array([[1, 2], [3, 4]])),
    }
    with tierstore.create(tmp_path / "emb.tier", made) as store:
        assert np.array_equal(np.asarray(store["parameter"]), weight.detach().numpy())
        half = weight.detach().bfloat16().float().numpy()
        assert np.array_equal(np.asarray(store["half"]), half)
        assert np.array_equal(np.asarray(store["lists"]), [[1, 2], [3, 4]])
        store["lists"].write([0], [[5, 6]])
        store["parameter"].write([1, 0], weight[:2])
        assert np.array_equal(store["lists"][0], [5, 6])
        assert np.array_equal(store["parameter"][:2], weight.detach().numpy()[[1, 0]])
        store.commit()
    with pytest.raises(InvalidInputError):
        tierstore.from_array(np.ones((2, 2), np.int64))
    with pytest.raises(TypeError):
        tierstore.normal(0.01)


def test_a_layer_over_zeros_says_so_once(tmp_path):
    pytest.importorskip("torch")
    from tierstore.errors import ZeroRowsWarning
    from tierstore.nn import TieredEmbedding

    specs = {
        "zeros": tierstore.TableSpec(5000, 4),
        "bias": tierstore.TableSpec(50, 1),
        "drawn": SPEC["t"],
        "padded": SPEC["t"],
    }
    with tierstore.create(tmp_path / "emb.tier", specs) as store:
        store["padded"].write([0], np.zeros((1, 4), np.float32))
        for name in ("bias", "drawn", "padded"):
            TieredEmbedding(store[name])
        with pytest.warns(ZeroRowsWarning, match="'zeros'") as caught:
            TieredEmbedding(store["zeros"])
            TieredEmbedding(store["zeros"])
        assert len(caught) == 1
        assert caught[0].filename == __file__
        store.commit()
