"""Every benchmark runs with tiny arguments each night and answers its question.

What it measures then means nothing: no figure is compared with a target or with another.
"""

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.every import every

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("bench_*.py"))
TINY = {
    "bench_attach": ["--rows", "20000", "--batch", "500", "--gigabytes", "2"],
    "bench_bookkeeping": ["--slots", "4096", "--batch", "200"],
    "bench_billion_rows": ["--rows", "50000", "--budget-mib", "16"],
    "bench_commit": ["--rows", "5000"],
    "bench_commit_protocols": ["--rows", "5000"],
    "bench_export": ["--rows", "300", "--formats", ".npy", ".vec"],
    "bench_row_memory_cap": [
        *("--device", "cpu", "--mib", "4", "--batch", "64", "--steps", "4"),
    ],
    "bench_shared_space": ["--rows", "3000", "--batch", "64", "--batches", "6"],
    "bench_hit_rates": ["--rows", "2000", "--batch", "128"],
    "bench_cached_read": ["--rows", "20000", "--repeat", "1"],
    "bench_capped_epoch": ["--rows", "20000", "--batch", "512", "--cap", "300000000"],
    "bench_capped_tables": [
        *("--device", "cpu", "--mib", "4", "--dim", "8", "--samples", "32", "--steps", "4"),
    ],
    "bench_cold_reads": ["--rows", "20000", "--batch", "500"],
    "bench_host_read": ["--rows", "5000", "--batch", "300"],
    "bench_keys": ["--rows", "3000", "--batch", "100", "--map-rows", "5000", "--map-batch", "999"],
    "bench_keyed_arrival": ["--new", "300", "--batch", "300", "--steps", "20"],
    "bench_keyed_step": ["--rows", "3000", "--batch", "200", "--dim", "8"],
    "bench_keyed_opening": [
        *("--rows", "5000", "--batch", "300", "--expiry-rows", "3000"),
        *("--read-rows", "2000", "--dim", "8"),
    ],
    "bench_gpu_many_tables": [
        *("--device", "cpu", "--rows", "5000", "--samples", "16", "40", "--dims", "8"),
        *("--bags", "3", "--bag-samples", "8", "--seconds", "1"),
    ],
    "bench_gpu_ranks": [
        *("--device", "cpu", "--rows", "3000", "--samples", "16", "--dim", "8"),
        *("--partitions", "4", "--dense-ms", "1"),
    ],
    "bench_gpu_torchrec": [
        *("--device", "cpu", "--rows", "3000", "--samples", "16", "--dim", "8"),
        *("--partitions", "4"),
    ],
    "bench_fresh_process": ["--rows", "300", "--dim", "8"],
    "bench_core_parts": ["--repeat", "1"],
    "bench_reading_threads": ["--rows", "3000", "--dim", "8"],
    "bench_following": ["--rows", "5000", "--seconds", "1"],
    "bench_import": [],
    "bench_command_line": ["--rows", "300", "--dim", "4", "--repeat", "1"],
    "bench_text": ["--rows", "300", "--dim", "4"],
    "bench_checksums": ["--rows", "50"],
    "bench_near": ["--rows", "3000", "--dim", "8"],
    "bench_diff": ["--rows", "3000", "--dim", "8", "--changed", "50"],
    "bench_many_tables": ["--rows", "5000", "--batch", "64"],
    "bench_memory": ["--budget", "2000000", "--batch", "512"],
    "bench_power_cut": ["--rows", "400", "--writers", "tierstore", "--systems", "ext4"],
    "bench_plan": ["--rows", "5000", "--batch", "300"],
    "bench_plan_times": ["--rows", "5000", "--batch", "300", "--seconds", "0.02"],
    "bench_reads_beside_misses": ["--rows", "4000", "--batch", "300", "--reads", "50"],
    "bench_recovery": ["--rows", "100000"],
    "bench_three_tiers": [
        *("--rows", "3000", "--dim", "8", "--ids", "300", "--device", "cpu", "--threads", "1"),
        *("--model-ms", "1"),
    ],
    "bench_small_tier": ["--rows", "300", "--ids", "40"],
    "bench_small_steps": ["--rows", "3000", "--dims", "8", "--ids", "20", "300"],
    "bench_speedtorch_memory": ["--rows", "40000", "--dim", "8", "--batch", "500"],
    "bench_speedtorch_scale": ["--part", "3000", "--steps", "2"],
    "bench_speedtorch_tables": ["--rows", "5000", "--dim", "8", "--batch", "300"],
    "bench_thousand_tables": ["--tables", "12"],
    "bench_verify": ["--mib", "1", "--turn-ms", "100"],
    "bench_train_end_to_end": ["--rows", "2000", "--batch", "128", "--steps", "8"],
    "bench_transfer_techniques": ["--rows", "5000", "--dim", "8", "--batch", "300"],
}
NEEDS = {
    "bench_bookkeeping": "cachetools",
    "bench_capped_tables": "torch",
    "bench_host_read": "torch",
    "bench_row_memory_cap": "torch",
    "bench_train_end_to_end": "torch",
    "bench_gpu_many_tables": "torch",
    "bench_gpu_ranks": "torch",
    "bench_gpu_torchrec": "torch",
    "bench_many_tables": "torch",
    "bench_small_steps": "torch",
    "bench_small_tier": "torch",
    "bench_three_tiers": "torch",
    **{name: "torch" for name in TINY if "speedtorch" in name or "transfer" in name},
}


def test_every_benchmark_that_needs_no_gpu_is_run_here():
    assert set(TINY) >= {name for name in SCRIPTS if not name.startswith("bench_gpu_")}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.nightly
def test_the_benchmark_runs(tmp_path, name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *TINY[name]]
    command += ["--repeat", "2", "--output", str(tmp_path), "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (result,) = tmp_path.iterdir()
    answer = json.loads(result.read_text())
    assert answer["question"] in done.stdout
    assert answer["must_move"]
    assert answer["rows"]
    assert all(map(math.isfinite, answer["ratios"].values()))
    assert answer["machine"]["cpus"] >= 1


@every(path=sorted((ROOT / "benchmarks/results").glob("*.json")))
def test_committed_results_belong_to_a_benchmark(path):
    answer = json.loads(path.read_text())
    assert f"bench_{path.stem}" in SCRIPTS
    assert answer["met"] in (True, False, None)
    assert len(answer["load_before_and_after"]) == 2


def compare(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks/compare.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_figures_are_printed_beside_those_of_the_results():
    printed = compare("bookkeeping", "--", *TINY["bench_bookkeeping"], "--repeat", "2")
    assert "ours" in printed and "yours" in printed
    ours = json.loads((ROOT / "benchmarks/results/bookkeeping.json").read_text())["ratios"]
    name, ratio = next(iter(ours.items()))
    assert name in printed and f"{ratio:.3g}" in printed


def test_every_result_can_be_compared():
    listed = {line.split()[0] for line in compare("--list").splitlines()}
    assert listed == {path.stem for path in (ROOT / "benchmarks/results").glob("*.json")}
    assert all((ROOT / f"benchmarks/bench_{name}.py").exists() for name in listed)


def comparison():
    spec = importlib.util.spec_from_file_location("compare", ROOT / "benchmarks/compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_of_the_readme_are_those_of_the_results():
    """In its table, in the order of the command that measures them and prints them beside."""
    module = comparison()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("## Measured") : text.index("`python benchmarks/compare.py`")]
    said = [module.README[name].said(ratios_of(name)[ratio]) for name, ratio in claims(module)]
    assert re.findall(r"\*\*([\d.]+)\*\*", table) == said
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    cells = re.findall(r"\| ([\d.]+)[^|]*\| `compare.py (\w+)` \|", page)
    assert cells == list(zip(said, module.README, strict=True))
    cold, read = ratios_of("cold_reads"), ratios_of("gpu_read")
    assert f"{cold['times Lance take']:.1f} of Lance" in table
    assert f"{cold['times memmap']:.0f} of a memmap" in table
    most = max(1 / read[name] for name in read if name.startswith("all hits / F.embedding"))
    assert f"0.97 to {most:.1f}, as batches grow" in table


def claims(module):
    return [(name, claim.ratio) for name, claim in module.README.items()]


def ratios_of(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["ratios"]


def test_a_figure_of_the_readme_is_printed_beside_what_it_is_here():
    module = comparison()
    yours = module.published("host_read")
    yours["ratios"] = yours["ratios"] | {"of torch.index_select, 2 threads": 1.25}
    printed = module.beside("host_read", module.published("host_read"), yours)
    assert "the README says 2.5; here that is 1.2" in printed
    assert "* of torch.index_select, 2 threads" in printed
