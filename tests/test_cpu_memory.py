"""Memory that training on a CPU keeps."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

# Prints how many new pages the system had to give for a block of 320 MiB, and for one of 256 MiB when that is freed.
FAULTS = """
import resource, sys
import torch
from finetune.cpu_memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for mebibytes in (320, 256):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(mebibytes << 18)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep what they like")
def test_freed_memory_is_kept() -> None:
    def faults(how: str) -> list[int]:
        command = [sys.executable, "-c", FAULTS, how]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        return [int(number) for number in done.stdout.split()]

    huge_pages = 256 // 2  # of 2 MiB each: the fewest that a new block can take
    first, second = faults("kept")
    assert second < huge_pages <= faults("given back")[1]
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert first < 10_000  # where small pages would be 81,920
