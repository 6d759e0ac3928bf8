"""Random programs of keys beside training, against a dict: see `key_programs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training import key_programs


@pytest.mark.variants(2, 20)
@pytest.mark.parametrize("seed", range(1, 21))
def test_every_gradient_reaches_its_key_or_the_call_raises(tmp_path: Path, seed: int) -> None:
    for store in range(4):
        key_programs.run(100 * seed + store, 25, tmp_path)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10_000, 10_040))
def test_so_do_many(tmp_path: Path, seed: int) -> None:
    key_programs.run(seed, 2_500, tmp_path)
