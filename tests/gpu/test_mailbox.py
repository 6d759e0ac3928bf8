"""Numbers that come from the device without anybody waiting."""

from __future__ import annotations

import numpy as np

from tests.gpu.conftest import Place
from tierstore._tiers.gpu.link import Mailbox


def test_every_number_comes_and_places_are_used_again(place: Place) -> None:
    device = place.device
    box = Mailbox(device)
    for turn in range(3):
        sent = [place.put(np.array([number * 7 + turn], np.uint32)) for number in range(200)]
        stream = device.current_stream()
        letters = [box.post(device.pointer(number), stream) for number in sent]
        for number, letter in enumerate(letters):
            assert letter is not None
            if number % 3 == 2:
                letter.drop()
            else:
                assert letter.read() == number * 7 + turn
    device.synchronize(device.current_stream())
    box.close()


def test_a_full_box_takes_none(place: Place) -> None:
    device = place.device
    box = Mailbox(device)
    number = place.put(np.array([5], np.uint32))
    letters = [box.post(device.pointer(number), device.current_stream()) for _ in range(300)]
    assert letters.count(None) == 300 - 256
    kept = [letter for letter in letters if letter is not None]
    assert kept[7].read() == 5
    assert box.post(device.pointer(number), device.current_stream()) is not None
    device.synchronize(device.current_stream())
    box.close()
