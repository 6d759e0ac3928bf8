"""Standard input and output, and pipes, in place of files."""

import errno
import gzip
import io
import os
import resource
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from click.testing import CliRunner

import tierstore
from tests.cli.conftest import COMMAND
from tierstore_cli.main import cli
from tierstore_cli.output import Output

ROWS = np.random.default_rng(8).standard_normal((7, 3)).astype("f4")
TEXT = "".join(f"w{n} {' '.join(map(repr, row))}\n" for n, row in enumerate(ROWS.tolist())).encode()


def rows_of(path):
    with tierstore.open(path) as store:
        return store["embeddings"].read(np.arange(7))


def piped(*args, data=b""):
    return subprocess.run([*COMMAND, *map(str, args)], input=data, capture_output=True, timeout=600)


def fed(data, *args):
    """Run a command in this process, whose standard input has this."""
    return CliRunner().invoke(cli, list(map(str, args)), input=data)


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize(
    ("suffix", "data"),
    [("vec", TEXT), (".vec.gz", gzip.compress(TEXT, mtime=0))],
    ids=["vec", "gz"],
)
def test_load_from_standard_input(tmp_path, suffix, data):
    done = piped("load", tmp_path / "s.tier", "-", "--format", suffix, data=data)
    assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path / "s.tier").tobytes() == ROWS.tobytes()


def test_load_from_a_pipe_and_from_a_file_of_another_suffix(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(TEXT,))
    writer.start()
    run("load", tmp_path / "s.tier", tmp_path / "pipe", "--format", "vec")
    writer.join()
    assert rows_of(tmp_path / "s.tier").tobytes() == ROWS.tobytes()
    (tmp_path / "words.data").write_bytes(TEXT)
    run("load", tmp_path / "t.tier", tmp_path / "words.data", "--format", "txt")
    assert rows_of(tmp_path / "t.tier").tobytes() == ROWS.tobytes()


@pytest.mark.slow
def test_export_to_standard_output(run, tmp_path, single):
    done = piped("export", single, "-", "--format", "npy")
    assert done.returncode == 0, done.stderr
    (tmp_path / "f.npy").write_bytes(done.stdout)
    run("export", single, tmp_path / "g.npy")
    assert (tmp_path / "f.npy").read_bytes() == (tmp_path / "g.npy").read_bytes()
    assert fed(b"", "export", single, "-", "--format", "vec").stdout.startswith("50 16\n0 ")


def test_export_into_a_pipe_leaves_the_pipe(run, tmp_path, single):
    pipe, found = tmp_path / "rows.npy", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    run("export", single, pipe, "--force")
    reader.join()
    assert pipe.is_fifo()
    run("export", single, tmp_path / "g.npy")
    assert found == [(tmp_path / "g.npy").read_bytes()]
    assert "wrote /dev/null" in run("export", single, "/dev/null", "--format", "csv").output


@pytest.mark.parametrize(
    "args",
    [
        ["load", "s.tier", "-"],
        ["load", "s.tier", "-", "--format", "a/b"],
        ["export", "single.tier", "-"],
        ["export", "single.tier", "/dev/null"],
        ["export", "single.tier", "-", "--format", "npy", "--json"],
        ["export", "single.tier", "f.npy", "--format", "npy"],
        ["export", "single.tier", "-", "--format", "zarr"],
    ],
)
def test_streams_that_cannot_be(run, tmp_path, single, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    run(*args, code=2)
    assert list(tmp_path.iterdir()) == [single]


@pytest.mark.slow
def test_ids_and_keys_from_a_pipe(single):
    rows = fed(b"3\n17\n", "get", single, "--ids-from", "-").stdout.splitlines()
    assert [line.split("\t")[0] for line in rows] == ["3", "17"]
    keys = "".join(f"k{n}\n" for n in range(50)).encode()
    assert piped("keys", "set", single, "/dev/stdin", data=keys).returncode == 0
    lines = fed(
        b"k9\nk4\n", "export", single, "-", "--format", "tsv", "--keys-from", "-"
    ).stdout.splitlines()[1:]
    assert [line.split("\t")[0] for line in lines] == ["k9", "k4"]
    assert "line 2 is empty" in fed(b"3\n\n", "get", single, "--ids-from", "-").stderr


@pytest.mark.slow
def test_standard_output_by_its_other_name(tmp_path, single):
    """Which may be a file without a suffix, where the shell leads it into one."""
    expected = fed(b"", "export", single, "-", "--format", "csv").stdout_bytes
    assert expected.startswith(b"key,")
    with (tmp_path / "out").open("wb") as file:
        given = ["export", str(single), "/dev/stdout", "--format", "csv"]
        subprocess.run([*COMMAND, *given], stdout=file, check=True, timeout=600)
    assert (tmp_path / "out").read_bytes() == expected


def test_errors_name_what_was_given(run, tmp_path):
    done = fed(b"noise", "load", tmp_path / "s.tier", "-", "--format", "npy")
    assert done.exit_code == 3 and done.stderr.startswith("Error: standard input: ")
    (tmp_path / "raw").write_bytes(b"noise")
    said = run("load", tmp_path / "s.tier", tmp_path / "raw", "--format", "npy", code=3).stderr
    assert f"Error: {tmp_path / 'raw'}: " in said
    (tmp_path / "empty").mkdir()
    said = run("load", tmp_path / "s.tier", tmp_path / "empty", code=3).stderr
    assert "holds no .parquet or .arrow files" in said
    assert "no such file" in run("load", tmp_path / "s.tier", tmp_path / "none", code=3).stderr


@pytest.mark.variants(1, 2)
@pytest.mark.fault(76)
@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("--help | true", 141, None),
        ("get single.tier 1 >&-", 6, "cannot write to standard output: Bad file descriptor"),
        ("get --help >/dev/full", 6, "cannot write to standard output: No space left on device"),
        ("load new.tier - --format npy <&-", 6, "cannot read standard input: Bad file descriptor"),
        ("export single.tier out.npy 2>&- >&- <&-", 6, None),
        ("get single.tier 1 99 2>/dev/full", 1, None),
        ("get 2>/dev/full", 2, None),
    ],
)
def test_standard_streams_that_are_closed_or_full(single, tmp_path, line, code, said):
    program = f"{sys.executable} -c 'from tierstore_cli.main import cli; cli()' {line}"
    shell = ["bash", "-o", "pipefail", "-c", program]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done
    assert done.stderr == ("" if said is None else f"Error: {said}\n")
    if "out.npy" in line:
        with tierstore.open(single) as store:
            rows = store["embeddings"].read(np.arange(50))
        assert np.array_equal(np.load(tmp_path / "out.npy"), rows)


@pytest.mark.fault(76)
def test_messages_that_cannot_be_written_change_nothing(run, single, tmp_path, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stderr", Full())
    Output().note("said to nobody")
    with pytest.raises(SystemExit) as ended:
        cli(["get", str(single), "99"])
    assert ended.value.code == 1
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(SystemExit) as ended:
        cli(["put", str(single), "--id", "1", *["1"] * 16])
    assert ended.value.code == 6
    with tierstore.open(single) as store:
        assert store.version == 2


def test_what_is_no_number_on_standard_input(single):
    for given in (b"", b" , ", b"\xff\xfe1"):
        done = fed(given, "put", single, "--id", 1, "-")
        assert done.exit_code == 2 and "VALUE: " in done.stderr


def test_the_temporary_file_of_standard_output_is_not_named(run, single):
    said = run("export", single, "-", "--format", "jsonl", code=1).stderr
    assert said.startswith("Error: standard output: ")


@pytest.mark.fault(76)
def test_a_disk_that_is_too_small_for_a_stream(single, tmp_path, monkeypatch):
    limit, action = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        done = fed(bytes(5000), "load", tmp_path / "new.tier", "-", "--format", "npy")
        out = fed(b"", "export", single, "-", "--format", "npy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, action)
    for each, what in ((done, "standard input"), (out, "standard output")):
        assert each.exit_code == 6 and "TMPDIR" in each.stderr, each.output
        assert f" for {what}, of which a copy" in each.stderr
    assert not (tmp_path / "new.tier").exists()
