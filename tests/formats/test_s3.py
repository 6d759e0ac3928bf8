"""Files and stores in a bucket: whole ones, or none, and errors that say what to do."""

import json

import numpy as np
import pytest

import tierstore
from tests.formats.matrices import random_matrix, random_words, write_file
from tests.s3 import forget_connections, serving
from tierstore._formats import SINK_SUFFIXES, open_sink
from tierstore._formats.base import FORMATS
from tierstore.errors import AccessError, ExistsError, FormatError, NotAStoreError, StoreIOError

pytestmark = pytest.mark.slow  # `make test-all` installs the bucket

STREAMS = [suffix for suffix in SINK_SUFFIXES if not FORMATS[suffix].is_directory]
MATRIX, WORDS = random_matrix(300, 6), random_words(300)


@pytest.fixture(scope="module")
def served():
    with serving() as bucket:
        yield bucket


@pytest.fixture
def bucket(served, monkeypatch):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in served.env.items():
        monkeypatch.setenv(name, value)
    forget_connections()
    yield served
    served.clear()
    forget_connections()


@pytest.fixture
def small_parts(monkeypatch):
    """Upload in parts of the least size that S3 takes, so that a few megabytes are several."""
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "default_block_size", 5 << 20)


@pytest.mark.parametrize("suffix", STREAMS)
@pytest.mark.nightly(*set(STREAMS) - {".npy", ".npz", ".parquet", ".csv"})
def test_every_stream(tmp_path, bucket, suffix):
    """By day one of each kind: keys beside, an archive, a library that writes, a text."""
    url = f"s3://bucket/a/items{suffix}"
    write_file(url, MATRIX, "float32", block_rows=70, keys=WORDS)
    beside = FORMATS[suffix].keys == "never"
    assert bucket.names() == sorted([f"a/items{suffix}", *["a/items.keys.npy"] * beside])
    keys = "s3://bucket/a/items.keys.npy" if beside else None
    tierstore.import_table(tmp_path / "s.tier", url, keys=keys)
    with tierstore.open(tmp_path / "s.tier") as store:
        assert store["embeddings"][:].tobytes() == MATRIX.tobytes()
        assert list(store["embeddings"].keys[:]) == WORDS
    with pytest.raises(ExistsError):
        write_file(url, MATRIX, "float32")


LARGE = random_matrix(1 << 16, 48)  # 12 MiB


def broken_export(url, **options):
    rows, dim = LARGE.shape
    with (
        pytest.raises(ZeroDivisionError),
        open_sink(url, rows=rows, dim=dim, dtype="float32", **options) as sink,
    ):
        sink.write(LARGE[:60000])
        raise ZeroDivisionError


def test_an_export_that_breaks_off_leaves_nothing(bucket, small_parts):
    broken_export("s3://bucket/items.npy", keys=range(len(LARGE)))
    assert (bucket.names(), bucket.uploads()) == ([], 0)


def test_what_is_replaced_stays_until_the_new_one_is_complete(bucket, small_parts):
    write_file("s3://bucket/items.npy", MATRIX, "float32")
    before = bucket.read("items.npy")
    broken_export("s3://bucket/items.npy", force=True)
    assert (bucket.read("items.npy"), bucket.uploads()) == (before, 0)
    write_file("s3://bucket/items.npy", LARGE, "float32", force=True)
    assert bucket.read("items.npy")[-LARGE.nbytes :] == LARGE.tobytes()


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("part", [1, 2, None])
def test_an_upload_that_fails(bucket, small_parts, monkeypatch, part):
    """Of one of the parts, or when they are put together."""
    import botocore.exceptions
    import s3fs

    calls, call = [], s3fs.core.S3File._call_s3

    def failing(file, method, *given, **options):
        calls.append(method)
        fails = "complete_multipart_upload" if part is None else "upload_part"
        if method == fails and calls.count(method) >= (part or 1):
            raise botocore.exceptions.EndpointConnectionError(endpoint_url="http://gone")
        return call(file, method, *given, **options)

    monkeypatch.setattr(s3fs.core.S3File, "_call_s3", failing)
    with pytest.raises(StoreIOError, match=r"s3://bucket/items\.npy cannot be reached: Endpoint"):
        write_file("s3://bucket/items.npy", LARGE, "float32")
    assert "upload_part" in calls
    assert (bucket.names(), bucket.uploads()) == ([], 0)


@pytest.fixture
def store(tmp_path):
    spec = tierstore.TableSpec(300, 8, init=tierstore.normal(seed=1))
    path = tmp_path / "emb.tier"
    with tierstore.create(path, {"item": spec, "user": spec}) as store:
        store["item"].write([3], np.ones((1, 8), "f4"))
        store.commit(step=1, payload={"note": b"abc"})
        yield store


def test_a_store_goes_to_a_bucket_and_back(store, bucket, tmp_path):
    store.save("s3://bucket/emb.tier")
    with tierstore.open("s3://bucket/emb.tier") as copy:
        assert copy["item"][:].tobytes() == store["item"][:].tobytes()
        assert copy.verify().ok
        copy.save(tmp_path / "back.tier")
    with tierstore.open(tmp_path / "back.tier") as back:
        assert back["item"][:].tobytes() == store["item"][:].tobytes()
        assert back.payload["note"].read() == b"abc"
    with pytest.raises(ExistsError):
        store.save("s3://bucket/emb.tier")


def test_a_save_that_breaks_off_is_no_store(store, bucket, monkeypatch):
    import s3fs

    call = s3fs.S3FileSystem._call_s3

    async def failing(system, method, *given, **options):
        if method == "put_object" and "manifest" in options.get("Key", ""):
            raise OSError("gone")
        if method in ("delete_objects", "delete_object"):  # a killed process tidies up nothing
            raise OSError("gone")
        return await call(system, method, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "_call_s3", failing)
        with pytest.raises(StoreIOError):
            store.save("s3://bucket/emb.tier")
    assert len(bucket.names()) > 5
    with pytest.raises(NotAStoreError, match="never completed"):
        tierstore.open("s3://bucket/emb.tier")


ACTS = {
    "export": lambda store, place: tierstore.export_table(store["item"], f"{place}/items.npy"),
    "import": lambda store, place: tierstore.import_table(
        store.path.parent / "new.tier", f"{place}/items.npy"
    ),
    "save": lambda store, place: store.save(f"{place}/emb.tier"),
    "open": lambda store, place: tierstore.open(f"{place}/emb.tier"),
}


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_no_credentials(store, bucket, monkeypatch, act):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(AccessError, match="AWS_PROFILE") as caught:
        act(store, "s3://bucket")
    assert "s3://bucket" in str(caught.value) and "NoCredentials" in str(caught.value)
    assert isinstance(caught.value, PermissionError)
    assert bucket.names() == []


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_credentials_that_may_not(store, bucket, monkeypatch, act):
    with monkeypatch.context() as patch:
        patch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)
        with pytest.raises(AccessError, match="refuses access"):
            act(store, "s3://bucket")
    assert bucket.names() == []


def test_buckets_and_files_that_are_not_there(store, bucket):
    for name in ("export", "save"):
        with pytest.raises(StoreIOError, match="that the bucket exists"):
            ACTS[name](store, "s3://nowhere")
    with pytest.raises(FormatError, match=r"s3://nowhere/items\.npy: no such file"):
        ACTS["import"](store, "s3://nowhere")
    with pytest.raises(NotAStoreError):
        ACTS["open"](store, "s3://nowhere")


def test_failures_of_commands(store, bucket, monkeypatch, tmp_path):
    from click.testing import CliRunner

    from tierstore_cli.main import cli

    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    given = ["export", str(store.path), "s3://bucket/x.npy", "--table", "item", "--json"]
    result = CliRunner().invoke(cli, given)
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["type"], error["exit_code"]) == (6, "AccessError", 6)
