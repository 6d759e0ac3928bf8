""".projector: what TensorBoard and projector.tensorflow.org read, and metadata of others."""

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, read_file, read_keys_of, write_file
from tierstore.errors import FormatError, InvalidInputError


@pytest.mark.parametrize("keys", [None, [3, 5, 8], ["a b", '"', "é"]])
def test_the_files_are_those_of_the_projector(tmp_path, keys):
    path, matrix = tmp_path / "p.projector", np.random.default_rng(2).standard_normal((3, 2), "f4")
    write_file(path, matrix, "float32", keys=keys, field="exp_avg")
    assert (
        np.loadtxt(path / "vectors.tsv", delimiter="\t", dtype="f4").tobytes() == matrix.tobytes()
    )
    config = (path / "projector_config.pbtxt").read_text()
    assert config.startswith(
        'embeddings {\n  tensor_name: "exp_avg"\n  tensor_path: "vectors.tsv"\n'
    )
    if keys is None:
        assert len(list(path.iterdir())) == 2
    else:
        assert (path / "metadata.tsv").read_text() == "".join(f"{key}\n" for key in keys)
        assert 'metadata_path: "metadata.tsv"' in config


def test_metadata_of_several_columns_is_refused(tmp_path):
    path = tmp_path / "p.projector"
    write_file(path, random_matrix(3, 2), "float32")
    (path / "metadata.tsv").write_text("word\tcount\na\t1\nb\t2\nc\t3\n")
    assert read_file(path).shape == (3, 2)
    with pytest.raises(FormatError, match="4 lines for 3 rows; one of several columns"):
        read_keys_of(path)


def test_there_must_be_rows(tmp_path):
    with pytest.raises(InvalidInputError, match="at least one row"):
        write_file(tmp_path / "p.projector", random_matrix(0, 2), "float32")
    assert list(tmp_path.iterdir()) == []
