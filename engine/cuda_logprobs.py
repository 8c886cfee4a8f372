"""Log probabilities of tokens on a card: launched behind the step that makes the logits, read when that step is read.

The same reports as engine.sampler makes, by csrc/logprobs.cu, without waiting for the card in between. Keeps no logits:
what is launched reads them before the stream's next step overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backend import launches
from engine.backend.cuda import Gpu
from engine.types import Candidate, TokenLogprob


@dataclass(frozen=True, slots=True)
class Reports:
    """One for each of `counts`, which says how many of the best tokens it has. `values` is on the host once the step is
    done."""

    counts: Sequence[int]
    values: Tensor  # int32 [reports, 3 + 2 * the largest count]: token, rank, log probability, then pairs

    def read(self) -> list[TokenLogprob]:
        """Once what was launched is done."""
        ints, floats = self.values.tolist(), self.values.view(torch.float32).tolist()
        return [_report(*each) for each in zip(ints, floats, self.counts, strict=True)]


def launch_reports(
    gpu: Gpu, logits: Tensor, rows: Sequence[int], tokens: Tensor, counts: Sequence[int], *, by_row: bool
) -> Reports:
    """About rows of `logits` and, of int32 `tokens`, the one of the same row or (not `by_row`) of the same place."""
    most = max(counts)
    out = torch.empty(len(rows), 3 + 2 * most, dtype=torch.int32, device=logits.device)
    dtype = str(logits.dtype).removeprefix("torch.")
    launch = launches.logprobs(logits.shape[1], len(rows), dtype)
    gpu.launch(launch, logits, gpu.to_device(rows), tokens, int(by_row), most, out, overlap=False)
    return Reports(counts, gpu.to_host(out))


def _report(ints: Sequence[int], floats: Sequence[float], count: int) -> TokenLogprob:
    end = 3 + 2 * count
    pairs = sorted(zip(ints[3:end:2], floats[4:end:2], strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprob(ints[0], floats[2], ints[1], tuple(Candidate(*pair) for pair in pairs))
