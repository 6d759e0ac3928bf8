"""The results of the matrix as a table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.durability.matrix.cells import Outcome

__all__ = ["Result", "table"]


@dataclass
class Result:
    """How the trials of one cell on one file system ended, or why there were none."""

    system: str
    cell: str
    outcomes: list[Outcome] = field(default_factory=list)
    reason: str = ""

    @property
    def lost(self) -> list[Outcome]:
        """The trials that lost something."""
        return [outcome for outcome in self.outcomes if outcome.kind == "lost"]

    @property
    def summary(self) -> str:
        """What stands in the table."""
        if self.reason:
            return f"skipped: {self.reason}"
        counts = Counter(outcome.kind for outcome in self.outcomes)
        kinds = ("held", "refused", "lost")
        return ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind])

    def plain(self) -> dict[str, Any]:
        """The result as JSON holds it; trials that held are only counted."""
        counts = Counter(outcome.kind for outcome in self.outcomes)
        said = [dataclasses.asdict(o) for o in self.outcomes if o.kind != "held"]
        return {
            "file_system": self.system,
            "cell": self.cell,
            "skipped": self.reason,
            **{kind: counts[kind] for kind in ("held", "refused", "lost")},
            "said": said,
        }


def table(results: list[Result]) -> str:
    """A Markdown table: a column a file system, a row a cell; then what was not tried, and why."""
    found = {(result.system, result.cell): result for result in results}
    systems = list(dict.fromkeys(r.system for r in results))
    absent = {
        system: reasons.pop()
        for system in systems
        if len(reasons := {r.reason for r in results if r.system == system}) == 1
        and "" not in reasons
    }
    tried = [system for system in systems if system not in absent]
    lines = [f"| | {' | '.join(tried)} |", "|---" * (len(tried) + 1) + "|"]
    for cell in dict.fromkeys(r.cell for r in results):
        summaries = [_short(found[system, cell]) for system in tried]
        lines.append(f"| {cell} | {' | '.join(summaries)} |")
    if absent:
        lines.append("")
        lines.append(f"Not tried: {'; '.join(f'{name} ({why})' for name, why in absent.items())}.")
    return "\n".join(lines)


def _short(result: Result) -> str:
    return "–" if result.reason else result.summary.replace(" held", "")
