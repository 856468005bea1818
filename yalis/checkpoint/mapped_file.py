"""A weight file mapped into memory. Its pages are released as soon as they have been copied."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from yalis.errors import YalisError, YalisFailure

#: Bytes converted at a time. Loading needs a small multiple of this in addition to the model.
CHUNK_BYTES = 8 << 20


class MappedFile:
    """A private (copy-on-write) mapping: torch requires a writable buffer, and writes do not reach the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        try:
            if path.exists() and not path.is_file():  # opening a named pipe would wait for a writer
                raise YalisError(f"{path} is not a regular file; fetch it again")
            with path.open("rb") as file:
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise YalisError(f"cannot read {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise YalisError(f"{path} is empty; fetch it again") from error
        self.size = len(self.buffer)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the bytes at `offset` as a tensor without a copy; pages are read on first access."""
        self.check_size()
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        if offset % dtype.itemsize:  # allowed in safetensors, but not in torch
            raw = torch.frombuffer(self.buffer, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
            return raw.clone().view(dtype).view(shape)
        return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset).view(shape)

    def check_size(self) -> None:
        """Raise YalisFailure if the file was truncated: reading beyond its end would kill the process with SIGBUS."""
        if self.buffer.size() < self.size:
            raise YalisFailure(
                f"{self.path} was truncated to {self.buffer.size()} of {self.size} bytes while it was read; fetch it "
                "again, and replace a model only while no job loads it"
            )

    def close(self) -> None:
        with suppress(BufferError):  # a view is still in use, and keeps the mapping open
            self.buffer.close()

    def prefetch_columns(self, offset: int, rows: range, row_bytes: int, columns: range) -> None:
        """Start to read these bytes (`columns`) of each of the rows of a matrix at `offset`, if others can be skipped.

        A page fault makes the kernel read ahead as in a sequential file. Of a narrow slice of the columns it would read
        whole rows, on every host that holds such a slice. Whole rows are left to it, because that costs least.
        """
        if not hasattr(mmap, "MADV_WILLNEED") or row_bytes - len(columns) <= mmap.PAGESIZE:
            return
        advise, page, length = self.buffer.madvise, mmap.PAGESIZE, len(columns)
        first = offset + rows.start * row_bytes + columns.start
        for start in range(first, first + len(rows) * row_bytes, row_bytes):
            within = start % page
            advise(mmap.MADV_WILLNEED, start - within, within + length)

    def release(self, start: int, stop: int) -> None:
        """Release the pages of these bytes from this process; they stay in the page cache."""
        start -= start % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and stop > start:
            self.buffer.madvise(mmap.MADV_DONTNEED, start, min(stop, self.size) - start)


def row_chunks(rows: range, row_bytes: int) -> Iterator[range]:
    """Yield `rows` in chunks of about CHUNK_BYTES."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))
