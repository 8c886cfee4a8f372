"""Choosing tokens from logits: a pure function of (logits, parameters, seed, token index, tokens so far).

Order, as in vLLM: logprobs are reported from the raw logits; then logit_bias, the min_tokens mask, repetition,
frequency and presence penalties, temperature, top_k, top_p, min_p, and one draw. The draw is one uniform number from
Philox(seed, index) looked up in the cumulative weights of the kept tokens in the order of their ids, in float64.

Every row is computed alone, by the same operations, whatever else is in the batch; ties always go to the lowest id.
Keeps no state and never changes the logits it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.batch import SampleInput
from engine.philox import uniform
from engine.types import Candidate, SamplingParams, Token, TokenLogprob

_MIN_TEMPERATURE = 1e-5  # below it float32 logits, divided, lose their order
_REPORT_ELEMENTS = 1 << 18  # logits reported at once: what is made of them stays in the processor's cache


def sample(logits: Tensor, inputs: Sequence[SampleInput]) -> list[Token]:
    """One token per row of `logits` [R, V]. Blocks until the device has them."""
    assert logits.shape[0] == len(inputs), f"{logits.shape[0]} rows of logits for {len(inputs)} inputs"
    if not inputs:
        return []
    logits = logits.float()
    changed = [_changes_logits(one) for one in inputs]
    if all(one.params.greedy for one in inputs) and not any(changed):
        token_ids = _argmax(logits)
    else:
        picks = [
            _pick(_adjusted(row, one) if change else row, one)
            for row, one, change in zip(logits, inputs, changed, strict=True)
        ]
        token_ids = torch.stack(picks)
    ids: list[int] = token_ids.tolist()
    reports = _reports(logits, token_ids, inputs)
    return [Token(one.index, token_id, report) for one, token_id, report in zip(inputs, ids, reports, strict=True)]


def prompt_logprobs(logits: Tensor, targets: Sequence[int], k: int) -> list[TokenLogprob]:
    """For each row of `logits` [T, V]: how likely the model found targets[i], and the k best."""
    assert logits.shape[0] == len(targets), f"{logits.shape[0]} rows of logits for {len(targets)} targets"
    if not targets:
        return []
    step = max(1, _REPORT_ELEMENTS // logits.shape[1])
    logits, wanted = logits.float(), torch.tensor(targets, device=logits.device)
    reports: list[TokenLogprob] = []
    for start in range(0, len(targets), step):
        reports.extend(_report(logits[start : start + step], wanted[start : start + step], k))
    return reports


# ---- what changes the logits --------------------------------------------------------------------------------------


def _changes_logits(one: SampleInput) -> bool:
    params = one.params
    return bool(
        params.logit_bias
        or one.index < params.min_tokens
        or params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
    )


def _adjusted(row: Tensor, one: SampleInput) -> Tensor:
    """A changed copy of `row` [V]."""
    params, row = one.params, row.clone()
    if params.logit_bias:
        ids = _known(list(params.logit_bias), row)
        biases = [bias for token_id, bias in params.logit_bias.items() if token_id < row.numel()]
        row[ids] += torch.tensor(biases, dtype=row.dtype, device=row.device)
    if one.index < params.min_tokens:
        ends: set[int] = set(params.stop_token_ids) | (set() if params.ignore_eos else one.eos)
        row[_known(sorted(ends), row)] = -torch.inf
    if params.repetition_penalty != 1:
        seen = torch.cat([_known(one.prompt, row), _known(one.output, row)])
        values = row[seen]
        # A repeated id writes the same value again: no need to make them unique.
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        emitted, counts = _known(one.output, row).unique(return_counts=True)
        row[emitted] -= params.frequency_penalty * counts.to(row.dtype) + params.presence_penalty
    return row


def _known(ids: Sequence[int], row: Tensor) -> Tensor:
    """As a tensor, without ids outside the vocabulary."""
    tensor = torch.tensor(ids, dtype=torch.int64, device=row.device)
    return tensor[tensor < row.numel()]


# ---- the choice ---------------------------------------------------------------------------------------------------


def _pick(row: Tensor, one: SampleInput) -> Tensor:
    """A token id from `row` [V], as a tensor without dimensions: no waiting for the device here."""
    params = one.params
    if params.greedy:
        return _argmax(row)
    assert params.seed is not None, "a sampled request has a seed by the time it reaches a worker"
    scaled = (row - row.max()) / max(params.temperature, _MIN_TEMPERATURE)
    scaled.nan_to_num_(nan=0.0, neginf=-torch.inf)  # infinite logits, of a broken model, must still give some id
    kept, weights = _filtered(scaled, params)
    cumulative = weights.cumsum(0, dtype=torch.float64)
    total = cumulative[-1]
    # The first id whose cumulative weight exceeds the draw; a product rounded up to the total means the last one.
    place = torch.searchsorted(cumulative, uniform(params.seed, one.index) * total, right=True)
    place = torch.minimum(place, torch.searchsorted(cumulative, total))
    return place if kept is None else kept[place]


def _filtered(scaled: Tensor, params: SamplingParams) -> tuple[Tensor | None, Tensor]:
    """The ids that top_k, top_p and min_p keep, ascending, or None for all of them; and their weights.

    `scaled` has its maximum at 0, so the best weight is 1. Tokens equal to the k-th best are all kept.
    """
    kept = None
    if 0 < params.top_k < scaled.numel():
        worst = scaled.topk(params.top_k).values[-1]
        kept = _where(scaled >= worst)
        scaled = scaled[kept]
    weights = scaled.exp()
    if params.top_p < 1:
        inside = _nucleus(weights, params.top_p)
        kept, weights = inside if kept is None else kept[inside], weights[inside]
    if params.min_p > 0:
        likely = _where(weights >= params.min_p)
        kept, weights = likely if kept is None else kept[likely], weights[likely]
    return kept, weights


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Positions, ascending, of the fewest most likely tokens that hold `top_p` of the whole weight."""
    ordered = _descending(weights)
    cumulative = ordered.cumsum(0, dtype=torch.float64)
    count = int((cumulative - ordered < top_p * cumulative[-1]).sum())
    worst = ordered[count - 1]
    inside = _where(weights >= worst)
    if (surplus := inside.numel() - count) == 0:
        return inside
    equals = _where(weights[inside] == worst)
    keep = torch.ones(inside.numel(), dtype=torch.bool, device=inside.device)
    keep[equals[-surplus:]] = False
    return inside[keep]


# ---- what numpy does much faster than torch, on the CPU: five to fifteen times on a vocabulary of 49,152 ----------


def _argmax(logits: Tensor) -> Tensor:
    """Over the last dimension, the lowest id of equals."""
    if logits.device.type == "cpu":
        return torch.as_tensor(logits.detach().numpy().argmax(-1))
    return logits.argmax(-1)


def _where(mask: Tensor) -> Tensor:
    """Ascending positions of True in one dimension."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)


def _count(mask: Tensor) -> list[int]:
    """How many are True in each row."""
    if mask.device.type == "cpu":
        return np.count_nonzero(mask.numpy(), axis=1).tolist()
    return mask.sum(1).tolist()


def _descending(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.detach().numpy())).flip(0)
    return values.sort(descending=True).values


# ---- logprobs -----------------------------------------------------------------------------------------------------


def _reports(logits: Tensor, token_ids: Tensor, inputs: Sequence[SampleInput]) -> list[TokenLogprob | None]:
    reports: list[TokenLogprob | None] = [None] * len(inputs)
    for i, one in enumerate(inputs):
        if one.params.logprobs is not None:
            reports[i] = _report(logits[i : i + 1], token_ids[i : i + 1], one.params.logprobs)[0]
    return reports


def _report(logits: Tensor, targets: Tensor, k: int) -> list[TokenLogprob]:
    """Sums are in float64 and results are rounded to float32, which hides in which order a row was summed."""
    best = logits.amax(1, keepdim=True)
    normalizer = best[:, 0].double() + (logits - best).exp().sum(1, dtype=torch.float64).log()
    chosen = logits.gather(1, targets[:, None])
    ranks = _count(logits > chosen)
    for i, equals in enumerate(_count(logits == chosen)):
        ranks[i] += 1
        if equals > 1:  # those with lower ids come first
            ranks[i] += int((logits[i, : targets[i]] == chosen[i]).sum())
    logprobs = (chosen[:, 0].double() - normalizer).float().tolist()
    tops = _tops(logits, normalizer, k)
    return [
        TokenLogprob(target, logprob, rank, top)
        for target, logprob, rank, top in zip(targets.tolist(), logprobs, ranks, tops, strict=True)
    ]


def _tops(logits: Tensor, normalizer: Tensor, k: int) -> list[tuple[Candidate, ...]]:
    """The k best of each row, best first, the lower id first among equals."""
    if k == 0:
        return [()] * logits.shape[0]
    k = min(k, logits.shape[1])
    values, ids = logits.topk(k)
    for i, count in enumerate(_count(logits >= values[:, -1:])):
        if count > k:  # equals at the border, of which topk takes any
            values[i], ids[i] = (part[:k] for part in logits[i].sort(descending=True, stable=True))
    logprobs = (values.double() - normalizer[:, None]).float()
    tops = []
    for row_ids, row_values in zip(ids.tolist(), logprobs.tolist(), strict=True):
        pairs = sorted(zip(row_ids, row_values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        tops.append(tuple(Candidate(token_id, logprob) for token_id, logprob in pairs))
    return tops
