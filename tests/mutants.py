"""Mutants: small mistakes in the library, each of which the tests of `make test` must detect.

    python -m tests.mutants                 every mutant
    python -m tests.mutants --jobs 64       64 at a time: all take some minutes on 64 cores
    python -m tests.mutants slots commit    those with one of the words in file, text or tests
    python -m tests.mutants --part 3/8      every eighth, from the third, for one machine of eight

Each mutant is applied to a copy of the tree, where the tests that it names must fail. First, these
must pass without a mutant. One that survives its tests is tried with all of `make test` where
`--whole` is given: what fails then is to be named. If none does, a test is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests import processors

ROOT = Path(__file__).parents[1]
_PASSED, _FAILED = 0, 1
"""Exit codes of pytest; other positive codes mean that it could not run."""
_TIMEOUT = 300


class Mutant(NamedTuple):
    """A mistake: `old`, which occurs once in `file`, is replaced by `new`; `tests` detect it.

    `file` is in the library, or begins with `cli/`. `tests` are files or single tests, the quickest
    that fail.
    """

    file: str
    old: str
    new: str
    tests: str

    @property
    def path(self) -> Path:
        """The file in the tree."""
        return Path(self.file) if self.file.startswith("cli/") else Path("tierstore", self.file)

    def apply(self, tree: Path) -> None:
        """Write the mistake into a copy of the tree."""
        path = tree / self.path
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times, not once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")

    def __str__(self) -> str:
        old, new = " ".join(self.old.split()), " ".join(self.new.split())
        return f"{self.file}: {old}  ->  {new}"


MUTANTS = [
    # The maps of keys: no key is lost, found in the row of another, or given two rows.
    Mutant(
        "_keys/hashmap.py",
        "for at in np.flatnonzero(rows < 0).tolist():",
        "for at in np.flatnonzero(rows < -1).tolist():",
        "tests/keys/test_hashmap.py",
    ),
    Mutant(
        "_keys/hashmap.py",
        "progress[:] = at, row + (holder == row or not dense)",
        "progress[:] = at, row + 1",
        "tests/keys/test_hashmap.py",
    ),
    Mutant(
        "_keys/growing.py",
        "np.cumsum(is_new)[firsts]",
        "(firsts + 1)",
        "tests/keys/test_keyed.py tests/keys/test_adversarial.py",
    ),
    Mutant(
        "_core/keys.c",
        "segment >= k->segments",
        "segment > k->segments",
        "tests/core/test_core.py",
    ),
    Mutant(
        "_core/keys.c",
        "own && length == other && !memcmp",
        "own && !memcmp",
        "tests/core/test_core.py tests/keys/test_text.py",
    ),
    Mutant(
        "_core/keys.c",
        "row += !dense || holder == row;",
        "row += 1;",
        "tests/core/test_core.py tests/keys/test_hashmap.py",
    ),
    Mutant(
        "_core/keys.c",
        "if (tried == k->probes) break;",
        "if (tried > k->probes) break;",
        "tests/core/test_core.py",
    ),
    Mutant(
        "_keys/hashmap.py",
        "self._put(kept[kept > 0])",
        "self._put(kept[kept > 1])",
        "tests/keys/test_hashmap.py",
    ),
    Mutant(
        "_keys/hashmap.py",
        "numbers[sources + 1] = others + 1",
        "numbers[sources + 1] = others",
        "tests/keys/test_hashmap.py",
    ),
    Mutant(
        "_tiers/gpu/keys.py",
        "given[missing.order] = rows",
        "given[:] = rows",
        "tests/gpu/test_keyed.py",
    ),
    Mutant(
        "_tiers/gpu/keys.py",
        "device.fill(keys.count, 0, 4, stream)",
        "device.fill(keys.count, 0, 1, stream)",
        "tests/gpu/test_keyed.py",
    ),
    Mutant(
        "_tiers/gpu/tier.py",
        "for lease in keeping:",
        "for lease in keeping[1:]:",
        "tests/gpu/test_places.py",
    ),
    Mutant(
        "_tiers/gpu/kernels/maintain.cu",
        "tally(&t.places->taken, row >= 0);",
        "tally(&t.places->taken, false);",
        "tests/gpu/test_places.py",
    ),
    # What ends a batch: no gradient is that of another key, and none is lost without a word.
    Mutant(
        "_tiers/base.py",
        "return self.names == names and not self._renames",
        "return True",
        "tests/training/test_named.py",
    ),
    Mutant(
        "_tiers/base.py",
        "return Epoch(self.names + self._renames, self.renamed)",
        "return Epoch(self.names, self.renamed)",
        "tests/training/test_named.py",
    ),
    Mutant(
        "_store/tables.py",
        "            space.end_leases(REMOVED, [name])",
        "            space.end_leases(REMOVED, [])",
        "tests/training/test_named.py",
    ),
    Mutant(
        "_tiers/base.py",
        "return self.names == names and not self._renames",
        "return self.names >= names - 1",
        "tests/training/test_key_programs.py",
    ),
    Mutant(
        "_store/tables.py",
        "            space.end_leases(REMOVED, [name])",
        "            space.end_leases(REMOVED, ())",
        "tests/training/test_key_programs.py",
    ),
    Mutant(
        "_tiers/space.py",
        "names=renamed is None or extent.table in renamed",
        "names=renamed is not None and extent.table in renamed",
        "tests/training/test_key_programs.py",
    ),
    Mutant(
        "_table/keyed.py",
        "        order[to] = moved\n",
        "        order[to] = moved[::-1]\n",
        "tests/training/test_key_programs.py",
    ),
    # Who was removed is in no file: places that no key has are zeros.
    Mutant(
        "_table/keyed.py",
        "for start in range(0, freed.size if own_rows else 0, _BLOCK_ROWS):",
        "for start in range(0, 0, _BLOCK_ROWS):",
        "tests/keys/test_erasing.py",
    ),
    Mutant(
        "_disk/partitioned_keys.py",
        "for start in range(left, before[number], _BLOCK_ROWS):",
        "for start in range(left, left, _BLOCK_ROWS):",
        "tests/keys/test_erasing.py",
    ),
    # What a version says that it wrote, and what has a manifest's name and is none.
    Mutant(
        "_store/state.py",
        'if is_new and "written" not in changes:',
        "if False:",
        "tests/store/test_written.py",
    ),
    Mutant(
        "_disk/manifest.py",
        "(name in tables) != (counts[name] is not None)",
        "False",
        "tests/durability/test_manifests.py::test_a_bad_table_name_is_refused",
    ),
    Mutant(
        "_disk/manifest.py",
        "if rows or old != info:",
        "if rows:",
        "tests/store/test_written.py",
    ),
    Mutant(
        "_store/versions.py",
        "return not directory.may_be_file(name)",
        "return False",
        "tests/durability/test_strays.py",
    ),
    Mutant(
        "_table/keyed.py",
        "if known.source != names:",
        "if known.source < 0:",
        "tests/gpu/test_keyed.py",
    ),
    Mutant(
        "_table/expiry.py",
        "older, last = tied[values < edge], tied[values == edge]",
        "older, last = tied[values <= edge], tied[values == edge]",
        "tests/keys/test_keyed.py",
    ),
    # Work in parts: each row once, errors of any part, equal values in their order.
    Mutant(
        "_parts.py",
        "            self._running.append(None)",
        "            self._running.extend([])",
        "tests/test_parts.py",
    ),
    Mutant(
        "optim/on_host.py",
        "of = records, slots[now], self._starts, given[now]",
        "of = records, slots[now], self._starts, given[: slots[now].size]",
        "tests/training/test_on_records.py",
    ),
    # The budget: the index below the tiers is a part of it.
    Mutant(
        "_tiers/slots.py",
        "return arena + staging + queue_bytes(record_bytes, slots) + index",
        "return arena + staging + queue_bytes(record_bytes, slots)",
        "tests/tiers/test_placement.py",
    ),
    # The host tier: changed rows are written down, rows without a slot are served from below.
    Mutant(
        "_tiers/host.py",
        "self.map.dirty[slots] = 1\n        _rowcopy.scatter",
        "self.map.dirty[slots] = 0\n        _rowcopy.scatter",
        "tests/tiers/test_host.py",
    ),
    Mutant(
        "_tiers/host.py",
        "self.map.dirty[room.slots[: rows.size]] = dirty",
        "self.map.dirty[room.slots[: rows.size]] = False",
        "tests/tiers/test_host.py",
    ),
    Mutant(
        "_tiers/host.py",
        "self.map.dirty.take(victims) != 0",
        "self.map.dirty.take(victims) == 0",
        "tests/tiers/test_host.py",
    ),
    Mutant(
        "_tiers/host.py",
        "missing = np.sort(missing[room.slots.size :])",
        "missing = missing[:0]",
        "tests/tiers/test_host.py",
    ),
    Mutant(
        "_tiers/host.py",
        "_rowcopy.unique(np.concatenate([changed, slots]))",
        "changed",
        "tests/tiers/test_host.py",
    ),
    Mutant(
        "_tiers/host.py",
        "self._are_moving(rows.take(missing))):",
        "False):",
        "tests/test_concurrency.py",
    ),
    # What is copied without the lock is believed where no record changed meanwhile.
    Mutant(
        "_tiers/host.py",
        "return changes.number == before",
        "return True",
        "tests/test_concurrency.py",
    ),
    Mutant(
        "_tiers/host.py",
        "        self.before_change()\n        self._changes.number += 1\n",
        "        self.before_change()\n",
        "tests/test_concurrency.py",
    ),
    Mutant(
        "_tiers/host.py",
        "self._changes.number += 1  # entries of the map move",
        "",
        "tests/test_concurrency.py",
    ),
    # A commit copies rows while those before are written.
    Mutant(
        "_disk/write_queue.py",
        "spare = blocks[(number + 1) % 2, : part",
        "spare = blocks[number % 2, : part",
        "tests/disk/test_write_queue.py",
    ),
    # A refresh reads beside reads, and switches only to what is still protected.
    Mutant(
        "_store/reading.py",
        "opening.before is not self.manifest or opening.manifest.version not in self.reader.held",
        "opening.before is not self.manifest",
        "tests/store/test_following.py",
    ),
    Mutant(
        "_store/reading.py",
        "opening.before is not self.manifest or opening.manifest.version not in self.reader.held",
        "opening.manifest.version not in self.reader.held",
        "tests/store/test_following.py",
    ),
    Mutant(
        "_store/reading.py",
        "if not is_safe:",
        "if False:",
        "tests/store/test_following.py",
    ),
    Mutant(
        "_store/store.py",
        "with Errand(self._door):",
        "with self._door.use():",
        "tests/store/test_following.py",
    ),
    Mutant(
        "_tiers/host.py",
        "self.map.release(slots[stale])",
        "pass",
        "tests/store/test_following.py",
    ),
    Mutant(
        "_tiers/host.py",
        "_rowcopy.scatter(self.records, new[here], renewed.records[here])",
        "pass",
        "tests/store/test_following.py",
    ),
    Mutant(
        "_disk/index.py",
        "id(delta) not in known, reversed(deltas))]",
        "id(delta) not in known, reversed(deltas))][::-1]",
        "tests/disk/test_tier.py",
    ),
    Mutant(
        "_disk/index.py",
        "itertools.takewhile(lambda delta: id(delta) not in known, reversed(deltas))",
        "reversed([each for each in deltas if id(each) not in known])",
        "tests/disk/test_tier.py",
    ),
    Mutant(
        "_disk/delta.py",
        'np.searchsorted(self.ids, rows, "right", sorter=order) - 1',
        "np.searchsorted(self.ids, rows, sorter=order) % max(1, self.ids.size)",
        "tests/disk/test_tier.py",
    ),
    # Byte ranges that the tier below serves, and spaces of several tables.
    Mutant(
        "_tiers/uncached.py",
        "block = np.arange(part.start, part.stop), records[:, lo : lo + width]",
        "block = np.arange(part.start, part.stop), records[:, :width]",
        "tests/tiers",
    ),
    Mutant(
        "_tiers/uncached.py",
        "whole[:, lo : lo + records.shape[1]] = records.take(order, axis=0)",
        "whole[:, lo : lo + records.shape[1]] = records",
        "tests/tiers",
    ),
    Mutant(
        "_tiers/space.py",
        "return rows + self.start if self.start else rows",
        "return rows",
        "tests/tiers/test_space.py",
    ),
    Mutant(
        "_tiers/space.py",
        "part, rows[part] - self._starts[number]",
        "part, rows[part]",
        "tests/tiers/test_space.py",
    ),
    Mutant(
        "_tiers/space.py",
        "partial(call_at, get, order[part])",
        "partial(call_at, get, np.arange(rows.size)[part])",
        "tests/tiers/test_space.py",
    ),
    Mutant(
        "_tiers/space.py",
        "np.union1d(handed_down, extent.own(self.nearest.dirty()))",
        "extent.own(self.nearest.dirty())",
        "tests/tiers tests/store/test_store.py",
    ),
    # Slots.
    Mutant(
        "_tiers/slots.py",
        "self.slot_of.set(rows.compress(rows >= 0), None)",
        "self.slot_of.set(rows.compress(rows > 0), None)",
        "tests/tiers/test_slots.py",
    ),
    Mutant(
        "_tiers/slots.py",
        "self._released.append(slots[wanted:])",
        "self._released.append(slots[wanted + 1 :])",
        "tests/tiers/test_slots.py",
    ),
    Mutant(
        "_tiers/slots.py",
        "self.leases[slots] > 0",
        "self.leases[slots] > 1",
        "tests/tiers/test_slots.py tests/tiers/test_host.py",
    ),
    Mutant(
        "_tiers/slots.py",
        "self._ahead[slots] > self._floor",
        "self._ahead[slots] > self._ticket",
        "tests/tiers/test_slots.py tests/tiers/test_host.py",
    ),
    # Policies.
    Mutant(
        "policy/recency.py",
        "same = (self.stamps.take(slots) == stamps) &",
        "same = (self.stamps.take(slots) >= stamps) &",
        "tests/policy/test_lru.py",
    ),
    Mutant(
        "policy/recency.py",
        "if self.now == 2**32 - 1:",
        "if self.now == 2**33:",
        "tests/policy/test_lru.py",
    ),
    Mutant(
        "policy/recency.py",
        "            self.stamps[slots] = stamps\n",
        "",
        "tests/policy/test_lru.py",
    ),
    Mutant(
        "policy/recency.py",
        " & (self._row_of.take(slots) >= 0)",
        "",
        "tests/policy/test_lru.py",
    ),
    Mutant(
        "policy/recency.py",
        "            seen.append(slots)\n",
        "",
        "tests/policy/test_lru.py",
    ),
    Mutant(
        "_core/slots.c",
        "stamp == limit && equal > 0",
        "stamp == limit",
        "tests/core/test_core.py::test_programs_have_the_results_of_the_oracle",
    ),
    Mutant(
        "_core/slots.c",
        "if (id >= (uint64_t)b->most || slot_of(",
        "if (id > (uint64_t)b->most || slot_of(",
        "tests/core/test_core.py::test_programs_have_the_results_of_the_oracle",
    ),
    Mutant(
        "_core/slots.c",
        "b->stamps && i < count; i++) store32(b->stamps + NUMBER * slots[i], b->number);",
        "b->stamps && i + 1 < count; i++) store32(b->stamps + NUMBER * slots[i], b->number);",
        "tests/core/test_core.py::test_programs_have_the_results_of_the_oracle",
    ),
    Mutant(
        "_tiers/host.py",
        "readable.read(self.records, ids, rows, lo, None, True)",
        "pass",
        "tests/test_concurrency.py",
    ),
    Mutant(
        "_tiers/host.py",
        "        self._readable = None\n",
        "",
        "tests/test_concurrency.py",
    ),
    Mutant(
        "_tiers/host.py",
        "            self._await_copies()  # the map moves\n",
        "",
        "tests/test_concurrency.py::test_a_map_moves_once_no_thread_reads_it_without_the_lock",
    ),
    Mutant(
        "policy/frequency.py",
        "self._weight *= 2 ** (1 / self.half_life)",
        "self._weight *= 2 ** (-1 / self.half_life)",
        "tests/policy/test_policies.py",
    ),
    Mutant(
        "policy/ranked.py",
        "scores > self._keys[slots]",
        "scores >= self._keys[slots]",
        "tests/policy",
    ),
    Mutant(
        "policy/ranked.py",
        "low = slots[keys <= self._bound]",
        "low = slots[keys < 0]",
        "tests/policy",
    ),
    Mutant(
        "policy/hints.py",
        "_SOONEST - due, self.base.keys(rows)",
        "due, self.base.keys(rows)",
        "tests/policy",
    ),
    # A commit.
    Mutant(
        "_store/compaction.py",
        "max(_LEAST_BYTES, min(base // 2, _MOST_BYTES), base // 4)",
        "max(_MOST_BYTES, base // 4)",
        "tests/store/test_folding.py",
    ),
    Mutant(
        "_store/commit.py",
        "if folder.done:",
        "if False:",
        "tests/store/test_folding.py",
    ),
    Mutant(
        "_progress.py",
        "self._bar.update(done - self._bar.n)",
        "self._bar.update(done)",
        "tests/test_notebooks.py",
    ),
    Mutant(
        "_html.py",
        "return _BRIEF.repr([*thing])",
        "return repr([*thing])",
        "tests/test_notebooks.py",
    ),
    Mutant(
        "_store/commit.py",
        "version = state.ledger.last_version + 1",
        "version = state.manifest.version + 1",
        "tests/durability/test_versions.py",
    ),
    Mutant(
        "_store/commit.py",
        "elif payload is None and self.step == before.step:",
        "elif payload is None:",
        "tests/store/test_store.py",
    ),
    Mutant(
        "_store/commit.py",
        "state.backings[name].generation.sync()",
        "pass",
        "tests/durability/test_crash.py",
    ),
    Mutant(
        "_store/commit.py",
        'changes["confirmed"] = state.manifest.confirmed',
        "pass",
        "tests/durability/test_versions.py",
    ),
    Mutant(
        "_store/commit.py",
        "deltas=deltas, scalars=scalars, keys=keys",
        "deltas=deltas, keys=keys",
        "tests/store/test_store.py tests/store/test_schema.py",
    ),
    Mutant(
        "_store/ledger.py",
        "make_durable()\n            file.sync()",
        "make_durable()",
        "tests/durability/test_crash.py",
    ),
    Mutant(
        "_store/ledger.py",
        "        directory.sync()\n    except CommitFailedError:",
        "    except CommitFailedError:",
        "tests/durability/test_crash.py",
    ),
    Mutant(
        "_store/ledger.py",
        "confirmed.__gt__, spare",
        "confirmed.__ge__, spare",
        "tests/store/test_store.py",
    ),
    Mutant(
        "_store/ledger.py",
        "if self._unsynced:  # a manifest",
        "if False:  # a manifest",
        "tests/durability/test_crash.py",
    ),
    Mutant(
        "_store/ledger.py",
        "if not _is_published(directory, name, data):\n            raise\n",
        "raise\n",
        "tests/durability/test_versions.py",
    ),
    # Manifests.
    Mutant(
        "_disk/manifest.py",
        '"last_version": max(self.version, self.last_version)',
        '"last_version": self.version',
        "tests/durability/test_versions.py",
    ),
    Mutant(
        "_disk/manifest.py",
        "if not max(floor, confirmed) <= version <= last_version:",
        "if not floor <= version <= last_version:",
        "tests/durability/test_manifests.py",
    ),
    Mutant(
        "_disk/manifest.py",
        "if rows > MAX_DELTA_IMAGES * spec.rows:",
        "if rows > 2**62:",
        "tests/durability/test_bounds.py tests/durability/test_crafted.py",
    ),
    Mutant(
        "_strictjson.py",
        "if match is None or int(match[1]) != crc32c(match[2]):",
        "if match is None:",
        "tests/durability/test_manifests.py",
    ),
    # Files that a version gone back to names again.
    Mutant(
        "_store/ledger.py",
        "self._runs[path] = self._runs.get(path, 0) + 1",
        "self._runs[path] = 1",
        "tests/store/test_needed.py",
    ),
    # Checksums.
    Mutant(
        "_rowcopy.py",
        "return Target(self.records, self.slots[which])",
        "return Target(self.records, which)",
        "tests/disk/test_tier.py",
    ),
    Mutant(
        "_disk/delta.py",
        "positions, rows, target = positions[left], rows[left], target.of(left)",
        "positions, rows, target = positions[left], rows[left], target",
        "tests/disk/test_tier.py",
    ),
    Mutant(
        "_checksum.py",
        "return sums ^ row_checksums(rows, zeros) ^ row_checksums(others, zeros)",
        "return sums ^ row_checksums(others, zeros)",
        "tests/test_checksum.py",
    ),
    # Maps of rows.
    Mutant(
        "_rowmap.py",
        "self._move(max(self._held + fresh, self._held * 3 // 2))",
        "self._move(self._held * 3 // 2)",
        "tests/test_rowmap.py",
    ),
    Mutant(
        "_rowmap.py",
        "if self._by_row or not is_hashed(rows, self._most or self._held):",
        "if True:",
        "tests/test_rowmap.py",
    ),
    Mutant(
        "_core/map.c",
        "hole < i ? hole < home && home <= i : hole < home || home <= i",
        "hole < home && home <= i",
        "tests/test_rowmap.py",
    ),
    Mutant(
        "_core/map.c",
        "|| *held + 1 >= m->count) return 0;",
        "|| *held >= m->count) return 0;",
        "tests/test_rowmap.py",
    ),
    Mutant(
        "_core/map.c",
        "if (i == (uint64_t)m->count ||",
        "if (",
        "tests/test_rowmap.py",
    ),
    Mutant(
        "_core/groups.c",
        "if (below && bits + below <= 64)",
        "if (below)",
        "tests/test_groups.py",
    ),
    Mutant(
        "_core/groups.c",
        "to[k] += value[k];",
        "to[k] = value[k];",
        "tests/core/test_core.py",
    ),
    Mutant(
        "_core/map.h",
        "if (ended | number) return number;",
        "return number;",
        "tests/test_rowmap.py",
    ),
    Mutant(
        "_core/map.h",
        "(row ^ row >> 32) * 0x9E3779B97F4A7C15u",
        "row << 32",
        "tests/test_rowmap.py",
    ),
    Mutant(
        "_tiers/slots.py",
        "np.int32 if resident.size < 2**31 else np.int64",
        "np.int32",
        "tests/test_rowmap.py",
    ),
    Mutant(
        "_tiers/placement.py",
        "max(divisions[each], min(total or 0, 1))",
        "divisions[each]",
        "tests/tiers/test_placement.py",
    ),
    # Steps on records.
    Mutant(
        "optim/on_host.py",
        "None if marks is None else marks[now], roots)",
        "marks if marks is None else marks[: slots[now].size], roots)",
        "tests/training/test_on_records.py",
    ),
    Mutant(
        "optim/on_host.py",
        "torch.from_numpy(roots).sqrt_()",
        "np.sqrt(roots, out=roots)",
        "tests/training/test_on_records.py::test_bits_are_those_of_steps_on_copies",
    ),
    Mutant(
        "optim/on_host.py",
        "self._storage.type(numbers[2]) == 1",
        "False",
        "tests/training/test_on_records.py",
    ),
    Mutant(
        "optim/on_host.py",
        "or not _rounds_as_torch(dtype)",
        "",
        "tests/training/test_on_records.py",
    ),
    Mutant(
        "optim/on_host.py",
        "return not (differs or any(",
        "return not (any(",
        "tests/training/test_on_records.py",
    ),
    Mutant(
        "_core/step.h",
        "part < (REAL)0.5 ? FMA(part, to - from, from)",
        "part <= 1 ? FMA(part, to - from, from)",
        "tests/core/test_core.py::test_programs_have_the_results_of_the_oracle",
    ),
    Mutant(
        "_core/step.h",
        "FMA(times * b, c, a)",
        "FMA(times, b * c, a)",
        "tests/core/test_core.py::test_programs_have_the_results_of_the_oracle",
    ),
    Mutant(
        "_core/step.h",
        "return a + times * b / c;",
        "return FMA(times, b / c, a);",
        "tests/core/test_core.py::test_programs_have_the_results_of_the_oracle",
    ),
    Mutant(
        "_core/step.h",
        "if (flags & TS_MAXIMIZE) g = -g;",
        "",
        "tests/core/test_core.py::test_programs_have_the_results_of_the_oracle",
    ),
    Mutant(
        "_core/step.h",
        "for (int half = LANES / 2; half; half /= 2)",
        "for (int half = LANES / 2; half > 1; half /= 2)",
        "tests/core/test_core.py::test_programs_have_the_results_of_the_oracle",
    ),
    Mutant(
        "_core/steps.c",
        "if ((uint64_t)slot_at(s, i) >= (uint64_t)s->count) return -(i + 1);",
        "if ((uint64_t)slot_at(s, i) > (uint64_t)s->count) return -(i + 1);",
        "tests/core/test_core.py::test_programs_have_the_results_of_the_oracle",
    ),
    # Leased rows in the host tier.
    Mutant(
        "_tiers/host.py",
        "hits = requested - np.diff(of_gone[gone])",
        "hits = requested",
        "tests/tiers/test_host.py",
    ),
    Mutant(
        "_tiers/host.py",
        "elif out.nbytes >= _MANY_BYTES and 2 * slots.size <= len(out):",
        "elif False:",
        "tests/tiers/test_host.py",
    ),
    # The base.
    Mutant(
        "_disk/base.py",
        "wrong[_checksum.mismatches(rows, records, checksums)] = True",
        "pass",
        "tests/durability/test_thin_disk.py",
    ),
    Mutant(
        "_disk/base.py",
        "rows = rows[block.any(axis=1)]",
        "rows = rows[block.all(axis=1)]",
        "tests/disk/test_base.py",
    ),
    # Deltas.
    Mutant(
        "_disk/index.py",
        "self._runs = [part for part in parts if part.start < part.stop]",
        "pass",
        "tests/disk/test_tier.py tests/disk/test_compacting.py",
    ),
    Mutant(
        "_disk/delta.py",
        "if found != expected or crc32c != info.crc32c:",
        "if found != expected:",
        "tests/durability/test_corruption.py tests/disk/test_tier.py",
    ),
    Mutant(
        "_disk/delta.py",
        "self._torn = np.union1d(self._torn, used[~self.segments.dead(used)])",
        "pass",
        "tests/durability/test_places.py",
    ),
    Mutant(
        "_disk/delta.py",
        "piece = self._records(last + 1)[first:].copy()",
        "piece = np.empty((last + 1 - first, self.record_bytes), np.uint8)",
        "tests/disk/test_tier.py",
    ),
    Mutant(
        "_disk/delta.py",
        "self._queue.drain()\n        if self._torn.size:",
        "self.drain()\n        if False:",
        "tests/durability/test_places.py",
    ),
    Mutant(
        "_disk/delta.py",
        "            written[which] = False\n        left = np",
        "            pass\n        left = np",
        "tests/durability/test_write_back.py",
    ),
    Mutant(
        "_disk/tier.py",
        "places[known] = replaced[there]",
        "pass",
        "tests/disk/test_tier.py",
    ),
    Mutant(
        "_disk/tier.py",
        "while segments.garbage > segments.alive and not live.full:",
        "while False:",
        "tests/disk/test_tier.py",
    ),
    Mutant(
        "_disk/segments.py",
        "counts[np.unique(self._free // self._rows)] = 0",
        "pass",
        "tests/disk/test_segments.py",
    ),
    Mutant(
        "_disk/segments.py",
        "return others + self._rows <= most",
        "return True",
        "tests/disk/test_tier.py",
    ),
    Mutant(
        "_disk/segments.py",
        "self.ordered = self.ordered and not again",
        "pass",
        "tests/disk/test_tier.py",
    ),
    Mutant(
        "_disk/delta.py",
        "for position in self._loose[self._loose < count]:",
        "for position in []:",
        "tests/disk/test_tier.py",
    ),
    Mutant(
        "_disk/delta.py",
        "used[~self.segments.dead(used)]",
        "used",
        "tests/disk/test_tier.py",
    ),
    # Folds.
    Mutant(
        "_disk/merging.py",
        "np.unique(ids[::-1], return_index=True)",
        "np.unique(ids[::1], return_index=True)",
        "tests/store/test_folding.py",
    ),
    Mutant(
        "_disk/merging.py",
        "np.maximum.at(newest, rows[here], places)",
        "np.minimum.at(newest, rows[here], places)",
        "tests/disk/test_merging.py tests/durability/test_bounds.py",
    ),
    Mutant(
        "_disk/merging.py",
        "wrong = self._base.unproven(rows, sums)",
        "wrong = rows[:0]",
        "tests/durability/test_thin_disk.py",
    ),
    # Initializers.
    Mutant(
        "initializers.py",
        "(field << 48) | block",
        "block",
        "tests/test_initializers.py",
    ),
    Mutant(
        "initializers.py",
        "start = block * BLOCK_ROWS",
        "start = 0",
        "tests/test_initializers.py",
    ),
    Mutant(
        "initializers.py",
        "6 / (shape[0] + shape[1])",
        "6 / shape[1]",
        "tests/test_initializers.py",
    ),
    # Ids and values.
    Mutant(
        "_table/address.py",
        "np.maximum.reduce(flat.view(np.uint64)) < rows",
        "np.maximum.reduce(flat.view(np.uint64)) <= rows",
        "tests/table/test_ids.py",
    ),
    Mutant(
        "_table/address.py",
        "if flat.min() >= 0 and flat.max() < rows:",
        "if flat.max() < rows:",
        "tests/table/test_ids.py",
    ),
    Mutant(
        "_table/address.py",
        "else rows.size - 1 - first",
        "else first",
        "tests/table/test_ids.py tests/table/test_table.py",
    ),
    Mutant(
        "_table/values.py",
        "fits = out.flags.c_contiguous and out.flags.writeable",
        "fits = out.flags.writeable",
        "tests/table/test_values.py tests/table/test_table.py",
    ),
    Mutant(
        "_table/values.py",
        "if not element.accepts_array(array.dtype):",
        "if False:",
        "tests/table/test_values.py",
    ),
    Mutant(
        "_table/host.py",
        "data if last is None else data[last]",
        "data",
        "tests/table/test_table.py",
    ),
    Mutant(
        "_dtypes.py",
        "(bits + np.uint32(0x7FFF) + even)",
        "(bits + np.uint32(0x8000))",
        "tests/test_dtypes.py tests/table/test_values.py",
    ),
    Mutant(
        "_dtypes.py",
        "np.where(is_nan, quiet, rounded)",
        "np.where(False, quiet, rounded)",
        "tests/test_dtypes.py tests/table/test_values.py",
    ),
    # The tier and the optimizers on a GPU, by the emulator.
    Mutant(
        "_tiers/gpu/kernels/batch.cu",
        "mark_host(t, home);",
        ";",
        "tests/gpu/test_tier.py",
    ),
    Mutant(
        "_tiers/gpu/kernels/map.cuh",
        "if (*(volatile u32 *)contest < position + 1) atomicMax",
        "if (*(volatile u32 *)contest == 0) atomicMax",
        "tests/gpu/test_tier.py tests/gpu/test_random.py",
    ),
    Mutant(
        "_tiers/gpu/kernels/select.cuh",
        "if ((stamp & HELD) || (stamp & NUMBER) == b.now) return false;",
        "if ((stamp & NUMBER) == b.now) return false;",
        "tests/gpu/test_leases.py tests/gpu/test_tier.py",
    ),
    Mutant(
        "loader.py",
        "with OwnGenerators(random):\n                iter(self._loader)",
        "pass",
        "tests/training/test_resume.py::test_workers_that_stay_are_told_where_they_drew_before",
    ),
    Mutant(
        "nn/rows.py",
        "self._waiting, self._whole = [], gradient",
        "self._whole = gradient",
        "tests/training/test_parameter.py::test_a_hook_goes_by_the_rows_of_its_gradient",
    ),
    Mutant(
        "nn/placed.py",
        "if few == many or few == 1:",
        "if few == many:",
        "tests/training/test_kept.py",
    ),
    Mutant(
        "nn/placed.py",
        "is_dual or _functorch.peek_interpreter_stack() is not None",
        "False",
        "tests/training/test_kept.py",
    ),
    Mutant(
        "nn/placed.py",
        "elif self.is_whole or (order.ids is None and sources):",
        "elif order.ids is None and sources:",
        "tests/training/test_kept.py",
    ),
    Mutant(
        "nn/placed.py",
        "            copy = torch.nn.Parameter(copy)",
        "            pass",
        "tests/training/test_kept.py",
    ),
    Mutant(
        "nn/by_row.py",
        "or one.ndim - one.row_dim == other.ndim - other.row_dim",
        "or True",
        "tests/training/test_kept.py",
    ),
    Mutant(
        "nn/rows.py",
        "if (along >= 0).all() or (along <= 0).all() or torch",
        "if torch",
        "tests/training/test_writes.py",
    ),
    Mutant(
        "nn/rows.py",
        "if all(torch.equal(each, now) for each in self._orders):",
        "if all(each.shape == now.shape for each in self._orders):",
        "tests/training/test_writes.py",
    ),
    Mutant(
        "nn/rows.py",
        "            registered.shape[:1] != (0,)\n            or (",
        "            (",
        "tests/training/test_writes.py",
    ),
    Mutant(
        "optim/state.py",
        "if self._has_state and found is not self._token:",
        "if False:",
        "tests/training/test_anew.py",
    ),
    Mutant(
        "optim/state.py",
        "if self._begun_at is not None:\n            self.check_holder()\n        elif holders",
        "if self._begun_at is None and holders",
        "tests/training/test_anew.py",
    ),
    Mutant(
        "optim/optimizer.py",
        "            rows.clear()\n        if self._ordinary",
        "            rows.give_up()\n        if self._ordinary",
        "tests/training/test_writes.py",
    ),
    Mutant(
        "optim/ordinary.py",
        "        if self._rows:\n            raise",
        "        if False:\n            raise",
        "tests/training/test_whole_model.py::test_the_state_of_rows_is_not_dropped_by_halves",
    ),
    Mutant(
        "nn/rows.py",
        "return self._exposed or (self.data_ptr(), self._version) != self._noted",
        "return False",
        "tests/training/test_parameter.py",
    ),
    Mutant(
        "nn/rows.py",
        "parts = [part for part, why in zip(parts, whys, strict=True) if not why]",
        "parts = list(parts)",
        "tests/training/test_pending.py",
    ),
    Mutant(
        "nn/autograd.py",
        "return bool(torch._C._will_engine_execute_node(leaf))",
        "return True",
        "tests/training/test_parameter.py",
    ),
    Mutant(
        "nn/autograd.py",
        "        self.zeros = None\n        self.batch.lease.trim(wait=True)",
        "        self.batch.lease.trim(wait=True)",
        "tests/gpu/test_small_steps.py",
    ),
    Mutant(
        "nn/zeros.py",
        "not rows <= kept.shape[0] <= 2 * rows",
        "False",
        "tests/gpu/test_small_steps.py",
    ),
    Mutant(
        "_tiers/gpu/kernels/rows.cuh",
        "if (slot >= 0 && --rows.pins[slot] == 0) rows.stamp[slot] &= ~HELD;",
        "",
        "tests/gpu/test_small_steps.py",
    ),
    Mutant(
        "nn/sum.cu",
        "part.at[e] += value(more.at[e])",
        "part.at[e] = value(more.at[e])",
        "tests/training/test_in_place.py",
    ),
    Mutant(
        "nn/pool.cu",
        "for (u32 k = 0; k < TOGETHER; ++k) field[k] = next[k];",
        ";",
        "tests/training/test_pooling.py",
    ),
    Mutant(
        "nn/pool.cu",
        "divided ? 1.0f / counted : 1;",
        "1;",
        "tests/training/test_pooling.py",
    ),
    Mutant(
        "nn/pool.cu",
        "return found < 0 ? 0 : found < rows.n ? found : rows.n;",
        "return found;",
        "tests/training/test_pooling.py",
    ),
    Mutant(
        "nn/pooled.py",
        "order = ids.argsort(stable=True)",
        "order = ids.argsort(stable=True, descending=True).flip(0)",
        "tests/training/test_pooling.py",
    ),
    Mutant(
        "nn/bags.py",
        "if self._whole is not None and self._seen() == self._versions:",
        "if self._whole is not None:",
        "tests/training/test_pooling.py",
    ),
    Mutant(
        "optim/in_place.py",
        "(1 - beta2**step) ** 0.5",
        "(1 - beta2**step)",
        "tests/training/test_on_records.py",
    ),
    Mutant(
        "_table/table.py",
        "        for each in self._each:\n            each.update(numbers)",
        "        for each in self._each[:1]:\n            each.update(numbers)",
        "tests/training/test_collections.py",
    ),
    Mutant(
        "optim/trained.py",
        "                key = group, *self._scalars.of_table(number, names)",
        "                key = (group,)",
        "tests/training/test_collections.py",
    ),
    # What a program holds while something happens to its table.
    Mutant(
        "_tiers/base.py",
        "return Epoch(self.names + self._renames, self.renamed)",
        "return Epoch(self.names, self.renamed)",
        "tests/table/test_events.py",
    ),
    Mutant(
        "_table/joint.py",
        "        if before is now:",
        "        if True:",
        "tests/training/test_collections.py",
    ),
    # Which rank owns which ids of a batch, and where their rows lie there.
    Mutant(
        "distributed/owners.cu",
        "if (is_new || before == key) break;",
        "break;",
        "tests/distributed/test_owners.py",
    ),
    Mutant(
        "distributed/owners.cu",
        "while (known < owner) first += asked.counts[known++];",
        "while (known < owner) first += asked.counts[owner], known++;",
        "tests/distributed/test_owners.py",
    ),
    Mutant(
        "distributed/owners.cu",
        "place >= wrapped ? start - wrapped : 0",
        "place >= wrapped ? start : 0",
        "tests/distributed/test_owners.py",
    ),
    Mutant(
        "distributed/owners.cu",
        "if ((u64)id >= (u64)places.rows[feature]) {",
        "if (id >= places.rows[feature]) {",
        "tests/distributed/test_owners.py",
    ),
    Mutant(
        "distributed/owners.py",
        "block[: counted + slots].zero_()",
        "block[:counted].zero_()",
        "tests/distributed/test_owners.py",
    ),
    Mutant(
        "distributed/owners.py",
        "is_bad = (ids < 0) | (ids >= rows)",
        "is_bad = ids >= rows",
        "tests/distributed/test_owners.py",
    ),
    # Readers that open a store while its partitions, or names of versions, are published.
    Mutant(
        "_store/tables.py",
        "if readers is None or not readers.have_moved():",
        "if True:",
        "tests/distributed/test_store.py",
    ),
    Mutant(
        "_store/versions.py",
        "if len(manifests) == len(numbers):",
        "if True:",
        "tests/distributed/test_store.py",
    ),
    # Rows that stay where a dense optimizer would change them: when that is said.
    Mutant(
        "optim/lazy.py",
        "        return not bool(torch.isin(first, gradient.batch.distinct).all())",
        "        return True",
        "tests/training/test_lazy.py",
    ),
    Mutant(
        "optim/lazy.py",
        "            self.wait, after = self._waits\n"
        "            self._waits = after, self.wait + after",
        "            self.wait, self._waits = 1000, (1000, 1000)",
        "tests/training/test_lazy.py",
    ),
    Mutant(
        "optim/lazy.py",
        "                self._fields.clear()\n",
        "                pass\n",
        "tests/training/test_lazy.py",
    ),
    Mutant(
        "optim/probe.py",
        '    for steps, when in ((0, "always"), (2, "later")):',
        '    for steps, when in ((2, "later"), (0, "always")):',
        "tests/training/test_lazy.py",
    ),
    Mutant(
        "optim/probe.py",
        "        trial.optimizer.param_groups[0].update(own)\n        for _ in range(steps):",
        "        for _ in range(steps):",
        "tests/training/test_lazy.py",
    ),
    # Norms of what is made of a gradient that ranks share.
    Mutant(
        "nn/norms.py",
        "                return self._like(result, self.squares, self.power)",
        "                return result",
        "tests/distributed/test_norms.py",
    ),
    Mutant(
        "nn/norms.py",
        "        by = 1.0 if name in _SAME else _factor(name, args)",
        "        by = 1.0",
        "tests/distributed/test_norms.py",
    ),
    Mutant(
        "nn/norms.py",
        "        return 1 / by if _is_shard(args[0]) else None",
        "        return 1 / by",
        "tests/distributed/test_norms.py",
    ),
    Mutant(
        "nn/norms.py",
        "        norm.is_norms = True",
        "        norm.is_norms = False",
        "tests/distributed/test_norms.py",
    ),
    Mutant(
        "nn/norms.py",
        "            return self._like(result, self._times(1.0), 2)",
        "            return result",
        "tests/distributed/test_norms.py",
    ),
    Mutant(
        "nn/norms.py",
        "        if factor is None or self.power == 2 or self.squares.factor is None:",
        "        if factor is None or self.squares.factor is None:",
        "tests/distributed/test_norms.py",
    ),
    Mutant(
        "distributed/wire.py",
        "self.factor is None else self.factor * by",
        "self.factor is None else by",
        "tests/distributed/test_norms.py",
    ),
    # Versions to which states point: which are kept, how many, and until when.
    Mutant(
        "_store/pointed.py",
        "reversed(living[uuid].valuerefs())",
        "living[uuid].valuerefs()",
        "tests/training/test_keeping_states.py",
    ),
    Mutant(
        "_store/pointed.py",
        "        _saved[self.uuid] = self",
        "        _saved[self.uuid + '?'] = None",
        "tests/training/test_keeping_states.py",
    ),
    Mutant(
        "_store/state.py",
        "self.manifest.confirmed, versions[:MOST])",
        "self.manifest.confirmed, versions)",
        "tests/training/test_keeping_states.py",
    ),
    Mutant(
        "_store/state.py",
        "dropped.intersection(number for number, _ in versions[MOST:])",
        "dropped",
        "tests/training/test_keeping_states.py",
    ),
    Mutant(
        "nn/pointers.py",
        "                return _claiming(result, source.claim)",
        "                return result",
        "tests/training/test_keeping_states.py",
    ),
    Mutant(
        "nn/pointers.py",
        "        self.claim.was_saved()\n        with",
        "        with",
        "tests/training/test_keeping_states.py",
    ),
    # Versions of partitions: the root alone confirms them, and going back writes nothing.
    Mutant(
        "_store/part.py",
        '        """Drop nothing: `keep_only` does."""\n',
        "        super()._keep_newest(keep)\n",
        "tests/distributed/test_left_behind.py",
    ),
    Mutant(
        "_store/part.py",
        '**(changes | {"confirmed": self.manifest.confirmed})',
        "**changes",
        "tests/distributed/test_confirming.py",
    ),
    Mutant(
        "_store/part.py",
        "wanted = {open_one, *(number_in_part(marks, *each) for each in named)} & marks.keys()",
        "wanted = {open_one}",
        "tests/distributed/test_left_behind.py",
    ),
    Mutant(
        "_store/part.py",
        "if open_one == max(wanted) < self.ledger.newest or names",
        "if names",
        "tests/distributed/test_confirming.py",
    ),
    Mutant(
        "_store/versions.py",
        "return max((number for number, each in marks.items() if each == mark), default=version)",
        "return version",
        "tests/distributed/test_left_behind.py",
    ),
    Mutant(
        "distributed/apart.py",
        "self._take_back(self.discard if drop_rows else self._show_root)",
        "pass",
        "tests/distributed/test_confirming.py",
    ),
    Mutant(
        "distributed/apart.py",
        "            self.parts.show(self.manifest)\n",
        "            self.parts.restore(self.manifest)\n",
        "tests/distributed/test_confirming.py",
    ),
    Mutant(
        "distributed/apart.py",
        "                generation.note_moved_keys()",
        "                pass",
        "tests/distributed/test_confirming.py",
    ),
    Mutant(
        "distributed/apart.py",
        "            if not ranks.several:\n                self.clean_up(",
        "            if ranks.leads:\n                self.clean_up(",
        "tests/distributed/test_confirming.py",
    ),
    Mutant(
        "distributed/apart.py",
        "return max(common)",
        "return max(seen[0].marks)",
        "tests/distributed/test_confirming.py",
    ),
    Mutant(
        "distributed/apart.py",
        "if any(told):",
        "if all(told):",
        "tests/distributed/test_confirming.py",
    ),
    # One function of a store for one process and for ranks: what each state does in it.
    Mutant(
        "_store/ledger.py",
        "        return [*self._partitions_of.values()]",
        "        return [*self._partitions_of.values()][-1:]",
        "tests/distributed/test_store.py",
    ),
    Mutant(
        "_store/ledger.py",
        "            self._partitions_of.pop(seq, None)\n",
        "",
        "tests/distributed/test_store.py",
    ),
    Mutant(
        "_store/part.py",
        "            self.check_whole(self.history.part(version, mark))",
        "            self.history.part(version, mark)",
        "tests/distributed/test_together.py",
    ),
    Mutant(
        "distributed/apart.py",
        "        own = self._is_own(ids)\n",
        "        own = np.ones(len(ids), np.bool_)\n",
        "tests/distributed/test_together.py",
    ),
    Mutant(
        "distributed/apart.py",
        "        self.roll_back()\n        with self.or_back(",
        "        with self.or_back(",
        "tests/distributed/test_together.py",
    ),
    Mutant(
        "distributed/apart.py",
        "        return self.or_back(what, drop_rows=True)",
        "        return self.or_back(what)",
        "tests/distributed/test_together.py",
    ),
    Mutant(
        "distributed/apart.py",
        "        with self.closed_when_broken(), super().alone(what):",
        "        with super().alone(what):",
        "tests/distributed/test_together.py",
    ),
    Mutant(
        "distributed/apart.py",
        '            self.ranks.fault = ""\n',
        "",
        "tests/distributed/test_together.py",
    ),
    Mutant(
        "distributed/ranks.py",
        "        outcome = (None if own is None else _described(own), value)",
        "        outcome = (None, value)",
        "tests/distributed/test_confirming.py",
    ),
    Mutant(
        "_store/commit.py",
        "    if folder.done:\n",
        "    if False:\n",
        "tests/distributed/test_together.py",
    ),
    Mutant(
        "distributed/lacking.py",
        "        for name in given:\n            raise",
        "        for name in ():\n            raise",
        "tests/distributed/test_lacking.py",
    ),
    # Batches that are announced are known in any shape, and a rank may be asked for no row.
    Mutant(
        "distributed/known.py",
        "layout = None if ids.is_contiguous() else (ids.shape, ids.stride())",
        "layout = ids.shape, ids.stride()",
        "tests/distributed/test_announcing.py",
    ),
    # Tables that are loaded into all partitions, and keys that expire on all ranks together.
    Mutant(
        "distributed/schema.py",
        "        state.published(prepared, drop, state.place)",
        "        state.published(prepared, drop)\n        state.place()",
        "tests/distributed/test_changing.py",
    ),
    Mutant(
        "_store/alter.py",
        "if keys is None and spec.keys is None and state.whole(name).rows == spec.rows:",
        "if keys is None and spec.keys is not None:",
        "tests/distributed/test_loading.py",
    ),
    Mutant(
        "distributed/apart.py",
        "yield records[self._is_own(np.arange(start, start + len(records)))]",
        "yield records",
        "tests/distributed/test_changing.py",
    ),
    Mutant(
        "distributed/schema.py",
        "    return table.name in state.tables and table.keys is state.keys_of(table.name)",
        "    return table.name in state.tables",
        "tests/distributed/test_loading.py",
    ),
    Mutant(
        "_store/commit.py",
        "            if draft.written or draft.dropped:\n                state.reopen",
        "            if draft.written:\n                state.reopen",
        "tests/store/test_schema.py::test_a_table_that_shares_tiers_stays_when_another_is_dropped",
    ),
    Mutant(
        "_disk/generation.py",
        "        unless_made.callback(_remove_each, tables, name)\n",
        "",
        "tests/distributed/test_confirming.py",
    ),
    Mutant(
        "_disk/generation.py",
        "!= of.ids and not spec.sparse:",
        "!= of.ids and spec.sparse:",
        "tests/distributed/test_loading.py",
    ),
    Mutant(
        "_table/expiry.py",
        "order = np.lexsort((owners, -uses[:, 1], -uses[:, 0]))",
        "order = np.lexsort((owners, -uses[:, 0]))",
        "tests/distributed/test_keys.py",
    ),
    Mutant(
        "_tiers/gpu/kernels/batch.cu",
        "        if (b.data) copy(source, target, span, b.bytes, b.width);",
        "",
        "tests/gpu/test_tier.py",
    ),
    Mutant(
        "_tiers/gpu/kernels/features.cu",
        "    const bool good = (u64)id < (u64)rows[feature];",
        "    const bool good = true;",
        "tests/training/test_collections.py",
    ),
    Mutant(
        "optim/step.cu",
        "if (MAXIMIZE) g = -g;",
        "",
        "tests/training/test_in_place.py",
    ),
    Mutant(
        "optim/step.cu",
        "if (pack == 0) changed(rows, row);",
        "",
        "tests/training/test_in_place.py",
    ),
    Mutant(
        "optim/trained.py",
        "if begun or not kept.late:",
        "if True:",
        "tests/training/test_equivalence.py",
    ),
    Mutant(
        "optim/step.cu",
        "set_at_random(x, to, key, column);",
        "set(x, to);",
        "tests/training/test_narrow_state.py",
    ),
    Mutant(
        "_tiers/gpu/tier.py",
        "if self.replays.ready:\n            self.device.drain()",
        "if False:\n            self.device.drain()",
        "tests/gpu/test_replay.py",
    ),
    Mutant(
        "optim/rounding.py",
        "torch.where(values.isnan(), values, up.view(torch.float32))",
        "up.view(torch.float32)",
        "tests/training/test_rounding.py",
    ),
    # Columns that a GPU holds whole.
    Mutant(
        "_tiers/split.py",
        "here = piece.at + begin - piece.lo",
        "here = begin - piece.lo",
        "tests/gpu/test_split.py",
    ),
    Mutant(
        "_table/split.py",
        "choice.start, choice.stray = self.within.start, _STRAY",
        "choice.start = self.within.start",
        "tests/gpu/test_split.py",
    ),
    Mutant(
        "_table/split.cu",
        "choice.ids ? choice.ids[position] : (i64)position",
        "(i64)position",
        "tests/gpu/test_split.py",
    ),
    Mutant(
        "_table/scaled.cu",
        "known = (u64)id < (u64)apart.bound;",
        "known = true;",
        "tests/gpu/test_split.py",
    ),
    Mutant(
        "_disk/foreign.py",
        "each.start - lo + at, each.stop - lo + at",
        "each.start - lo, each.stop - lo",
        "tests/gpu/test_split.py",
    ),
    # What may not be read is not damaged, and what is interrupted leaves nothing behind.
    Mutant(
        "_store/versions.py",
        "        except AccessError:\n            raise\n",
        "        except AccessError:\n            continue\n",
        "tests/cli/test_access.py",
    ),
    Mutant(
        "_io/system.py",
        "if isinstance(error, PermissionError):",
        "if isinstance(error, ProcessLookupError):",
        "tests/cli/test_access.py",
    ),
    Mutant(
        "_io/atomic.py",
        "            except KeyboardInterrupt:\n                _remove(str(temporary))\n",
        "            except KeyboardInterrupt:\n",
        "tests/io/test_io.py::test_what_is_removed_is_removed_even_if_it_is_interrupted_again",
    ),
    Mutant(
        "_formats/_cells.py",
        """if self.sep == "\\t" and '"' in text and _opens_and_closes(cells):""",
        """if self.sep == "|" and '"' in text and _opens_and_closes(cells):""",
        "tests/formats/test_reports.py",
    ),
    Mutant(
        "_formats/_torch_pickle.py",
        "return self._tensor(*arguments[:4], *arguments[6:7])",
        "return self._tensor(*arguments[:4])",
        "tests/formats/test_pt.py",
    ),
    Mutant(
        "_formats/_torch_pickle.py",
        "if isinstance(kind, _Global) and kind.name in _DENSE:",
        "if isinstance(kind, _Global) or kind:",
        "tests/formats/test_pt.py",
    ),
    Mutant(
        "importing.py",
        "if len(some) == rows:",
        "if len(some):",
        "tests/test_importing.py::test_a_preview_is_what_an_import_reads",
    ),
    Mutant(
        "_io/atomic.py",
        "known and place.lock_within(_offset(path.name), 1) is None",
        "known",
        "tests/io/test_io.py::test_what_a_killed_process_left_is_removed",
    ),
    Mutant(
        "importing.py",
        "return sorted(listed, key=by_numbers) if listed in (sorted(listed), letters) else listed",
        "return sorted(listed, key=by_numbers)",
        "tests/cli/test_load_export.py::test_files_as_a_shell_lists_them_are_read_by_their_numbers",
    ),
    Mutant(
        "_store/repair.py",
        "if not os.path.lexists(where):\n            self",
        "if not os.path.lexists(where.parent):\n            self",
        "tests/durability/test_damage.py::test_a_repair_that_is_interrupted_leaves_no_list_without_its_store",
    ),
    Mutant(
        "_formats/zarr.py",
        "        with interrupts_deferred():\n            array[start",
        "        if True:\n            array[start",
        "tests/formats/test_zarr.py::test_an_interrupt_waits_for_the_threads_of_zarr",
    ),
    # What the partitions of a store wrote.
    Mutant(
        "_store/partitions.py",
        "last = own - 1 if before is None else before.partitions[number][0]",
        "last = own - 1",
        "tests/cli/test_partitioned_commands.py::test_a_commit_counts_what_it_wrote_and_no_partition_twice",
    ),
    # Cosines.
    Mutant(
        "_table/topk.py",
        "_roots(squares, rows, np)",
        "_roots(scores[0], rows, np)",
        "tests/table/test_table.py::test_the_nearest_rows_on_any_number_of_threads",
    ),
    # Formats.
    Mutant(
        "_formats/_arrow.py",
        "block.dtype == np.float32 and _may_round_twice(block)",
        "False",
        "tests/formats/test_both_roads.py::test_digits_that_would_be_rounded_twice_are_written_in_full",
    ),
    Mutant(
        "_formats/delimited.py",
        """(renamed or b'"' in b"".join(words))""",
        "False",
        "tests/formats/test_both_roads.py::test_words_stand_before_their_numbers_on_all_roads",
    ),
    Mutant(
        "_formats/_cells.py",
        "if (stop >= ends).any() or (sep == BLANKS and not lengths.all()):",
        "if sep == BLANKS and not lengths.all():",
        "tests/formats/test_both_roads.py",
    ),
    Mutant(
        "_formats/joined.py",
        "if keys is None and each.numbering is None and each.rows:",
        "if False:",
        "tests/formats/test_ranges.py::test_files_of_other_rows_are_refused",
    ),
    Mutant(
        "_disk/foreign.py",
        "rows[at] - (self._ends[number - 1] if number else 0)",
        "rows[at]",
        "tests/formats/test_ranges.py::test_ranges_are_attached_as_one",
    ),
    Mutant(
        "_disk/foreign.py",
        "        for part, _, own in self._divided(rows):\n            part.check(own)\n",
        "        self._parts[0].check(rows)\n",
        "tests/formats/test_ranges.py::test_ranges_are_attached_as_one",
    ),
    Mutant(
        "_formats/reading.py",
        "if each.is_matrix and n not in scales}",
        "if each.is_matrix}",
        "tests/formats/test_scales_out.py::test_the_pair_is_attached",
    ),
    Mutant(
        "_upsert.py",
        "rest[name] = next(blocks[name], rest[name])",
        "rest[name] = next(blocks[name], rest[name]) if count else rest[name]",
        "tests/test_upsert.py::test_rows_come_in_whatever_their_blocks_are",
    ),
    Mutant(
        "attaching.py",
        'warn(f"{each.path}: {note}", FilledRowsWarning)',
        "pass",
        "tests/test_attaching.py::test_chunks_that_are_not_stored_are_said",
    ),
    Mutant(
        "_upsert.py",
        "count, rest[name] = count - len(parts[-1]), rest[name][len(parts[-1]) :]",
        "count, rest[name] = count - len(parts[-1]), rest[name][:0]",
        "tests/test_upsert.py::test_rows_come_in_whatever_their_blocks_are",
    ),
    Mutant(
        "_formats/reading.py",
        "read = (self._key, *self._names, *wanted.beside)",
        "read = (self._key, *self._names)",
        "tests/test_importing.py::test_several_fields_of_one_file",
    ),
    Mutant(
        "_formats/reading.py",
        '(_PACKED if column.kind == "list" else _EIGHT_BITS).fullmatch',
        "_EIGHT_BITS.fullmatch",
        "tests/formats/test_unread.py::test_packed_elements_beside_their_scales_are_refused",
    ),
    Mutant(
        "_formats/base.py",
        "(values > 2**53) | (values < -(2**53))",
        "values < -(2**53)",
        "tests/formats/test_ways_on.py::test_whole_numbers_of_any_width_are_read_exactly_or_refused",
    ),
    Mutant(
        "_formats/__init__.py",
        "(not format_.holds_scales or len(fields) > 1)",
        "len(fields) > 1",
        "tests/formats/test_scales_out.py::test_files_of_one_array_are_refused",
    ),
    Mutant(
        "_formats/npy.py",
        "offset=header.nbytes, stored=header.dtype",
        'offset=header.nbytes, stored=header.dtype.newbyteorder("<")',
        "tests/formats/test_npy.py",
    ),
    Mutant(
        "_formats/npy.py",
        "read(start + at * shape[0], count)",
        "read(start + at, count)",
        "tests/formats/test_npy.py",
    ),
    Mutant(
        "_formats/safetensors.py",
        "if tensor.start != end:",
        "if tensor.start < end:",
        "tests/formats/test_safetensors.py",
    ),
    Mutant(
        "_formats/words.py",
        'if (data[at:] + stream.read(2))[:2] not in (b"", b"\\n"):',
        "if False:",
        "tests/formats/test_contract.py",
    ),
    Mutant(
        "_formats/words.py",
        "if len(data) - at <= MAX_WORD_BYTES + nbytes:",
        "if len(data) - at <= nbytes:",
        "tests/formats/test_word2vec.py",
    ),
    Mutant(
        "_formats/_arrow.py",
        "if np.isfinite(numbers).all():",
        "if True:",
        "tests/formats/test_text.py",
    ),
    Mutant(
        "_formats/_layout.py",
        "if fractions and counting and len(labels) > 2:",
        "if fractions and counting and len(labels) > 1:",
        "tests/formats/test_text.py",
    ),
    Mutant(
        "_formats/_roles.py",
        "if len(rest) == 1 and self.names is None:",
        "if self.names is None:",
        "tests/formats/test_text.py",
    ),
    Mutant(
        "_formats/base.py",
        "yield block[self._chosen[start : start + len(block)]]",
        "yield block",
        "tests/test_notes.py",
    ),
    # Threads beside a rollback, a refresh and each other: no key gets the row of another.
    Mutant(
        "_table/address.py",
        "return self.naming is not None and bool(self.naming.lost())",
        "return False",
        "tests/keys/test_keyed.py",
    ),
    Mutant(
        "_table/keyed.py",
        "            if not any(map(Naming.replaced, names)):\n                return found\n",
        "            return found\n",
        "tests/keys/test_keyed.py",
    ),
    Mutant(
        "_store/tables.py",
        "            space.end_epochs(REFRESHED, renamed=keyed)",
        "            pass",
        "tests/keys/test_keyed.py",
    ),
    Mutant(
        "_disk/generation.py",
        "            if self.info.keys != keys:\n                return None\n",
        "",
        "tests/keys/test_keyed.py",
    ),
    Mutant(
        "_disk/partitioned_keys.py",
        "with self._map_lock:\n                loaded = self._map\n",
        "if True:\n                loaded = self._map\n",
        "tests/distributed/test_keys.py::test_threads_of_a_reader_load_its_keys_together",
    ),
    Mutant(
        "_table/host.py",
        "_NOTHING if space.host is None else space.host.still",
        "_NOTHING",
        "tests/table/test_table.py",
    ),
    Mutant(
        "_door.py",
        "if frame is not None and frame.f_code in _undisturbed:",
        "if False:",
        "tests/test_door.py",
    ),
    Mutant(
        "_parts.py",
        "[unknown] * len(self.rest)",
        "[None] * len(self.rest)",
        "tests/test_parts.py",
    ),
    # What a user is told: of rows in the way of a change, and of a call that removed nothing.
    Mutant(
        "_table/expiry.py",
        "self._begun = True\n        return next(self._blocks)",
        "return next(self._blocks)",
        "tests/keys/test_keyed.py::test_expiry_without_a_loop_removes_nothing_and_warns",
    ),
    Mutant(
        "_store/state.py",
        "if space.uncommitted(extent).size\n",
        "if not space.uncommitted(extent).size\n",
        "tests/store/test_schema.py::test_a_change_says_what_is_in_its_way_and_what_it_is",
    ),
    Mutant(
        "_io/allocated.py",
        "yield from _statuses(entry.path)",
        "yield entry.stat(follow_symlinks=False)",
        "tests/cli/test_inspect.py::test_what_a_store_takes_beside_its_data_and_how_to_get_it_back",
    ),
    # The compiled core, which is built anew: no memory but that which is given, no record missed.
    Mutant(
        "_core/core.c",
        "outside |= at | ((uint64_t)count - 1 - at);",
        "outside |= at | ((uint64_t)count - at);",
        "tests/core/test_core.py",
    ),
    Mutant(
        "_core/core.c",
        "!(w->sparse && !expected && is_zero(record, r->width));",
        "!(w->sparse && !expected);",
        "tests/core/test_core.py tests/test_checksum.py",
    ),
    Mutant(
        "_core/core.c",
        "if (good < end || !memcmp(found, w->sums + 4 * begin, 4 * (size_t)n)) continue;",
        "if (good < end || !memcmp(found, w->sums + 4 * begin, (size_t)n)) continue;",
        "tests/core/test_core.py tests/test_checksum.py",
    ),
    # Its threads: no item left out or refused unseen, none that works on after its call has ended.
    Mutant(
        "_core/pool.c",
        "const int64_t end = j->n - begin < j->step ? j->n : begin + j->step;",
        "const int64_t end = j->n - begin < j->step ? j->n : begin + j->step - 1;",
        "tests/core/test_core.py tests/core/test_pool.py",
    ),
    Mutant(
        "_core/pool.c",
        "while (j.inside) pthread_cond_wait(&all.over, &all.lock);",
        "",
        "tests/core/test_core.py tests/core/test_pool.py",
    ),
    Mutant(
        "_core/pool.c",
        "while (known != mine) {",
        "while (!known) {",
        "tests/core/test_pool.py",
    ),
    Mutant(
        "_core/pool.c",
        "    sigfillset(&every);",
        "    sigemptyset(&every);",
        "tests/core/test_pool.py",
    ),
    Mutant(
        "_core/pool.c",
        "while (done < end && done < known &&",
        "while (done < end && done > known &&",
        "tests/core/test_core.py tests/core/test_pool.py",
    ),
    # The command line: exit codes that scripts act on, and output that is whole and safe.
    Mutant(
        "cli/tierstore_cli/failure.py",
        "(errors.CorruptStoreError, 4),",
        "(errors.CorruptStoreError, 1),",
        "tests/cli/test_main.py::test_exit_code_of_each_error",
    ),
    Mutant(
        "cli/tierstore_cli/failure.py",
        "(errors.LockedError, 5),",
        "(errors.LockedError, 1),",
        "tests/cli/test_main.py::test_exit_code_of_each_error",
    ),
    Mutant(
        "cli/tierstore_cli/failure.py",
        "if isinstance(error, OSError) and error.errno == errno.EPIPE:",
        "if False:",
        "tests/cli/test_main.py::test_a_closed_pipe_is_quiet",
    ),
    Mutant(
        "cli/tierstore_cli/printing.py",
        "{code - 0xDC00:02x}",
        "{code:02x}",
        "tests/cli/test_output.py",
    ),
    Mutant(
        "cli/tierstore_cli/printing.py",
        "rest = len(ids) - LISTED",
        "rest = len(ids)",
        "tests/cli/test_save_verify_fold.py::test_verify_does_not_list_endless_ids",
    ),
    Mutant(
        "cli/tierstore_cli/commands/mend.py",
        "return bad if same is None else store.changed(same)",
        "return {}",
        "tests/cli/test_changes.py::test_rows_that_changed_since_the_copy_are_left_unless_they_are_wanted",
    ),
    Mutant(
        "cli/tierstore_cli/commands/keep.py",
        "released = days[:-last] if",
        "released = days[-last:] if",
        "tests/cli/test_changes.py::test_nights_are_kept_by_date",
    ),
    Mutant(
        "cli/tierstore_cli/main.py",
        "            if name not in known:",
        "            if False:",
        "tests/cli/test_names.py::test_unknown_variables_are_named_with_the_nearest",
    ),
    Mutant(
        "cli/tierstore_cli/failure.py",
        "        if words not in message:",
        "        if False:",
        "tests/cli/test_get.py::test_messages_name_what_is_wrong_and_the_way_on",
    ),
    Mutant(
        "cli/tierstore_cli/commands/copy_table.py",
        "layout.view(records, name)[:] = block",
        "layout.view(records, name)[:] = 0",
        "tests/cli/test_changes.py::test_a_table_is_copied_between_stores",
    ),
    Mutant(
        "cli/tierstore_cli/command.py",
        "                context.params[name] = value",
        "                pass",
        "tests/cli/test_names.py::test_an_old_name_does_the_same_and_says_the_new_one",
    ),
    Mutant(
        "cli/tierstore_cli/shown_rows.py",
        "values = vectors[0] if len(fields) == 1 else",
        "values = vectors[-1] if len(fields) == 1 or True else",
        "tests/cli/test_changes.py::test_get_several_fields",
    ),
    Mutant(
        "cli/tierstore_cli/output.py",
        "        return None, 1\n",
        "        return None, 0\n",
        "tests/cli/test_output.py",
    ),
    Mutant(
        "cli/tierstore_cli/shown_rows.py",
        "ids[start : start + _SHOWN_TOGETHER])\n        if len(ids)",
        "ids[:_SHOWN_TOGETHER])\n        if len(ids)",
        "tests/cli/test_inspect.py",
    ),
    Mutant(
        "cli/tierstore_cli/commands/verify.py",
        "    if not report.ok:\n",
        "    if report.bad_rows:\n",
        "tests/cli/test_save_verify_fold.py::test_verify_of_a_store_with_a_damaged_manifest",
    ),
    Mutant(
        "cli/tierstore_cli/background.py",
        "            stopped.set()\n",
        "",
        "tests/cli/test_background.py",
    ),
    Mutant(
        "cli/tierstore_cli/picking.py",
        "[str(key) for key in keys.tolist()]",
        "keys",
        "tests/cli/test_put_near.py::test_an_export_of_ids_and_keys_in_their_order",
    ),
    # Keys without a row, and which reads are counted.
    Mutant(
        "_table/keyed.py",
        '            if chosen == "raise" and found.unknown.size:\n',
        "            if False:\n",
        "tests/keys/test_missing.py",
    ),
    Mutant(
        "_tiers/sampling.py",
        "        return taken\n",
        "        return 1\n",
        "tests/tiers/test_sampling.py",
    ),
    # Imports, exports, files in place and plans: rows keep their keys, a tier its size.
    Mutant(
        "importing.py",
        "keys, incoming = _chosen(keys, kept), incoming.only(kept)",
        "incoming = incoming.only(kept)",
        "tests/test_notes.py::test_keys_that_come_twice",
    ),
    Mutant(
        "importing.py",
        "upsert = upsert or isinstance(existing, KeyedTable)",
        "upsert = upsert and isinstance(existing, KeyedTable)",
        "tests/test_upsert.py",
    ),
    Mutant(
        "exporting.py",
        "keys = ids if keys is None else",
        "keys = None if keys is None else",
        "tests/test_exporting.py::test_rows_of_a_list_have_their_ids_for_keys",
    ),
    Mutant(
        "exporting.py",
        "                settled.check_settled()\n",
        "                pass\n",
        "tests/keys/test_keyed.py::test_no_listed_row_is_paired_with_the_key_of_another",
    ),
    Mutant(
        "attaching.py",
        "                opened.callback(bases[name].close)\n",
        "",
        "tests/test_attaching.py::test_files_are_let_go_of",
    ),
    Mutant(
        "sizing/simulation.py",
        "kept[held] = False\n        kept[candidates] = True",
        "kept[candidates] = True",
        "tests/sizing/test_simulate.py",
    ),
    Mutant(
        "sizing/simulation.py",
        'rows = rows[np.argsort(-counts, kind="stable")]',
        'rows = rows[np.argsort(counts, kind="stable")]',
        "tests/sizing/test_simulate.py",
    ),
    Mutant(
        "distributed/owners.py",
        "is_narrow = int(self._ends[-1]) <= torch.iinfo(_NARROW).max",
        "is_narrow = True",
        "tests/distributed/test_owners.py",
    ),
    # Foreign hands: `closed` means free, a creator has the lock, other names keep their rows.
    Mutant(
        "_store/store.py",
        "return self._door.closed and not any(lock.locked for lock in self._state.locks)",
        "return self._door.closed",
        "tests/durability/test_closing.py",
    ),
    Mutant(
        "_io/file.py",
        "(self.fd >= 0 or self._locked_by != os.getpid())",
        "self.fd >= 0",
        "tests/durability/test_closing.py tests/io/test_io.py",
    ),
    Mutant(
        "_store/locking.py",
        "return self._lock.locked or self._store.locked",
        "return self._lock.locked",
        "tests/durability/test_closing.py",
    ),
    Mutant(
        "_table/prefetch.py",
        "with self._advising:  #",
        "if self._advising.acquire():  #",
        "tests/durability/test_closing.py",
    ),
    Mutant(
        "_store/opening.py",
        "return Store(options, lock)",
        "lock.close()\n            return Store(options)",
        "tests/store/test_creating_at_once.py",
    ),
    Mutant(
        "_store/opening.py",
        " or History(directory, uuid).newest().seq > 1",
        "",
        "tests/store/test_creating_at_once.py",
    ),
    Mutant(
        "_garbage.py",
        "found.__traceback__ = None",
        "pass",
        "tests/durability/test_released_behind.py",
    ),
    Mutant(
        "_disk/records.py",
        ".st_nlink > 1]",
        ".st_nlink > 2]",
        "tests/durability/test_hard_links.py",
    ),
    Mutant(
        "_disk/records.py",
        "            copy.sync()\n        place.rename",
        "        place.rename",
        "tests/durability/test_mutants.py",
    ),
    Mutant(
        "_disk/records.py",
        "                place.sync()\n                self.records = self._mapped()",
        "                self.records = self._mapped()",
        "tests/durability/test_mutants.py",
    ),
    # The command line: exit codes, notes, units, dry runs, and what is refused.
    Mutant(
        "cli/tierstore_cli/failure.py",
        "(errors.NotAStoreError, 3),",
        "(errors.NotAStoreError, 1),",
        "tests/cli/test_main.py::test_exit_code_of_each_error",
    ),
    Mutant(
        "cli/tierstore_cli/failure.py",
        "(errors.AmbiguousFileError, 2),",
        "(errors.AmbiguousFileError, 3),",
        "tests/cli/test_load_export.py::test_load_asks_what_a_text_is",
    ),
    Mutant(
        "cli/tierstore_cli/failure.py",
        "(errors.CommitFailedError, 6),",
        "(errors.CommitFailedError, 1),",
        "tests/cli/test_main.py::test_exit_code_of_each_error",
    ),
    Mutant(
        "cli/tierstore_cli/failure.py",
        "(OSError, 6),",
        "(OSError, 1),",
        "tests/cli/test_main.py::test_exit_code_of_each_error",
    ),
    Mutant(
        "cli/tierstore_cli/failure.py",
        "super().__init__(message, 10)",
        "super().__init__(message, 0)",
        "tests/cli/test_diff_patch_log.py::test_a_patch_brings_a_copy_up_to_date",
    ),
    Mutant(
        "cli/tierstore_cli/command.py",
        "if each.version != before]",
        "if each.version == before]",
        "tests/cli/test_main.py::test_a_command_interrupted_after_its_commit_says_that_this_is_done",
    ),
    Mutant(
        "cli/tierstore_cli/command.py",
        "kind = type(error.__cause__ or error).__name__",
        "kind = type(error).__name__",
        "tests/cli/test_main.py::test_a_failure_is_one_object_with_json",
    ),
    Mutant(
        "cli/tierstore_cli/command.py",
        'out.note(f"Warning: {in_a_shell(str(message))}")',
        "pass",
        "tests/cli/test_load_export.py::test_export_counts_what_overflows",
    ),
    Mutant(
        "cli/tierstore_cli/stores.py",
        "first, end = (start + (stop - start) * each // count for each in (number, number + 1))",
        "first, end = (start + (stop - start) // count * each for each in (number, number + 1))",
        "tests/cli/test_partitions.py::test_parts_of_an_export_make_one_target",
    ),
    Mutant(
        "cli/tierstore_cli/stores.py",
        "if not (start < stop <= table.rows or start == stop == table.rows == 0):",
        "if not (start < stop or start == stop == table.rows == 0):",
        "tests/cli/test_inspect.py::test_rows_out_of_range",
    ),
    Mutant(
        "cli/tierstore_cli/stores.py",
        "if left <= 0:\n                raise",
        "if left <= 0 and not seconds:\n                raise",
        "tests/cli/test_wait.py::test_a_command_waits_until_the_writer_has_closed",
    ),
    Mutant(
        "cli/tierstore_cli/picking.py",
        "if not table.contains(keys).all():",
        "if table.contains(keys).all():",
        "tests/cli/test_keyed.py::test_a_table_by_key",
    ),
    Mutant(
        "cli/tierstore_cli/shown_rows.py",
        "gone = table.lookup(some, missing=-1) < 0",
        "gone = table.lookup(some, missing=-1) <= 0",
        "tests/cli/test_diff_patch_log.py::test_keys_that_went_are_listed",
    ),
    Mutant(
        "cli/tierstore_cli/shown_rows.py",
        "if gone.any():",
        "if gone.all():",
        "tests/cli/test_diff_patch_log.py::test_keys_that_went_are_listed",
    ),
    Mutant(
        "cli/tierstore_cli/rowstats.py",
        "finite = values[~(is_nan | is_inf)]",
        "finite = values[~is_nan]",
        "tests/cli/test_inspect.py::test_stats",
    ),
    Mutant(
        "cli/tierstore_cli/rowstats.py",
        "zero += int((~values.any(axis=1)).sum())",
        "zero += int((~values.all(axis=1)).sum())",
        "tests/cli/test_inspect.py::test_stats",
    ),
    Mutant(
        "cli/tierstore_cli/params.py",
        "if number >= count:",
        "if number > count:",
        "tests/cli/test_params.py::test_parts_count_from_0",
    ),
    Mutant(
        "cli/tierstore_cli/params.py",
        "if stop is not None and stop <= start:",
        "if stop is not None and stop < start:",
        "tests/cli/test_params.py::test_bad_rows",
    ),
    Mutant(
        "cli/tierstore_cli/params.py",
        '/ (100 if text.endswith("%") else 1)',
        "/ 1",
        "tests/cli/test_sizing.py::test_plan_knows_the_sizes_of_a_table_of_a_store",
    ),
    Mutant(
        "cli/tierstore_cli/params.py",
        "if dim == 1:",
        "if dim == 0:",
        "tests/cli/test_params.py",
    ),
    Mutant(
        "cli/tierstore_cli/params.py",
        "lambda text: int(text) if text.isdecimal() else text",
        "lambda text: text",
        "tests/cli/test_restore_keep_release.py::test_keep_restore_and_release",
    ),
    Mutant(
        "cli/tierstore_cli/replaying.py",
        "float(text[:-1]) / 100",
        "float(text[:-1])",
        "tests/cli/test_sizing.py::test_simulate_shows_every_policy_at_every_size",
    ),
    Mutant(
        "cli/tierstore_cli/replaying.py",
        "isinstance(size, float) and size > 1",
        "isinstance(size, float) and size > 100",
        "tests/cli/test_sizing.py::test_simulate_says_what_is_wrong",
    ),
    Mutant(
        "cli/tierstore_cli/pipes.py",
        "if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):",
        "if error.errno != errno.ENOSPC:",
        "tests/cli/test_streams.py::test_a_disk_that_is_too_small_for_a_stream",
    ),
    Mutant(
        "cli/tierstore_cli/commands/init.py",
        "disk_bytes = spec.nbytes + CHECKSUM_BYTES * spec.rows",
        "disk_bytes = spec.nbytes",
        "tests/cli/test_init.py::test_a_new_store",
    ),
    Mutant(
        "cli/tierstore_cli/commands/init.py",
        'spec.backend == "memmap" and not spec.sparse',
        'spec.backend == "memmap"',
        "tests/cli/test_init.py::test_sparse_takes_no_space",
    ),
    Mutant(
        "cli/tierstore_cli/commands/init.py",
        "path.chmod(stat.S_IMODE(mode))",
        "pass",
        "tests/cli/test_init.py::test_an_empty_directory_becomes_a_store_of_the_same_mode",
    ),
    Mutant(
        "cli/tierstore_cli/commands/init.py",
        "if seed is not None and not isinstance(first, Random):",
        "if False:",
        "tests/cli/test_init.py::test_bad_values_are_usage_errors_and_make_nothing",
    ),
    Mutant(
        "cli/tierstore_cli/commands/remove.py",
        "if missing and not missing_ok:",
        "if missing > 1 and not missing_ok:",
        "tests/cli/test_remove.py::test_a_key_without_a_row_is_an_error_unless_that_is_allowed",
    ),
    Mutant(
        "cli/tierstore_cli/removing.py",
        "    if dry_run:\n        change.store.rollback()\n    elif removed:",
        "    if removed:",
        "tests/cli/test_remove.py::test_keys_are_removed_in_a_commit_of_their_own",
    ),
    Mutant(
        "cli/tierstore_cli/commands/diff.py",
        "if name == table}\n        if shown_lines",
        "}\n        if shown_lines",
        "tests/cli/test_diff_patch_log.py::test_ids_and_keys_of_rows_that_differ",
    ),
    Mutant(
        "cli/tierstore_cli/commands/diff.py",
        "old in (each.version, *each.names)",
        "old == each.version",
        "tests/cli/test_diff_patch_log.py::test_a_patch_brings_a_copy_up_to_date",
    ),
    Mutant(
        "cli/tierstore_cli/commands/log.py",
        "opened.versions()[::-1]",
        "opened.versions()",
        "tests/cli/test_diff_patch_log.py::test_versions_with_what_they_wrote",
    ),
    Mutant(
        "cli/tierstore_cli/commands/inspect.py",
        "text if real > 0.9 * size else",
        "text if real > 0.1 * size else",
        "tests/cli/test_inspect.py::test_sizes_are_apparent_and_real_and_keys_are_named",
    ),
    Mutant(
        "cli/tierstore_cli/commands/inspect.py",
        "    for error in damaged.values():\n        raise error\n",
        "",
        "tests/cli/test_save_verify_fold.py::test_inspect_shows_what_is_damaged",
    ),
    Mutant(
        "cli/tierstore_cli/commands/inspect.py",
        "if older and rest > least:",
        "if older and rest > 0:",
        "tests/cli/test_inspect.py::test_a_thousand_tables_are_readable",
    ),
    Mutant(
        "cli/tierstore_cli/commands/export.py",
        "if part is not None and shared and skip_damaged:",
        "if False:",
        "tests/cli/test_partitions.py::test_parts_that_make_no_target_are_refused",
    ),
    Mutant(
        "cli/tierstore_cli/commands/export.py",
        'out.note(f"Warning: {some_rows(chosen.name, done.skipped)} and NaN in {target}")',
        "pass",
        "tests/cli/test_save_verify_fold.py::test_save_and_export_skip_damage_when_asked",
    ),
    Mutant(
        "cli/tierstore_cli/commands/export.py",
        "all_rows=list(stores.choose_rows(chosen, span))",
        "all_rows=list(picked)",
        "tests/cli/test_partitions.py::test_parts_of_an_export_make_one_target",
    ),
    Mutant(
        "cli/tierstore_cli/commands/follow.py",
        "                before = _held(opened)\n",
        "",
        "tests/cli/test_follow.py::test_keys_that_went",
    ),
    Mutant(
        "cli/tierstore_cli/commands/near.py",
        "exclude=left_out, ",
        "",
        "tests/cli/test_put_near.py::test_near_is_exact",
    ),
    Mutant(
        "cli/tierstore_cli/commands/put.py",
        "if element.overflowed(vector, stored):",
        "if False:",
        "tests/cli/test_put_near.py::test_put_refuses_what_the_type_cannot_hold",
    ),
    Mutant(
        "cli/tierstore_cli/commands/repair.py",
        "if report.filled and not fills:",
        "if report.filled and fills:",
        "tests/cli/test_repair.py::test_filled_rows_are_exit_4_unless_a_fill_was_given",
    ),
    Mutant(
        "cli/tierstore_cli/commands/save.py",
        "                dry_run=dry_run,\n                allow",
        "                dry_run=False,\n                allow",
        "tests/cli/test_save_verify_fold.py::test_save_of_what_a_copy_lacks",
    ),
    Mutant(
        "cli/tierstore_cli/commands/doctor.py",
        "    if facts.problems:\n",
        "    if False:\n",
        "tests/cli/test_doctor.py::test_a_wrong_pair_prints_the_line_that_mends_it_and_fails",
    ),
    Mutant(
        "cli/tierstore_cli/commands/plan.py",
        "table_size = rows, spec.layout.record_bytes",
        "table_size = rows, spec.layout.record_bytes + 4",
        "tests/cli/test_sizing.py::test_plan_without_a_trace_says_what_fits",
    ),
    Mutant(
        "cli/tierstore_cli/commands/simulate.py",
        "points[0].slots * record_bytes",
        "points[0].slots",
        "tests/cli/test_files_in_place.py::test_simulate",
    ),
    Mutant(
        "cli/tierstore_cli/commands/load.py",
        'out.note(f"Note: {note}")',
        "pass",
        "tests/cli/test_load_export.py::test_what_is_left_out_is_a_line_on_stderr_and_a_field_of_json",
    ),
    Mutant(
        "cli/tierstore_cli/commands/verify.py",
        "sample=sample, progress=report",
        "progress=report",
        "tests/cli/test_save_verify_fold.py::test_verify",
    ),
    Mutant(
        "cli/tierstore_cli/commands/keep.py",
        "opened.version if version is None else version",
        "opened.version",
        "tests/cli/test_restore_keep_release.py::test_keep_restore_and_release",
    ),
    Mutant(
        "cli/tierstore_cli/commands/publish.py",
        "keep=last or 2,",
        "keep=2,",
        "tests/test_publishing.py::test_the_command",
    ),
    Mutant(
        "cli/tierstore_cli/commands/grow.py",
        "change.store.grow(name, rows, init=init,",
        "change.store.grow(name, rows,",
        "tests/cli/test_tables.py::test_grow",
    ),
    Mutant(
        "cli/tierstore_cli/failure.py",
        'lines = [described(error), *getattr(error, "__notes__", ())]',
        "lines = [described(error)]",
        "tests/cli/test_main.py::test_notes_of_an_error_are_lines_of_its_message",
    ),
    Mutant(
        "cli/tierstore_cli/output.py",
        "self._open = end + before  # where",
        "self._open = before  # where",
        "tests/cli/test_output.py::test_a_failure_after_rows_were_written_ends_the_one_object",
    ),
    Mutant(
        "cli/tierstore_cli/output.py",
        "taken += cells + (_GAP if column else 0)",
        "taken += cells",
        "tests/cli/test_output.py::test_columns_are_left_out_that_do_not_fit_with_the_space_between",
    ),
    Mutant(
        "cli/tierstore_cli/stores.py",
        "        except ConcurrentWriterError:\n            raise\n",
        "",
        "tests/cli/test_wait.py::test_no_command_waits_for_another_writer_to_undo_what_it_published",
    ),
    Mutant(
        "cli/tierstore_cli/picking.py",
        "return list(dict.fromkeys(every))",
        "return every",
        "tests/cli/test_remove.py::test_a_key_without_a_row_is_an_error_unless_that_is_allowed",
    ),
    Mutant(
        "cli/tierstore_cli/rowstats.py",
        "is_inf & ~is_nan",
        "is_inf",
        "tests/cli/test_inspect.py::test_stats",
    ),
    Mutant(
        "cli/tierstore_cli/commands/init.py",
        "            if not dry_run:\n                opened.create_table",
        "            if True:\n                opened.create_table",
        "tests/cli/test_init.py::test_an_existing_store_gets_one_more_table",
    ),
    Mutant(
        "cli/tierstore_cli/commands/expire.py",
        "sum(len(keys) for keys, _ in gone)",
        "len(list(gone))",
        "tests/cli/test_keyed.py::test_keys_expire_in_a_commit_and_a_dry_run_commits_none",
    ),
    Mutant(
        "cli/tierstore_cli/dated.py",
        "{datetime.fromtimestamp(each.time, UTC):%F %T}",
        "{datetime.fromtimestamp(each.time):%F %T}",
        "tests/cli/test_diff_patch_log.py::test_times_are_utc_wherever_the_machine_is",
    ),
    Mutant(
        "cli/tierstore_cli/commands/inspect.py",
        'since = "" if new is None else f", {new:+,}"',
        'since = "" if new is None else f", {new:,}"',
        "tests/cli/test_keyed.py::test_keys_expire_in_a_commit_and_a_dry_run_commits_none",
    ),
    Mutant(
        "cli/tierstore_cli/commands/export.py",
        "if part is not None and (picks or since is not None):",
        "if False:",
        "tests/cli/test_partitions.py::test_parts_that_make_no_target_are_refused",
    ),
    Mutant(
        "cli/tierstore_cli/commands/export.py",
        "            if not picked.size:  # keys",
        "            if False:  # keys",
        "tests/cli/test_keyed.py::test_keys_that_were_removed_are_a_change",
    ),
    Mutant(
        "cli/tierstore_cli/commands/export.py",
        "        if unless_like is not None:\n            _changed(opened, chosen, unless_like)\n",
        "",
        "tests/cli/test_keyed.py::test_keys_that_were_removed_are_a_change",
    ),
    Mutant(
        "cli/tierstore_cli/commands/top.py",
        "requested / seconds",
        "requested",
        "tests/cli/test_top.py::test_rates_between_two_screens",
    ),
    Mutant(
        "cli/tierstore_cli/commands/top.py",
        "if where not in before or now.get(where, 0.0) < before[where]:  # a new trainer",
        "if where not in before:",
        "tests/cli/test_top.py::test_rates_between_two_screens",
    ),
    Mutant(
        "cli/tierstore_cli/commands/get.py",
        '".17g" if',
        '".9g" if',
        "tests/cli/test_get.py::test_what_is_printed_is_the_very_number",
    ),
    Mutant(
        "cli/tierstore_cli/commands/put.py",
        "if element.integer and not whole.all():",
        "if False:",
        "tests/cli/test_put_near.py::test_put_refuses_what_the_type_cannot_hold",
    ),
    Mutant(
        "cli/tierstore_cli/numbers.py",
        'if number is None or not word.isascii() or "_" in word:',
        'if number is None or "_" in word:',
        "tests/cli/test_put_near.py::test_put_refuses_what_the_type_cannot_hold",
    ),
    Mutant(
        "cli/tierstore_cli/numbers.py",
        "if np.isinf(number) and any(map(str.isdigit, word)):",
        "if False:",
        "tests/cli/test_put_near.py::test_put_refuses_what_the_type_cannot_hold",
    ),
    Mutant(
        "cli/tierstore_cli/commands/repair.py",
        "each if isinstance(each, str) else each(seed)",
        "each if isinstance(each, str) else each(0)",
        "tests/cli/test_repair.py::test_filled_rows_are_exit_4_unless_a_fill_was_given",
    ),
    Mutant(
        "cli/tierstore_cli/commands/repair.py",
        "adopt=adopt,",
        "",
        "tests/durability/test_adopting.py::test_a_version_whose_manifest_was_removed",
    ),
    Mutant(
        "cli/tierstore_cli/commands/save.py",
        'out.note(f"Warning: {some_rows(name, rows)} and zeros in the copy")',
        "pass",
        "tests/cli/test_save_verify_fold.py::test_save_and_export_skip_damage_when_asked",
    ),
    Mutant(
        "cli/tierstore_cli/commands/save.py",
        'for kind in ("tables", "keys", "payload"):',
        'for kind in ("tables", "keys"):',
        "tests/cli/test_save_verify_fold.py::test_save_says_which_keys_and_payload_the_copy_lacks",
    ),
    Mutant(
        "cli/tierstore_cli/commands/doctor.py",
        'if store is not None and store["damage"]:',
        'if store is not None and store["bad_files"]:',
        "tests/cli/test_doctor.py::test_a_store_with_a_damaged_row_is_damaged",
    ),
    Mutant(
        "cli/tierstore_cli/commands/doctor.py",
        "else format_bytes(locked)",
        "else str(locked)",
        "tests/cli/test_doctor.py::test_the_limit_of_locked_memory_has_a_unit",
    ),
    Mutant(
        "cli/tierstore_cli/commands/bench.py",
        "if 2 * size > free:",
        "if size > free:",
        "tests/cli/test_sizing.py::test_bench_takes_no_more_of_the_disk_than_there_is",
    ),
    Mutant(
        "cli/tierstore_cli/commands/plan.py",
        'replay |= {"policy"',
        'replay |= {"training": True, "policy"',
        "tests/cli/test_sizing.py::test_plan_for_reading_finds_the_memory_for_a_hit_rate_of_reads",
    ),
    Mutant(
        "cli/tierstore_cli/commands/plan.py",
        "format_bytes(each.tiers[0].nbytes + each.index_bytes)",
        "format_bytes(each.tiers[0].nbytes)",
        "tests/cli/test_sizing.py::test_plan_shows_the_budget_of_each_size",
    ),
    Mutant(
        "cli/tierstore_cli/commands/plan.py",
        "link_bytes=float(link), gpu_missed=None",
        "link_bytes=float(link)",
        "tests/cli/test_sizing.py::test_a_link_that_is_given_replaces_what_was_measured_of_one",
    ),
    Mutant(
        "cli/tierstore_cli/commands/load.py",
        "**dataclasses.asdict(done)}",
        '**dataclasses.asdict(done), "overflowed": 0}',
        "tests/cli/test_load_export.py::test_load_counts_what_overflows",
    ),
    Mutant(
        "cli/tierstore_cli/commands/verify.py",
        '    if sample is not None:\n        return ""\n',
        "",
        "tests/cli/test_save_verify_fold.py::test_a_sample_does_not_say_which_versions_are_intact",
    ),
    Mutant(
        "cli/tierstore_cli/params.py",
        '"K": 10**3, "M": 10**6',
        '"K": 10**3, "M": 2**20',
        "tests/cli/test_init.py::test_large_numbers_of_rows_are_of_thousands",
    ),
    # Import, export and attach: no row is under another's key, and nothing is lost in silence.
    Mutant(
        "importing.py",
        'step = 1 if duplicates == "first" else -1',
        'step = -1 if duplicates == "first" else 1',
        "tests/test_notes.py::test_keys_that_come_twice",
    ),
    Mutant(
        "importing.py",
        "keys = range(first.rows)  # rows with these keys",
        "pass  # rows with these keys",
        "tests/test_upsert.py::test_keys_that_number_the_rows_of_a_text_are_keys",
    ),
    Mutant(
        "importing.py",
        "incoming.converters[each].warn(where)",
        "pass",
        "tests/test_importing.py::test_values_are_rounded_to_the_field",
    ),
    Mutant(
        "importing.py",
        "beyond = int((keys > np.uint64(2**63 - 1)).sum())",
        "beyond = int((keys > np.uint64(2**63)).sum())",
        "tests/test_importing.py::test_keys_beyond_int64_are_not_negative_without_a_word",
    ),
    Mutant(
        "importing.py",
        "if table is not None and not ELEMENT_TYPES[dtype].accepts(source.dtype):",
        "if False:",
        "tests/test_notes.py::test_types_that_a_table_narrows_are_noted",
    ),
    Mutant(
        "importing.py",
        "if keys is None and table is not None and table.keys is not None:\n        notes",
        "if False:\n        notes",
        "tests/test_notes.py::test_new_rows_under_old_keys_are_noted",
    ),
    Mutant(
        "importing.py",
        "if dtype is not None and dtype != item.dtype:",
        "if False:",
        "tests/test_importing.py::test_requests_that_do_not_fit",
    ),
    Mutant(
        "importing.py",
        "if keys is None or table.keys is None or len(table.fields) == 1:",
        "if keys is None or table.keys is None or len(table.fields) <= 2:",
        "tests/test_importing.py::test_keys_of_a_table_with_other_fields_must_agree",
    ),
    Mutant(
        "importing.py",
        "if (incoming.rows, source.dim) != (table.rows, dim):",
        "if source.dim != dim:",
        "tests/test_importing.py::test_shapes_that_do_not_fit",
    ),
    Mutant(
        "importing.py",
        "if incoming.rows == 0:\n        raise",
        "if False:\n        raise",
        "tests/test_importing.py::test_requests_that_do_not_fit",
    ),
    Mutant(
        "importing.py",
        "keys, text = None, dataclasses.replace(text, key_column=column)",
        "keys = None",
        "tests/test_notes.py::test_columns_of_whole_numbers_are_keys_by_name_or_noted",
    ),
    Mutant(
        "importing.py",
        "len(keys) - int(kept.sum())",
        "int(kept.sum())",
        "tests/test_notes.py::test_keys_that_come_twice",
    ),
    Mutant(
        "importing.py",
        "rows=incoming.rows,\n        dim",
        "rows=first.rows,\n        dim",
        "tests/test_notes.py::test_keys_that_come_twice",
    ),
    Mutant(
        "exporting.py",
        "if start > stop:\n        raise",
        "if False:\n        raise",
        "tests/test_exporting.py::test_ranges_that_are_none",
    ),
    Mutant(
        "exporting.py",
        "block[row - first] = nan",
        "block[row - first - 1] = nan",
        "tests/test_exporting.py::test_damaged_rows_of_any_block_become_nan_in_their_place",
    ),
    Mutant(
        "exporting.py",
        "return keys if len(keys) == stop - start else keys[start:stop]",
        "return keys if len(keys) == stop - start else keys[: stop - start]",
        "tests/test_exporting.py::test_the_keys_of_the_table_go_along",
    ),
    Mutant(
        "exporting.py",
        "        refuse_inside_store(path)\n",
        "        pass\n",
        "tests/test_exporting.py::test_targets_that_must_not_be_written",
    ),
    Mutant(
        "exporting.py",
        "return min(able, key=lambda each: each.stored.itemsize).name",
        "return max(able, key=lambda each: each.stored.itemsize).name",
        "tests/test_exporting.py::test_every_format",
    ),
    Mutant(
        "exporting.py",
        'if keyed and format_of(path, write=True).keys == "never":',
        "if False:",
        "tests/test_notes.py::test_keys_beside_a_file_are_noted",
    ),
    Mutant(
        "exporting.py",
        '        each.converter.warn(f"field {each.name!r}")\n',
        "        pass\n",
        "tests/test_exporting.py::test_fields_and_conversions",
    ),
    Mutant(
        "attaching.py",
        "if any(count != rows for found in counts.values() for count in found):",
        "if False:",
        "tests/test_attaching.py::test_what_cannot_be_read_in_place_says_what_can",
    ),
    Mutant(
        "attaching.py",
        "bases[name].checksums = each",
        "pass",
        "tests/test_attaching.py::test_checksums_are_made_once_and_find_changed_bytes",
    ),
    Mutant(
        "attaching.py",
        "    selected.stats = whole.stats\n",
        "",
        "tests/gpu/test_split.py::test_files_of_other_columns_are_not_read",
    ),
    Mutant(
        "attaching.py",
        "self.door: Door = Door(attached, writable=False, refusal=_REFUSAL)",
        "self.door: Door = Door(attached, writable=True, refusal=_REFUSAL)",
        "tests/test_attaching.py::test_tables_share_tiers_and_answer_as_those_of_a_store",
    ),
    Mutant(
        "attaching.py",
        "Watch([[file] for file in stored.files])",
        "Watch([])",
        "tests/test_attaching.py::test_rows_are_those_of_the_tensor",
    ),
    Mutant(
        "attaching.py",
        "            rows_per_file=stored.rows_per_file,\n",
        "            rows_per_file=rows,\n",
        "tests/test_attaching.py::test_zarr_arrays",
    ),
    Mutant(
        "importing.py",
        "incoming.converters[each].overflowed += source.overflowed",
        "pass",
        "tests/test_importing.py::test_numbers_of_a_text_that_are_too_large_are_counted",
    ),
    Mutant(
        "importing.py",
        "step = 1 << 16\n    starts = range(0, len(keys), step)",
        "step = 1 << 16\n    starts = range(0, 1, step)",
        "tests/test_importing.py::test_keys_are_compared_to_the_last_one",
    ),
    Mutant(
        "importing.py",
        "dataclasses.replace(existing.spec, sparse=False)",
        "existing.spec",
        "tests/test_importing.py::test_a_loaded_table_takes_the_space_of_its_rows",
    ),
    Mutant(
        "exporting.py",
        'if ids is not None and damaged == "skip":',
        "if False:",
        "tests/test_exporting.py::test_ids_that_are_none",
    ),
    Mutant(
        "exporting.py",
        "wrong = (ids < 0) | (ids >= count)",
        "wrong = ids >= count",
        "tests/test_exporting.py::test_ids_that_are_none",
    ),
    Mutant(
        "exporting.py",
        "wrong = (ids < 0) | (ids >= count)",
        "wrong = (ids < 0) | (ids > count)",
        "tests/test_exporting.py::test_ids_that_are_none",
    ),
    Mutant(
        "exporting.py",
        "return [keys[row] for row in ids.tolist()]",
        "return keys[: len(ids)]",
        "tests/test_exporting.py::test_given_words_go_with_the_rows_of_a_list",
    ),
    Mutant(
        "exporting.py",
        "first_row=start,",
        "first_row=0,",
        "tests/test_exporting.py::test_a_range_of_rows",
    ),
    Mutant(
        "exporting.py",
        "if len(dims) < len(fields) or not all(names.values()):",
        "if not all(names.values()):",
        "tests/test_exporting.py::test_fields_that_no_file_holds_together",
    ),
    Mutant(
        "attaching.py",
        "fields = {name: [item.form, item.dim] for name, item in spec.fields.items()}",
        "fields = {name: item.dim for name, item in spec.fields.items()}",
        "tests/test_attaching.py::test_checksums_of_others_are_refused",
    ),
    Mutant(
        "importing.py",
        "        _refuse_without_scales(source)\n    return",
        "    return",
        "tests/test_scaled.py::test_elements_beside_what_may_be_their_scales_are_no_rows",
    ),
    Mutant(
        "importing.py",
        "wide = wanted is not None and ELEMENT_TYPES[wanted].accepts(DEFAULT_DTYPE)",
        "wide = wanted is not None",
        "tests/test_scaled.py::test_a_text_is_quantised_from_floats",
    ),
    Mutant(
        "exporting.py",
        "            start += len(block)\n            yield",
        "            yield",
        "tests/test_exporting.py::test_damaged_rows_of_any_block_become_nan_in_their_place",
    ),
    Mutant(
        "exporting.py",
        "if skipped and nan is None:",
        "if False:",
        "tests/test_exporting.py::test_damaged_rows_of_whole_numbers_have_no_mark",
    ),
    Mutant(
        "attaching.py",
        'if dtype not in ("uint8", "int8") or dim != declared.nbytes:',
        'if dtype not in ("uint8", "int8"):',
        "tests/test_scaled.py::test_bytes_of_a_field_that_are_not_as_many_are_refused",
    ),
    Mutant(
        "attaching.py",
        "[(0, scaled.dim), (scaled.scales_at, scaled.nbytes)]",
        "[(0, scaled.dim), (scaled.dim, scaled.nbytes)]",
        "tests/test_scaled.py::test_scales_are_read_behind_elements_of_any_number",
    ),
    Mutant(
        "attaching.py",
        "self._given = tables, budget, policy, None, checksums",
        "self._given = tables, budget, policy, device, checksums",
        "tests/test_attaching.py::test_what_is_attached_can_be_pickled",
    ),
    Mutant(
        "exporting.py",
        "return ELEMENT_TYPES[dtype].integer and not whole",
        "return False",
        "tests/test_scaled.py::test_load_quantises_and_export_gives_floats",
    ),
    Mutant(
        "attaching.py",
        "if kind is None or dim % blocks:",
        "if kind is None:",
        "tests/test_scaled.py::test_what_has_no_scale_says_so",
    ),
    Mutant(
        "attaching.py",
        '"row" if blocks == 1 else dim // blocks',
        '"row" if blocks == 1 else blocks',
        "tests/test_scaled.py::test_attached_rows_are_what_torch_computes",
    ),
    # Sizing and machine: rates over what was measured, bytes in their unit, budgets that fit.
    Mutant(
        "sizing/simulation.py",
        "hits=int(batch.counts[hit].sum()),",
        "hits=int(hit.sum()),",
        "tests/sizing/test_simulate.py::test_what_is_predicted_is_what_a_store_does",
    ),
    Mutant(
        "sizing/simulation.py",
        "(self.unique - self.unique_hits) / self.batches",
        "(self.requested - self.hits) / self.batches",
        "tests/sizing/test_plan.py::test_a_tier_for_every_row_reads_nothing_once_they_are_there",
    ),
    Mutant(
        "sizing/simulation.py",
        "if number >= first:\n            count += int(np.count_nonzero(~seen",
        "if True:\n            count += int(np.count_nonzero(~seen",
        "tests/sizing/test_plan.py::test_rows_asked_for_first_are_counted",
    ),
    Mutant(
        "sizing/simulation.py",
        "slots.touch(places[stay], done=not self._leases)",
        "slots.touch(places[stay], done=True)",
        "tests/sizing/test_simulate.py::test_what_is_predicted_is_what_a_store_does",
    ),
    Mutant(
        "sizing/simulation.py",
        "    return min(size, rows)\n",
        "    return size\n",
        "tests/sizing/test_simulate.py::test_sizes_are_parts_or_slots",
    ),
    Mutant(
        "sizing/streams.py",
        "if rest.size and ids.size * epochs < size:",
        "if rest.size:",
        "tests/sizing/test_streams.py::test_ids_come_in_batches_from_every_kind_of_file",
    ),
    Mutant(
        "sizing/streams.py",
        "rest = np.concatenate([rest, rng.permutation(ids) if shuffle else ids])",
        "rest = np.concatenate([rest, ids])",
        "tests/sizing/test_streams.py::test_epochs_are_laid_end_to_end_and_shuffled_if_asked",
    ),
    Mutant(
        "sizing/streams.py",
        "counts[order].astype(np.int64)",
        "counts.astype(np.int64)",
        "tests/sizing/test_simulate.py::test_what_is_predicted_is_what_a_store_does",
    ),
    Mutant(
        "sizing/streams.py",
        "if least < 0 or greatest >= rows:",
        "if least < 0 or greatest > rows:",
        "tests/sizing/test_streams.py::test_what_holds_no_ids_is_refused",
    ),
    Mutant(
        "sizing/streams.py",
        "if least < 0 or greatest >= rows:",
        "if greatest >= rows:",
        "tests/sizing/test_streams.py::test_what_holds_no_ids_is_refused",
    ),
    Mutant(
        "sizing/streams.py",
        "batches = (ids for _ in range(epochs) for ids in read_trace(path))",
        "batches = read_trace(path)",
        "tests/sizing/test_streams.py::test_a_recorded_trace_keeps_its_batches",
    ),
    Mutant(
        "sizing/streams.py",
        "batch_size = ids.shape[1]",
        "batch_size = ids.shape[0]",
        "tests/sizing/test_streams.py::test_a_two_dimensional_array_has_a_batch_a_row",
    ),
    Mutant(
        "sizing/streams.py",
        "if name is None and len(able) != 1:",
        "if name is None and not able:",
        "tests/sizing/test_streams.py::test_what_holds_no_ids_is_refused",
    ),
    Mutant(
        "sizing/planning.py",
        'host = sizes["host"] + self.index_bytes if "host" in sizes else 0',
        'host = sizes["host"] if "host" in sizes else 0',
        "tests/cli/test_sizing.py::test_a_plan_prints_the_budget_that_gives_its_slots",
    ),
    Mutant(
        "sizing/planning.py",
        "(part.host_bytes - part.index_bytes, part.host_slots)",
        "(part.host_bytes, part.host_slots)",
        "tests/cli/test_sizing.py::test_plan_divides_memory_among_the_tables_of_a_store",
    ),
    Mutant(
        "sizing/planning.py",
        "        rows * (record_bytes + 4),\n",
        "        rows * record_bytes,\n",
        "tests/sizing/test_plan.py::test_the_host_tier_gets_the_slots_a_store_would_give_it",
    ),
    Mutant(
        "sizing/planning.py",
        "rows / 100 / speeds.committed_rows * max(1, record_bytes / ROW_BYTES)",
        "rows / 100 / speeds.committed_rows",
        "tests/sizing/test_plan.py::test_commits_take_what_was_measured_of_them",
    ),
    Mutant(
        "sizing/planning.py",
        "rows / 100 / speeds.committed_rows * max(1, record_bytes / ROW_BYTES)",
        "rows / speeds.committed_rows * max(1, record_bytes / ROW_BYTES)",
        "tests/sizing/test_plan.py::test_commits_take_what_was_measured_of_them",
    ),
    Mutant(
        "sizing/planning.py",
        "_commit_seconds(rows, record_bytes, speeds) if training else None",
        "_commit_seconds(rows, record_bytes, speeds)",
        "tests/sizing/test_plan.py::test_commits_take_what_was_measured_of_them",
    ),
    Mutant(
        "sizing/planning.py",
        "if stream is not None and stream.rows > rows:",
        "if False:",
        "tests/sizing/test_plan.py::test_what_cannot_be_is_refused",
    ),
    Mutant(
        "sizing/planning.py",
        "low, high = (low, middle) if reached(middle) >= hits else (middle, high)",
        "low, high = (low, middle) if reached(middle) > hits / 2 else (middle, high)",
        "tests/sizing/test_plan.py::test_the_memory_for_a_hit_rate_is_enough_and_little_more",
    ),
    Mutant(
        "sizing/planning.py",
        "return bytes_for(rows, record_bytes, high, policy, indexed=True)",
        "return bytes_for(rows, record_bytes, low, policy, indexed=True)",
        "tests/sizing/test_plan.py::test_the_memory_for_a_hit_rate_is_enough_and_little_more",
    ),
    Mutant(
        "sizing/planning.py",
        "return bytes_for(rows, record_bytes, high, policy, indexed=True)",
        "return bytes_for(rows, record_bytes, high, policy)",
        "tests/sizing/test_plan.py::test_the_memory_for_a_hit_rate_is_enough_and_little_more",
    ),
    Mutant(
        "sizing/planning.py",
        "if best < hits:\n        raise",
        "if False:\n        raise",
        "tests/sizing/test_plan.py::test_the_memory_for_a_hit_rate_is_enough_and_little_more",
    ),
    Mutant(
        "sizing/planning.py",
        "rows.size * -(-record_bytes // _PAGE)",
        "rows.size * (record_bytes // _PAGE)",
        "tests/sizing/test_plan.py::test_long_records_have_pages_of_their_own",
    ),
    Mutant(
        "sizing/planning.py",
        "batch = DistinctRows(batch.rows[~hit], batch.counts[~hit])",
        "pass",
        "tests/sizing/test_plan.py::test_times_are_those_measured_of_tierstore",
    ),
    Mutant(
        "sizing/planning.py",
        "        if number >= first:\n            pages += _pages(batch.rows, record_bytes)",
        "        pages += _pages(batch.rows, record_bytes)",
        "tests/sizing/test_plan.py::test_no_tier_at_all_and_one_for_everything",
    ),
    Mutant(
        "sizing/planning.py",
        "written * record_bytes / speeds.append_bytes if training else 0.0",
        "written * record_bytes / speeds.append_bytes",
        "tests/sizing/test_plan.py::test_a_gpu_tier_leaves_the_host_tier_what_it_misses",
    ),
    Mutant(
        "sizing/planning.py",
        "warm + min(cold, whole)",
        "warm + cold",
        "tests/sizing/test_plan.py::test_times_are_those_measured_of_tierstore",
    ),
    Mutant(
        "sizing/planning.py",
        'times["link"] = max(moved, back) * record_bytes / speeds.link_bytes',
        'times["link"] = (moved + back) * record_bytes / speeds.link_bytes',
        "tests/sizing/test_plan.py::test_a_link_that_is_given_works_both_ways_at_once",
    ),
    Mutant(
        "sizing/planning.py",
        "hits.of(unique if training else ids, wide)",
        "hits.of(ids, wide)",
        "tests/sizing/test_plan.py::test_a_gpu_takes_time_for_rows_that_it_has_and_the_link_for_others",
    ),
    Mutant(
        "sizing/planning.py",
        "speeds.missed.of(misses, wide) - speeds.warm.of(misses, wide)",
        "speeds.missed.of(misses, wide)",
        "tests/sizing/test_plan.py::test_times_are_those_measured_of_tierstore",
    ),
    Mutant(
        "sizing/planning.py",
        "if gpu and speeds.link_bytes is None:",
        "if False:",
        "tests/sizing/test_plan.py::test_a_plan_says_what_was_not_measured",
    ),
    Mutant(
        "sizing/planning.py",
        "        whole = whole or slots >= rows\n",
        "        whole = slots >= rows\n",
        "tests/sizing/test_plan.py::test_a_gpu_tier_for_every_row_moves_nothing_once_they_are_there",
    ),
    Mutant(
        "machine/__init__.py",
        "if driver is not None and _major(driver) < FIRST_DRIVER.get(major, 0):",
        "if driver is not None and _major(driver) <= FIRST_DRIVER.get(major, 0):",
        "tests/machine/test_cuda.py::test_pairs_that_fit",
    ),
    Mutant(
        "machine/__init__.py",
        "if built_for and int(built_for[1]) != major:",
        "if built_for and int(built_for[1]) < major - 1:",
        "tests/machine/test_cuda.py::test_pairs_that_do_not_fit_are_told_the_line_that_mends_them",
    ),
    Mutant(
        "machine/__init__.py",
        "space.f_bavail * space.f_frsize",
        "space.f_bavail * 512",
        "tests/machine/test_report.py::test_free_is_what_this_user_may_take",
    ),
    Mutant(
        "machine/__init__.py",
        'kib.get("MemTotal", 0) * 1024, kib.get("MemAvailable", 0) * 1024',
        'kib.get("MemTotal", 0) * 1000, kib.get("MemAvailable", 0) * 1000',
        "tests/machine/test_report.py::test_a_memory_cgroup_counts",
    ),
    Mutant(
        "machine/__init__.py",
        "total, available = min(total, limit), min(available, free)",
        "total, available = min(total, limit), available",
        "tests/machine/test_report.py::test_a_memory_cgroup_counts",
    ),
    Mutant(
        "machine/__init__.py",
        "if not self.storage.tested:",
        "if False:",
        "tests/machine/test_report.py::test_a_file_system_that_was_not_tested_is_a_problem",
    ),
    Mutant(
        "machine/__init__.py",
        'found += sorted(directory.glob(f"{BENCH_PREFIX}*"))',
        "pass",
        "tests/machine/test_report.py::test_leftovers_beside_a_path_and_in_it",
    ),
    Mutant(
        "machine/__init__.py",
        "for directory in (path.parent, path):",
        "for directory in (path,):",
        "tests/machine/test_report.py::test_leftovers_beside_a_path_and_in_it",
    ),
    Mutant(
        "machine/__init__.py",
        "    while not there.exists():\n        there = there.parent\n",
        "    there = there if there.exists() else Path('/')\n",
        "tests/machine/test_report.py::test_storage_of_a_path_that_does_not_exist_yet",
    ),
    Mutant(
        "machine/comparison.py",
        "store.rollback()\n    return took\n\n\ndef _on_gpu",
        "pass\n    return took\n\n\ndef _on_gpu",
        "tests/machine/test_speeds.py::test_what_is_measured_of_tierstore_is_kept",
    ),
    Mutant(
        "machine/comparison.py",
        "np.quantile(rates, [0.1, 0.5, 0.9])",
        "np.quantile(rates, [0.9, 0.5, 0.1])",
        "tests/cli/test_sizing.py::test_bench_measures_the_machine_and_keeps_the_figures",
    ),
    Mutant(
        "machine/speeds.py",
        "slope = (self.seconds[-1] - self.seconds[-2]) / (last - self.counts[-2])",
        "slope = self.seconds[-1] / last",
        "tests/sizing/test_plan.py::test_batches_take_what_is_interpolated_between_those_measured",
    ),
    Mutant(
        "machine/speeds.py",
        "return min(1.0, count) * (fixed + (took - fixed) * wide)",
        "return fixed + (took - fixed) * wide",
        "tests/sizing/test_plan.py::test_batches_take_what_is_interpolated_between_those_measured",
    ),
    Mutant(
        "machine/speeds.py",
        "return min(1.0, count) * (fixed + (took - fixed) * wide)",
        "return min(1.0, count) * took * wide",
        "tests/sizing/test_plan.py::test_batches_take_what_is_interpolated_between_those_measured",
    ),
    Mutant(
        "sizing/simulation.py",
        "min(int(len(stream.batches) * (1 - measured)), len(stream.batches) - 1)",
        "int(len(stream.batches) * (1 - measured))",
        "tests/sizing/test_simulate.py::test_at_least_a_row_and_a_batch_are_counted",
    ),
    Mutant(
        "sizing/simulation.py",
        "candidates = candidates[due[candidates] != NEVER]",
        "pass",
        "tests/sizing/test_simulate.py::test_rows_that_the_optimum_drops_are_evicted",
    ),
    Mutant(
        "sizing/simulation.py",
        "evictions = int(np.count_nonzero(~kept[held]))",
        "evictions = int(np.count_nonzero(kept[held]))",
        "tests/sizing/test_simulate.py::test_rows_that_the_optimum_drops_are_evicted",
    ),
    Mutant(
        "sizing/simulation.py",
        "first_touches(stream, measured) * rates.batches / max(1, rates.unique)",
        "first_touches(stream, measured) / max(1, rates.unique)",
        "tests/sizing/test_simulate.py::test_the_share_of_rows_that_are_asked_for_first",
    ),
    Mutant(
        "sizing/simulation.py",
        "return max(1, int(rows * size))",
        "return int(rows * size)",
        "tests/sizing/test_simulate.py::test_at_least_a_row_and_a_batch_are_counted",
    ),
    Mutant(
        "sizing/simulation.py",
        "stream.batches[announced : number + depth + 1]",
        "stream.batches[announced : number + depth]",
        "tests/sizing/test_simulate.py::test_as_many_batches_are_announced_ahead_as_are_asked_for",
    ),
    Mutant(
        "sizing/streams.py",
        "rows = trace_rows(path) if rows is None else rows\n    else",
        "pass\n    else",
        "tests/sizing/test_streams.py::test_a_recorded_trace_keeps_its_batches",
    ),
    Mutant(
        "sizing/streams.py",
        'order="F" if header.fortran_order else "C"',
        'order="C"',
        "tests/sizing/test_streams.py::test_the_order_of_an_array_in_memory_does_not_matter",
    ),
    Mutant(
        "sizing/streams.py",
        '    allowance.take(header.data_bytes, f"the array {name!r}")\n',
        "",
        "tests/sizing/test_streams.py::test_ids_of_an_archive_are_read_in_blocks_within_the_memory",
    ),
    Mutant(
        "sizing/planning.py",
        "disk_bytes = part.rows * (part.stored_bytes + 4)",
        "disk_bytes = part.rows * part.stored_bytes",
        "tests/cli/test_sizing.py::test_plan_divides_memory_among_the_tables_of_a_store",
    ),
    Mutant(
        "sizing/planning.py",
        "gathered = 0.0 if whole_host else moved",
        "gathered = moved",
        "tests/sizing/test_plan.py::test_a_link_that_is_given_works_both_ways_at_once",
    ),
    Mutant(
        "sizing/planning.py",
        "free = max(0, available_bytes() - host) if page_cache is None else page_cache",
        "free = available_bytes() if page_cache is None else page_cache",
        "tests/sizing/test_plan.py::test_files_are_kept_in_the_memory_that_the_host_tier_leaves",
    ),
    Mutant(
        "machine/__init__.py",
        "space.f_bavail * space.f_frsize",
        "space.f_bfree * space.f_frsize",
        "tests/machine/test_report.py::test_free_is_what_this_user_may_take",
    ),
    Mutant(
        "machine/__init__.py",
        "None if limit == resource.RLIM_INFINITY else limit",
        "limit",
        "tests/cli/test_doctor.py::test_the_limit_of_locked_memory_has_a_unit",
    ),
    Mutant(
        "machine/comparison.py",
        "return [count / each for each in took[count]]",
        "return [each / count for each in took[count]]",
        "tests/machine/test_speeds.py::test_tierstore_is_compared_in_rows_per_second",
    ),
    Mutant(
        "machine/comparison.py",
        "speeds.append_bytes / ROW_BYTES, committed)",
        "speeds.append_bytes, committed)",
        "tests/machine/test_speeds.py::test_tierstore_is_compared_in_rows_per_second",
    ),
    Mutant(
        "machine/comparison.py",
        "self.reached / self.limit if self.limit else 0.0",
        "self.limit / self.reached",
        "tests/machine/test_speeds.py::test_tierstore_is_compared_in_rows_per_second",
    ),
    Mutant(
        "machine/comparison.py",
        "return [count / took for took in _calls(work, seconds)]",
        "return [1 / took for took in _calls(work, seconds)]",
        "tests/machine/test_speeds.py::test_tierstore_is_compared_in_rows_per_second",
    ),
    Mutant(
        "machine/comparison.py",
        "pages = pages or np.unique(ids * ROW_BYTES // mmap.PAGESIZE).size",
        "pages = pages or ids.size",
        "tests/machine/test_speeds.py::test_tierstore_is_compared_in_rows_per_second",
    ),
    Mutant(
        "machine/speeds.py",
        "if value is not None and not float(value) > 0:",
        "if value is not None and not float(value) >= 0:",
        "tests/machine/test_speeds.py::test_figures_of_an_earlier_release_are_kept_as_far_as_they_mean_the_same",
    ),
    Mutant(
        "machine/speeds.py",
        "append_bytes=step(_append(path, 8 * MIB, seconds) * 8 * MIB)",
        "append_bytes=step(_append(path, 8 * MIB, seconds) * MIB)",
        "tests/machine/test_speeds.py::test_rates_are_what_was_done_by_the_time_it_took",
    ),
    Mutant(
        "machine/speeds.py",
        "return total / (time.perf_counter() - begin)",
        "return total * (time.perf_counter() - begin)",
        "tests/machine/test_speeds.py::test_rates_are_what_was_done_by_the_time_it_took",
    ),
    Mutant(
        "machine/speeds.py",
        "readahead.read_cache(readahead.SPEEDS) | {",
        "{",
        "tests/machine/test_speeds.py::test_figures_of_other_disks_are_kept",
    ),
    Mutant(
        "machine/speeds.py",
        "        _rowcopy.gather(records, rows, out)\n        return count",
        "        _rowcopy.gather(records, rows, out)\n        return out.nbytes",
        "tests/machine/test_speeds.py::test_rates_are_what_was_done_by_the_time_it_took",
    ),
    Mutant(
        "machine/speeds.py",
        "positive = all(0 < each < math.inf for each in self.seconds)",
        "positive = all(0 <= each for each in self.seconds)",
        "tests/sizing/test_plan.py::test_times_that_cannot_be_are_refused",
    ),
    Mutant(
        "sizing/streams.py",
        "filled += block.size",
        "filled = block.size",
        "tests/sizing/test_streams.py::test_ids_of_an_archive_are_read_in_blocks_within_the_memory",
    ),
    # Commits, versions, repairs and openings: what a crash, a fault or a second program may cost.
    Mutant(
        "_store/commit.py",
        "elif keys != info.keys or not _same(scalars, info.scalars):",
        "elif keys != info.keys:",
        "tests/store/test_store.py::test_scalars_are_committed_with_the_rows",
    ),
    Mutant(
        "_store/commit.py",
        "elif keys != info.keys or not _same(scalars, info.scalars):",
        "elif not _same(scalars, info.scalars):",
        "tests/store/test_schema.py::test_keys_can_be_part_of_a_commit",
    ),
    Mutant(
        "_store/commit.py",
        "if not folder.warned and state.unconfirmed > _MANY_UNCONFIRMED:",
        "if not folder.warned and state.unconfirmed > 10 * _MANY_UNCONFIRMED:",
        "tests/durability/test_versions.py::test_many_versions_that_wait_to_be_confirmed_warn_once",
    ),
    Mutant(
        "_store/commit.py",
        "    if state.door.held:\n            raise",
        "    if False:\n            raise",
        "tests/store/test_commit_async.py::test_not_from_within_another_call",
    ),
    Mutant(
        "_store/commit.py",
        "        if not self._flushed:\n            raise error\n",
        "",
        "tests/store/test_commit_async.py::test_a_full_disk_while_rows_are_handed_down_is_told_at_once",
    ),
    Mutant(
        "_store/pointer.py",
        'if mark and pointer.get("payload") and mark',
        "if False and mark",
        "tests/store/test_commit_async.py::test_a_state_that_names_a_version_of_another_thread_is_not_committed",
    ),
    Mutant(
        "_store/pointer.py",
        "return manifest.mark == mark",
        "return manifest.version == number",
        "tests/store/test_store.py::test_a_pointer_stands_for_the_store",
    ),
    Mutant(
        "_store/versions.py",
        "if manifest.seq != seq:",
        "if False:",
        "tests/durability/test_manifests.py::test_a_bad_manifest_is_refused",
    ),
    Mutant(
        "_store/versions.py",
        "while numbers and self._directory.exists(name",
        "while False and self._directory.exists(name",
        "tests/durability/test_versions.py::test_a_listing_cannot_hide_the_newest_version",
    ),
    Mutant(
        "_store/versions.py",
        "return max((manifest.version for manifest in self.manifests()), default=0)",
        "return 0",
        "tests/durability/test_damage.py::test_verify_goes_on_below_a_damaged_manifest",
    ),
    Mutant(
        "_store/versions.py",
        "if manifest.mark != mark:",
        "if False:",
        "tests/distributed/test_store.py::test_partitions_of_two_copies_are_no_store",
    ),
    Mutant(
        "_store/versions.py",
        "names = max(kept.values(), key=lambda manifest: manifest.seq).names if kept else {}",
        "names = min(kept.values(), key=lambda manifest: manifest.seq).names if kept else {}",
        "tests/cli/test_restore_keep_release.py::test_keep_restore_and_release",
    ),
    Mutant(
        "_store/versions.py",
        "    if not os.path.lexists(path):\n        refuse_inside_store(path)\n        return",
        "    if not os.path.lexists(path):\n        return",
        "tests/store/test_store.py::test_no_store_is_made_inside_a_store",
    ),
    Mutant(
        "_store/versions.py",
        "if names and not (uuid and history.manifests()):",
        "if names and not uuid:",
        "tests/durability/test_damage.py::test_repair_refuses",
    ),
    Mutant(
        "_store/repair.py",
        "if adopt and version is not None:",
        "if False:",
        "tests/durability/test_adopting.py::test_a_version_with_adopt_is_no_sense",
    ),
    Mutant(
        "_store/repair.py",
        "    if writer is not None:\n        raise",
        "    if False:\n        raise",
        "tests/durability/test_adopting.py::test_a_writer_is_not_disturbed",
    ),
    Mutant(
        "_store/repair.py",
        "if isinstance(source, Path) and path.resolve().is_relative_to(source.resolve()):",
        "if False:",
        "tests/durability/test_damage.py::test_repair_refuses",
    ),
    Mutant(
        "_store/repair.py",
        "            check_readable(directory)\n",
        "            pass\n",
        "tests/cli/test_access.py::test_what_may_not_be_read_is_not_damaged",
    ),
    Mutant(
        "_store/repair.py",
        "return not self.left_out and not any(t.older + t.filled + t.unknown for t in counts)",
        "return not self.left_out and not any(t.older + t.filled for t in counts)",
        "tests/durability/test_damage.py::test_repair_searches_damaged_runs",
    ),
    Mutant(
        "_store/repair.py",
        "filled = (found.state == LOST) | ((found.state == OLDER) & ~older)",
        "filled = found.state == LOST",
        "tests/durability/test_damage.py::test_repair_fills_as_asked",
    ),
    Mutant(
        "_store/repair.py",
        "images = np.where(filled[which], FILLED, found.versions[which])",
        "images = found.versions[which]",
        "tests/durability/test_damage.py::test_repair_of_a_row_in_the_base",
    ),
    Mutant(
        "_store/repair.py",
        "found.state[lost[here]] = OLDER",
        "found.state[lost[here]] = WHOLE",
        "tests/durability/test_damage.py::test_repair_looks_into_older_generations",
    ),
    Mutant(
        "_store/repair.py",
        'if fill == "nan":',
        "if False:",
        "tests/cli/test_repair.py::test_a_damaged_row_of_a_table_by_key_is_named_by_its_key",
    ),
    Mutant(
        "_store/repair.py",
        "return dataclasses.replace(created, scalars=dict(info.scalars), keys=keys)",
        "return dataclasses.replace(created, keys=keys)",
        "tests/durability/test_damage.py::test_without_checksums_a_repair_copies_wrong_rows",
    ),
    Mutant(
        "_store/repair.py",
        "if not self._is_newest:",
        "if False:",
        "tests/distributed/test_left_behind.py::test_a_partition_without_the_version_gives_what_it_has",
    ),
    Mutant(
        "_store/repair.py",
        "return np.where(ids < total, ids, -1)",
        "return ids",
        "tests/cli/test_repair.py::test_places_of_partitions_beyond_the_table_are_no_rows_that_were_lost",
    ),
    Mutant(
        "_store/repair.py",
        "    if fill is None and report.filled:\n",
        "    if False:\n",
        "tests/cli/test_repair.py::test_a_table_by_key_lists_keys_and_counts_only_them",
    ),
    Mutant(
        "_store/store.py",
        "if store._door.pid != os.getpid() or",
        "if",
        "tests/test_sessions.py::test_a_forked_child_does_not_get_the_store_of_its_parent",
    ),
    Mutant(
        "_store/store.py",
        "if differing := store._options.differing(options):",
        "if differing := None:",
        "tests/test_sessions.py::test_a_cell_with_other_options_names_them_and_the_way_on",
    ),
    Mutant(
        "_store/opening.py",
        "if rows < spec.rows and not table.spec.grows:",
        "if False:",
        "tests/test_sessions.py::test_another_table_than_the_one_there_is_an_error",
    ),
    Mutant(
        "_store/opening.py",
        "if table.fields.get(field) != item:",
        "if field not in table.fields:",
        "tests/test_sessions.py::test_another_table_than_the_one_there_is_an_error",
    ),
    Mutant(
        "_store/opening.py",
        "if not allow_untested and where.parent.is_dir():",
        "if False:",
        "tests/durability/test_filesystems.py::test_only_what_was_tested_is_written",
    ),
    Mutant(
        "_store/opening.py",
        "_check_all_same(store, tables)\n        except BaseException:",
        "_check_all_same(store, tables)\n        except ZeroDivisionError:",
        "tests/test_sessions.py::test_another_table_than_the_one_there_is_an_error",
    ),
    Mutant(
        "_store/commit.py",
        '        else:\n            self.numbers["payload_mark"] = ""\n',
        "",
        "tests/training/test_states.py::test_a_module_in_a_payload_points_to_the_version_it_is_committed_with",
    ),
    Mutant(
        "_store/pointer.py",
        "rows = 0 if state.door.closed else state.uncommitted_rows()",
        "rows = 0",
        "tests/training/test_states.py::test_a_state_with_uncommitted_rows_says_how_many_and_what_to_call",
    ),
    Mutant(
        "_store/pointer.py",
        "data.ljust(-(-len(data) // _MULTIPLE) * _MULTIPLE)",
        "data",
        "tests/training/test_states.py::test_a_pointer_is_as_long_for_any_version",
    ),
    Mutant(
        "_store/pointer.py",
        "    if not isinstance(pointer, dict):\n        raise",
        "    if False:\n        raise",
        "tests/training/test_states.py::test_a_state_of_another_table_or_field_is_refused",
    ),
    Mutant(
        "_store/commit.py",
        "if self._coming.is_named and version != self._coming.version:",
        "if False:",
        "tests/store/test_commit_async.py::test_a_state_that_names_a_version_of_another_thread_is_not_committed",
    ),
    Mutant(
        "_store/commit.py",
        "    with state.unless_published(draft.drop):\n        flush(draft)",
        "    with state.unless_published(lambda: None):\n        flush(draft)",
        "tests/store/test_store.py::test_a_payload_of_a_commit_that_fails_is_removed",
    ),
    Mutant(
        "_store/commit.py",
        "            state.touched.keys.clear()\n",
        "",
        "tests/store/test_updating.py::test_keys",
    ),
    Mutant(
        "_store/commit.py",
        "return scalars == others and (not scalars or canonical(scalars) == canonical(others))",
        "return scalars == others",
        "tests/store/test_store.py::test_a_scalar_of_another_type_is_another_one",
    ),
    Mutant(
        "_store/commit.py",
        "for name in draft.dropped:\n        del tables[name]",
        "for name in draft.dropped:\n        pass",
        "tests/store/test_updating.py::test_a_table_that_was_dropped_goes_from_the_copy",
    ),
    Mutant(
        "_store/commit.py",
        "if isinstance(error, CommitFailedError):\n            state.door.close(str(error))",
        "pass",
        "tests/store/test_store.py::test_a_sync_that_fails_after_a_version_is_safe_closes_the_store",
    ),
    Mutant(
        "_store/commit.py",
        "except (TierStoreError, OSError, MemoryError) as error:\n        if isinstance",
        "except (TierStoreError, OSError) as error:\n        if isinstance",
        "tests/store/test_store.py::test_work_after_a_version_is_safe_does_not_fail_its_commit",
    ),
    Mutant(
        "_store/pointer.py",
        "coming.is_named = True\n",
        "pass\n",
        "tests/store/test_commit_async.py::test_a_state_that_names_a_version_of_another_thread_is_not_committed",
    ),
    Mutant(
        "_store/versions.py",
        "if manifest.uuid != self._store:",
        "if False:",
        "tests/durability/test_manifests.py::test_a_whole_manifest_of_another_store_is_refused",
    ),
    Mutant(
        "_store/versions.py",
        "if uuid and found != uuid:",
        "if False:",
        "tests/durability/test_damage.py::test_an_identity_of_another_store_is_damage",
    ),
    Mutant(
        "_store/repair.py",
        "return not self.left_out and not any(t.older + t.filled + t.unknown for t in counts)",
        "return not any(t.older + t.filled + t.unknown for t in counts)",
        "tests/durability/test_damage.py::test_what_is_left_out_is_not_complete",
    ),
    Mutant(
        "_store/repair.py",
        "                committed.verify()\n",
        "",
        "tests/durability/test_damage.py::test_what_is_left_out_is_not_complete",
    ),
    Mutant(
        "_store/repair.py",
        "here = rows[rows // BLOCK_ROWS == block] - block * BLOCK_ROWS",
        "here = rows[rows // BLOCK_ROWS == block]",
        "tests/durability/test_damage.py::test_an_initializer_fills_a_row_of_any_block",
    ),
    Mutant(
        "_store/repair.py",
        "which = np.flatnonzero(found.state == WHOLE)",
        "which = np.flatnonzero(found.state != LOST)",
        "tests/durability/test_damage.py::test_mending_does_not_take_the_row_of_the_version_before",
    ),
    Mutant(
        "_store/opening.py",
        "if table.spec.keys != spec.keys:",
        "if False:",
        "tests/test_sessions.py::test_another_table_than_the_one_there_is_an_error",
    ),
    Mutant(
        "_store/opening.py",
        "if rows < spec.rows and not table.spec.grows:",
        "if rows < spec.rows:",
        "tests/test_sessions.py::test_another_table_than_the_one_there_is_an_error",
    ),
    Mutant(
        "_store/opening.py",
        "if each.stat(follow_symlinks=False).st_uid != os.getuid():\n                continue",
        "pass",
        "tests/store/test_create.py::test_what_other_users_left_in_memory_is_theirs",
    ),
    Mutant(
        "_store/opening.py",
        "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "tests/store/test_create.py::test_a_store_in_memory_leaves_those_that_are_in_use",
    ),
    Mutant(
        "_store/opening.py",
        "    if os.getpid() == made_by:\n",
        "    if True:\n",
        "tests/store/test_create.py::test_a_store_in_memory_leaves_those_that_are_in_use",
    ),
    Mutant(
        "_store/opening.py",
        "check_names(store, options.budget, policy)\n        except BaseException:",
        "check_names(store, options.budget, policy)\n        except ZeroDivisionError:",
        "tests/store/test_create.py::test_a_store_that_is_not_opened_is_not_left_locked",
    ),
    Mutant(
        "_store/opening.py",
        "return directory.exists(STORE) or has_manifests(directory)",
        "return directory.exists(STORE)",
        "tests/store/test_create.py::test_a_store_that_lost_its_identity_is_one",
    ),
    Mutant(
        "_store/commit.py",
        'changes["names"] = {**state.manifest.names, draft.keep: changes["version"]}',
        'changes["names"] = {draft.keep: changes["version"]}',
        "tests/store/test_store.py::test_commits_under_names_keep_those_before",
    ),
    Mutant(
        "_store/commit.py",
        "        self.seen = True\n        return error",
        "        return error",
        "tests/store/test_commit_async.py::test_an_error_that_was_asked_for_is_not_raised_again",
    ),
    # What is adopted, locked, patched, restored and copied: nothing unproven, nothing twice.
    Mutant(
        "_store/newer.py",
        "        bad = opened.damaged()\n",
        "        bad: list[int] = []\n",
        "tests/durability/test_adopting.py::test_a_damaged_delta_is_never_adopted",
    ),
    Mutant(
        "_store/newer.py",
        "    if newest.step is not None or newest.payload:\n",
        "    if newest.payload:\n",
        "tests/durability/test_adopting.py::test_what_only_a_manifest_could_say_is_not_guessed",
    ),
    Mutant(
        "_store/newer.py",
        "    if lacking:\n        raise",
        "    if False:\n        raise",
        "tests/durability/test_adopting.py::test_several_versions",
    ),
    Mutant(
        "_store/newer.py",
        "        if info.scalars:\n            raise",
        "        if False:\n            raise",
        "tests/durability/test_adopting.py::test_what_only_a_manifest_could_say_is_not_guessed",
    ),
    Mutant(
        "_store/locking.py",
        "if (host, boot) != (socket.gethostname(), _boot()):",
        "if host != socket.gethostname():",
        "tests/store/test_locking.py::test_the_holder_is_described",
    ),
    Mutant(
        "_store/locking.py",
        "if not self._directory.is_same(LOCK, self._lock_status):",
        "if False:",
        "tests/store/test_locking.py::test_removing_lock_lets_no_second_writer_in",
    ),
    Mutant(
        "_store/locking.py",
        "if not self._directory.is_same(STORE, self._store_status):",
        "if False:",
        "tests/store/test_locking.py::test_a_writer_whose_store_file_is_another_publishes_nothing",
    ),
    Mutant(
        "_store/locking.py",
        "first = versions[-1] + 1",
        "first = versions[-1] + 2",
        "tests/store/test_locking.py::test_readers_are_known_by_their_versions",
    ),
    Mutant(
        "_store/locking.py",
        "for other in self.held - {version}:",
        "for other in ():",
        "tests/store/test_locking.py::test_readers_are_known_by_their_versions",
    ),
    Mutant(
        "_store/locking.py",
        "elif not self._store.lock_range(0, version, exclusive=True):\n            yield False",
        "elif not self._store.lock_range(0, version, exclusive=True):\n            yield True",
        "tests/store/test_locking.py::test_readers_are_known_by_their_versions",
    ),
    Mutant(
        "_store/locking.py",
        "            finally:\n                self._store.unlock_range(0, version)\n",
        "            finally:\n                pass\n",
        "tests/store/test_locking.py::test_readers_are_known_by_their_versions",
    ),
    Mutant(
        "_store/ledger.py",
        "self.last_version += 1  # it may have been a new version",
        "pass",
        "tests/durability/test_versions.py::test_a_damaged_newest_manifest_keeps_its_number",
    ),
    Mutant(
        "_store/ledger.py",
        "self._next = max(self.seq, history.last_number()) + 1",
        "self._next = self.seq + 1",
        "tests/durability/test_strays.py::test_what_is_no_file_is_no_manifest",
    ),
    Mutant(
        "_store/ledger.py",
        "if lacking or ahead:",
        "if ahead:",
        "tests/durability/test_versions.py::test_a_listing_that_contradicts_the_manifests_stops_the_sweep",
    ),
    Mutant(
        "_store/ledger.py",
        "if lacking or ahead:",
        "if lacking:",
        "tests/durability/test_versions.py::test_a_file_that_only_a_later_manifest_can_name_stops_the_sweep",
    ),
    Mutant(
        "_store/ledger.py",
        "        if going and not is_read(self._kept):",
        "        if going:",
        "tests/durability/test_readers.py::test_a_reader_keeps_rows_keys_and_payload",
    ),
    Mutant(
        "_store/ledger.py",
        "if first <= before:",
        "if False:",
        "tests/store/test_needed.py::test_what_goes_is_what_no_other_manifest_names",
    ),
    Mutant(
        "_store/ledger.py",
        "if manifest.step is not None and abs(manifest.step) > 2**63 - 1:",
        "if False:",
        "tests/durability/test_manifests.py::test_an_unreadable_manifest_is_not_published",
    ),
    Mutant(
        "_store/ledger.py",
        "spare = itertools.islice(self._kept, max(0, len(self._kept) - keep))",
        "spare = itertools.islice(self._kept, max(0, len(self._kept) - keep + 1))",
        "tests/store/test_store.py::test_kept_versions_can_be_read_and_others_not",
    ),
    Mutant(
        "_store/patching.py",
        'if manifest.mark != self.old.text("mark"):',
        "if False:",
        "tests/store/test_changes.py::test_patches_are_refused_out_of_order",
    ),
    Mutant(
        "_store/patching.py",
        "if _checksum.mismatches(rows[part], records, expected[part]).size:",
        "if False:",
        "tests/store/test_changes.py::test_every_changed_bit_of_a_patch_is_found",
    ),
    Mutant(
        "_store/patching.py",
        '        state.check_clean("apply a patch")\n',
        "",
        "tests/store/test_changes.py::test_patches_are_refused_by_copies_that_were_changed_and_by_other_stores",
    ),
    Mutant(
        "_store/patching.py",
        "if keys_of(new.manifest, name) != keys_of(old.manifest, name):",
        "if False:",
        "tests/store/test_changes.py::test_a_patch_holds_values_only",
    ),
    Mutant(
        "_store/keeping.py",
        "    if name.isdecimal():\n        raise",
        "    if False:\n        raise",
        "tests/cli/test_restore_keep_release.py::test_keep_restore_and_release",
    ),
    Mutant(
        "_store/updating.py",
        "if copy.identity.uuid == source.uuid:",
        "if False:",
        "tests/store/test_updating.py::test_copies_that_are_refused",
    ),
    Mutant(
        "_store/updating.py",
        "if origin.version > source.version:",
        "if False:",
        "tests/store/test_updating.py::test_a_kept_version",
    ),
    Mutant(
        "_store/updating.py",
        "return files_of(new).continues_keys_of(files_of(base))",
        "return True",
        "tests/store/test_updating.py::test_keys_that_come_go_and_come_again",
    ),
    Mutant(
        "_store/updating.py",
        "return _continues(new, base) or _begins",
        "return _begins",
        "tests/store/test_updating.py::test_keys_of_a_version_that_is_kept_are_not_read",
    ),
    Mutant(
        "_store/updating.py",
        "if old.rows > new.rows:\n        return False",
        "if False:\n        return False",
        "tests/store/test_updating.py::test_tables_by_key_get_new_keys",
    ),
    Mutant(
        "_store/updating.py",
        "if not plan.payload:\n        draft.payload = copy.manifest.payload",
        "if False:\n        draft.payload = copy.manifest.payload",
        "tests/store/test_updating.py::test_scalars_steps_and_payload",
    ),
    Mutant(
        "_store/copy.py",
        "        directory.clear()\n        raise",
        "        raise",
        "tests/store/test_objects.py::test_a_save_that_breaks_off_leaves_nothing",
    ),
    Mutant(
        "_store/copy.py",
        "origin=Origin(manifest.uuid, manifest.version) if is_whole else None,",
        "origin=Origin(manifest.uuid, manifest.version),",
        "tests/store/test_updating.py::test_a_copy_that_omits_damage_is_no_copy_to_bring_up_to_date",
    ),
    Mutant(
        "_store/copy.py",
        "keep=manifest.keep,",
        "",
        "tests/store/test_updating.py::test_copies_keep_as_many_versions_as_the_original",
    ),
    Mutant(
        "_store/payload.py",
        "if (size, found) != (self._info.size, self._info.crc32c):",
        "if size != self._info.size:",
        "tests/durability/test_corruption.py::test_a_flipped_bit_is_noticed",
    ),
    Mutant(
        "_store/payload.py",
        "        self._check_holes(memory)\n        data",
        "        data",
        "tests/durability/test_bounds.py::test_holes_are_read_where_they_are_allowed",
    ),
    Mutant(
        "_store/newer.py",
        "if each.uuid == newest.uuid and each.version > newest.last_version:",
        "if each.version > newest.last_version:",
        "tests/durability/test_adopting.py::test_a_manifest_or_delta_of_another_store_is_not_newer",
    ),
    Mutant(
        "_store/newer.py",
        "if stated is None or stated.store != store:",
        "if stated is None:",
        "tests/durability/test_adopting.py::test_a_manifest_or_delta_of_another_store_is_not_newer",
    ),
    Mutant(
        "_store/newer.py",
        "                _check_delta(directory, name, info, delta, newest.uuid)\n",
        "                pass\n",
        "tests/durability/test_adopting.py::test_a_manifest_is_no_proof_of_files_that_are_damaged",
    ),
    Mutant(
        "_store/newer.py",
        "            _check_keys(directory, name, info)\n",
        "            pass\n",
        "tests/durability/test_adopting.py::test_a_manifest_is_no_proof_of_files_that_are_damaged",
    ),
    Mutant(
        "_store/newer.py",
        "            Payload(directory, payload).verify()\n",
        "            pass\n",
        "tests/durability/test_adopting.py::test_a_manifest_is_no_proof_of_files_that_are_damaged",
    ),
    Mutant(
        "_store/newer.py",
        "if len(own) != sum(each.info.version == version for each in later):",
        "if False:",
        "tests/durability/test_adopting.py::test_two_deltas_of_a_table_are_no_version",
    ),
    Mutant(
        "_store/locking.py",
        "elif self._is_noted and (note := self._lock.read(_NOTE_BYTES)) != self._note:",
        "elif False and (note := self._lock.read(_NOTE_BYTES)) != self._note:",
        "tests/store/test_locking.py::test_a_note_of_another_writer_in_the_lock_file_publishes_nothing",
    ),
    Mutant(
        "_store/locking.py",
        "gaps = [(lo + 1, hi) for lo, hi in pairwise(ends) if hi > lo + 1]",
        "gaps = [(lo + 1, hi) for lo, hi in pairwise(ends) if hi > lo + 2]",
        "tests/store/test_locking.py::test_a_version_between_two_that_are_kept_is_seen",
    ),
    Mutant(
        "_store/ledger.py",
        "directory.filesystem not in _io.TESTED:",
        "False:",
        "tests/durability/test_manifests.py::test_on_an_untested_file_system_a_manifest_is_synced_by_its_name",
    ),
    Mutant(
        "_store/ledger.py",
        "    if len(data) > MAX_BYTES:\n",
        "    if False:\n",
        "tests/durability/test_manifests.py::test_a_manifest_that_no_reader_would_take_is_not_published",
    ),
    Mutant(
        "_store/patching.py",
        'if info.crc32c != (self.payload or {})[name].integer("crc32c"):',
        "if False:",
        "tests/cli/test_diff_patch_log.py::test_a_patch_with_a_damaged_payload_changes_nothing",
    ),
    Mutant(
        "_store/keeping.py",
        '"confirmed": version if before.confirmed >= before.version else before.confirmed,',
        '"confirmed": version,',
        "tests/store/test_store.py::test_versions_that_are_not_confirmed_stay_so_when_one_is_restored",
    ),
    Mutant(
        "_store/keeping.py",
        "        state.check_restorable(older)\n",
        "",
        "tests/durability/test_damage.py::test_a_store_is_not_restored_to_a_version_that_is_damaged",
    ),
    # Upserts, parts, publications, and what changed between versions.
    Mutant(
        "_upsert.py",
        "    if store.uncommitted_rows():\n        raise",
        "    if False:\n        raise",
        "tests/test_upsert.py::test_uncommitted_rows_are_in_the_way",
    ),
    Mutant(
        "_upsert.py",
        "outside = (keys < 0) | (keys >= table.rows)",
        "outside = (keys < 0) | (keys > table.rows)",
        "tests/test_upsert.py::test_rows_of_a_table_without_keys_go_by_id",
    ),
    Mutant(
        "_upsert.py",
        "nbytes = int((~new).sum()) * sum(table.fields[name].nbytes for name in incoming.sources)",
        "nbytes = 0",
        "tests/test_upsert.py::test_rows_to_replace_are_held_against_the_memory",
    ),
    Mutant(
        "_upsert.py",
        "each[order[low:high]]",
        "each[low:high]",
        "tests/test_upsert.py::test_rows_are_replaced_and_new_ones_appended",
    ),
    Mutant(
        "_upsert.py",
        "return joined(own[:], more)",
        "return np.concatenate([own[:], more])",
        "tests/test_upsert.py::test_keys_above_int64_stay",
    ),
    Mutant(
        "sharing.py",
        "    if len(counts) > 1:\n",
        "    if False:\n",
        "tests/cli/test_partitions.py::test_parts_that_differ_make_no_target",
    ),
    Mutant(
        "sharing.py",
        'if other is not None and name not in ("rows", "overflowed"):',
        'if other is not None and name not in ("rows", "overflowed", "version"):',
        "tests/cli/test_partitions.py::test_parts_that_differ_make_no_target",
    ),
    Mutant(
        "sharing.py",
        "if (source.rows, source.dim) != (stop - first, about.dim):",
        "if False:",
        "tests/cli/test_partitions.py::test_parts_that_differ_make_no_target",
    ),
    Mutant(
        "sharing.py",
        "        begun.touch()  #",
        "        pass  #",
        "tests/cli/test_partitions.py::test_an_end_that_is_killed_is_harmless",
    ),
    Mutant(
        "sharing.py",
        "    gone = [each.name for each in files if not each.is_file()]\n",
        "    gone: list[str] = []\n",
        "tests/cli/test_partitions.py::test_parts_that_differ_make_no_target",
    ),
    Mutant(
        "publishing.py",
        "    if store.uncommitted_rows():\n        raise",
        "    if False:\n        raise",
        "tests/test_publishing.py::test_what_is_refused",
    ),
    Mutant(
        "publishing.py",
        "            _check_note(target, note)\n",
        "            pass\n",
        "tests/test_publishing.py::test_what_is_refused",
    ),
    Mutant(
        "publishing.py",
        "            _check_store(place, store.uuid)\n",
        "            pass\n",
        "tests/test_publishing.py::test_what_is_refused",
    ),
    Mutant(
        "publishing.py",
        "for version in others[keep - 1 :]:",
        "for version in others[keep:]:",
        "tests/test_publishing.py::test_a_name_for_the_newest_version",
    ),
    Mutant(
        "publishing.py",
        "for version in others[keep - 1 :]:",
        "for version in others[keep - 2 :]:",
        "tests/test_publishing.py::test_a_name_for_the_newest_version",
    ),
    Mutant(
        "publishing.py",
        "    refuse_inside_store(target)\n",
        "",
        "tests/test_publishing.py::test_what_is_refused",
    ),
    Mutant(
        "publishing.py",
        "reverse=True)\n    others",
        "reverse=False)\n    others",
        "tests/test_publishing.py::test_a_name_for_the_newest_version",
    ),
    Mutant(
        "_store/changes.py",
        "if rows.size or (before is not None and table.rows < before.rows):",
        "if rows.size:",
        "tests/cli/test_keyed.py::test_keys_that_were_removed_are_a_change",
    ),
    Mutant(
        "_store/changes.py",
        "rows.view(RowNumbers) if isinstance(table, KeyedTable) else rows",
        "rows",
        "tests/keys/test_row_numbers.py",
    ),
    Mutant(
        "_keys/given.py",
        '    refuse_row_numbers(keys)\n    check_unmasked(keys, "keys")\n    try:',
        '    check_unmasked(keys, "keys")\n    try:',
        "tests/keys/test_row_numbers.py",
    ),
    Mutant(
        "_table/keyed.py",
        "rows.view(RowNumbers) if isinstance(rows, np.ndarray) else rows",
        "rows",
        "tests/keys/test_row_numbers.py::test_what_topk_returns_is_refused_in_place_of_keys",
    ),
    Mutant(
        "_table/values.py",
        'if hasattr(values, "__array__"):',
        "if isinstance(values, np.ndarray):",
        "tests/table/test_values.py::test_a_frame_is_held_to_the_type_of_its_elements",
    ),
    Mutant(
        "nn/rows.py",
        "        self._to(State.CLEARED if is_written else State.REST)\n        self._passes = 0\n",
        "        self._to(State.CLEARED if is_written else State.REST)\n",
        "tests/training/test_parameter.py::test_a_loop_that_never_steps_is_told",
    ),
    Mutant(
        "_store/changes.py",
        "        found.append(pair.in_new(np.arange(*pair.counts, dtype=np.int64)))\n",
        "",
        "tests/store/test_changes.py::test_added_rows_and_other_fields",
    ),
    Mutant(
        "_store/changes.py",
        "for name in before.keys() ^ after.keys()]",
        "for name in after.keys() - before.keys()]",
        "tests/store/test_changes.py::test_changes_across_folds_and_restored_versions",
    ),
    Mutant(
        "_store/changes.py",
        "every = every[every < count]",
        "pass",
        "tests/cli/test_follow.py::test_keys_that_went",
    ),
    Mutant(
        "_store/row_list.py",
        "last + 1 - first, outcome, version",
        "last - first, outcome, version",
        "tests/durability/test_damage.py::test_repair_of_a_row_in_the_base",
    ),
    Mutant(
        "_upsert.py",
        "outside = (keys < 0) | (keys >= table.rows)",
        "outside = keys >= table.rows",
        "tests/test_upsert.py::test_an_upsert_that_fails_in_the_middle_changes_nothing",
    ),
    Mutant(
        "_upsert.py",
        "            store.rollback()\n        raise",
        "            pass\n        raise",
        "tests/test_upsert.py::test_an_upsert_that_fails_in_the_middle_changes_nothing",
    ),
    Mutant(
        "_upsert.py",
        "        first += len(records)\n        yield",
        "        yield",
        "tests/test_upsert.py::test_rows_of_several_blocks_are_replaced_and_appended",
    ),
    Mutant(
        "_upsert.py",
        "at = ids[low:high] - first",
        "at = ids[low:high]",
        "tests/test_upsert.py::test_rows_of_several_blocks_are_replaced_and_appended",
    ),
    Mutant(
        "_upsert.py",
        "chunk_rows=None, sparse=False",
        "chunk_rows=None",
        "tests/test_upsert.py::test_a_table_that_got_more_rows_takes_the_space_of_all",
    ),
    Mutant(
        "_upsert.py",
        "low, high = np.searchsorted(chosen, [start, start + _KEYS])\n            for",
        "low, high = 0, chosen.size\n            for",
        "tests/test_upsert.py::test_many_new_words_keep_their_rows",
    ),
    Mutant(
        "_upsert.py",
        "if each.dim != (dim := table.fields[name].dim):",
        "if each.dim > (dim := table.fields[name].dim):",
        "tests/test_upsert.py::test_an_upsert_that_fails_in_the_middle_changes_nothing",
    ),
    Mutant(
        "sharing.py",
        '        file.with_suffix(".json").unlink()\n',
        "        pass\n",
        "tests/cli/test_partitions.py::test_a_part_that_is_written_again_is_none_until_it_is_whole",
    ),
    Mutant(
        "sharing.py",
        "lost = sum(each.overflowed for each in notes)",
        "lost = notes[0].overflowed",
        "tests/cli/test_partitions.py::test_what_overflows_in_any_part_is_counted",
    ),
    Mutant(
        "sharing.py",
        "return directory.is_symlink() or all(",
        "return True or all(",
        "tests/cli/test_partitions.py::test_a_directory_of_other_files_is_not_replaced_by_parts",
    ),
    Mutant(
        "_store/changes.py",
        "if self.old.bases != self.new.bases:",
        "if False:",
        "tests/store/test_changes.py::test_rows_of_a_table_that_was_written_anew_are_compared",
    ),
    Mutant(
        "_store/changes.py",
        "elif (before := files_of(old)).info.keys != (after := files_of(new)).info.keys:",
        "elif False:",
        "tests/store/test_changes.py::test_rows_of_a_table_that_was_written_anew_are_compared",
    ),
    Mutant(
        "_store/lineage.py",
        "        last = restored\n",
        "        last = restoring\n",
        "tests/store/test_changes.py::test_ancestors_of_versions_that_were_restored",
    ),
    Mutant(
        "_store/lineage.py",
        "if max(first, begin) <= min(last, until)",
        "if max(first, begin) < min(last, until)",
        "tests/store/test_changes.py::test_ancestors_of_versions_that_were_restored",
    ),
    Mutant(
        "_store/row_list.py",
        "(np.diff(ids) != 1) | (np.diff(images) != 0)",
        "np.diff(ids) != 1",
        "tests/store/test_changes.py::test_runs_of_a_list_of_rows_have_one_outcome",
    ),
    Mutant(
        "_store/row_list.py",
        "(run[0], run[2] + 1, *run[3:]) == (table, first, *outcome)",
        "(run[0], run[2] + 1) == (table, first)",
        "tests/store/test_changes.py::test_runs_of_a_list_of_rows_have_one_outcome",
    ),
    Mutant(
        "_store/following.py",
        "name: np.union1d(one.get(name, empty), other.get(name, empty))",
        "name: other.get(name, empty)",
        "tests/store/test_changes.py::test_rows_of_two_versions_are_told_together",
    ),
    Mutant(
        "_upsert.py",
        "            table.write(at[start:stop], rows)\n",
        "            table.write(at[: stop - start], rows)\n",
        "tests/test_upsert.py::test_rows_of_several_blocks_go_to_their_ids",
    ),
    # What a newer version wrote, and numbers that are consistent and wrong.
    Mutant(
        "_store/versions.py",
        "                except NewerVersionError:\n"
        "                    raise\n"
        "                except FormatError as error:\n"
        "                    manifests[seq] = error",
        "                except FormatError as error:\n                    manifests[seq] = error",
        "tests/durability/test_manifests.py::test_what_a_newer_version_wrote_is_refused_whole",
    ),
    Mutant(
        "_store/versions.py",
        "        uuid = read_identity(directory).uuid\n"
        "    except NewerVersionError:\n"
        "        raise\n",
        "        uuid = read_identity(directory).uuid\n",
        "tests/durability/test_manifests.py::test_an_identity_of_a_newer_version_is_refused_by_repair_too",
    ),
    Mutant(
        "_store/newer.py",
        "            except NewerVersionError:\n                raise\n",
        "",
        "tests/durability/test_manifests.py::test_an_interrupted_commit_of_a_newer_version_is_not_adopted_in_part",
    ),
    Mutant(
        "_strictjson.py",
        'raise NewerVersionError(f"{self.name}: unknown key',
        'raise FormatError(f"{self.name}: unknown key',
        "tests/durability/test_manifests.py::test_what_a_newer_version_wrote_is_refused_whole",
    ),
    Mutant(
        "_strictjson.py",
        '            raise NewerVersionError(\n                f"{self.name}: unknown {key}',
        '            raise FormatError(\n                f"{self.name}: unknown {key}',
        "tests/durability/test_manifests.py::test_what_a_newer_version_wrote_is_refused_whole",
    ),
    Mutant(
        "_disk/images.py",
        "            self._count_outside()\n            if self._used",
        "            0\n            if self._used",
        "tests/durability/test_crafted.py::test_a_row_that_no_table_has_is_not_left_out_of_a_repair_in_silence",
    ),
    Mutant(
        "_disk/images.py",
        "int(((ids < 0) | (ids >= self._rows)).sum())",
        "int((ids >= self._rows).sum())",
        "tests/durability/test_crafted.py::test_a_row_that_no_table_has_is_not_left_out_of_a_repair_in_silence",
    ),
    Mutant(
        "_disk/images.py",
        "int(((ids < 0) | (ids >= self._rows)).sum())",
        "int(((ids < 0) | (ids > self._rows)).sum())",
        "tests/durability/test_crafted.py::test_a_row_that_no_table_has_is_not_left_out_of_a_repair_in_silence",
    ),
    Mutant(
        "_disk/footer.py",
        "return body, run - 1 if run and count >= _RUN_ROWS else None",
        "return body, run - 1 if run else None",
        "tests/durability/test_crafted.py::test_a_footer_does_not_say_which_rows_a_few_records_are_of",
    ),
    Mutant(
        "_disk/keys.py",
        "wrong = np.flatnonzero(index.of_all(keys) < 0)",
        "wrong = np.empty(0, np.int64)",
        "tests/disk/test_keys.py",
    ),
    Mutant(
        "_disk/manifest.py",
        "    if size != footer.file_bytes(rows, width):",
        "    if size < footer.file_bytes(rows, width):",
        "tests/durability/test_manifests.py::test_numbers_of_a_manifest_that_contradict_each_other_are_refused",
    ),
    Mutant(
        "_disk/manifest.py",
        "found_keys.count > spec.rows",
        "found_keys.count > 2**62",
        "tests/durability/test_manifests.py::test_numbers_of_a_manifest_that_contradict_each_other_are_refused",
    ),
    Mutant(
        "_disk/manifest.py",
        "found_keys.count == 0 and any(",
        "found_keys.count < 0 and any(",
        "tests/durability/test_manifests.py::test_numbers_of_a_manifest_that_contradict_each_other_are_refused",
    ),
    Mutant(
        "_disk/manifest.py",
        "not 0 <= number < 2**63 for number in pair",
        "number < 0 for number in pair",
        "tests/durability/test_manifests.py::test_numbers_of_a_manifest_that_contradict_each_other_are_refused",
    ),
    Mutant(
        "_store/partitions.py",
        "(of_part.keys, of_part.layout) == (of_whole.keys, of_whole.layout)",
        "of_part.keys == of_whole.keys",
        "tests/distributed/test_changing.py::test_keys_of_partitions_of_another_shape_are_not_left_out_in_silence",
    ),
    Mutant(
        "_store/repair.py",
        "                if info is shapes[name]",
        "                if info is None",
        "tests/distributed/test_changing.py::test_keys_of_partitions_of_another_shape_are_not_left_out_in_silence",
    ),
]


_LEFT = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "build", "dist")


@contextmanager
def copy(of: Path = ROOT) -> Iterator[Path]:
    """Yield a temporary copy of a tree, compiled modules included."""
    with tempfile.TemporaryDirectory(prefix="tierstore-mutant-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(of, tree, ignore=_LEFT)
        yield tree


def run_tests(tree: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """Run tests of a copy; return pytest's exit code, and its first failure or last line."""
    first = [str(tree), str(tree / "cli"), *filter(None, [os.environ.get("PYTHONPATH")])]
    paths = {"PYTHONPATH": os.pathsep.join(first), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *options, *tests],
            cwd=tree,
            env={**os.environ, **paths},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return _FAILED, f"not done after {_TIMEOUT} s"
    if done.returncode < 0:
        return _FAILED, f"pytest was killed by signal {-done.returncode}"
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return done.returncode, (failed or done.stdout.splitlines() or [done.stderr])[-1]


class Tried(NamedTuple):
    """What became of a mutant."""

    mutant: Mutant
    killed: bool
    text: str


def tried(mutant: Mutant, original: Path, whole: bool) -> Tried:
    """Run the tests that a mutant names and, if these pass and `whole` says so, all tests."""
    start = time.monotonic()
    with copy(original) as tree:
        mutant.apply(tree)
        code, line = run_tests(tree, mutant.tests.split())
        said = {_PASSED: "SURVIVED", _FAILED: "killed  "}.get(code, "NOT RUN ")
        if code == _PASSED and whole:
            code, line = run_tests(tree, [])
            said = "BY OTHERS" if code == _FAILED else said
    seconds = time.monotonic() - start
    text = f"{said} {seconds:4.0f} s  {mutant}\n{'':17}{line[:150]}"
    return Tried(mutant, code == _FAILED, text)


def part(text: str) -> tuple[int, int]:
    """Read 3/8 as a part of MUTANTS."""
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of:
        raise ValueError(text)
    return number, of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="mutants with one in their lines or tests")
    parser.add_argument(
        "-j", "--jobs", type=int, default=processors.usable(), help="mutants at a time"
    )
    parser.add_argument("--part", type=part, default=(1, 1), metavar="N/OF", help="such as 3/8")
    parser.add_argument(
        "--whole", action="store_true", help="try those that survive with all of `make test`"
    )
    given = parser.parse_args()
    number, of = given.part
    chosen = [
        mutant
        for mutant in MUTANTS[number - 1 :: of]
        if not given.words or any(word in f"{mutant} {mutant.tests}" for word in given.words)
    ]
    if not chosen:
        parser.error("no mutant has one of these words")
    with copy() as original:  # which has all modules compiled, once the tests have passed
        tests = sorted({test for mutant in chosen for test in mutant.tests.split()})
        code, line = run_tests(original, tests, "-n", str(given.jobs), "--dist", "worksteal")
        print(f"without a mutant: {line}", flush=True)
        if code != _PASSED:
            return 1
        alive = []
        with ThreadPoolExecutor(given.jobs) as pool:
            trials = [pool.submit(tried, mutant, original, given.whole) for mutant in chosen]
            for trial in as_completed(trials):
                print(trial.result().text, flush=True)
                alive.extend([] if trial.result().killed else [trial.result().text])
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants killed", *alive, sep="\n")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
