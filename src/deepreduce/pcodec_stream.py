"""Arrays through the pcodec package, in chunks, with hostile bytes kept in check. What a chunk holds is up to the codec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from .errors import CorruptError
from .reader import Reader, varint

if TYPE_CHECKING:
    from pcodec import ChunkConfig

CHUNK = 1 << 18
"""Numbers in a chunk; each has a histogram of its own."""

_HEADER_BYTES = 2


def compress(numbers: NDArray[Any], config: ChunkConfig) -> bytes:
    """The header of pcodec, and every chunk with its length in front."""
    from pcodec.wrapped import FileCompressor

    file = FileCompressor()
    parts = [file.write_header()]
    for chunk in _chunks(numbers):
        compressor = file.chunk_compressor(chunk, config)
        coded = compressor.write_meta() + compressor.write_page(0)
        parts += [varint(len(coded)), coded]
    return b"".join(parts)


def decompress_into(part: Reader, numbers: NDArray[Any], first_byte: bytes = b"") -> None:
    """Fill `numbers`: pcodec writes there and nowhere else. Every chunk must begin with `first_byte`, the form that the writer chose."""
    from pcodec.wrapped import FileDecompressor

    kind = f"{numbers.dtype.kind}{8 * numbers.itemsize}"
    header = bytes(part.take(_HEADER_BYTES))
    try:
        file, header_bytes = FileDecompressor.new(header)
        if header_bytes != _HEADER_BYTES:
            raise CorruptError(f"a pcodec header of {header_bytes} bytes, not {_HEADER_BYTES}")
        for chunk in _chunks(numbers):
            coded = bytes(part.take(part.varint()))
            if not coded.startswith(first_byte):
                raise CorruptError("a pcodec chunk in a form that this codec never writes")
            decompressor, meta_bytes = file.chunk_decompressor(coded, kind)
            progress, page_bytes = decompressor.read_page_into(coded[meta_bytes:], chunk.size, chunk)
            if progress.n_processed != chunk.size or meta_bytes + page_bytes != len(coded):
                raise CorruptError(f"a pcodec chunk of {len(coded)} bytes does not hold {chunk.size} numbers exactly")
    except RuntimeError as error:
        raise CorruptError(f"pcodec refuses the bytes: {error}") from error


def _chunks(numbers: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return (numbers[start : start + CHUNK] for start in range(0, numbers.size, CHUNK))
