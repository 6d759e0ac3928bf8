"""A kernel that copies rows and does nothing else: the limit of a link for random rows."""

from __future__ import annotations

from typing import Any

__all__ = ["BareCopy"]

_SOURCE = r"""
typedef long long i64;

extern "C" __global__ void copy(char *host, char *device, const i64 *ids, i64 rows, int bytes,
                                int to_host) {
    const i64 warp = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    for (i64 i = warp; i < rows; i += (i64)gridDim.x * blockDim.x / 32) {
        uint4 *const far = (uint4 *)(host + ids[i] * bytes);
        uint4 *const near = (uint4 *)(device + i * bytes);
        for (int unit = threadIdx.x & 31; unit < bytes / 16; unit += 32) {
            if (to_host) far[unit] = near[unit];
            else near[unit] = far[unit];
        }
    }
}
"""
_BLOCKS, _THREADS = 264, 256


class BareCopy:
    """Copies rows between a table that the GPU can address and a tensor on the GPU."""

    def __init__(self, host: int, nbytes: int) -> None:
        """Compile; `host` is the address of row 0, `nbytes` those of a row, a multiple of 16."""
        import cupy

        self._kernel = cupy.RawModule(code=_SOURCE, options=("--std=c++11",)).get_function("copy")
        self._host, self._nbytes = host, nbytes

    def __call__(self, ids: Any, device: Any, *, to_host: bool) -> None:
        """Copy rows `ids` `(n,)`, int64 on the GPU, into `device` `(n, ...)`, or back `to_host`."""
        import numpy as np

        self._kernel(
            (_BLOCKS,),
            (_THREADS,),
            (
                np.uint64(self._host),
                np.uint64(device.data_ptr()),
                np.uint64(ids.data_ptr()),
                np.int64(len(ids)),
                np.int32(self._nbytes),
                np.int32(to_host),
            ),
        )
