"""Which bytes of a file the kernel has read: its pages in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path


def resident_bytes(path: Path) -> int:
    """Return how many bytes of a file are in the page cache."""
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages
        )
        del first  # the mapping cannot be closed before
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def evict(path: Path) -> None:
    """Remove a file from the page cache, which not every file system does."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
