"""Files at URLs: whole ones with the rows, or none."""

import functools
import http.server
import threading

import numpy as np
import pytest

import tierstore
from tests.formats.matrices import random_matrix, random_words, read_file, read_keys_of, write_file
from tests.pairs import pairs
from tierstore._formats import SINK_SUFFIXES, open_sink, open_source, read_keys
from tierstore._formats.base import FORMATS
from tierstore._io import unreachable
from tierstore.errors import ExistsError, FormatError, InvalidInputError, StoreIOError

fsspec = pytest.importorskip("fsspec")

STREAMS = [suffix for suffix in SINK_SUFFIXES if not FORMATS[suffix].is_directory]
MATRIX, WORDS = random_matrix(300, 6), random_words(300)
MATRIX[100:200] = 0


@pytest.fixture(params=["memory", "file"])
def place(request, tmp_path):
    yield "memory://bucket" if request.param == "memory" else f"file://{tmp_path}/bucket"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(autouse=True)
def bucket(place):
    system, path = fsspec.core.url_to_fs(place)
    system.makedirs(path, exist_ok=True)
    return lambda: sorted(name.rpartition("/")[2] for name in system.find(path))


@pairs(together=1, suffix=STREAMS, place=["memory", "file"])
def test_every_stream(tmp_path, place, bucket, suffix):
    url, local = f"{place}/items{suffix}", tmp_path / f"items{suffix}"
    write_file(url, MATRIX, "float32", block_rows=70, keys=WORDS)
    with fsspec.open(url) as file:
        local.write_bytes(file.read())
    assert read_file(local).tobytes() == MATRIX.tobytes()
    if FORMATS[suffix].keys == "never":
        with fsspec.open(f"{place}/items.keys.npy") as file:
            (tmp_path / "k.npy").write_bytes(file.read())
        assert read_keys(tmp_path / "k.npy") == WORDS
    else:
        assert read_keys_of(local) == WORDS
        assert bucket() == [local.name]
    with pytest.raises(ExistsError):
        write_file(url, MATRIX, "float32")
    write_file(url, MATRIX[:7], "float32", force=True)
    with fsspec.open(url) as file:
        local.write_bytes(file.read())
    assert read_file(local).tobytes() == MATRIX[:7].tobytes()


@pytest.mark.parametrize("suffix", STREAMS)
def test_nothing_is_there_when_the_rows_break_off(place, bucket, suffix):
    url = f"{place}/items{suffix}"
    with pytest.raises(RuntimeError), open_sink(url, rows=300, dim=6, dtype="float32") as sink:
        sink.write(MATRIX[:100])
        raise RuntimeError
    assert bucket() == []


@pytest.mark.variants(6)
@pairs(together=1, suffix=STREAMS, place=["memory", "file"])
def test_every_stream_is_loaded(tmp_path, place, suffix):
    write_file(f"{place}/items{suffix}", MATRIX, "float32", block_rows=70, keys=WORDS)
    keys = f"{place}/items.keys.npy" if FORMATS[suffix].keys == "never" else None
    tierstore.import_table(tmp_path / "s.tier", f"{place}/items{suffix}", keys=keys)
    with tierstore.open(tmp_path / "s.tier") as store:
        assert list(store["embeddings"].keys[:]) == WORDS
        assert store["embeddings"][:].tobytes() == MATRIX.tobytes()
    assert list(tmp_path.glob("tierstore-*")) == []


def test_one_of_several_arrays_at_a_url(tmp_path, place):
    with fsspec.open(f"{place}/two.npz", "wb") as file:
        np.savez(file, one=MATRIX[:5], two=MATRIX)
    tierstore.import_table(tmp_path / "s.tier", f"{place}/two.npz:one")
    with tierstore.open(tmp_path / "s.tier") as store:
        assert store["embeddings"][:].tobytes() == MATRIX[:5].tobytes()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.variants(1)
def test_a_file_on_the_web(tmp_path):
    pytest.importorskip("aiohttp")
    write_file(tmp_path / "items.csv", MATRIX, "float32", keys=WORDS)
    serve = functools.partial(Quiet, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/items.csv"
        try:
            tierstore.import_table(tmp_path / "s.tier", url)
            with pytest.raises(FormatError, match="no such file"):
                tierstore.import_table(tmp_path / "t.tier", url.replace("items", "none"))
        finally:
            server.shutdown()
    with tierstore.open(tmp_path / "s.tier") as store:
        assert store["embeddings"][:].tobytes() == MATRIX.tobytes()


def test_what_is_no_stream(place):
    with pytest.raises(InvalidInputError, match="a directory, which is not written to a URL"):
        write_file(f"{place}/items.projector", MATRIX, "float32")
    with pytest.raises(InvalidInputError, match="copy the file to a disk first"):
        open_source(f"{place}/items.npy")
    with pytest.raises(InvalidInputError, match="cannot be reached"):
        write_file("nothing://bucket/items.npy", np.ones((2, 2), "f4"), "float32")


def test_a_package_that_is_too_old_says_so():
    """An old s3fs fails with a TypeError, for an argument that it does not know."""
    error = unreachable("s3://b/x", TypeError("got an unexpected keyword argument 'asynchronous'"))
    assert isinstance(error, StoreIOError)
    assert "s3://b/x cannot be reached: TypeError" in str(error)
    assert "that the package of this kind of place is recent" in str(error)
