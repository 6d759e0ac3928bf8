"""Entries that have a manifest's name and are none are named, not read, and stop nothing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tierstore._disk.manifest import manifest_name
from tierstore.errors import FormatError, UpkeepWarning

KINDS = {
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_no_manifest(tmp_path: Path, kind: str) -> None:
    """Before the first manifest, between two and after the last."""
    path, spec = tmp_path / "s.tier", {"t": tierstore.TableSpec(9, 2)}
    with tierstore.create(path, spec, keep=4) as store:
        for version in range(3):
            store["t"].write([1], np.full((1, 2), version, np.float32))
            store.commit()
    numbers = [0, 5, 6, 99]
    for number in numbers:
        KINDS[kind](path / manifest_name(number))
    with pytest.warns(UpkeepWarning, match=r"0000\.json, .*0099\.json are no files, nor manifests"):
        with tierstore.open(path, "r+") as store:
            assert store["t"].read([1]).tolist() == [[2, 2]]
            for version in range(3, 6):
                store["t"].write([1], np.full((1, 2), version, np.float32))
                store.commit()
            store.fold()
            store["t"].write([2], np.full((1, 2), 7, np.float32))
            store.commit()
        with tierstore.open(path) as reader:
            assert reader["t"].read([1, 2]).tolist() == [[5, 5], [7, 7]]
            assert reader.version == 8
        assert tierstore.verify(path).ok
    for number in numbers:
        stray = path / manifest_name(number)
        assert os.path.lexists(stray)
        stray.rmdir() if kind == "directory" else stray.unlink()
    with tierstore.open(path, "r+") as store:
        store.commit()
        assert store.version == 9


@pytest.mark.parametrize("kind", ["file", "link", "broken link"])
def test_a_file_of_that_name_is_a_damaged_manifest(tmp_path: Path, kind: str) -> None:
    """Nothing tells it from one, and the rows of the newest may be later: it says what opens.

    Programs put links in the place of files: what one leads to may be the newest manifest.
    """
    path, moved = tmp_path / "s.tier", tmp_path / "moved"
    tierstore.create(path, {"t": tierstore.TableSpec(9, 2)}).close()
    if kind == "file":
        (path / manifest_name(99)).write_text("mine")
    else:
        (path / manifest_name(99)).symlink_to(moved)
    if kind == "link":
        moved.write_bytes((path / manifest_name(1)).read_bytes())
    with pytest.raises(FormatError, match=r"0099\.json.* can be opened.*: 1"):
        tierstore.open(path)
    with tierstore.open(path, version=1) as reader:
        assert reader.version == 1
