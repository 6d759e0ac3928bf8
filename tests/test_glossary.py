"""The glossary: one word for one thing, no word of elsewhere for two, and names that exist."""

import importlib
import re
from pathlib import Path

import click

import tierstore
from tierstore_cli.commands import load_command, summaries

PAGE = Path(__file__).parents[1] / "docs/glossary.md"
LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
][1:]
"""The cells of each line of the table: word, meaning, words of elsewhere, the name here."""


def test_a_word_has_one_line_and_a_word_of_elsewhere_one_meaning():
    words = [word for line in LINES for word in line[0].split(", ")]
    others = [word for line in LINES for word in line[2].split(", ")]
    assert len(set(words)) == len(words)
    # A word of elsewhere may be one of ours, which means another thing here, but not two of ours.
    repeated = {word for word in others if others.count(word) > 1}
    assert repeated == set()


def test_what_is_named_here_exists():
    options = {
        name
        for command in map(load_command, summaries())
        for each in command.params
        if isinstance(each, click.Option) and not each.hidden
        for name in each.opts
    }
    for line in LINES:
        (name,) = re.fullmatch(r"`([^`]+)`", line[3]).groups()
        if name.startswith("--"):
            assert name in options, name
        elif name.startswith("tierstore "):
            assert name.split()[1] in summaries(), name
        else:
            owner, _, attribute = name.removeprefix("tierstore.").rpartition(".")
            if owner and owner.islower():
                found = importlib.import_module(f"tierstore.{owner}")
            else:
                found = getattr(tierstore, owner) if owner else tierstore
            assert hasattr(found, attribute), name


def test_words_are_used_for_what_they_are_in_the_concepts():
    """The page of concepts has its words from here."""
    text = (PAGE.parent / "concepts.md").read_text(encoding="utf-8")
    table = text.partition("## Words")[2].partition("## ")[0]
    named = re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)[1:]
    words = {word for line in LINES for word in line[0].split(", ")}
    assert len(named) > 5
    assert {word for each in named for word in each.split(", ")} - {"---"} <= words
