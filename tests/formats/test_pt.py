""".pt: tensors that torch saved, alone or in dicts, and files that are something else."""

import argparse
import collections
import pathlib
import pickle
import re
import zipfile
from collections import OrderedDict
from contextlib import suppress

import numpy as np
import pytest

import tierstore
from tests.formats.matrices import random_matrix, read_file, read_keys_of
from tierstore._formats import open_sink, open_source
from tierstore.errors import FormatError, InvalidInputError

torch = pytest.importorskip("torch")


def tensor_of(matrix, dtype="float32"):
    if dtype == "bfloat16":
        return torch.from_numpy(matrix.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(matrix)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (31, 6)], ids=str)
def test_reads_a_tensor(tmp_path, dtype, shape):
    matrix = random_matrix(*shape, dtype)
    torch.save(tensor_of(matrix, dtype), tmp_path / "file.pt")
    with open_source(tmp_path / "file.pt") as source:
        assert source.dtype == dtype
        assert source.keys is None
    assert read_file(tmp_path / "file.pt", block_rows=4).tobytes() == matrix.tobytes()


def test_reads_views_of_larger_tensors(tmp_path):
    tensor = torch.randn(40, 20, generator=torch.Generator().manual_seed(0))
    for view in (tensor[3:9, 2:5], tensor.t(), tensor[::3, ::2], tensor[0].expand(7, 20)):
        torch.save(view, tmp_path / "file.pt")
        assert read_file(tmp_path / "file.pt", block_rows=4).tolist() == view.tolist()


def test_reads_a_state_dict(tmp_path):
    module = torch.nn.ModuleDict({"emb": torch.nn.Embedding(9, 4), "out": torch.nn.Linear(4, 2)})
    path = tmp_path / "file.pt"
    torch.save({"model": module.state_dict(), "step": 3}, path)
    expected = module["emb"].weight.detach().numpy()
    assert read_file(f"{path}:model.emb.weight").tobytes() == expected.tobytes()
    with pytest.raises(FormatError, match=r"2 matrices.*model\.emb\.weight.*model\.out\.weight"):
        open_source(path)
    with pytest.raises(FormatError, match=r"'model\.out\.bias' is float32 \(2,\)"):
        open_source(f"{path}:model.out.bias")


def test_reads_a_parameter_and_integer_keys(tmp_path):
    weight = torch.nn.Parameter(tensor_of(random_matrix(9, 4)))
    keys = torch.arange(9) * 3 - 5
    torch.save({"weight": weight, "keys": keys}, tmp_path / "file.pt")
    assert read_file(tmp_path / "file.pt").tobytes() == random_matrix(9, 4).tobytes()
    assert read_keys_of(tmp_path / "file.pt").tolist() == keys.tolist()


@pytest.mark.parametrize("keys", [["a", "é", ""], [5, -(2**63), 3], [2**64 - 1, 0, 2**63]], ids=str)
def test_keys_in_a_list(tmp_path, keys):
    torch.save({"w": torch.ones(3, 2), "keys": keys}, tmp_path / "file.pt")
    assert list(read_keys_of(tmp_path / "file.pt")) == keys


def test_keys_that_are_a_view(tmp_path):
    keys = torch.from_numpy(np.arange(2**64 - 40, 2**64 - 10, dtype=np.uint64))[3::4]
    torch.save({"w": torch.ones(len(keys), 2), "keys": keys}, tmp_path / "file.pt")
    assert read_keys_of(tmp_path / "file.pt").tolist() == keys.tolist()


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (torch.ones(3), "'keys' has the name of keys and holds fractions: say --key-column none"),
        (torch.ones(4, dtype=torch.uint64), r"'keys' is not read: it is uint64 \(4,\);"),
        (["a", 1, "b"], "'keys' is a list of 3, not of keys.*--key-column none"),
        ([1, 2], "'keys' is not read: it is a list of 2;"),
    ],
    ids=str,
)
def test_what_cannot_be_keys_is_said(tmp_path, keys, what):
    torch.save({"w": torch.ones(3, 2), "keys": keys}, tmp_path / "file.pt")
    try:
        notes = tierstore.import_table(tmp_path / "s.tier", tmp_path / "file.pt").notes
    except FormatError as error:
        notes = (str(error),)
    assert any(re.search(what, note) for note in notes)
    done = tierstore.importing.preview(tmp_path / "file.pt", key_column=False)
    assert (done.rows, done.keys, done.notes) == (3, None, ())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_reads_tensors_of_types_without_a_storage_of_their_own(tmp_path, dtype):
    matrix = random_matrix(9, 4, dtype)
    tensor = torch.from_numpy(matrix).view(getattr(torch, dtype))
    for name, save in (("new.pt", torch.save), ("old.pt", save_as_before)):
        save({"w": tensor}, tmp_path / name)
        with open_source(tmp_path / name) as source:
            assert source.dtype == dtype
        assert read_file(tmp_path / name, block_rows=4).tobytes() == matrix.tobytes()


class Evil:
    def __reduce__(self):
        return (open, ("evil-ran", "w"))


def test_code_in_a_file_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": tensor_of(random_matrix(2, 2)), "evil": Evil()}, "file.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(FormatError):
        open_source("plain.pt")
    with open_source("file.pt") as source:
        assert (source.rows, source.dim) == (2, 2) and "open" in source.notes[0]
    assert not (tmp_path / "evil-ran").exists()


def test_blocks_cannot_change_the_tensor(tmp_path):
    torch.save(torch.ones(9, 4), tmp_path / "file.pt")
    with open_source(tmp_path / "file.pt") as source:
        for block in source.blocks(4):
            with pytest.raises(ValueError, match="read-only"):
                block[:] = 0


@pytest.mark.parametrize(
    "content",
    [
        7,
        [torch.ones(2)],
        {},
        {"step": 1},
        torch.ones(3),
        torch.ones(2, 2, 2),
        torch.ones(2, 2, dtype=torch.bool),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, 2, device="meta"),
        torch.ones(2, 0),
    ],
    ids=lambda c: str(c)[:20].replace("\n", ""),
)
def test_contents_without_a_matrix(tmp_path, content):
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(FormatError):
        open_source(tmp_path / "file.pt")


def test_a_storage_that_is_too_small(tmp_path):
    torch.save(torch.randn(64, 64), tmp_path / "whole.pt")
    with (
        zipfile.ZipFile(tmp_path / "whole.pt") as whole,
        zipfile.ZipFile(tmp_path / "file.pt", "w") as cut,
    ):
        for entry in whole.infolist():
            data = whole.read(entry)
            cut.writestr(entry.filename, data[:64] if "/data/" in entry.filename else data)
    with pytest.raises(FormatError):
        read_file(tmp_path / "file.pt")


def save_as_before(value, path):
    """Save in the format of PyTorch before 1.6."""
    torch.save(value, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_files_from_before_pytorch_1_6(tmp_path, dtype):
    matrix = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    state = {
        "n": torch.arange(3),
        "emb": OrderedDict(weight=matrix, part=matrix[2:7, 1:3], turned=matrix.T),
        "keys": torch.arange(9) * 5,
        "epoch": 7,
    }
    save_as_before(state, tmp_path / "f.pt")
    torch.save(state, tmp_path / "g.pt")
    for name in ("weight", "part", "turned"):
        found = read_file(f"{tmp_path}/f.pt:emb.{name}", block_rows=3)
        assert found.tobytes() == read_file(f"{tmp_path}/g.pt:emb.{name}").tobytes()
    assert list(read_keys_of(f"{tmp_path}/f.pt:emb.weight")) == list(range(0, 45, 5))
    save_as_before(matrix, tmp_path / "one.pth")
    assert read_file(tmp_path / "one.pth").tobytes() == found.T.tobytes()


def test_code_in_files_from_before_is_refused(tmp_path):
    save_as_before(torch.nn.Embedding(3, 2), tmp_path / "f.pt")
    with pytest.raises(FormatError, match="would run code"):
        open_source(tmp_path / "f.pt")
    save_as_before({"w": torch.ones(2, 2), "hook": print}, tmp_path / "f.pt")
    with open_source(tmp_path / "f.pt") as source:
        assert (source.rows, source.dim) == (2, 2) and "builtin" in source.notes[0]


def test_files_from_before_that_are_damaged(tmp_path):
    save_as_before({"w": torch.randn(40, 8), "v": torch.randn(3)}, tmp_path / "f.pt")
    data = (tmp_path / "f.pt").read_bytes()
    for cut in range(20, len(data) - 1, 37):
        (tmp_path / "cut.pt").write_bytes(data[:cut])
        with pytest.raises(FormatError):
            read_file(tmp_path / "cut.pt")
    rng = np.random.default_rng(0)
    for _ in range(300):
        spoiled = bytearray(data)
        spoiled[int(rng.integers(15, 500))] = int(rng.integers(256))
        (tmp_path / "odd.pt").write_bytes(spoiled)
        with suppress(FormatError, InvalidInputError):
            read_file(tmp_path / "odd.pt")
    with pytest.raises(FormatError, match="memory"):
        read_file(tmp_path / "f.pt", memory=1000)


def test_it_is_only_read(tmp_path):
    with (
        pytest.raises(InvalidInputError, match=r"\.pt.*\.npy"),
        open_sink(tmp_path / "file.pt", rows=1, dim=1, dtype="float32"),
    ):
        pass


def test_torch_is_not_needed(tmp_path, monkeypatch):
    tensor = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    torch.save(tensor, tmp_path / "file.pt")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert read_file(tmp_path / "file.pt").tobytes() == tensor.numpy().tobytes()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_checkpoints_hold_more_than_tensors(tmp_path, protocol):
    """Tensors can be read regardless of other values and of the pickle protocol."""
    weight = torch.nn.Parameter(tensor_of(random_matrix(9, 4)))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    content = {
        "model": {"weight": weight, "shared": weight},
        "optimizer": optimizer.state_dict(),
        "args": {"lr": 0.1, "name": "é", "sizes": [1, (2, 3)], "none": None, 7: True},
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "bytes": b"raw",
        "long": 2**100,
        "sparse": torch.ones(2, 2).to_sparse(),
    }
    torch.save(content, tmp_path / "file.pt", pickle_protocol=protocol)
    for name in ("weight", "shared"):
        found = read_file(f"{tmp_path / 'file.pt'}:model.{name}")
        assert found.tobytes() == weight.detach().numpy().tobytes()
    moment = optimizer.state_dict()["state"][0]["exp_avg"].numpy()
    assert read_file(f"{tmp_path / 'file.pt'}:optimizer.state.0.exp_avg").tolist() == (
        moment.tolist()
    )


def test_a_file_of_the_other_byte_order(tmp_path):
    matrix = random_matrix(7, 3)
    torch.save({"weight": tensor_of(matrix), "keys": torch.arange(7) - 3}, tmp_path / "whole.pt")
    with (
        zipfile.ZipFile(tmp_path / "whole.pt") as whole,
        zipfile.ZipFile(tmp_path / "file.pt", "w") as other,
    ):
        for entry in whole.infolist():
            data = whole.read(entry)
            if "/data/" in entry.filename:
                kind = "f4" if len(data) == matrix.nbytes else "i8"
                data = np.frombuffer(data, f"<{kind}").astype(f">{kind}").tobytes()
            other.writestr(entry.filename, b"big" if "byteorder" in entry.filename else data)
    assert read_file(tmp_path / "file.pt").tobytes() == matrix.tobytes()
    assert list(read_keys_of(tmp_path / "file.pt")) == list(range(-3, 4))


def test_dicts_in_dicts_are_named_once_for_all_the_ways_to_them(tmp_path):
    """A dict that is held 30 times, by one that is held 30 times, and so on, has no end."""
    content = {"weight": tensor_of(random_matrix(2, 2))}
    for _ in range(15):
        content = {str(number): content for number in range(30)}
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(FormatError, match="names of its tensors"):
        open_source(tmp_path / "file.pt", memory="8MiB")


@pytest.mark.parametrize("name", ["model.pth", "last.ckpt", "pytorch_model.bin"])
def test_other_names_of_the_same_files(tmp_path, name):
    matrix = random_matrix(31, 6)
    state = {"state_dict": {"emb.weight": torch.from_numpy(matrix)}, "epoch": 3, "lr": [0.1, None]}
    torch.save(state, tmp_path / name)
    assert read_file(tmp_path / name, block_rows=4).tobytes() == matrix.tobytes()
    assert read_file(f"{tmp_path / name}:state_dict.emb.weight").tobytes() == matrix.tobytes()


@pytest.mark.parametrize("name", ["model.pth", "last.ckpt", "pytorch_model.bin"])
def test_objects_around_a_tensor_are_named_and_not_made(tmp_path, name):
    made = []

    class Config(dict):
        def __setstate__(self, state):
            made.append(state)

        def __reduce__(self):
            return made.append, ("made",)

    Config.__module__, Config.__qualname__ = "builtins", "Config"
    objects = {
        "config": argparse.Namespace(lr=0.1, table=torch.ones(3, 3)),
        "set": {1, 2},
        "counter": collections.Counter("ab"),
        "default": collections.defaultdict(list, a=[1]),
        "path": pathlib.PurePosixPath("/a"),
        "scalar": np.float64(1.5),
        "state": np.random.default_rng(1).bit_generator.state["state"],
        "array": np.ones(3),
        "hook": print,
    }
    for each in [objects, *({key: value} for key, value in objects.items())]:
        torch.save({**each, "weight": torch.ones(2, 2)}, tmp_path / name)
        with open_source(tmp_path / name) as source:
            assert np.concatenate(list(source.blocks())).tolist() == [[1, 1]] * 2
            if "config" in each:
                assert "argparse.Namespace" in source.notes[0]
    torch.save({"weight": torch.ones(2, 2), "hook": Config()}, tmp_path / name)
    with open_source(tmp_path / name) as source:
        assert source.rows == 2 and made == []


def test_tensors_in_tuples_and_words_beside_them(tmp_path):
    """As torchtext caches vectors: words, their rows, vectors, and the number of elements."""
    matrix, words = random_matrix(5, 3), list("abcde")
    rows = {word: row for row, word in enumerate(words)}
    torch.save((words, rows, torch.from_numpy(matrix), 3), tmp_path / "f.pt")
    with open_source(tmp_path / "f.pt") as source:
        assert np.concatenate(list(source.blocks())).tobytes() == matrix.tobytes()
        assert [note.partition(": ")[2][:1] for note in source.notes] == ["0", "1"]
    torch.save([torch.from_numpy(matrix), torch.ones(2, 2)], tmp_path / "f.pt")
    assert read_file(f"{tmp_path}/f.pt:0").tobytes() == matrix.tobytes()
    torch.save({"vocab": words, "weight": torch.from_numpy(matrix)}, tmp_path / "f.pt")
    with open_source(tmp_path / "f.pt") as source:
        assert "vocab" in source.notes[0]


def test_a_whole_model_says_what_to_save(tmp_path):
    torch.save(torch.nn.Embedding(3, 2), tmp_path / "f.pt")
    with pytest.raises(FormatError, match=r"would run code.* model\.state_dict\(\)") as error:
        open_source(tmp_path / "f.pt")
    assert "damaged" not in str(error.value)
    assert str(error.value).isprintable() and "[1m" not in str(error.value)


class Own(torch.Tensor):
    """A class whose tensors may mean anything."""


def with_attribute(rows):
    rows.origin = "elsewhere"
    return rows


DENSE = {
    "plain": lambda rows: rows,
    "transposed": lambda rows: rows.t().contiguous().t(),
    "every other": lambda rows: rows.repeat_interleave(2, 0)[::2],
    "parameter": torch.nn.Parameter,
    "buffer": torch.nn.Buffer,
    "with an attribute": with_attribute,
    "half": torch.Tensor.half,
    "twice": lambda rows: rows.double(),
}
"""Tensors whose elements are in the file as they are read."""
OTHERS = {
    "negated": torch.Tensor._neg_view,
    "imaginary": lambda rows: torch.complex(rows, -rows).conj().imag,
    "conjugated": lambda rows: torch.complex(rows, rows).conj(),
    "sparse": torch.Tensor.to_sparse,
    "quantised": lambda rows: torch.quantize_per_tensor(rows, 0.1, 0, torch.qint8),
    "without elements": lambda rows: rows.to("meta"),
    "of a class": lambda rows: rows.as_subclass(Own),
    "module": torch.nn.Embedding.from_pretrained,
}
"""What needs torch, which the file says in its own ways."""


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", [*DENSE, *OTHERS])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_what_torch_saves_is_read_as_torch_reads_it_or_named(tmp_path, name, zipped):
    """Beside rows and alone: no tensor is left out without a word, or read in another way."""
    rows = torch.from_numpy(random_matrix(6, 3))
    try:
        made = {**DENSE, **OTHERS}[name](rows.clone())
        torch.save({"it": made}, tmp_path / "alone.pt", _use_new_zipfile_serialization=zipped)
    except (NotImplementedError, RuntimeError):
        pytest.skip("torch cannot save it so")
    both = {"rows": rows, "it": made}
    torch.save(both, tmp_path / "both.pt", _use_new_zipfile_serialization=zipped)
    if name in DENSE:
        known = made.detach().numpy().astype(np.float32).tolist()
        assert read_file(tmp_path / "alone.pt", block_rows=4).astype("f4").tolist() == known
        assert read_file(f"{tmp_path}/both.pt:it").astype("f4").tolist() == known
        return
    with pytest.raises(FormatError):
        read_file(tmp_path / "alone.pt")
    if name == "quantised" and not zipped:
        with pytest.raises(FormatError, match="QInt8Storage"):
            read_file(tmp_path / "both.pt")
        return
    with open_source(f"{tmp_path}/both.pt:rows") as source:
        assert np.concatenate(list(source.blocks())).tolist() == rows.tolist()
        assert "it (" in str(source.notes) or "what objects of" in str(source.notes), source.notes
