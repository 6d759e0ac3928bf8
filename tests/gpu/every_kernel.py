"""A little work that launches every kernel, for compute-sanitizer; see CONTRIBUTING.md.

compute-sanitizer --tool racecheck python -m tests.gpu.every_kernel
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.gpu.conftest import Place, cuda_device
from tests.gpu.model import Twin
from tierstore._tiers.gpu.abi import TIER
from tierstore.policy import lfu, lru


class Watching:
    """A device that remembers which kernels were launched."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.launched: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def passed(self, event: Any) -> bool:
        return False  # so that batches behind a prefetch launch `fence`

    def load(self, source: str, name: str, macros: Any, **how: bool) -> Any:
        launch, blocks = self._device.load(source, name, macros, **how)

        def noted(*given: int) -> None:
            self.launched.add(name)
            launch(*given)

        return noted, blocks


def reach_every_kernel(place: Place) -> set[str]:
    """Do the work on a device, check its results, and return the kernels that it took."""
    watching = Watching(place.device)
    place = Place(watching, place.kind)
    everything = np.arange(90)
    for host_slots, policy, sparse in ((90, lru(), True), (90, lru(), False), (40, lfu(1), False)):
        with Twin(
            place,
            rows=90,
            record_bytes=48,
            slots=12,
            host_slots=host_slots,
            chunk=9,
            policy=policy,
            sparse=sparse,
        ) as twin:
            twin.work(12, sizes=(5, 40))
            while twin.leases:
                twin.release()
            twin.lease(everything)  # some rows stay in host memory, or in the lease's spill
            twin.scatter(twin.leases[0][0], everything, 16, 32)
            twin.check_lease(*twin.leases[0])
            twin.release()
            twin.check_features()
            twin.tier.fetch(place.put(everything[:6]), 2)
            twin.write(everything[::-1].copy(), 0, 16)
            twin.tier._now = 2**30 - 2
            for _ in range(70 if policy.name == "lfu" else 2):
                twin.read(everything[:3])
            if host_slots < 90:
                fail_once(twin)
            else:
                replay(twin, everything[::-1].copy())
            twin.check()
    return watching.launched


def replay(twin: Twin, ids: np.ndarray) -> None:
    """Read as a CUDA graph does, and admit what it has read."""
    out, stream = twin.place.noise(ids.size, 48), twin.place.device.current_stream()
    twin.tier.prepare_replays(stream)
    twin.tier.capture(twin.place.put(ids), out, 0, 48, within=range(90), stream=stream)
    np.testing.assert_array_equal(twin.place.get(out), twin.truth[ids])
    twin.tier.adapt(stream)


def fail_once(twin: Twin) -> None:
    """Make the tiers below fail in the middle of a batch, which is then undone."""
    read, rows = twin.host.read, twin.tier
    twin.host.read = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
    try:
        rows.read(twin.place.put(np.arange(90)), twin.place.noise(90, 48))
    except ZeroDivisionError:
        pass
    finally:
        twin.host.read = read  # type: ignore[method-assign]


def all_kernels() -> set[str]:
    return set(TIER.kernels)


if __name__ == "__main__":
    missing = all_kernels() - reach_every_kernel(Place(cuda_device(), "pinned"))
    print("every kernel ran" if not missing else f"these kernels did not run: {sorted(missing)}")
