import numpy as np
import pytest

from tests.reference.elements import BFLOAT16

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
