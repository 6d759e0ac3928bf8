"""Texts in bulk against Python's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.every import every
from tests.tries import tries
from tierstore._keys.hashmap import HashMap
from tierstore._keys.text import MAX_TEXT_BYTES, Texts
from tierstore.errors import InvalidInputError

TEXTS = st.lists(
    st.text(max_size=40)
    | st.sampled_from(["", "\0", "a", "a\0", "a\0\0", "🙂", "x" * 255, "x" * 256, "x" * 257])
    | st.integers(200, 600).map(lambda length: "y" * length),
    max_size=40,
)


def test_the_hash_is_murmur3():
    published = {
        "hello": 0xCBD8A7B341BD9B02,
        "hello, world": 0x342FAC623A5EBC8E,
        "19 Jan 2038 at 3:14:07 AM": 0xB89E5988B737AFFC,
        "The quick brown fox jumps over the lazy dog.": 0xCD99481F9EE902C9,
    }
    assert Texts.of(published).hashes().tolist() == list(published.values())


@pytest.mark.slow
@given(TEXTS)
def test_texts_hash_alike_in_any_company(texts):
    together = Texts.of(texts)
    assert [together.encoded(at).decode() for at in range(len(texts))] == texts
    alone = [int(Texts.of([text]).hashes()[0]) for text in texts]
    assert together.hashes().tolist() == alone
    assert len(set(alone)) == len(set(texts))


@tries(20)
@given(TEXTS, st.randoms(use_true_random=False))
def test_texts_are_equal_as_in_python(texts, random):
    """All of them, and one by one, as a map of texts of one hash compares them."""
    others = [random.choice(texts) if random.random() < 0.5 else text for text in texts]
    assert Texts.of(texts).equal(Texts.of(others)) == (texts == others)
    code, first = np.full(len(texts), 7, np.uint64), {}
    for row, text in enumerate(texts):
        first.setdefault(text, row)
    found = HashMap.of(code, Texts.of(texts))[0].find(code, Texts.of(others))
    assert found.tolist() == [first.get(other, -1) for other in others]


@pytest.mark.slow
@every(at=range(300))
def test_one_other_character_is_seen(at):
    text = "z" * 300
    other = text[:at] + "y" + text[at + 1 :]
    one, two = Texts.of([text, text[: at + 1]]), Texts.of([other, other[: at + 1]])
    code = np.full(2, 7, np.uint64)
    assert (HashMap.of(code, one)[0].find(code, two) == -1).all()
    assert (one.hashes() != two.hashes()).all()


@pytest.mark.parametrize("text", ["x" * (1 << 20), "é" * (MAX_TEXT_BYTES // 2 + 1), "\ud800"])
def test_texts_that_are_too_long_or_no_unicode(text):
    with pytest.raises(InvalidInputError, match=r"a key has at most|not Unicode"):
        Texts.of(["a", text])
