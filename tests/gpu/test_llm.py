"""An LLM on the card gives back all that it took, whichever thread was the last to hold it."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.backend.cuda import CudaError, Gpu  # noqa: E402
from pagewire import LLM, SamplingParams  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GIB = 1 << 30


def test_a_pool_ends_with_its_last_tensor_in_whichever_thread() -> None:
    gpu = Gpu()
    made: list[torch.Tensor] = []
    before, _ = gpu.free_bytes()
    thread = threading.Thread(target=lambda: made.append(gpu.pool(GIB)))
    thread.start()
    thread.join()
    part = made.pop()[-16:]
    part.fill_(7)
    assert gpu.free_bytes()[0] <= before - GIB, "a part of it is still in use"
    assert part.cpu().tolist() == [7] * 16
    del part
    assert gpu.free_bytes()[0] >= before - (4 << 20)


def test_a_pool_that_does_not_fit_says_what_is_needed_and_what_is_free() -> None:
    with pytest.raises(CudaError, match=rf"^{1 << 50} bytes of GPU memory are needed and \d+ of \d+ are free$"):
        Gpu().pool(1 << 50)


def test_a_closed_llm_gives_its_memory_back() -> None:
    arguments = dict(device="cuda", dtype="float32", max_model_len=2048, kv_cache_memory_bytes="4GiB")
    left = []
    for _ in range(3):
        with LLM("random:smollm2-135m", **arguments) as llm:
            llm.generate({"prompt_token_ids": [5] * 40}, SamplingParams(max_tokens=8), use_tqdm=False)
        left.append(torch.cuda.mem_get_info()[0])
    assert min(left[1:]) >= left[0] - (8 << 20), f"not all of it comes back: {left} bytes are free"
