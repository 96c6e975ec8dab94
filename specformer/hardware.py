"""What a number was measured on: it stands beside every table and figure."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

GIB = 1024**3


def describe(dtype: Any = None, device: str | torch.device = "cpu") -> dict[str, Any]:
    """This machine and this code, as one flat record.

    dtype: what the measurement ran in, a torch dtype or its name. device: where it ran.
    Keys: cpu (model name), cores (int, usable), threads (int, torch's), memory_gib (float),
    accelerator (name or "none"), torch, transformers (versions), dtype (name or ""), commit
    (12 digits, "" outside git), dirty (bool: tracked files differ from the commit).
    """
    commit, dirty = _git()
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "accelerator": _accelerator(torch.device(device)),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "dtype": "" if dtype is None else str(dtype).removeprefix("torch."),
        "commit": commit,
        "dirty": dirty,
    }


def caption(record: Mapping[str, Any]) -> str:
    """One short line of a describe() record (or of a row that holds its columns)."""
    place = record["cpu"]
    if record["accelerator"] != "none":
        place = f"{record['accelerator']}, host {place}"
    parts = [f"{place}, {record['threads']} of {record['cores']} cores"]
    if record["dtype"]:
        parts.append(str(record["dtype"]))
    parts.append(f"torch {record['torch']}")
    return ", ".join(parts)


def peak_memory() -> float:
    """Largest resident memory of this process so far, in GiB."""
    import resource  # not on Windows; this keeps the rest of the module importable there

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB  # Linux counts in KiB


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine() or "unknown"


def _accelerator(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "none" if device.type == "cpu" else device.type


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _git() -> tuple[str, bool]:
    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        # An installed copy may lie inside somebody else's repository: is this file tracked there?
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return (
            git("rev-parse", "--short=12", "HEAD").strip(),
            bool(git("status", "--porcelain", "--untracked-files=no").strip()),
        )
    except (OSError, subprocess.CalledProcessError):
        return "", False
