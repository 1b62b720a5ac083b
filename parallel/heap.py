"""The memory of tensors on a CPU, as glibc hands it out."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h

_library = ctypes.CDLL(None)


def is_ours() -> bool:
    """Whether malloc is glibc's, and the environment has no settings of it (MALLOC_...)."""
    return hasattr(_library, "gnu_get_libc_version") and not any(n.startswith("MALLOC_") for n in os.environ)


def keep_freed() -> bool:
    """Have glibc keep what tensors have freed, for the next ones; whether it does, which takes `is_ours`.

    A step takes and frees large tensors by the hundred. As it comes, glibc gives each back to the kernel,
    which clears every page of the next one: a tenth of a step in bf16.
    """
    # No separate mappings, and no end of the heap that is too large: -1 is never reached.
    return is_ours() and bool(_library.mallopt(M_MMAP_MAX, 0) and _library.mallopt(M_TRIM_THRESHOLD, -1))


def give_back() -> None:
    """What is free now, to the kernel: a bound for what is lost between tensors that stay.

    torch asks for aligned memory, for which the hole of a tensor of the same size is too small by some bytes.
    """
    if is_ours():
        _library.malloc_trim(0)
