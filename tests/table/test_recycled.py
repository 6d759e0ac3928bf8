"""Memory of large results that is taken again."""

import gc
import threading

import numpy as np
import pytest
import torch

import tierstore
from tierstore._table import host, recycled
from tierstore._table.recycled import Recycled
from tierstore.nn import TieredEmbedding

HOLDERS = {
    "the array": lambda out: out,
    "a slice": lambda out: out[1:2],
    "another type": lambda out: out.view(np.float32)[:, 1],
    "a tensor": torch.from_numpy,
    "a view of a tensor": lambda out: torch.from_numpy(out)[2:].view(torch.float32),
    "an array of a tensor": lambda out: torch.from_numpy(out).numpy()[::2],
    "a memoryview": memoryview,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_is_taken_again_when_nobody_refers_to_it(holder):
    results = Recycled()
    for _ in range(3):
        held = HOLDERS[holder](results.take(10, 16))
        other = results.take(10, 16)
        assert not np.shares_memory(np.asarray(held), other)
        del held, other
    first = results.take(10, 16).ctypes.data
    assert results.take(10, 16).ctypes.data == first
    assert results.take(5, 16).ctypes.data == first  # of half as much
    assert results.take(10, 16).shape == (10, 16)


def test_memory_much_too_large_or_too_small_is_given_back():
    results = Recycled()
    results.take(100, 16)
    assert results.take(10, 16).base.nbytes == 160
    assert results.take(11, 16).base.nbytes == 176
    assert results.take(1, 16).base.nbytes == 16


def test_what_is_larger_than_a_batch_is_not_kept(monkeypatch):
    monkeypatch.setattr(recycled, "_MOST", 320)
    results = Recycled()
    results.take(20, 16)
    held = results.take(21, 16)
    assert held.base is None or held.base.nbytes == 336
    assert results._block.nbytes == 320


def test_threads_never_share_it():
    results, wrong = Recycled(), []

    def work(number):
        for _ in range(300):
            mine = results.take(64, 64)
            mine[:] = number
            if (mine != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_results_that_are_kept_do_not_change(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "LARGE", 64)
    spec = tierstore.TableSpec(500, 8, init=tierstore.normal(seed=1))
    with tierstore.create(tmp_path / "s", {"t": spec}, device="cpu") as store:
        table, kept = store["t"], []
        layer = TieredEmbedding(table)
        truth = table.read(np.arange(500)).copy()
        rng = np.random.default_rng(2)
        for number in range(30):
            ids = rng.integers(0, 500, 400)
            found = table.read(ids) if number % 3 else layer(torch.from_numpy(ids))
            if number % 2:
                kept.append((ids, found))
            del found
            gc.collect()
        for ids, found in kept:
            values = found.detach().numpy() if isinstance(found, torch.Tensor) else found
            assert np.array_equal(values, truth[ids])
