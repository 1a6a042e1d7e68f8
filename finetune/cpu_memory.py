"""How the C library handles the memory of a process that trains on a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT_BLOCK = 1 << 30  # bytes: blocks up to this size are kept
KEPT_IN_ALL = (1 << 31) - 1  # bytes: the largest number that mallopt takes


def keep_freed_memory() -> None:
    """Keep what one training step frees for the next one, and have the first GiB in huge pages.

    glibc gives large blocks back to the system, which clears each page when it is wanted again: 6 % of a step. Huge
    pages are another 4 %; torch's own setting for them (``THP_MEM_ALLOC_ENABLE``) begins every block with a new one,
    and takes more memory. Other C libraries have no such settings, and are left alone.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # the last one is Windows', of CDLL(None)
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_IN_ALL)
        library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        library.free.argtypes = [ctypes.c_void_p]
        library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        size = KEPT_BLOCK - mmap.PAGESIZE  # as large as what comes from the heap can be; nothing here touches it
        block = library.malloc(size)
        if block:
            begin = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
            pages = (block + size - begin) // mmap.PAGESIZE
            library.madvise(begin, pages * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
            library.free(block)
