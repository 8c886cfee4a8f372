"""A small model's large batch on a card: two halves side by side give what the whole batch gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability()[0] < 9:
    pytest.skip("older cards decode all rows on one stream", allow_module_level=True)

from engine.backend.cuda import Gpu  # noqa: E402
from engine.config import ModelConfig  # noqa: E402
from engine.cuda_cache import CudaKVCache  # noqa: E402
from engine.kv_cache import kv_layout  # noqa: E402
from engine.loader.random_shapes import SHAPES  # noqa: E402
from engine.loader.random_weights import random_tensors  # noqa: E402
from engine.models.cuda_decode import DecodeInputs, DecodeSteps, Places  # noqa: E402
from engine.models.llama import Llama  # noqa: E402
from engine.models.llama_cuda import CudaLlama  # noqa: E402

pytestmark = pytest.mark.gpu
MOST, WIDTH = 256, 8


@pytest.fixture(scope="module")
def parts() -> tuple[Gpu, DecodeSteps, CudaKVCache]:
    gpu, config = Gpu(), replace(ModelConfig.from_dict(SHAPES["smollm2-135m"]), num_layers=4)
    tensors = {name: one.cuda() for name, one in random_tensors(config, 0, torch.bfloat16, lambda *_: None).items()}
    layout = kv_layout(config, b"m", "bfloat16", 16, "")
    cache = CudaKVCache(layout, MOST * WIDTH, gpu)
    model = CudaLlama(Llama(config, tensors), layout, gpu, MOST, 16 * WIDTH)._steps
    assert model._halves, "this shape and card decode in two lanes"
    return gpu, model, cache


def inputs_of(seed: int) -> DecodeInputs:
    made = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 16 * WIDTH, (MOST,), generator=made, dtype=torch.int32)
    tables = torch.randperm(MOST * WIDTH, generator=made).to(torch.int32).view(MOST, WIDTH)
    tokens = torch.randint(0, 49152, (MOST,), generator=made, dtype=torch.int32)
    places = Places((lengths - 1).cuda(), tables.cuda(), None)
    return DecodeInputs(tokens.cuda(), lengths.cuda(), places)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [192, 195, 256])
def test_two_lanes_give_the_logits_of_one(parts: tuple[Gpu, DecodeSteps, CudaKVCache], rows: int) -> None:
    gpu, model, cache = parts
    kept = torch.randn_like(cache.data)
    halves, logits = model._halves, []
    inputs = inputs_of(rows)
    gpu.catch_up()
    for lanes in ((), halves):
        model._halves = lanes
        held: list[torch.Tensor] = []
        replay = gpu.capture(lambda held=held: held.append(model.decode(inputs, rows, cache.data)))
        for seed in (1, 2):
            changed = inputs_of(seed)
            gpu.stream.synchronize()
            for mine, new in ((inputs.tokens, changed.tokens), (inputs.lengths, changed.lengths),
                              (inputs.places.positions, changed.places.positions)):  # fmt: skip
                mine.copy_(new)
            cache.data.copy_(kept)  # a step writes its tokens' K and V
            gpu.catch_up()
            replay()
            gpu.stream.synchronize()
            logits.append(held[-1].float()[(inputs.lengths > 0)[:rows]].clone())
    for one, two in zip(logits[:2], logits[2:], strict=True):
        assert torch.isfinite(two).all()
        assert (one - two).abs().max() < 0.03 * one.abs().max()
        assert torch.cosine_similarity(one, two).min() > 0.999
