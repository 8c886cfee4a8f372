"""Small models through the runner until every kernel has run, for NVIDIA's checker: wrong accesses and races.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python tests/gpu/every_kernel.py
    compute-sanitizer --tool racecheck python tests/gpu/every_kernel.py --alone [numbers of cases]

The driver's bindings ask for functions that it lacks, which is no error here. racecheck misreads the barriers of
cuDNN's and cuBLAS's kernels (cudnn_..., nvjet_...): what it must not name is a kernel of csrc/. It ends in an error of
its own where kernels overlap, hence --alone: one kernel at a time, no graphs, and fewer and shorter requests, since
each launch takes it a tenth of a second.

Every head dim and element type, graphs whose rows join and leave, chunks over earlier blocks, penalties, log
probabilities, blocks that are gathered, scattered and zeroed. Compares float32 tokens with the CPU's; times nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch  # noqa: E402

from engine.backend.cpu import CPUBackend  # noqa: E402
from engine.backend.cuda import Argument, Gpu  # noqa: E402
from engine.backend.launches import Heads, Launch, copy_blocks  # noqa: E402
from engine.batch import DigestRequest  # noqa: E402
from engine.config import EngineConfig, ModelConfig  # noqa: E402
from engine.cuda_cache import CudaKVCache  # noqa: E402
from engine.cuda_runner import CudaRunner  # noqa: E402
from engine.kv_cache import TORCH_DTYPES, KVCache, kv_layout  # noqa: E402
from engine.kv_digest import block_sum  # noqa: E402
from engine.loader.random_shapes import SHAPES  # noqa: E402
from engine.loader.random_weights import random_tensors  # noqa: E402
from engine.models.cuda_products import Products  # noqa: E402
from engine.models.llama import Llama  # noqa: E402
from engine.runner import ModelRunner  # noqa: E402
from engine.types import SamplingParams  # noqa: E402
from pagewire.local_engine import LocalEngine  # noqa: E402

# head dim, query heads, KV heads, element type, block size, sliding window, rows; with 40, skinny.cu has all of a
# layer's products, and the logits of smaller batches; with 130, attention its longest rings
Case = tuple[int, int, int, str, int, int | None, int]
CASES: list[Case] = [
    (64, 3, 1, "float32", 16, None, 5),
    (128, 4, 2, "float32", 32, 40, 5),
    (64, 3, 1, "bfloat16", 16, None, 40),
    (96, 2, 2, "bfloat16", 64, None, 5),
    (128, 4, 1, "bfloat16", 16, 40, 5),
    (128, 16, 1, "float16", 16, None, 12),
    (256, 2, 1, "float16", 128, None, 5),
    (64, 3, 1, "bfloat16", 16, None, 130),
]


def model_of(head_dim: int, heads: int, kv_heads: int, window: int | None, vocab: int) -> ModelConfig:
    changes = {
        "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": head_dim, "vocab_size": vocab,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "sliding_window": window,
    }  # fmt: skip
    return ModelConfig.from_dict({**SHAPES["tiny"], **changes}, {"eos_token_id": [2, 0]})


def config_of(dtype: str, block_size: int, rows: int) -> EngineConfig:
    return EngineConfig(
        block_size=block_size,
        num_blocks=max(80, 8 * rows),
        max_num_seqs=rows,
        max_num_batched_tokens=48 if rows < 100 else 64 * rows,
        max_model_len=512,
        dtype=dtype,
    )


class Alone(Gpu):
    """One launch at a time: each has ended before the next one begins, and what would be a graph is launched again."""

    def launch(self, launch: Launch, *arguments: Argument, overlap: bool = True, yields: bool = False) -> None:
        super().launch(launch, *arguments, overlap=False, yields=yields)
        self.stream.synchronize()

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        def again() -> None:
            with self.on_stream():
                body()

        again()
        return again


def requests(rows: int, longest: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(0)
    found = []
    lengths = (1, 15, 16, 17, 33, 100, 64)
    for i, length in enumerate((lengths * rows)[:rows]):
        params = SamplingParams(
            temperature=0 if i % 2 else 0.8, seed=i, max_tokens=min(longest, (3, 9, 20)[i % 3]),
            top_p=0.9 if i % 4 == 0 else 1.0, top_k=20 if i % 4 == 2 else 0, min_p=0.05 if i == 4 else 0.0,
            min_tokens=2, stop_token_ids=[11],
            repetition_penalty=1.2 if i in (0, 5) else 1.0, frequency_penalty=0.3 if i == 5 else 0.0,
            logit_bias={7: 2.0} if i == 3 else {}, logprobs=3 if i in (1, 4) else None,
            prompt_logprobs=2 if i == 6 else None,
        )  # fmt: skip
        found.append(([rng.randrange(3, 1000) for _ in range(length)], params))
    return found


def tokens_of(runner: Any, config: EngineConfig, few: bool) -> list[list[int]]:
    """Of more requests than run at a time; few: of each, and of few of them where not all have to run at once."""
    engine = LocalEngine(runner, config)
    most = config.max_num_seqs + 2
    wanted = requests(most if most > 100 else 10, 4) if few else requests(most, 20)
    numbers = [engine.add_request(*each) for each in wanted]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.has_work:
        for number, token, _ in engine.step():
            tokens[number].append(token.token_id)
    engine.audit()
    return [tokens[number] for number in numbers]


def run_case(gpu: Gpu, case: Case) -> None:
    head_dim, heads, kv_heads, dtype, block_size, window, rows = case
    vocab = 1024 if rows > 32 else 1000  # 1000 logits are no whole tiles
    model, config = model_of(head_dim, heads, kv_heads, window, vocab), config_of(dtype, block_size, rows)
    tensors = random_tensors(model, 0, TORCH_DTYPES[dtype], lambda *_: None)
    layout = kv_layout(model, b"m", dtype, block_size, "")
    cache = CudaKVCache(layout, config.num_blocks, gpu)
    weights = Llama(model, {name: tensor.to("cuda") for name, tensor in tensors.items()})
    runner = CudaRunner(weights, config, cache, gpu)
    runner.warm_up()
    few = isinstance(gpu, Alone)
    found = tokens_of(runner, config, few)
    if dtype == "float32":
        cpu = ModelRunner(Llama(model, tensors), config, KVCache(layout, config.num_blocks), CPUBackend())
        assert found == tokens_of(cpu, config, few), f"{case}: other tokens than on the CPU"
    move_blocks(gpu, cache)
    print("ran", *case, flush=True)


def move_blocks(gpu: Gpu, cache: CudaKVCache) -> None:
    """As transports do: bytes out and in, blocks gathered, scattered, digested and zeroed."""
    size = cache.layout.block_bytes
    cache.write(3, 0, bytes(range(256)) * (size // 256))
    assert bytes(cache.block_bytes(3)[:256]) == bytes(range(256))
    other = gpu.pool(4 * size)
    with gpu.on_stream():
        ids, to = gpu.to_device([3, 0]), gpu.to_device([1, 3])
        gpu.launch(copy_blocks(size, 2), other, cache.data, to, ids, overlap=False)
        cache.zero([0, 79])
    gpu.stream.synchronize()
    assert bytes(other[size : 2 * size].cpu().numpy().tobytes()) == bytes(cache.block_bytes(3))
    assert not any(bytes(cache.block_bytes(79)))
    sums = cache.copies.copy(other.data_ptr(), [1], [5])
    assert bytes(cache.block_bytes(5)) == bytes(cache.block_bytes(3)) and sums == [block_sum(cache.block_bytes(5))]
    asked = DigestRequest(3, 0, [1, 2])
    with gpu.on_stream():
        launched = cache.launch_digests([asked])
    gpu.stream.synchronize()
    assert cache.digest(3, 0, [1, 2]) == cache.digests([asked], launched)[0]


def run_wide(gpu: Gpu) -> None:
    """gate_up of more rows and inputs than those models have."""
    if not gpu.clusters:
        return
    with gpu.on_stream():
        x, weight = (torch.randn(rows, 4160, device=gpu.device).half() for rows in (256, 7680))
        for rows in (65, 192, 200):
            out = torch.empty(rows, 3840, dtype=torch.float16, device=gpu.device)
            products = Products(gpu, "float16", Heads(1, 1, 64, 16, 1), 1e-5, [x])
            products.launch_wide(gpu, weight.t(), x[:rows], out)
    gpu.stream.synchronize()
    print("ran wide", flush=True)


def main() -> None:
    torch.set_num_threads(2)
    alone, numbers = "--alone" in sys.argv, [one for one in sys.argv[1:] if one != "--alone"]
    gpu = Alone() if alone else Gpu()
    for number in map(int, numbers or range(len(CASES) + 1)):
        if number < len(CASES):
            run_case(gpu, CASES[number])
        else:
            run_wide(gpu)


if __name__ == "__main__":
    main()
