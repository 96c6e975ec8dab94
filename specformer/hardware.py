"""The machine: what a number was measured on, and in which dtype on how many threads it decodes fastest."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from specformer import native
from specformer.matmul import linear, packed_matmul_available

GIB = 1024**3
PROBE_PARAMETERS = 2**25
"""Weights that the probe streams: more than most CPUs' caches hold, as decoding does."""
BUSY_PERCENT = 25
"""Use of all cores by others above which a measurement would be theirs, not the machine's."""
PROBE_GAIN = 0.9
"""What torch's own thread count and bfloat16 are left for: less than this share of their seconds."""


def describe(dtype: Any = None, device: str | torch.device = "cpu") -> dict[str, Any]:
    """This machine and this code, as one flat record.

    dtype: what the measurement ran in, a torch dtype or its name. device: where it ran.
    Keys: cpu (model name), cores (int, usable), threads (int, torch's), memory_gib (float),
    kernels ("native" or "torch", see specformer.native), accelerator (name or "none"), torch,
    transformers (versions), dtype (name or ""), commit (12 digits, "" outside git), dirty (bool:
    tracked files differ from the commit).
    """
    commit, dirty = _git()
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "kernels": "native" if torch.device(device).type == "cpu" and native.library() else "torch",
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
    if record.get("kernels") == "native":
        parts.append("C++ kernels")
    return ", ".join(parts)


@dataclass(frozen=True)
class Speed:
    """Seconds of one pass over the probe's weights with 1 and with 16 rows."""

    threads: int
    dtype: str
    rows_1: float
    rows_16: float

    @property
    def cost(self) -> float:
        """Both sizes weigh the same, whichever takes longer."""
        return (self.rows_1 * self.rows_16) ** 0.5


def fastest(hidden: int, intermediate: int, dtype: str = "auto") -> tuple[int, str]:
    """Threads and dtype in which this CPU decodes a base LLM of these sizes fastest.

    dtype: "auto" chooses between float32 and bfloat16; a named one is kept and only the threads are chosen;
    OMP_NUM_THREADS in the environment is kept likewise. Measured in about a second and kept, with the
    numbers, in `cache_file()`; a file that is damaged or cannot be written means measuring again. While
    others use the machine nothing is measured: torch's own threads, and bfloat16 where the CPU has it.
    """
    own = torch.get_num_threads()
    fixed = own if "OMP_NUM_THREADS" in os.environ else None
    if dtype not in ("auto", "float32", "bfloat16") or (dtype != "auto" and fixed):
        return own, dtype
    speeds = _recall(hidden, intermediate)
    if speeds is None:
        return own, _dtypes()[-1] if dtype == "auto" else dtype
    fitting = [s for s in speeds if dtype in ("auto", s.dtype) and fixed in (None, s.threads)]
    if not fitting:  # bfloat16 was asked for on a CPU that has no instructions for it
        return own, dtype
    best = min(fitting, key=lambda s: s.cost)
    # a moment's noise must not decide for good: near ties go to what torch itself would do
    usual = min((s for s in fitting if s.threads == own), key=lambda s: s.dtype)
    chosen = best if best.cost < PROBE_GAIN * usual.cost else usual
    return chosen.threads, chosen.dtype


def cache_file() -> Path:
    """Where `fastest` keeps what it measured: a JSON file in the user's cache folder."""
    return native.cache_folder() / "decode_speed.json"


def _recall(hidden: int, intermediate: int) -> list[Speed] | None:
    """This machine's speeds, measured unless the cache file has them; None if it is too busy for that."""
    counts = _thread_counts()
    key = f"{_cpu()}, threads {counts}, torch {torch.__version__}, {hidden} x {intermediate}"
    file = cache_file()
    try:
        return [Speed(**record) for record in read_cache(file)[key]]
    except (KeyError, TypeError):
        pass
    if busy():
        return None
    speeds = measure_speeds(hidden, intermediate, counts)
    write_cache(file, key, [asdict(s) for s in speeds])
    return speeds


def busy() -> bool:
    """Whether others use so much of the cores (BUSY_PERCENT) that a measurement would be theirs; 0.2 s."""
    return psutil.cpu_percent(0.2) > BUSY_PERCENT


def read_cache(file: Path) -> dict[str, Any]:
    """What was measured before, by key; nothing where the file is missing or damaged."""
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def write_cache(file: Path, key: str, value: Any) -> None:
    """Add a measurement to what others have kept meanwhile; a read-only home is let be."""
    known = read_cache(file) | {key: value}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(known, indent=2) + "\n")
        temporary.replace(file)
    except OSError:  # the next process measures for itself
        pass


def _thread_counts() -> list[int]:
    """1, the physical and the logical cores that this process may use, and what torch uses now."""
    usable = len(os.sched_getaffinity(0))
    physical = min(psutil.cpu_count(logical=False) or usable, usable)
    return sorted({1, physical, usable, torch.get_num_threads()})


@torch.no_grad()
def measure_speeds(hidden: int, intermediate: int, threads: Sequence[int]) -> list[Speed]:
    """Time a feed-forward's matmuls, as decoding runs them (`matmul.linear`), over enough of them that the
    weights come from memory: float32, and bfloat16 where the CPU has it; the best of three passes each.
    """
    intermediate = min(
        intermediate, max(1, PROBE_PARAMETERS // (3 * hidden))
    )  # of a large base a part will do
    # of a tiny one a few layers, or calling them would be all that is timed
    copies = min(64, max(1, PROBE_PARAMETERS // (3 * hidden * intermediate)))
    before, speeds = torch.get_num_threads(), []
    try:
        for name in _dtypes():
            dtype = getattr(torch, name)
            layers = [
                (
                    linear(torch.full((2 * intermediate, hidden), 0.01, dtype=dtype)),
                    linear(torch.full((hidden, intermediate), 0.01, dtype=dtype)),
                )
                for _ in range(copies)
            ]
            for count in threads:
                torch.set_num_threads(count)
                seconds = []
                for rows in (1, 16):
                    x = torch.full((rows, hidden), 0.01, dtype=dtype)
                    passes = []
                    for _ in range(4):
                        start = time.perf_counter()
                        for up, down in layers:
                            down(up(x)[:, :intermediate])
                        passes.append(time.perf_counter() - start)
                    seconds.append(min(passes[1:]))  # the first one wakes the threads
                speeds.append(Speed(count, name, *seconds))
    finally:
        torch.set_num_threads(before)
    return speeds


def _dtypes() -> list[str]:
    """float32, and bfloat16 where the CPU has instructions and torch a packed matmul for it."""
    packed = packed_matmul_available(torch.empty(1, 1, dtype=torch.bfloat16))
    return ["float32", "bfloat16"] if packed and _has_bfloat16() else ["float32"]


def _has_bfloat16() -> bool:
    # Private names of torch 2.x, so look before calling: a CPU that cannot tell runs in float32.
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, check)() for check in checks if hasattr(torch.cpu, check))


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
