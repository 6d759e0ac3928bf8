"""The pages of docs about commands say what the commands say."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

from tierstore_cli.commands import GROUPS, summaries

ROOT = Path(__file__).parents[2]


def generator(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_what_json_prints_is_up_to_date():
    generate = generator("generate_json")
    assert generate.PAGE.read_text(encoding="utf-8") == generate.page(), "run make docs"


def test_the_pages_of_commands_are_up_to_date():
    made = generator("generate_cli").pages()
    there = {*(ROOT / "docs/cli").glob("*.md"), ROOT / "docs/cli.md"}
    assert {path: path.read_text(encoding="utf-8") for path in there} == made, "run make docs"


def test_every_command_is_in_one_group():
    names = " ".join(GROUPS.values()).split()
    assert sorted(names) == list(summaries())


def test_the_lines_for_cron_and_slurm_are_lines_of_theirs():
    """What cannot be run here: five fields and a command, and options that sbatch has."""
    text = (ROOT / "docs/how-to/nightly.md").read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    cron, slurm, bucket = [block for language, block in fences if not language]
    times, command = re.fullmatch(r"((?:[\d*/,-]+ ){5})(.*)\n", cron).groups()
    limits = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
    for field, (low, high) in zip(times.split(), limits, strict=True):
        assert field == "*" or low <= int(field) <= high
    assert "%" not in command  # which cron takes for the end of a line
    for line in (command, slurm, bucket):
        subprocess.run(["bash", "-n", "-c", line], check=True)
    program, *options = shlex.split(slurm)
    assert program == "sbatch" and options[0].startswith("--dependency=afterok:")
    assert options[1] == "--wrap" and options[2].split()[0] == shlex.split(command)[3]
