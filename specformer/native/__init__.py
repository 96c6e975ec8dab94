"""The decode step's small operations in C++ (kernels.cpp), compiled once by the machine's own compiler.

A decode step on a CPU is a few hundred matmuls with some microseconds of work between them; PyTorch's
operators there cost more in calls and temporaries than in arithmetic, and its attention is made for long
queries. Where there is no compiler, or SPECFORMER_NATIVE=0 is set, the same is done by PyTorch's operators.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-march=native")
FLAGS += ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
HEAD_SIZES = (16, 32, 64, 96, 128)
"""Head sizes that `attention` is compiled for (the end of kernels.cpp)."""
MOST_QUERIES = 128
"""Queries of a key/value head up to which `attention` beats PyTorch's, which is made for long ones."""

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_ARGUMENTS = {
    "rms_norm": "ppp ii f t",
    "swiglu": "pp i p ii t",
    "rope": "pppp iiii f t",
    "write": "pp i ppp iiiiii",
    "attention": "p i pppp iiiiiii f t",
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "t": ctypes.c_int}


def compiler() -> str | None:
    """The C++ compiler: CXX where it is set, else g++ or clang++; None where there is none."""
    asked = os.environ.get("CXX")
    names = shlex.split(asked)[:1] if asked else ["g++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def cache_folder() -> Path:
    """Where what is built or measured once for a machine is kept, in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specformer"


Kernels = Mapping[tuple[str, torch.dtype], Callable[..., None]]


@cache
def library() -> Kernels | None:
    """The compiled kernels, built on first use (2-3 s) and kept in the user's cache folder; None where there
    is no compiler, and where it fails, which is said once."""
    cxx = compiler()
    if os.environ.get("SPECFORMER_NATIVE") == "0" or cxx is None or sys.platform != "linux":
        return None
    try:
        file = cache_folder() / f"kernels-{_key(cxx)}.so"
        if not file.exists():
            build(cxx, file)
        return _declare(ctypes.CDLL(str(file)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        print(f"decoding goes on with PyTorch's operators, {cxx} built no kernels: {detail}", file=sys.stderr)
        return None


def build(cxx: str, file: Path) -> None:
    """Compile kernels.cpp into `file`, atomically: processes that start together do not disturb each other.

    Raises subprocess.CalledProcessError with the compiler's words, OSError where the folder is read-only.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [cxx, *FLAGS, "-o", str(made), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        made.replace(file)


def _key(cxx: str) -> str:
    """Changes with the source, the flags, the compiler and the CPU that -march=native looks at."""
    version = subprocess.run([cxx, "--version"], check=True, capture_output=True, text=True).stdout
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    cpu = [line for line in lines if line.startswith(("model name", "flags", "Features"))][:2]
    parts = (SOURCE.read_text(), *FLAGS, version, *cpu)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _declare(found: ctypes.CDLL) -> Kernels:
    kernels = {}
    for name, letters in _ARGUMENTS.items():
        for dtype, suffix in _NAMES.items():
            kernel = kernels[name, dtype] = getattr(found, f"{name}_{suffix}")
            kernel.argtypes = [_TYPES[letter] for letter in letters.replace(" ", "")]
            kernel.restype = None
    return kernels


def serves(x: Tensor, y: Tensor) -> bool:
    """Whether the kernels take these tensors: on a CPU, both float32 or both bfloat16, nothing to
    differentiate, nothing being traced for torch.compile."""
    return (
        x.dtype in _NAMES
        and y.dtype == x.dtype
        and x.is_cpu
        and y.is_cpu
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and library() is not None
    )


def _call(name: str, dtype: torch.dtype, *arguments: float | int | None) -> None:
    kernels = library()
    assert kernels is not None  # `serves` was asked first
    kernels[name, dtype](*arguments)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., H) scaled to a mean square of 1 over H, times weight (H,); rounded once, like F.rms_norm."""
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    _call(
        "rms_norm",
        x.dtype,
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.numel() // size,
        size,
        eps,
        torch.get_num_threads(),
    )
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, (..., I) each; the two may be halves of one tensor (chunks of its last dimension)."""
    if gate.stride() != up.stride() or not _rows(gate):
        gate, up = gate.contiguous(), up.contiguous()
    size = gate.shape[-1]
    out = gate.new_empty(gate.shape)
    stride = gate.stride(-2) if gate.dim() > 1 else size
    _call(
        "swiglu",
        gate.dtype,
        gate.data_ptr(),
        up.data_ptr(),
        stride,
        out.data_ptr(),
        gate.numel() // size,
        size,
        torch.get_num_threads(),
    )
    return out


def _rows(x: Tensor) -> bool:
    """Whether x (..., n, size) is rows at one distance, each of them dense."""
    outer = all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))
    return x.stride(-1) == 1 and outer


def rope_(heads: Tensor, cos: Tensor, sin: Tensor, rotated: int, scale: Tensor | None, eps: float) -> None:
    """RoPE of the first `rotated` heads of heads (B, n, heads, D), dense, in place; cos and sin (B, n, 1, D)
    as `layers.rotate` takes them. With scale (rotated, D), RMSNorm per head goes before (Qwen3)."""
    B, n, count, D = heads.shape
    # names keep them alive until the kernel has read them
    cos, sin = cos.expand(B, n, 1, D).contiguous(), sin.expand(B, n, 1, D).contiguous()
    _call(
        "rope",
        heads.dtype,
        heads.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        None if scale is None else scale.data_ptr(),
        B * n,
        count * D,
        rotated,
        D,
        eps,
        torch.get_num_threads(),
    )


def write(k: Tensor, v: Tensor, kv: Tensor, rows: Tensor | None, positions: Tensor) -> None:
    """k and v (B, n, Hkv, D) go to `positions` (B, n) of `rows` (B,) int64 (None: the first B) of a store's
    layer (2, rows, Hkv, capacity, D)."""
    B, n, kv_heads, D = k.shape
    _call(
        "write",
        kv.dtype,
        k.data_ptr(),
        v.data_ptr(),
        k.stride(1),
        kv.data_ptr(),
        None if rows is None else rows.data_ptr(),
        positions.data_ptr(),
        B,
        n,
        kv_heads,
        D,
        kv.shape[1],
        kv.shape[3],
    )


def token_major(x: Tensor) -> bool:
    """Whether x (B, n, heads, D) has its heads side by side and its tokens at one distance."""
    B, n, heads, D = x.shape
    dense = x.stride(3) == 1 and x.stride(2) == D
    return dense and (B == 1 or x.stride(0) == n * x.stride(1))


def attention(q: Tensor, kv: Tensor, rows: Tensor | None, positions: Tensor) -> Tensor:
    """Query i of row b sees the keys at positions <= positions[b, i], which increase along a row.

    q (B, n, Hq, D), token-major; kv (2, rows, Hkv, capacity, D); rows (B,) int64 or None for the first B;
    positions (B, n) int64 -> (B, n, Hq * D). D must be one of HEAD_SIZES.
    """
    B, n, heads, D = q.shape
    if D not in HEAD_SIZES:
        raise ValueError(f"head size {D} is not one of {HEAD_SIZES}")
    out = q.new_empty(B, n, heads * D)
    _call(
        "attention",
        q.dtype,
        q.data_ptr(),
        q.stride(1),
        kv.data_ptr(),
        None if rows is None else rows.data_ptr(),
        positions.data_ptr(),
        out.data_ptr(),
        B,
        n,
        heads,
        kv.shape[2],
        D,
        kv.shape[1],
        kv.shape[3],
        D**-0.5,
        torch.get_num_threads(),
    )
    return out
