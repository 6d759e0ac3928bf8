import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tierstore._tiers.placement import nbytes_of, slots_of, total_of
from tierstore.budget import Budget, format_bytes, parse_bytes, size_of_at_least
from tierstore.errors import InvalidInputError, InvalidTypeError


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (0, 0),
        (12, 12),
        ("12", 12),
        ("12B", 12),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("1 MiB", 2**20),
        (" 2GiB ", 2**31),
        ("2gib", 2**31),
        ("2GB", 2 * 10**9),
        ("2G", 2 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        ("0.5PiB", 2**49),
    ],
)
def test_sizes_in_words(size, nbytes):
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize(
    "size", ["", "GiB", "-1", "1e9", "1 GiBs", "1,5 GB", "٣GB", "0x10", "1..5"]
)
def test_what_is_not_a_size_is_refused(size):
    with pytest.raises(InvalidInputError, match=re.escape(repr(size))):
        parse_bytes(size)


def test_sizes_are_numbers_of_bytes():
    with pytest.raises(InvalidInputError, match="negative"):
        parse_bytes(-1)
    for wrong in (True, 1.5, None, b"1"):
        with pytest.raises(InvalidTypeError):
            parse_bytes(wrong)


@given(st.integers(0, 2**60))
def test_a_size_written_for_people_is_near_the_size(nbytes):
    text = format_bytes(nbytes)
    assert parse_bytes(text) == pytest.approx(nbytes, rel=0.06)


def test_a_budget_is_checked_when_it_is_made():
    with pytest.raises(InvalidInputError):
        Budget(host="lots")
    with pytest.raises(InvalidInputError):
        Budget(gpu={"item": -1})
    with pytest.raises(InvalidInputError, match="not both"):
        Budget(host="1GiB", host_rows=10)
    assert "host='1GiB'" in repr(Budget(host="1GiB"))


def test_a_number_of_rows_is_no_size():
    for wrong in ("1GiB", 1.5, True, {"item": "1GiB"}):
        with pytest.raises(InvalidTypeError, match="number of rows"):
            Budget(host_rows=wrong)
    with pytest.raises(InvalidInputError, match="negative"):
        Budget(gpu_rows={"item": -1})


def test_a_size_is_a_budget_of_the_host():
    assert Budget.of("8GiB") == Budget(host="8GiB")
    assert Budget.of(0) == Budget(host=0)
    assert Budget.of(None) == Budget()
    budget = Budget(gpu_rows=3)
    assert Budget.of(budget) is budget
    for wrong in (True, 1.5, {}, [1], b"1"):
        with pytest.raises(InvalidTypeError, match="a budget is"):
            Budget.of(wrong)
    with pytest.raises(InvalidInputError):
        Budget.of("8 gigs")


def test_a_budget_is_shared_by_the_tables_or_given_to_each():
    assert total_of(Budget(host=1000), "host") == 1000
    assert nbytes_of(Budget(host=1000), "host", "item") is None
    assert total_of(Budget(host={"item": "1kB"}), "host") is None
    assert nbytes_of(Budget(host={"item": "1kB"}), "host", "item") == 1000
    assert nbytes_of(Budget(host={"item": "1kB"}), "host", "user") is None
    assert total_of(Budget(), "gpu") is nbytes_of(Budget(), "gpu", "item") is None
    assert slots_of(Budget(host_rows=7), "host", "item") == 7
    assert slots_of(Budget(gpu_rows={"item": 3}), "gpu", "item") == 3
    assert slots_of(Budget(gpu_rows={"item": 3}), "gpu", "user") is None
    assert slots_of(Budget(host=1), "host", "item") is None


@pytest.mark.parametrize(
    "nbytes", [0, 1, 102_399, 102_400, 433_153, 104_857_600, 10**12 + 7, 10**19]
)
def test_a_size_of_at_least_some_bytes_has_at_most_one_percent_more(nbytes):
    assert nbytes <= parse_bytes(size_of_at_least(nbytes)) <= 1.01 * nbytes


def test_a_size_of_at_least_some_bytes_is_short():
    given = [0, 2_000, 100_402, (64 << 30) - 3_000, 64 << 30, 1 << 40]
    told = ["0B", "2000B", "100402B", "64GiB", "64GiB", "1TiB"]
    assert [size_of_at_least(nbytes) for nbytes in given] == told


@pytest.mark.parametrize(
    ("size", "budget"),
    [("24KiB", Budget(host="24KiB")), (" 0 ", Budget(host="0")), ("", Budget()), (" ", Budget())],
)
def test_the_environment_gives_a_budget_where_a_program_does_not(
    size: str, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERSTORE_BUDGET", size)
    assert Budget.of(None) == budget
    assert Budget.of("8GiB") == Budget(host="8GiB")
    assert Budget.of(Budget()) == Budget()


def test_a_budget_in_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_BUDGET", "128KiB")
    with tierstore.create(None, {"t": tierstore.TableSpec(10_000, 16)}) as store:
        (tier,) = store.info().tables[0].tiers
        assert 0 < tier.nbytes <= 128 << 10


def test_what_is_no_size_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_BUDGET", "8 gigs")
    with pytest.raises(InvalidInputError, match=r"^TIERSTORE_BUDGET=8 gigs: not a size: '8 gigs'"):
        tierstore.create(None, {"t": tierstore.TableSpec(10, 16)})
