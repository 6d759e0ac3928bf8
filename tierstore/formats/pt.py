""".pt: what `torch.save` wrote, read without running the file's code (weights only). Needs torch.

Either a tensor, or a dict of tensors, such as a state dict, in which names may be nested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.errors import FormatError, MissingExtraError
from tierstore.formats.choice import choose
from tierstore.formats.files import open_input, parsing
from tierstore.formats.keys import Keys
from tierstore.formats.seam import Array, Format, Source, Wanted
from tierstore.spec import DTYPES

__all__ = ["FORMAT"]

MAX_DEPTH = 16
_KEYS = "keys"


class _PtSource(Source):
    def __init__(self, path: Path, tensor: Any, keys: Keys | None) -> None:
        rows, dim = tensor.shape
        super().__init__(path, rows, dim, _dtype_name(tensor))
        self._tensor = tensor
        self._keys = keys

    @property
    def keys(self) -> Keys | None:
        return self._keys

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        for start in range(0, self.rows, block_rows):
            block = self._tensor[start : start + block_rows].contiguous()
            if self.dtype == "bfloat16":
                block = block.view(_torch().int16)
            array = block.numpy().view(DTYPES[self.dtype])
            array.flags.writeable = False  # it may be the tensor itself
            yield array

    def close(self) -> None:
        self._tensor = self._tensor[:0].clone()


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingExtraError(
            "reading .pt files needs torch: pip install 'tierstore[torch]'"
        ) from None
    return torch


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _open(path: Path, wanted: Wanted) -> Source:
    torch = _torch()
    open_input(path).close()
    with parsing(path, ".pt file of tensors alone", Exception):
        # The mapping is private: nothing can reach the file.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    if isinstance(loaded, torch.Tensor):
        if not _is_matrix(loaded):
            raise FormatError(
                f"{path}: holds {_describe(loaded)}; need floats of shape (rows, dim)"
            )
        return _PtSource(path, _checked(path, loaded), None)

    tensors = dict(_flatten(loaded, torch.Tensor)) if isinstance(loaded, Mapping) else {}
    matrices = {name: _describe(tensor) for name, tensor in tensors.items() if _is_matrix(tensor)}
    others = {name: _describe(tensor) for name, tensor in tensors.items()}
    tensor = _checked(path, tensors[choose(path, wanted, matrices, others)])
    return _PtSource(path, tensor, _integer_keys(path, tensors, tensor.shape[0]))


def _describe(tensor: Any) -> str:
    return f"{_dtype_name(tensor)} {tuple(tensor.shape)}"


def _flatten(
    entries: Mapping[Any, Any], tensor_type: type, prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of nested dicts, their names joined by dots."""
    for name, entry in entries.items():
        if isinstance(entry, tensor_type):
            yield f"{prefix}{name}", entry
        elif isinstance(entry, Mapping) and depth < MAX_DEPTH:
            yield from _flatten(entry, tensor_type, f"{prefix}{name}.", depth + 1)


def _is_matrix(tensor: Any) -> bool:
    return (
        str(tensor.layout) == "torch.strided"
        and tensor.dim() == 2
        and tensor.device.type == "cpu"
        and _dtype_name(tensor) in DTYPES
    )


def _checked(path: Path, tensor: Any) -> Any:
    """Return the tensor without history, its elements shown to lie within its storage.

    The reader of mapped archives takes offsets and strides as the file gives them.
    """
    tensor = tensor.detach()
    last = tensor.storage_offset()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (length - 1) * stride
    available = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.numel() and not 0 <= last < available:
        raise FormatError(
            f"{path}: {_describe(tensor)} reaches beyond the {available} elements stored"
        )
    return tensor


def _integer_keys(path: Path, tensors: Mapping[str, Any], rows: int) -> Keys | None:
    keys = tensors.get(_KEYS)
    if keys is None or _dtype_name(keys) != "int64" or tuple(keys.shape) != (rows,):
        return None
    return np.array(_checked(path, keys).numpy(), np.int64)


FORMAT = Format((".pt",), _open)
