"""What the C library does with the memory of tensors that are freed, in processes of their own."""

import os
import platform
import subprocess
import sys

import pytest

# Page faults of a tensor that fits where one was freed, then the growth of the process, in pages, over
# tensors of one size, each freed before the next.
PROGRAM = """
import resource
from pathlib import Path

import torch
from parallel.heap import give_back, keep_freed

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

print(keep_freed())
torch.ones(65 << 18)  # aligned memory needs some bytes of room: a MiB more than the next
before = faults()
torch.ones(64 << 18)
print(faults() - before)
before, between = resident(), []
for _ in range(8):
    tensor = torch.ones(64 << 18)
    between.append(bytearray(4096))  # stays, behind the tensor
    del tensor
    give_back()
print(resident() - before)
"""
PAGES = (64 << 20) // os.sysconf("SC_PAGE_SIZE")


def measured(**more: str) -> tuple[bool, int, int]:
    """(whether freed memory is kept, page faults of a second tensor, pages that stay of eight in turn)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, check=True)
    kept, faults, growth = done.stdout.split()
    return kept == "True", int(faults), int(growth)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc is left as it is")
def test_freed_memory_is_kept_and_given_back_when_asked() -> None:
    kept, faults, growth = measured()
    assert kept and faults < PAGES // 100
    assert growth < PAGES // 10


def test_what_the_environment_says_of_malloc_stays() -> None:
    kept, faults, _ = measured(MALLOC_MMAP_THRESHOLD_="1048576")
    assert not kept
    assert faults > PAGES // 2  # as it comes, each page is cleared again: the test above measures something
