"""Text, tables and progress bars."""

import io
import json
import sys

import pytest

from tierstore_cli import bars as progress_module
from tierstore_cli.bars import Progress
from tierstore_cli.output import Grid, Output, fitting
from tierstore_cli.printing import fitted, printable

GRID = Grid(("NAME", "ROWS"), [("item", "1,000"), ("u", "5")], right=frozenset({1}))


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain café ▁█", "plain café ▁█"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eexe.txt", "\\u202eexe.txt"),
        (b"caf\xe9".decode("utf-8", "surrogateescape"), "caf\\xe9"),
        ("it's", "it's"),
        ("\\", "\\"),
    ],
)
def test_printable(text, safe):
    assert printable(text) == safe


def test_printable_keeps_what_it_is_told_to():
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_fitted_survives_ascii():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert fitted("v · ▁█ é", stream) == "v | _# \\xe9"
    assert fitted("plain", stream) == "plain"


def test_grid_lines_up(capsys):
    Output().show({}, "head", GRID)
    assert capsys.readouterr().out == "head\nNAME   ROWS\nitem  1,000\nu         5\n"


def test_grid_without_headers_is_a_list(capsys):
    Output().show({}, Grid((), [("a", "b")]))
    assert capsys.readouterr().out == "a  b\n"


def test_json_is_one_strict_object(capsys):
    Output(as_json=True).show({"a": 1, "é": "\x1b"}, "for people", GRID)
    text = capsys.readouterr().out
    assert json.loads(text) == {"a": 1, "é": "\x1b"}
    assert text.isascii() and "\x1b" not in text


def test_numbers_that_json_lacks_are_null_and_a_note_says_how_many(capsys):
    rows = iter([{"values": [1.5, float("nan")]}, {"values": [float("-inf")]}])
    Output(as_json=True).show({"norm": float("inf"), "in": {"rows": rows}, "n": 1, "one": "nan"})
    said = capsys.readouterr()
    assert json.loads(said.out) == {
        "norm": None,
        "in": {"rows": [{"values": [1.5, None]}, {"values": [None]}]},
        "n": 1,
        "one": "nan",
    }
    assert said.err == "Note: 3 numbers are NaN or infinite, for which JSON has null\n"


def test_a_failure_after_rows_were_written_ends_the_one_object(capsys):
    def rows():
        yield 1
        raise OSError("the disk is gone")

    error = {"type": "OSError", "message": "the disk is gone", "exit_code": 6}
    for data, shown in (
        ({}, {}),
        ({"rows": rows()}, {"rows": [1]}),
        ({"in": {"r": rows()}}, {"in": {"r": [1]}}),
    ):
        out = Output(as_json=True)
        if data:
            with pytest.raises(OSError, match="gone"):
                out.show(data)
        for _ in range(2):
            out.fail("OSError", "the disk is gone", 6)
        assert json.loads(capsys.readouterr().out) == {**shown, "error": error}


def test_a_failure_after_the_object_adds_nothing(capsys):
    out = Output(as_json=True)
    out.show({"ok": False})
    out.fail("Failure", "damage", 4)
    assert capsys.readouterr().out == '{"ok": false}\n'


def test_columns_are_left_out_that_do_not_fit_with_the_space_between():
    grid = Grid(("NAME", "ROWS", "DIM"), [("item", "1,000", "8")])
    for width in range(1, 30):  # 4, 3 + 5 and 3 + 3 characters
        fit, left_out = fitting(grid, width)
        assert [*fit.headers, *left_out] == ["NAME", "ROWS", "DIM"]
        assert len(fit.headers) == 1 + (width >= 11) + (width >= 16), width


def test_a_table_is_the_same_on_a_terminal_and_in_a_file(monkeypatch, capsys):
    Output().show({}, GRID)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    Output().show({}, GRID)
    assert terminal.getvalue() == "NAME   ROWS\nitem  1,000\nu         5\n"
    monkeypatch.undo()
    assert capsys.readouterr().out == terminal.getvalue()


@pytest.mark.parametrize("width", [8, 20, 30, 40, 80, 200])
def test_no_number_is_cut_however_narrow_the_terminal(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    headers = ["TABLE", "ROWS", "DIM", "DISK", "DELTA"]
    rows = [["item_embeddings", "1,000,000", "128", "488.3 MiB", "363,040"]]
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    Output().show({}, Grid(headers, rows, right=frozenset({1, 2, 3, 4})))
    text = terminal.getvalue()
    for header, cell in zip(headers, rows[0], strict=True):
        assert header in text
        assert cell in text or (header in text.splitlines()[-1] and "too narrow" in text)
    assert "…" not in text and "item_embeddings" in text
    if width >= 80:
        assert "too narrow" not in text


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def test_a_bar_waits_a_second_then_shows_and_wipes_itself(clock, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("copying") as progress:
        progress(1, 10)
        assert terminal.getvalue() == ""
        clock.now = 2.0
        progress(5, 10)
        assert "copying" in terminal.getvalue() and "50%" in terminal.getvalue()
        assert "2 s left" in terminal.getvalue()
        drawn = terminal.getvalue()
        clock.now = 2.01
        progress(6, 10)
        assert terminal.getvalue() == drawn
    assert terminal.getvalue().endswith(" \r")


def test_the_time_before_the_first_row_is_not_that_of_a_row(clock, monkeypatch):
    """While a text file is counted, nothing can be said; then the rows go faster."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("loading") as progress:
        clock.now = 100.0
        progress(1, 100)
        clock.now = 101.0
        progress(11, 100)
        assert "11%  9 s left" in sys.stderr.getvalue()


def test_a_line_from_time_to_time_where_stderr_is_no_terminal(clock, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("copying") as progress:
        for second in range(101):
            clock.now = float(second)
            progress(second, 200)
    assert stream.getvalue().splitlines() == [
        "copying   15%  170 s left",
        "copying   30%  140 s left",
        "copying   45%  110 s left",
    ]


def test_a_bar_of_nothing(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("copying") as progress:
        clock.now = 5.0
        progress(0, 0)
