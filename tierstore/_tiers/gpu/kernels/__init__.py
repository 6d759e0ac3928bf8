"""CUDA sources of the GPU tier, by theme; `abi.TIER` puts them together."""
