"""One more of a kind is one file: what a registry holds is documented, tested and refused alike."""

import importlib
import pkgutil
import re
import typing
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.every import every
from tests.formats.matrices import read_file
from tests.reference import ABSENT, entry
from tests.reference.backends import variants
from tests.reference.elements import ELEMENTS, element
from tests.reference.formats import OF_BYTES, OF_INT32, UNSAID, write_without_us
from tests.reference.initializers import EXAMPLES, SEED, SHAPE
from tierstore import policy, spec
from tierstore._dtypes import ELEMENT_TYPES, check_dtype
from tierstore._formats import format_of
from tierstore._formats.base import FORMATS
from tierstore._registry import Registry
from tierstore.errors import InvalidInputError
from tierstore.initializers import INITIALIZERS, parse_initializer
from tierstore.spec import BACKENDS, TableSpec
from tierstore_cli.commands import summaries

ROOT = Path(__file__).parents[1]


KINDS: dict[str, tuple[Callable[[], Iterable[str]], tuple[str, ...]]] = {
    "element type": (lambda: ELEMENT_TYPES, ("concepts.md", "file-format.md", "python.md")),
    "format": (lambda: FORMATS, ("files.md",)),
    "backend": (lambda: BACKENDS, ("python.md", "file-format.md")),
    "initializer": (lambda: INITIALIZERS, ("python.md", "cli/fill-a-store.md")),
    "policy": (lambda: policy.NAMES, ("concepts.md", "cli/memory-and-speed.md")),
    "command": (summaries, ("cli.md",)),
}
"""Each kind: the names in its registry, and the pages of the documentation that name all."""

NAMES = {kind: list(names()) for kind, (names, _) in KINDS.items()}
"""Before a test registers one of its own."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_one_of_a_kind_is_documented(kind):
    for page in KINDS[kind][1]:
        text = (ROOT / "docs" / page).read_text()
        for name in NAMES[kind]:
            assert re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text), f"{page} lacks {name}"


def literal(part: object) -> tuple[str, ...]:
    """Return the texts of a Literal, or none of what is something else."""
    return typing.get_args(part) if typing.get_origin(part) is typing.Literal else ()


def literals() -> dict[str, set[str]]:
    """The texts of every Literal that a module of the library defines, by where."""
    found = {}
    for module in pkgutil.walk_packages(tierstore.__path__, "tierstore."):
        if module.name.rpartition(".")[2] == "_columns_child":
            continue  # a script
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                namespace = vars(importlib.import_module(module.name))
            except ImportError:  # of an extra that is missing
                continue
        for name, value in namespace.items():
            for part in (value, *typing.get_args(value)):  # a Literal, or one in a union
                if literal(part):
                    found[f"{module.name}.{name}"] = set(literal(part))
    return found


@pytest.mark.slow
def test_a_literal_that_names_two_of_a_kind_names_all():
    for where, texts in literals().items():
        for kind, (names, _) in KINDS.items():
            if len(texts & set(names())) > 1:
                assert texts == set(names()), f"{where} is a Literal of some of each {kind}"


def test_editors_complete_element_types_backends_and_policies():
    offered = {name for backend in BACKENDS.values() for name in backend.compressions}
    for known, names in (
        (spec.DTypeName, ELEMENT_TYPES),
        (spec.BackendName, BACKENDS),
        (spec.CompressionName, offered),
        (policy.PolicyName, policy.NAMES),
    ):
        texts = [each for part in (known, *typing.get_args(known)) for each in literal(part)]
        assert set(texts) == set(names)


def test_no_kind_has_the_name_that_tests_use_for_what_is_refused():
    assert all(ABSENT not in name for names in NAMES.values() for name in names)
    for ask in (check_dtype, parse_initializer, BACKENDS.find, policy.choose):
        with pytest.raises(InvalidInputError, match=ABSENT):
            ask(ABSENT)
    with pytest.raises(InvalidInputError, match=ABSENT):
        format_of(Path(f"file.{ABSENT}"))
    with pytest.raises(InvalidInputError, match=ABSENT):
        TableSpec(4, 4, backend=ABSENT)


def test_a_reference_that_is_missing_raises():
    with pytest.raises(LookupError, match="tests/reference"):
        entry(ELEMENTS, ABSENT)


# -- element types


@pytest.mark.parametrize("name", ELEMENT_TYPES)
def test_element_types_are_what_the_reference_says(name):
    kind, reference = ELEMENT_TYPES[name], element(name)
    assert (kind.name, kind.stored, kind.numpy) == (name, reference.stored, reference.reads_as)
    rng = np.random.default_rng(7)
    values = rng.standard_normal(1000) * 10.0 ** rng.uniform(
        -reference.exponent, reference.exponent, 1000
    )
    exact = reference.exact(values)
    assert kind.decode(kind.encode(exact)).tobytes() == exact.tobytes()
    assert kind.encode(values).tobytes() == reference.encode(values).tobytes()


@pytest.mark.parametrize("name", ELEMENT_TYPES)
def test_element_types_name_only_others_of_the_registry(name):
    kind = ELEMENT_TYPES[name]
    assert set(kind.held_by) <= set(ELEMENT_TYPES)
    values = element(name).exact(np.random.default_rng(3).standard_normal(100))
    for wider in kind.held_by:
        there = ELEMENT_TYPES[wider].encode(values)
        back = kind.encode(ELEMENT_TYPES[wider].decode(there))
        assert kind.decode(back).tobytes() == values.tobytes()


def test_codes_of_element_types_are_distinct():
    codes = [each.safetensors for each in ELEMENT_TYPES.values()]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("name", [n for n, each in ELEMENT_TYPES.items() if each.kernel])
def test_kernels_declare_the_types_they_compute_with(name):
    sources = "".join(each.read_text() for each in (ROOT / "tierstore").rglob("*.cu*"))
    assert re.search(rf"struct {ELEMENT_TYPES[name].kernel} ", sources)


# -- formats


@pytest.mark.parametrize("suffix", FORMATS)
def test_what_other_tools_write_is_read(tmp_path, suffix):
    matrix = np.random.default_rng(5).standard_normal((23, 5)).astype(np.float32)
    matrix = np.abs(matrix * 20).round() if suffix in (*OF_BYTES, *OF_INT32) else matrix
    path = tmp_path / f"file{suffix}"
    write_without_us(path, matrix)
    name = ":float32:5" if suffix in UNSAID else ""
    found = matrix.astype(np.float64) if suffix in OF_INT32 else matrix
    assert read_file(f"{path}{name}").tobytes() == found.tobytes()


@every(suffix=FORMATS)
def test_the_page_says_what_formats_hold(suffix):
    each = FORMATS[suffix]
    held = ", ".join(name for name, kind in ELEMENT_TYPES.items() if each.holds(kind))
    written, keys = (held, each.keys) if each.is_written else ("–", "–")
    line = f"| `{suffix}` | {written} | {keys} | {'yes' if each.holds_keys_alone else 'no'} |"
    assert line in (ROOT / "docs" / "files.md").read_text().splitlines()


# -- backends and initializers


def test_every_backend_has_a_variant():
    assert {spec.get("backend", "memmap") for spec in variants().values()} == set(BACKENDS)


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_describe_themselves(name):
    backend = BACKENDS[name]
    assert backend.name == name
    assert BACKENDS[backend.on_objects].on_objects == backend.on_objects
    others = [each.entry for each in BACKENDS.values() if each is not backend]
    assert backend.entry not in others


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializers_give_what_numpy_gives(name):
    text, oracle = entry(EXAMPLES, name)
    made = parse_initializer(text)(SEED)
    assert isinstance(made, INITIALIZERS[name])
    found = made.block(0, SHAPE[0], SHAPE, 0)
    assert np.array_equal(found.astype(np.float32), oracle().astype(np.float32))


# -- policies


@pytest.mark.parametrize("name", policy.NAMES)
def test_every_policy_says_how_a_gpu_ranks_rows(name):
    assert isinstance(policy.choose(name).on_device(), policy.DeviceScores | None)


# -- the registry


def test_a_registry_finds_modules_when_it_is_looked_at(tmp_path, monkeypatch):
    package = tmp_path / "kinds_of_test"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from tierstore._registry import Registry\nKINDS = Registry('kind', 'kinds_of_test')\n"
    )
    for name in ("late", "early"):
        (package / f"{name}.py").write_text(
            f"from kinds_of_test import KINDS\nKINDS.add('{name}', 1)\n"
        )
    (package / "_part.py").write_text("raise AssertionError('a part of a kind was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    kinds: Registry[int] = importlib.import_module("kinds_of_test").KINDS
    assert list(kinds) == ["early", "late"]
    assert kinds.find("late") == 1
    with pytest.raises(ValueError, match="early"):
        kinds.add("early", 2)
    for unknown in (ABSENT, None, 4):
        with pytest.raises(InvalidInputError, match="early, late"):
            kinds.find(unknown)
