"""Values of options."""

import inspect

import click
import numpy as np
import pytest

import tierstore
from tierstore.budget import parse_bytes
from tierstore.importing import import_table
from tierstore.initializers import constant, normal, uniform, xavier_uniform, zeros
from tierstore.spec import Field
from tierstore_cli.params import INITIALIZER, MEMORY, PART, PRESETS, ROW_RANGE, STATE


@pytest.mark.parametrize(
    ("text", "rows"),
    [("0:5", (0, 5)), (":5", (0, 5)), ("3:", (3, None)), (":", (0, None)), ("7:8", (7, 8))],
)
def test_rows(text, rows):
    assert ROW_RANGE.convert(text, None, None) == rows


@pytest.mark.parametrize(
    "text", ["5:3", "3:3", "0:0", "5", "-1:3", "a:b", "1:2:3", "", "1e3:2e3", "٣:٤"]
)
def test_bad_rows(text):
    with pytest.raises(click.BadParameter):
        ROW_RANGE.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "initializer"),
    [
        ("zeros", zeros()),
        ("zeros()", zeros()),
        ("uniform(-0.1,0.1)", uniform(-0.1, 0.1, seed=3)),
        (" normal( 0 , 1e-2 ) ", normal(mean=0, std=0.01, seed=3)),
        ("xavier_uniform", xavier_uniform(seed=3)),
        ("xavier_uniform(2)", xavier_uniform(2.0, seed=3)),
        ("constant(0.5)", constant(0.5)),
        ("normal", normal(seed=3)),
    ],
)
def test_initializers(text, initializer):
    made = INITIALIZER.convert(text, None, None)(3)
    assert made == initializer
    first = made.block(0, 4, (4, 3), 0)
    assert np.array_equal(first, initializer.block(0, 4, (4, 3), 0))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no-such-initializer",
        "from_file(1)",
        "constant",
        "normal(0)",
        "normal(0,1,2)",
        "normal(0,-1)",
        "normal(0,inf)",
        "uniform(2,1)",
        "uniform(a,b)",
        "zeros(1)",
        "normal(0,1); import os",
        "__import__('os')",
    ],
)
def test_bad_initializers(text):
    with pytest.raises(click.BadParameter):
        INITIALIZER.convert(text, None, None)


def fields(text: str) -> dict[str, Field]:
    weight = Field(8, "float16")
    return {each.name: each.beside(weight) for each in STATE.convert(text, None, None)}


def test_states():
    assert fields("adam") == {"exp_avg": Field(8, "float16"), "exp_avg_sq": Field(8, "float16")}
    assert fields("adagrad:float32") == {"sum": Field(8, "float32")}
    assert fields("rowwise_adagrad") == {"sum": Field(1, "float16")}
    assert fields("mine") == {"mine": Field(8, "float16")}
    assert fields("mine:bfloat16") == {"mine": Field(8, "bfloat16")}
    assert fields("mine:float64:2") == {"mine": Field(2, "float64")}
    assert fields("mine::2") == {"mine": Field(2, "float16")}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "9lives",
        "adam:no-such-thing",
        "m:float8",
        "field:adam:float8",
        "adam::4",
        "m:float32:0",
        "m:float32:x",
        "../x",
    ],
)
def test_bad_states(text):
    with pytest.raises(click.BadParameter):
        STATE.convert(text, None, None)


OPTIMIZERS = {
    "adadelta": ("Adadelta", {}),
    "adagrad": ("Adagrad", {}),
    "adam": ("Adam", {}),
    "adamax": ("Adamax", {}),
    "adamw": ("AdamW", {}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "rmsprop": ("RMSprop", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
    "sparse_adam": ("SparseAdam", {}),
}


def test_every_preset_is_compared_with_torch_or_is_not_of_torch():
    assert set(PRESETS) - set(OPTIMIZERS) == {"rowwise_adagrad"}


@pytest.mark.parametrize("preset", OPTIMIZERS)
def test_presets_are_what_torch_keeps(preset):
    torch = pytest.importorskip("torch")
    name, options = OPTIMIZERS[preset]
    weight = torch.nn.Parameter(torch.randn(5, 8))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1, **options)
    gradient = torch.randn(5, 8)
    weight.grad = gradient.to_sparse(1) if name == "SparseAdam" else gradient
    optimizer.step()
    state = optimizer.state[weight]
    rowwise = {key for key, value in state.items() if getattr(value, "shape", ()) == weight.shape}
    assert set(PRESETS[preset]) == rowwise


@pytest.mark.variants(8)
@pytest.mark.parametrize("dim", [1, 8])
@pytest.mark.parametrize("preset", OPTIMIZERS)
def test_presets_in_float8_are_what_an_optimizer_makes(preset, dim, tmp_path):
    torch = pytest.importorskip("torch")
    name, options = OPTIMIZERS[preset]
    states = STATE.convert(f"{preset}:float8", None, None)
    expected = {each.name: each.beside(Field(dim)) for each in states}
    spec = tierstore.TableSpec(9, dim, init=normal())
    with tierstore.create(tmp_path / "s", {"t": spec}) as store:
        emb = tierstore.nn.TieredEmbedding(store["t"])
        kind = getattr(torch.optim, name)
        tierstore.optim.TieredOptimizer(kind, [emb], state_dtype="float8", lr=0.1, **options)
        found = dict(store["t"].fields)
    del found["weight"]
    assert found == expected


def test_the_memory_of_a_read_is_the_librarys():
    command = click.command()(MEMORY(lambda memory: None))
    (option,) = command.params
    default = inspect.signature(import_table).parameters["memory"].default
    assert parse_bytes(option.default) == default


@pytest.mark.parametrize(
    ("text", "meant"),
    [("adm", "adam"), ("sgd", "sgd-momentum"), ("Adagard", "adagrad"), ("adamx", "adam")],
)
def test_names_like_those_of_presets_are_no_fields(text, meant):
    with pytest.raises(click.BadParameter, match=rf"did you mean {meant}.*field:{text}"):
        STATE.convert(text, None, None)
    assert list(fields(f"field:{text}:float32:2")) == [text]


@pytest.mark.parametrize("text", ["Adam", "ADAM:bfloat16", "Rowwise_Adagrad"])
def test_presets_are_of_either_case(text):
    assert fields(text) == fields(text.lower())


def test_a_field_may_be_called_as_a_preset():
    assert list(fields("field:adam")) == ["adam"]


@pytest.mark.parametrize("text", ["0/0", "0/00", "-1/3", "1/2/3", "a"])
def test_a_part_is_one_of_at_least_one(text):
    with pytest.raises(click.BadParameter, match="write K/N, such as 0/4"):
        PART.convert(text, None, None)


def test_parts_count_from_0():
    assert PART.convert("2/3", None, None) == (2, 3)
    with pytest.raises(click.BadParameter, match="the 3 parts are 0 to 2"):
        PART.convert("3/3", None, None)
