"""zarr arrays with size limits for decoded chunks.

A codec takes the decoded size from the bytes of the chunk, so a small file may expand without
limit. Here the decoded size is determined first. Codecs that do not allow this are refused.

numcodecs decodes into an array that is given, and refuses more than it holds, but for zlib and bz2,
which unpack all first. It says nothing of a chunk that holds less, whose rows would end in what was
in memory before.
"""

from __future__ import annotations

import bz2
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from numcodecs.abc import Codec as NumCodec
from zarr import Array, AsyncArray
from zarr.abc.codec import BytesBytesCodec, Codec
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)

from tierstore.errors import FormatError

_ZSTD_BLOCK_BYTES = 128 << 10
MORE_BYTES = 2 * _ZSTD_BLOCK_BYTES
"""Extra bytes of a decoded chunk, for a checksum and partial blocks."""


def zstd_size(data: memoryview) -> int:
    """Return the decompressed size of zstd frames, or an upper bound; raises ValueError.

    This is the sum of the sizes in the frame headers, or else of the maximum block sizes. Format:
    RFC 8878.
    """
    stated = held = at = 0
    all_stated = True
    while at < len(data):
        (magic,) = struct.unpack_from("<I", data, at)
        if magic & 0xFFFFFFF0 == 0x184D2A50:  # a skippable frame
            at += 8 + struct.unpack_from("<I", data, at + 4)[0]
            continue
        if magic != 0xFD2FB528:
            raise ValueError("not a zstd frame")
        descriptor = data[at + 4]
        single_segment = descriptor >> 5 & 1
        at += 5 + (not single_segment) + (0, 1, 2, 4)[descriptor & 3]
        size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
        stated += int.from_bytes(data[at : at + size_bytes], "little") + 256 * (size_bytes == 2)
        all_stated = all_stated and size_bytes > 0
        at, blocks = _after_blocks(data, at + size_bytes)
        held += blocks
        at += 4 * (descriptor >> 2 & 1)
    return stated if all_stated else held


def _after_blocks(data: memoryview, at: int) -> tuple[int, int]:
    """Return the end of a frame's blocks, and the maximum size of their contents."""
    total, last = 0, False
    while not last:
        if at + 3 > len(data):
            raise ValueError("a zstd frame is truncated")
        header = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        total += size if kind != 2 else _ZSTD_BLOCK_BYTES
        at += 3 + (1 if kind == 1 else size)
    return at, total


def _blosc_size(data: memoryview) -> int:
    """Return the decompressed size in the header, which Blosc enforces. Format: Blosc chunk."""
    if len(data) < 16 or int.from_bytes(data[12:16], "little") != len(data):
        raise ValueError(f"{len(data)} bytes differ from the length of the Blosc chunk")
    return int.from_bytes(data[4:8], "little")


def _lz4_size(data: memoryview) -> int:
    return int.from_bytes(data[:4], "little")


_SIZES: dict[str, Callable[[memoryview], int]] = {
    "zstd": zstd_size,
    "blosc": _blosc_size,
    "lz4": _lz4_size,
}
"""The decoded size that a chunk declares, for codecs that enforce it."""


def _unpacked(new: Callable[[], Any]) -> Callable[[memoryview, int], bytes]:
    """Return a function that decompresses consecutive streams up to `most` + 1 bytes."""

    def unpack(data: memoryview, most: int) -> bytes:
        parts, rest = bytearray(), bytes(data)
        while rest:
            stream = new()
            parts += stream.decompress(rest, most + 1 - len(parts))
            if len(parts) > most:
                break
            if not stream.eof:
                raise ValueError("its end is missing")
            rest = stream.unused_data
        return bytes(parts)

    return unpack


_UNPACKERS: dict[str, Callable[[memoryview, int], bytes]] = {
    "gzip": _unpacked(lambda: zlib.decompressobj(31)),
    "zlib": _unpacked(lambda: zlib.decompressobj(15)),
    "bz2": _unpacked(bz2.BZ2Decompressor),
}
"""Codecs that are decoded here, since their streams do not declare a size."""


def _decode(name: str, data: memoryview, most: int, theirs: Callable[[], Any]) -> Any:
    """Decode a chunk to at most `most` bytes; raises ValueError if there are more."""
    if name in _SIZES:
        size = _SIZES[name](data)
        if size > most:
            raise ValueError(f"a chunk of {most} bytes at most would unpack to {size}")
        return theirs()
    unpacked = _UNPACKERS[name](data, most)
    if len(unpacked) > most:
        raise ValueError(f"a chunk of {most} bytes at most would unpack to more")
    return unpacked


class _Bounded(BytesBytesCodec):  # type: ignore[misc]
    """A codec of zarr v3 that checks the decoded size of a chunk before decoding it."""

    is_fixed_size = False

    def __init__(self, name: str, codec: BytesBytesCodec) -> None:
        self._name = name
        self._codec = codec

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        most = _nbytes(chunk_spec.shape, chunk_spec.dtype.to_native_dtype().itemsize) + MORE_BYTES
        data = memoryview(chunk_bytes.as_numpy_array()).cast("B")
        if self._name in _SIZES:
            _decode(self._name, data, most, lambda: None)
            return await self._codec._decode_single(chunk_bytes, chunk_spec)
        return chunk_bytes.from_bytes(_decode(self._name, data, most, lambda: None))

    async def _encode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        raise NotImplementedError

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        raise NotImplementedError


class _BoundedFilter(NumCodec):  # type: ignore[misc]
    """A compressor of zarr v2 that does the same."""

    codec_id = "bounded"

    def __init__(self, codec: Any, most: int) -> None:
        self._codec = codec
        self._most = most

    def decode(self, buf: Any, out: Any = None) -> Any:
        data = memoryview(buf).cast("B")
        return _decode(self._codec.codec_id, data, self._most, lambda: self._codec.decode(buf))

    def encode(self, buf: Any) -> Any:
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        return dict(self._codec.get_config())


def _nbytes(shape: tuple[int, ...], itemsize: int) -> int:
    for length in shape:
        itemsize *= length
    return itemsize


_NAMES = {ZstdCodec: "zstd", GzipCodec: "gzip", BloscCodec: "blosc"}


def _bounded_codec(codec: Codec) -> Codec:
    if isinstance(codec, ShardingCodec):
        return replace(
            codec,
            codecs=tuple(map(_bounded_codec, codec.codecs)),
            index_codecs=tuple(map(_bounded_codec, codec.index_codecs)),
        )
    if type(codec) in (BytesCodec, TransposeCodec, Crc32cCodec):
        return codec
    if type(codec) in _NAMES:
        return _Bounded(_NAMES[type(codec)], codec)
    raise FormatError(f"chunks are stored by {type(codec).__name__}, which is not supported")


def bounded(array: Any) -> Any:
    """Return a zarr array over the same chunks that limits the decoded size of each.

    Raises FormatError for codecs other than those of zarr's specification, and in v2 zstd, blosc,
    lz4, gzip, zlib and bz2.
    """
    metadata = array.metadata
    if metadata.zarr_format == 3:
        codecs = tuple(map(_bounded_codec, metadata.codecs))
        metadata = replace(metadata, codecs=codecs)
    else:
        if metadata.filters:
            raise FormatError("chunks are stored through filters, which are not supported")
        codec = metadata.compressor
        if codec is not None and codec.codec_id not in (*_SIZES, *_UNPACKERS):
            raise FormatError(f"chunks are stored by {codec.codec_id!r:.100}, not supported")
        if codec is not None:
            most = _nbytes(array.chunks, array.dtype.itemsize) + MORE_BYTES
            metadata = replace(metadata, compressor=_BoundedFilter(codec, most))
    inner = array.async_array
    return Array(AsyncArray(metadata, inner.store_path, inner.config))
