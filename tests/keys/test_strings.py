"""Packed strings are those of a list."""

import numpy as np
import pytest

from tests.formats.matrices import random_words
from tierstore._keys.strings import Strings, may_repeat

WORDS = ["", "é🙂", *random_words(50), ""]


def test_they_are_a_sequence():
    strings = Strings(WORDS)
    assert strings == WORDS and strings == WORDS and list(strings) == WORDS
    assert len(strings) == len(WORDS) and strings[1] == "é🙂" and strings[-2] == WORDS[-2]
    assert strings[3:20:2] == WORDS[3:20:2] and strings[::-1] == WORDS[::-1] and strings[99:] == []
    assert strings != WORDS[:-1] and strings != [*WORDS[:-1], "x"] and strings != "text"
    for at in (len(WORDS), -len(WORDS) - 1):
        with pytest.raises(IndexError):
            strings[at]
    with pytest.raises(UnicodeEncodeError):
        strings.append("\ud800")
    assert strings == WORDS


def test_packed_ones_are_added():
    strings, more = Strings(WORDS), Strings(WORDS[::-1])
    strings.extend_packed(bytes(more.blob), more.offsets)
    assert strings == [*WORDS, *WORDS[::-1]]
    with pytest.raises(UnicodeDecodeError):
        strings.extend_packed("é".encode(), np.array([0, 1, 2]))


@pytest.mark.parametrize("kind", [Strings, list, np.array])
def test_repeats_are_found(kind):
    words = random_words(500)
    assert not may_repeat(kind(words)) or kind is np.array
    assert may_repeat(kind([*words, words[250]]))
    numbers = np.random.default_rng(0).permutation(5000)
    assert not may_repeat(numbers)
    assert may_repeat(np.append(numbers, numbers[17]))
    assert not may_repeat(Strings()) and not may_repeat(numbers[:0])
