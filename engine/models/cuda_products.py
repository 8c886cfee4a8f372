"""The products of a decode step on CUDA: which of our kernels computes one, and what it is told.

A product comes with all that is before and after it (norm; residual, silu, rotation and KV write) where one of our
kernels is faster than cuBLAS with the small kernels around it. Owns the tensor maps of weights and workspaces, and the
norms' gains, which it multiplies into the weights behind them. Launches no cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.backend import products
from engine.backend.cuda import Gpu
from engine.backend.launches import Heads
from engine.backend.products import WHOLE, Ending
from engine.backend.tensor_map import tensor_map
from engine.backend.wide import wide, wide_shape
from engine.models.llama import Llama


class Products:
    """`workspaces` are those that products read, whole: copies of their last rows may reach beyond what is in use."""

    def __init__(self, gpu: Gpu, dtype: str, heads: Heads, eps: float, workspaces: Sequence[Tensor]) -> None:
        self._gpu, self._dtype, self._heads, self._eps = gpu, dtype, heads, eps
        self._workspaces = list(workspaces)
        self._maps: dict[tuple[int, int, int], bytes] = {}

    def find(
        self, outputs: int, inputs: int, rows: int, ending: Ending, norm: bool, room: int = WHOLE
    ) -> products.Product | None:
        heads = self._heads if ending is Ending.ROPE else None
        return products.product(
            outputs, inputs, rows, self._dtype, ending, norm=norm, heads=heads, hopper=self._gpu.clusters, room=room
        )

    def launch(
        self, gpu: Gpu, weight: Tensor, x: Tensor, norm: Tensor | None, bias: Tensor | None, out: Tensor,
        ending: Ending, rope: bytes | None = None, room: int = WHOLE,
    ) -> bool:  # fmt: skip
        """out [rows, ...] from x [rows, inputs] and weight [inputs, outputs]; False where cuBLAS is faster."""
        rows, (inputs, columns) = x.shape[0], weight.shape
        outputs = columns // (2 if ending is Ending.SILU else 1)
        found = self.find(outputs, inputs, rows, ending, norm is not None, room)
        if found is None:
            return False
        more = () if rope is None else (rope,)
        if found.shape is None:
            gpu.launch(found.launch, weight.t(), x, norm, bias, out, rows, self._eps, *more)
        else:
            w_map = self._map(weight.t(), products.weight_box(ending, found.shape))
            x_map = self._map(self._rest(x), found.shape.columns)
            stages = inputs // found.shape.inputs
            gpu.launch(found.launch, w_map, x_map, bias, out, rows, outputs, stages, self._eps, *more)
        return True

    def launch_wide(self, gpu: Gpu, weight: Tensor, x: Tensor, out: Tensor) -> None:
        """Gate and up and silu of many rows, which are normalized already: where `wide_shape` has a cut."""
        (rows, inputs), outputs = x.shape, out.shape[1]
        shape = wide_shape(outputs, inputs, rows, self._dtype)
        assert shape is not None, "other kernels are faster"
        maps = self._map(weight.t(), shape.outputs), self._map(self._rest(x), shape.rows)
        gpu.launch(wide(outputs, rows, self._dtype, shape), *maps, out, rows, outputs, inputs // 64)

    def _rest(self, x: Tensor) -> Tensor:
        """The workspace from the first row of x to its end."""
        for whole in self._workspaces:
            offset = x.data_ptr() - whole.data_ptr()
            if 0 <= offset < whole.nbytes:
                return whole[offset // (whole.stride(0) * whole.element_size()) :]
        raise AssertionError("a product reads workspaces only")

    def _map(self, matrix: Tensor, box_rows: int) -> bytes:
        key = matrix.data_ptr(), matrix.shape[0], box_rows
        if key not in self._maps:
            self._maps[key] = tensor_map(matrix, box_rows)
        return self._maps[key]


@torch.inference_mode()
def fold_norms(weights: Llama) -> None:
    """Multiplies the gains of the layers' norms into the weights behind them, in place, and leaves ones: skinny.cu
    takes no gains. In 16 bits this rounds once, as multiplying the gain into every row of x would."""
    for layer in weights.layers:
        for norm, weight in ((layer.attention_norm, layer.qkv), (layer.mlp_norm, layer.gate_up)):
            weight.mul_(norm[:, None])
            norm.fill_(1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight, out=out)
    return torch.addmm(bias, x, weight, out=out)


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    residual.addmm_(x, weight)
    if bias is not None:
        residual.add_(bias)
