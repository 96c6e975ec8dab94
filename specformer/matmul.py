"""The matmul of every linear layer at inference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]


def packed_matmul_available(weight: Tensor) -> bool:
    """Whether oneDNN's prepacked matmul serves this weight: bfloat16 on a CPU that has it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """`x -> x @ weight.T + bias` for inference.

    On a bfloat16 CPU the weight is reordered once into oneDNN's blocked layout: plain `F.linear` reorders it
    on every call, which costs 1.2-2x at decoding sizes. The packed copy doubles this weight's memory.
    """
    if not packed_matmul_available(weight):
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    run, key, features = torch.ops.mkldnn._linear_pointwise, next(_keys), weight.shape[0]
    _packed[key] = packed

    def matmul(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _packed_linear(x, key, features, bias)
        return run(x, packed, bias, "none", [], "")

    return matmul


# torch.compile takes no tensor in oneDNN's layout, so compiled code asks for a packed weight by number. They
# are counted, so that the next process finds the same code in torch's cache. `matmul` holds the weight.
_keys = count()
_packed: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


@torch.library.custom_op("specformer::packed_linear", mutates_args=())
def _packed_linear(x: Tensor, key: int, features: int, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, _packed[key], bias, "none", [], "")


@_packed_linear.register_fake
def _(x: Tensor, key: int, features: int, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], features)
