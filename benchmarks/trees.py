"""Trees of the project: check commits out side by side, build what git does not hold, name them."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TIMEOUT = 600


class CannotRunError(Exception):
    """A tree or a benchmark cannot be run."""


@contextmanager
def checked_out(wanted: Mapping[str, str], repository: Path) -> Iterator[dict[str, Path]]:
    """Check out commits as trees in a temporary folder, removed at the end; folders stay."""
    git = ["git", "-C", str(repository)]
    made: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="tierstore-trees-") as folder:
        try:
            trees = {}
            for name, commit in wanted.items():
                trees[name] = Path(commit).resolve()
                if not (trees[name] / "tierstore/__init__.py").is_file():
                    trees[name] = Path(folder) / name
                    made.append(trees[name])
                    run([*git, "worktree", "add", "--detach", str(made[-1]), commit])
                prepare(trees[name])
            yield trees
        finally:
            for tree in made:
                subprocess.run(
                    [*git, "worktree", "remove", "--force", str(tree)],
                    check=False,
                    capture_output=True,
                )


def prepare(tree: Path) -> None:
    """Build what git does not hold: the compiled part of a library, by the tree's own build."""
    if (tree / "hatch_build.py").exists():
        run([sys.executable, "hatch_build.py"], cwd=tree)


def commit_of(tree: Path) -> str:
    """Return the commit of a tree, and "+ changes" after it where some are not committed."""
    git = ["git", "-C", str(tree)]
    commit = run([*git, "rev-parse", "HEAD"]).strip()
    return commit + (" + changes" if run([*git, "status", "--porcelain", "-uno"]) else "")


def run(command: Sequence[str], **given: Any) -> str:
    """Run a command and return what it printed; raise CannotRunError where it fails."""
    given |= {"capture_output": True, "text": True, "timeout": _TIMEOUT}
    try:
        done = subprocess.run(command, check=False, **given)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotRunError(str(error)) from None
    if done.returncode:
        raise CannotRunError(f"{shlex.join(command)}\n{done.stderr.strip()}")
    return str(done.stdout)
