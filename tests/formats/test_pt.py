""".pt: tensors that torch saved, alone or in dicts, and files that are something else."""

import pickle
import zipfile

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, read_file, read_keys_of
from tierstore.errors import FormatError, InvalidInputError, MissingExtraError
from tierstore.formats import open_sink, open_source

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


class Evil:
    def __reduce__(self):
        return (open, ("evil-ran", "w"))


def test_code_in_a_file_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": tensor_of(random_matrix(2, 2)), "evil": Evil()}, "file.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("file.pt", "plain.pt"):
        with pytest.raises(FormatError):
            open_source(name)
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
        [torch.ones(2, 2)],
        {},
        {"step": 1},
        torch.ones(3),
        torch.ones(2, 2, 2),
        torch.ones(2, 2, dtype=torch.int64),
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


def test_the_old_format_is_refused(tmp_path):
    torch.save(torch.ones(2, 2), tmp_path / "file.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError):
        open_source(tmp_path / "file.pt")


def test_it_is_only_read(tmp_path):
    with (
        pytest.raises(InvalidInputError, match=r"\.pt.*\.npy"),
        open_sink(tmp_path / "file.pt", rows=1, dim=1, dtype="float32"),
    ):
        pass


def test_without_torch_the_pip_line_is_given(tmp_path, monkeypatch):
    torch.save(torch.ones(2, 2), tmp_path / "file.pt")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tierstore\[torch\]'"):
        open_source(tmp_path / "file.pt")
