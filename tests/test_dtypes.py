import numpy as np
import pytest

from tests.reference.elements import BFLOAT16
from tierstore._dtypes import ELEMENT_TYPES

torch = pytest.importorskip("torch")


def test_every_bfloat16_is_widened_as_torch_does():
    bits = np.arange(2**16, dtype=np.uint16)
    peer = torch.from_numpy(bits.copy()).view(torch.bfloat16).float().numpy()
    found = BFLOAT16.decode(bits)
    assert np.array_equal(found, peer, equal_nan=True)
    assert np.array_equal(np.signbit(found), np.signbit(peer))


def test_every_bfloat16_survives_the_way_through_float32():
    bits = np.arange(2**16, dtype=np.uint16)
    back = BFLOAT16.encode(BFLOAT16.decode(bits))
    nan = np.isnan(BFLOAT16.decode(bits))
    assert np.array_equal(back[~nan], bits[~nan])
    assert np.isnan(BFLOAT16.decode(back[nan])).all()


def test_floats_are_rounded_as_torch_does():
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 2**32, 200_000, np.uint32)
    ties = rng.integers(0, 2**16, 1000, np.uint32) << 16 | 0x8000
    edges = np.array([0, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 1, 0x7F800001, 0xFFFFFFFF])
    values = np.concatenate([bits, ties, ties - 1, ties + 1, edges.astype(np.uint32)]).view("f4")
    peer = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    found = BFLOAT16.encode(values)
    nan = np.isnan(values)
    assert np.array_equal(found[~nan], peer[~nan])
    assert np.isnan(BFLOAT16.decode(found[nan])).all()


def test_shapes_strides_and_other_floats():
    values = np.random.default_rng(1).standard_normal((4, 6))
    assert BFLOAT16.encode(values[::2, ::3]).shape == (2, 2)
    assert np.array_equal(
        BFLOAT16.encode(values[::2]), BFLOAT16.encode(values.astype(np.float32))[::2]
    )
    assert BFLOAT16.decode(np.empty((0, 3), np.uint16)).shape == (0, 3)


FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("name", FLOAT8)
def test_every_float8_is_widened_as_torch_does(name):
    codes = np.arange(256, dtype=np.uint8)
    peer = torch.from_numpy(codes).view(getattr(torch, name)).float().numpy()
    found = ELEMENT_TYPES[name].decode(codes)
    assert np.array_equal(found, peer, equal_nan=True)
    assert np.array_equal(np.signbit(found), np.signbit(peer))
    assert np.array_equal(ELEMENT_TYPES[name].encode(peer)[~np.isnan(peer)], codes[~np.isnan(peer)])


@pytest.mark.parametrize("name", FLOAT8)
def test_floats_are_rounded_to_float8_as_torch_does(name):
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 2**32, 200_000, np.uint32)
    near = (rng.standard_normal(400_000) * 2.0 ** rng.uniform(-20, 18, 400_000)).astype("f4")
    kind = ELEMENT_TYPES[name]
    exact = kind.decode(np.arange(256, dtype=np.uint8))
    exact = np.sort(exact[np.isfinite(exact)])
    ties = ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype("f4")
    over = np.array([448, 463.9, 464, 464.1, 480, 57344, 61439, 61440, 65536, 1e30], "f4")
    around = np.concatenate([ties, exact, over, -over])
    around = [np.nextafter(around, np.float32(to)) for to in (-np.inf, 0, np.inf)] + [around]
    special = np.array([np.inf, -np.inf, np.nan, -0.0], "f4")
    values = np.concatenate([bits.view("f4"), near, *around, special])
    found = kind.encode(values)
    assert np.isnan(kind.decode(found[np.isnan(values)])).all()
    largest = 448 if name == "float8_e4m3fn" else np.inf
    beyond = np.abs(values) > 464 if name == "float8_e4m3fn" else np.abs(values) >= 61440
    assert np.array_equal(kind.decode(found[beyond]), np.copysign(largest, values[beyond]))
    lost = beyond & (np.isfinite(values) | (name == "float8_e4m3fn"))
    assert kind.overflowed(values, found) == lost.sum() > 0
    values, found = values[~beyond & ~np.isnan(values)], found[~beyond & ~np.isnan(values)]
    peer = torch.from_numpy(values).to(getattr(torch, name)).view(torch.uint8).numpy()
    assert np.array_equal(found, peer)


@pytest.mark.parametrize("name", ["int8", "uint8"])
def test_whole_numbers_are_rounded_and_clipped(name):
    kind, dtype = ELEMENT_TYPES[name], np.dtype(name)
    values = np.array([0.5, 1.5, -0.5, 2.4999, 300, -300, np.inf, -np.inf, np.nan, 127.5], "f8")
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    expected = [0, 2, 0, 2, high, low, high, low, 0, 127 if name == "int8" else 128]
    assert kind.encode(values).tolist() == expected
    assert kind.encode(values).dtype == dtype
    out = sum(not low <= np.rint(value) <= high for value in values)
    assert kind.overflowed(values, kind.encode(values)) == out
    assert kind.encode(np.array([-1, 5, 999])).tolist() == [max(low, -1), 5, high]
    assert kind.from_numbers(np.array([1, 200])).dtype == (np.int64 if name == "int8" else dtype)
