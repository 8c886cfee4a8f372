"""Log probabilities from the card are those of engine/sampler.py: tokens, ranks, the k best, ties and infinities."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.backend.cuda import Gpu  # noqa: E402
from engine.cuda_logprobs import launch_reports  # noqa: E402
from engine.sampler import prompt_logprobs  # noqa: E402
from engine.types import TokenLogprob  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu()


def of_the_card(
    gpu: Gpu, logits: torch.Tensor, rows: list[int], targets: list[int], counts: list[int], by_row: bool
) -> list[TokenLogprob]:
    with gpu.on_stream():
        gpu.stream.wait_stream(torch.cuda.default_stream())
        reports = launch_reports(gpu, logits, rows, gpu.to_device(targets), counts, by_row=by_row)
    gpu.stream.synchronize()
    return reports.read()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("vocab", [320, 1000, 49152, 50257, 128256])
def test_reports_are_those_of_the_sampler(gpu: Gpu, vocab: int, dtype: str) -> None:
    logits = (torch.randn(12, vocab, device="cuda") * 3).to(getattr(torch, dtype))
    logits[3] = 1.5  # all are equal
    logits[4, ::2] = -torch.inf
    logits[5, vocab // 2 :] = logits[5].max()  # more best ones than are asked for
    logits[6] = -torch.inf
    logits[6, 7] = 2.0
    targets = [int(target) for target in torch.randint(0, vocab, (12,))]
    targets[5], targets[6] = vocab - 1, 7
    counts = [0, 1, 5, 20, 20, 20, 3, 2, 0, 20, 7, 1]
    for by_row, rows in ((True, [11, 0, 3, 4, 5, 6, 9]), (False, list(range(12)))):
        wanted = [targets[row] for row in rows]
        ks = [counts[row] for row in rows]
        found = of_the_card(gpu, logits, rows, targets if by_row else wanted, ks, by_row)
        for row, target, k, report in zip(rows, wanted, ks, found, strict=True):
            (expected,) = prompt_logprobs(logits[row : row + 1].cpu(), [target], k)
            assert (report.token_id, report.rank) == (expected.token_id, expected.rank)
            assert [one.token_id for one in report.top] == [one.token_id for one in expected.top]
            pairs = zip([report, *report.top], [expected, *expected.top], strict=True)
            for ours, theirs in pairs:
                assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-6)
