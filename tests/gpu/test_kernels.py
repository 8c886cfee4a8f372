"""Every kernel other than attention against a reference in float64 or, for sampling, against engine/sampler.py.

Inputs are fresh random numbers, outputs are NaN before a launch, and what a kernel must not touch is checked too.
"""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.launcher import compile_all, run  # noqa: E402
from engine.backend import launches, products  # noqa: E402
from engine.backend.launches import Heads, Launch  # noqa: E402
from engine.backend.products import Ending, GemvShape  # noqa: E402
from engine.batch import SampleInput  # noqa: E402
from engine.sampler import sample  # noqa: E402
from engine.types import SamplingParams  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# ||out - reference|| / ||reference||: a few roundings to the element type.
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}
EPS = 1e-5
LLAMA = Heads(heads=32, kv_heads=8, head_dim=128, block_size=16, layers=3)
SMOL = Heads(heads=9, kv_heads=3, head_dim=64, block_size=16, layers=2)
WIDE = Heads(heads=4, kv_heads=2, head_dim=256, block_size=128, layers=2)
NARROW = Heads(heads=6, kv_heads=6, head_dim=96, block_size=32, layers=2)
ALL_HEADS = [LLAMA, SMOL, WIDE, NARROW]

# outputs, inputs, ending, norm
PRODUCTS = [
    (4096, 4096, Ending.RESIDUAL, False),
    (4096, 14336, Ending.RESIDUAL, False),
    (14336, 4096, Ending.SILU, True),
    (4096, 4096, Ending.STORE, False),
    (576, 576, Ending.RESIDUAL, False),
    (576, 1536, Ending.RESIDUAL, False),
    (1536, 576, Ending.SILU, True),
    (1536, 576, Ending.SILU, False),
    (49152, 576, Ending.LOGITS, True),
    (1008, 320, Ending.STORE, True),  # no power of two anywhere
]
ROWS = (1, 3, 8, 13, 32, 70)
CUTS = [
    GemvShape(tiles=2, m_tiles=4, warps=4, stages=3, chunk=32),
    GemvShape(tiles=2, m_tiles=2, warps=8, stages=2, chunk=32),
    GemvShape(tiles=6, m_tiles=1, warps=5, stages=2, chunk=32),
    GemvShape(tiles=4, m_tiles=4, warps=3, stages=1, chunk=32),
]
VOCABS = [(49152, "float32"), (128256, "float32"), (128256, "bfloat16"), (50257, "bfloat16"), (1000, "float32")]


def gemv_of(case: tuple[int, int, Ending, bool], rows: int, dtype: str, cut: GemvShape | None = None) -> Launch:
    outputs, inputs, ending, norm = case
    return products.gemv(outputs, inputs, rows, dtype, ending, norm=norm, shape=cut)


def rope_gemv(heads: Heads, inputs: int, rows: int, dtype: str, cut: GemvShape | None = None) -> Launch:
    outputs = (heads.heads + 2 * heads.kv_heads) * heads.head_dim
    return products.gemv(outputs, inputs, rows, dtype, Ending.ROPE, norm=True, heads=heads, shape=cut)


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    wanted = [gemv_of(case, rows, dtype) for case in PRODUCTS for rows in ROWS for dtype in DTYPES]
    wanted += [rope_gemv(heads, 576, rows, dtype) for heads in ALL_HEADS for rows in ROWS for dtype in DTYPES]
    wanted += [gemv_of(case, 1, "bfloat16", cut) for case in PRODUCTS for cut in CUTS]
    wanted += [rope_gemv(NARROW, 576, 1, "bfloat16", cut) for cut in CUTS]
    wanted += [launches.rope_write(heads, 1, dtype) for heads in ALL_HEADS for dtype in DTYPES]
    wanted += [launches.rms_norm(hidden, 1, dtype) for hidden in (576, 4096, 5120) for dtype in DTYPES]
    wanted += [launches.silu_mul(inner, 1, dtype) for inner in (1536, 14336) for dtype in DTYPES]
    wanted += [launches.sample(vocab, 1, dtype) for vocab, dtype in VOCABS]
    wanted += [
        launches.next_changes(),
        launches.advance(1000, 16, 1),
        launches.copy_blocks(368640, 1),
        launches.copy_blocks(4096, 1),
    ]
    compile_all(wanted)


def normal(*shape: int, dtype: str = "float32", scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(DTYPES[dtype])


def poisoned(*shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.full(shape, float("nan"), device="cuda", dtype=DTYPES[dtype])


def assert_close(out: torch.Tensor, reference: torch.Tensor, dtype: str) -> None:
    assert out.shape == reference.shape
    error = (out.double() - reference).norm() / reference.norm()
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e}"  # NaN fails, too


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def ints(values: list[int] | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


# ---- layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [576, 4096, 5120])
@pytest.mark.parametrize("adds", [False, True])
def test_rms_norm_adds_to_the_residual_and_normalizes(dtype: str, hidden: int, adds: bool) -> None:
    for rows in (1, 5, 300):
        x, delta, weight = (normal(*s, dtype=dtype) for s in ((rows, hidden), (rows, hidden), (hidden,)))
        total = (x + delta) if adds else x.clone()
        out = poisoned(rows, hidden, dtype=dtype)
        run(launches.rms_norm(hidden, rows, dtype), x, delta if adds else None, weight, out, EPS)
        assert_close(out, normed(total, weight), dtype)
        assert torch.equal(x, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_gives_the_rows_of_the_tokens_and_zeros_for_empty_rows(dtype: str) -> None:
    table, out = normal(1000, 576, dtype=dtype), poisoned(5, 576, dtype=dtype)
    run(launches.embed(576, 5, dtype), table, ints([7, 999, -1, 0, 7]), out)
    expected = table[torch.tensor([7, 999, 0, 0, 7], device="cuda")].clone()
    expected[2] = 0
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1536, 14336])
def test_silu_mul(dtype: str, inner: int) -> None:
    for rows in (1, 7, 130):
        both, out = normal(rows, 2 * inner, dtype=dtype, scale=3), poisoned(rows, inner, dtype=dtype)
        run(launches.silu_mul(inner, rows, dtype), both, out, rows)
        gate, up = both.double().chunk(2, -1)
        assert_close(out, torch.nn.functional.silu(gate) * up, dtype)


class Written:
    """Random positions and tables for some rows, and what must be in qkv and in the pool afterwards."""

    def __init__(self, heads: Heads, rows: int, dtype: str) -> None:
        self.heads, self.dtype = heads, dtype
        longest, width = 1000, -(-1000 // heads.block_size)
        self.blocks = rows * width + 3
        self.layer = heads.layers - 1
        angles = torch.rand(longest, heads.head_dim // 2, device="cuda") * 6
        self.rotation = torch.polar(torch.ones_like(angles), angles)
        edges = [0, heads.block_size - 1, heads.block_size, longest - 1, -1]
        self.positions = [edges[i] if i < len(edges) else random.randrange(-1, longest) for i in range(rows)]
        random.shuffle(self.positions)
        self.tables = torch.randperm(self.blocks)[: rows * width].view(rows, width)
        self.table_rows = torch.randperm(rows)
        shape = (self.blocks, heads.layers, 2, heads.kv_heads, heads.block_size, heads.head_dim)
        self.pool = torch.full(shape, float("nan"), device="cuda", dtype=DTYPES[dtype])
        self._held = [self.rotation, ints(self.positions), ints(self.tables), ints(self.table_rows)]

    def arguments(self) -> bytes:
        rotation, positions, tables, table_rows = (tensor.data_ptr() for tensor in self._held)
        width = self.tables.shape[1]
        return launches.ROPE_ARGS.pack(rotation, positions, tables, table_rows, self.pool.data_ptr(), width, self.layer)

    def check(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """`before` in float64: qkv before the rotation."""
        heads = self.heads
        rows = before.shape[0]
        split = before.view(rows, -1, heads.head_dim)
        turned = heads.heads + heads.kv_heads
        live = [row for row in range(rows) if self.positions[row] >= 0]
        angles = self.rotation.to(torch.complex128)[torch.tensor([self.positions[row] for row in live]).cuda()]
        pairs = torch.view_as_complex(split[live, :turned].unflatten(-1, (-1, 2)).contiguous())
        expected = split[live].clone()
        expected[:, :turned] = torch.view_as_real(pairs * angles[:, None]).flatten(-2)
        assert_close(after.view(rows, -1, heads.head_dim)[live, :turned], expected[:, :turned], self.dtype)
        written = torch.zeros(self.pool.shape[:5], dtype=torch.bool)
        for i, row in enumerate(live):
            position = self.positions[row]
            block = int(self.tables[self.table_rows[row], position // heads.block_size])
            offset = position % heads.block_size
            kv = expected[i, heads.heads :].view(2, heads.kv_heads, heads.head_dim)
            assert_close(self.pool[block, self.layer, :, :, offset], kv, self.dtype)
            written[block, self.layer, :, :, offset] = True
        untouched = self.pool[~written.cuda()]
        assert untouched.isnan().all(), "only the rows' own places are written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", ALL_HEADS, ids=lambda heads: str(heads.head_dim))
def test_rope_write_rotates_q_and_k_and_writes_k_and_v_to_their_blocks(heads: Heads, dtype: str) -> None:
    for rows in (1, 6, 40):
        written = Written(heads, rows, dtype)
        qkv = normal(rows, (heads.heads + 2 * heads.kv_heads) * heads.head_dim, dtype=dtype)
        before = qkv.double()
        run(launches.rope_write(heads, rows, dtype), qkv, rows, written.arguments())
        written.check(before, qkv)


# ---- products -----------------------------------------------------------------------------------------------------


class Problem:
    """A product with what comes before and after it, in float64."""

    def __init__(self, case: tuple[int, int, Ending, bool], dtype: str) -> None:
        self.outputs, self.inputs, self.ending, self.norm = case
        self.dtype = dtype
        halves = 2 if self.ending is Ending.SILU else 1
        self.weight = normal(self.outputs * halves, self.inputs, dtype=dtype, scale=self.inputs**-0.5)
        self.gain, self.bias = normal(self.inputs, dtype=dtype), normal(self.weight.shape[0], dtype=dtype)

    def check(self, launch: Launch, rows: int, *, biased: bool = False) -> None:
        x = normal(rows, self.inputs, dtype=self.dtype, scale=random.choice((0.02, 1.0, 30.0)) if self.norm else 1.0)
        product = (normed(x, self.gain) if self.norm else x.double()) @ self.weight.double().t()
        if biased:
            product += self.bias.double()
        out = poisoned(rows, self.outputs, dtype="float32" if self.ending is Ending.LOGITS else self.dtype)
        if self.ending is Ending.RESIDUAL:
            out = normal(rows, self.outputs, dtype=self.dtype)
            product += out.double()
        elif self.ending is Ending.SILU:
            gate, up = product.chunk(2, -1)
            product = torch.nn.functional.silu(gate) * up
        gain, bias = self.gain if self.norm else None, self.bias if biased else None
        run(launch, self.weight, x, gain, bias, out, rows, EPS)
        assert_close(out, product, self.dtype)


def name_of(case: tuple[int, int, Ending, bool]) -> str:
    return f"{case[0]}x{case[1]}-{case[2].name}{'-norm' if case[3] else ''}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PRODUCTS, ids=name_of)
def test_gemv_is_the_product_with_what_comes_before_and_after(case: tuple[int, int, Ending, bool], dtype: str) -> None:
    problem = Problem(case, dtype)
    for rows in ROWS:
        problem.check(gemv_of(case, rows, dtype), rows, biased=rows in (3, 32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_products_are_right_too(dtype: str) -> None:
    for case in ((16, 64, Ending.RESIDUAL, False), (16, 64, Ending.SILU, False), (48, 128, Ending.STORE, True)):
        problem = Problem(case, dtype)
        for rows in (1, 9, 33):
            problem.check(gemv_of(case, rows, dtype), rows)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("case", PRODUCTS, ids=name_of)
def test_a_product_does_not_depend_on_how_it_is_cut(case: tuple[int, int, Ending, bool], cut: GemvShape) -> None:
    problem = Problem(case, "bfloat16")
    for rows in ROWS:
        problem.check(gemv_of(case, rows, "bfloat16", cut), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", ALL_HEADS, ids=lambda heads: str(heads.head_dim))
def test_gemv_may_end_with_rotation_and_kv_write(heads: Heads, dtype: str) -> None:
    for rows in ROWS:
        check_rope(rope_gemv(heads, 576, rows, dtype), heads, rows, dtype)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_rotation_and_kv_write_do_not_depend_on_how_the_product_is_cut(cut: GemvShape) -> None:
    for rows in ROWS:
        check_rope(rope_gemv(NARROW, 576, rows, "bfloat16", cut), NARROW, rows, "bfloat16")


def check_rope(launch: Launch, heads: Heads, rows: int, dtype: str) -> None:
    outputs = (heads.heads + 2 * heads.kv_heads) * heads.head_dim
    weight, gain = normal(outputs, 576, dtype=dtype, scale=576**-0.5), normal(576, dtype=dtype)
    written = Written(heads, rows, dtype)
    x, out = normal(rows, 576, dtype=dtype), poisoned(rows, outputs, dtype=dtype)
    product = normed(x, gain) @ weight.double().t()
    run(launch, weight, x, gain, None, out, rows, EPS, written.arguments())
    written.check(product, out)


def test_overlapping_kernels_see_what_the_kernel_before_them_wrote() -> None:
    """A chain of products, each of which starts to read its weight while the one before it runs."""
    weights = [normal(4096, 4096, dtype="bfloat16", scale=1 / 64) for _ in range(12)]
    launch = products.gemv(4096, 4096, 4, "bfloat16", Ending.RESIDUAL)
    x = normal(4, 4096, dtype="bfloat16")
    results = []
    for overlap in (False, True, True):
        buffers = [x, *(torch.zeros_like(x) for _ in weights)]
        for i, weight in enumerate(weights):
            run(launch, weight, buffers[i], None, None, buffers[i + 1], 4, EPS, overlap=overlap)
        torch.cuda.synchronize()
        results.append(buffers[-1])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


# ---- sampling -----------------------------------------------------------------------------------------------------


class Sampled:
    """Runs the kernel for some rows and the CPU's sampler for the same."""

    def __init__(self, logits: torch.Tensor, inputs: list[SampleInput], dtype: str) -> None:
        rows, vocab = logits.shape
        self.logits, self.inputs = logits, inputs
        bias_width = max(1, *(len(one.params.logit_bias) for one in inputs))
        masks = [_ends(one) for one in inputs]
        end_width = max(1, *(len(mask) for mask in masks))
        bias_ids, biases = torch.full((rows, bias_width), -1), torch.zeros(rows, bias_width)
        ends, counts = torch.full((rows, end_width), -1), torch.zeros(rows, vocab, dtype=torch.int64)
        packed = bytearray()
        for row, one in enumerate(inputs):
            p = one.params
            for i, (token, bias) in enumerate(p.logit_bias.items()):
                bias_ids[row, i], biases[row, i] = token, bias
            ends[row, : len(masks[row])] = torch.tensor(masks[row])
            penalized = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
            if penalized:
                counts[row, torch.tensor(one.prompt, dtype=torch.int64)] = -(1 << 31)
                counts[row] += torch.bincount(torch.tensor(one.output, dtype=torch.int64), minlength=vocab)
            packed += launches.SAMPLE_ROW.pack(
                p.temperature, p.top_p, p.min_p, p.top_k, p.repetition_penalty, p.frequency_penalty, p.presence_penalty,
                p.min_tokens, p.seed or 0, len(p.logit_bias), len(masks[row]), penalized,
            )  # fmt: skip
        params = torch.frombuffer(packed, dtype=torch.uint8).cuda()
        positions, self.tokens = ints([5] * rows), ints([-7] * rows)
        scratch = poisoned(rows, vocab)
        before = logits.clone()
        run(
            launches.sample(vocab, rows, dtype), logits, params, positions, ints([one.index for one in inputs]),
            counts.to(torch.int32).cuda(), ints(bias_ids), biases.cuda(), bias_width, ints(ends), end_width, scratch,
            self.tokens,
        )  # fmt: skip
        assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8)), "logits are never changed"

    def check(self) -> None:
        expected = [token.token_id for token in sample(self.logits.float().cpu(), self.inputs)]
        got = self.tokens.tolist()
        wrong = [(i, e, g, self.inputs[i].params) for i, (e, g) in enumerate(zip(expected, got, strict=True)) if e != g]
        assert not wrong, f"{len(wrong)} of {len(got)} rows differ: {wrong[:3]}"


def _ends(one: SampleInput) -> list[int]:
    return sorted(set(one.params.stop_token_ids) | (set() if one.params.ignore_eos else one.eos))


def some_params(vocab: int, row: int) -> SampleInput:
    chance = random.random
    ids = [random.randrange(vocab) for _ in range(40)]
    index = random.randrange(30)
    params = SamplingParams(
        temperature=0.0 if chance() < 0.15 else random.choice((0.01, 0.7, 1.0, 1.5)),
        top_p=1.0 if chance() < 0.4 else random.choice((0.05, 0.5, 0.9, 0.999)),
        top_k=0 if chance() < 0.5 else random.choice((1, 2, 50, 3000)),
        min_p=0.0 if chance() < 0.6 else random.choice((0.01, 0.2, 1.0)),
        repetition_penalty=1.0 if chance() < 0.7 else 1.3,
        frequency_penalty=0.0 if chance() < 0.7 else 0.5,
        presence_penalty=0.0 if chance() < 0.7 else -0.4,
        seed=random.getrandbits(64),
        logit_bias={} if chance() < 0.7 else {token: random.uniform(-20, 20) for token in ids[:20]},
        min_tokens=0 if chance() < 0.5 else 20,
        max_tokens=100,
        stop_token_ids=ids[:3],
        ignore_eos=chance() < 0.3,
    )
    return SampleInput(params, index, ids, (ids * 2)[10 : 10 + index], frozenset({0, vocab - 1}))


@pytest.mark.parametrize(("vocab", "dtype"), VOCABS)
def test_sampling_chooses_the_token_that_the_cpu_chooses(vocab: int, dtype: str) -> None:
    random.seed(vocab)
    logits = normal(96, vocab, dtype=dtype, scale=3)
    logits[:24] = (logits[:24].float() * 0.05).to(logits.dtype)  # nearly flat: the cut goes through a crowd
    Sampled(logits, [some_params(vocab, row) for row in range(96)], dtype).check()


@pytest.mark.parametrize(("vocab", "dtype"), VOCABS)
def test_sampling_survives_logits_without_a_winner(vocab: int, dtype: str) -> None:
    logits = normal(24, vocab, dtype=dtype)
    logits[0:8] = 2.5
    logits[8:16] = -torch.inf
    logits[12:16, vocab // 3] = 1.0
    logits[16:20, 7] = torch.inf
    kinds = [{}, {"top_p": 0.5}, {"top_k": 5}, {"temperature": 0.0}]
    inputs = [SampleInput(SamplingParams(seed=row, **kinds[row % 4]), row, [1], []) for row in range(24)]
    Sampled(logits, inputs, dtype).check()


def test_draws_follow_the_weights() -> None:
    logits = normal(1, 1000).expand(512, 1000).contiguous()
    inputs = [SampleInput(SamplingParams(seed=row, top_p=0.8), row % 7, [], []) for row in range(512)]
    Sampled(logits, inputs, "float32").check()


# ---- state and blocks ---------------------------------------------------------------------------------------------


def test_a_steps_changes_come_from_its_own_entry_of_the_ring_however_many_they_are() -> None:
    for step, runs in ((3, 0), (11, 1), (20, 40), (5, 700)):  # 700: more than one look at the ring brings
        ring, state = torch.full((8, 1 << 14), -9, dtype=torch.int32).pin_memory(), ints(list(range(20000)))
        expected = state.clone()
        entry, head, values = ring[step % 8], [runs], list[int]()
        for run_number in range(runs):
            length = random.randrange(1, 9)
            head += (run_number * 20 + 3, 1 + 3 * runs + len(values), length)
            new = [random.randrange(1 << 30) for _ in range(length)]
            expected[run_number * 20 + 3 : run_number * 20 + 3 + length] = ints(new)
            values += new
        entry[: len(head) + len(values)] = torch.tensor(head + values, dtype=torch.int32)
        began = torch.zeros(1, dtype=torch.int64, device="cuda")
        run(launches.next_changes(), state, ring, 1 << 14, 8, ints([step]), began)
        torch.cuda.synchronize()
        assert torch.equal(state, expected) and began.item() > 0


def test_advance_moves_rows_on_and_reports_them() -> None:
    """Five rows: goes on, ends by a token, has no tokens left, has no next block, is empty."""
    rows, width = 5, 3
    positions, lengths = ints([3, 9, 20, 31, -1]), ints([4, 10, 21, 32, 0])
    tokens, indices, remaining = ints([1, 2, 3, 4, -1]), ints([0, 5, 6, 7, 0]), ints([9, 9, 1, 9, 0])
    tables = ints([[1, 2, 3], [1, 2, 3], [1, 2, 3], [4, 5, -1], [-1, -1, -1]])
    end_ids, ends = ints([[8, 9]] * rows), ints([2, 2, 2, 1, 0])
    counts, counted = torch.zeros(rows, 1000, dtype=torch.int32, device="cuda"), ints([1, 0, 0, 0, 0])
    sampled, step = ints([50, 9, 51, 9, 52]), ints([6])
    began = torch.full((1,), 5 << 32 | 77, dtype=torch.int64, device="cuda")
    entry = launches.RING_HEADER + 2 * rows
    ring = torch.full((4, entry), -1, dtype=torch.int32).pin_memory()
    held = (tokens, positions, lengths, indices, remaining, tables, end_ids, ends, counts, counted)
    state = launches.ROW_STATE.pack(*(tensor.data_ptr() for tensor in held), width, 2)
    launch = launches.advance(1000, 16, rows)
    run(launch, sampled, state, rows, ring, 4, step, began)
    torch.cuda.synchronize()
    assert ring[2, 0] == 6 and (ring[[0, 1, 3]] == -1).all() and step.item() == 7
    assert ring[2, 2:4].tolist() == [77, 5] and ring[2, 5] != -1
    assert ring[2, 8:13].tolist() == [50, 9, 51, 9, -1]
    assert ring[2, 13:].tolist() == [1, 1 | 2, 1 | 4, 1 | 8, 0]
    assert positions.tolist() == [4, -1, -1, -1, -1] and lengths.tolist() == [5, 0, 0, 0, 0]
    assert tokens.tolist() == [50, -1, -1, -1, -1] and indices.tolist() == [1, 6, 7, 8, 0]
    assert remaining.tolist() == [8, 8, 0, 8, 0]
    assert counts[0, 50] == 1 and counts.sum() == 1
    run(launch, sampled, state, rows, ring, 4, step, began)
    torch.cuda.synchronize()
    assert ring[3, 13:].tolist() == [1, 0, 0, 0, 0] and positions.tolist() == [5, -1, -1, -1, -1]


def test_changes_are_applied_where_they_belong() -> None:
    state = ints(list(range(100)))
    changes = ints([2, 10, 7, 3, 99, 10, 1, -1, -2, -3, -4])
    run(launches.apply(1000, 16, 8), state, changes)
    expected = list(range(100))
    expected[10:13], expected[99] = [-1, -2, -3], -4
    assert state.tolist() == expected


def test_counts_start_from_the_prompt_and_the_tokens_emitted() -> None:
    counts = torch.full((1000,), 5, dtype=torch.int32, device="cuda")
    run(launches.count(1000, 16), counts, ints([1, 2, 2, 5000, -1]), 5, ints([2, 3, 3, 5000]), 4)
    values = counts.tolist()
    assert [values[i] & 0xFFFFFFFF for i in (1, 2, 3)] == [1 << 31, 1 << 31 | 1, 2]
    assert sum(value != 0 for value in values) == 3


@pytest.mark.parametrize("size", [4096, 368640])
def test_blocks_are_gathered_scattered_and_zeroed_by_id(size: int) -> None:
    pool = torch.randint(0, 256, (40, size), dtype=torch.uint8, device="cuda")
    other = torch.randint(0, 256, (50, size), dtype=torch.uint8, device="cuda")
    source, target = torch.randperm(40)[:17].cuda(), torch.randperm(50)[:17].cuda()
    staging = torch.zeros(17, size, dtype=torch.uint8, device="cuda")
    run(launches.copy_blocks(size, 17), staging, pool, None, ints(source))
    assert torch.equal(staging, pool[source])
    expected = other.clone()
    expected[target] = pool[source]
    run(launches.copy_blocks(size, 17), other, pool, ints(target), ints(source))
    assert torch.equal(other, expected)
    expected[target] = 0
    run(launches.zero_blocks(size, 17), other, ints(target))
    assert torch.equal(other, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [LLAMA, SMOL, NARROW], ids=["llama", "smol", "narrow"])
def test_a_layer_of_a_sequences_blocks_is_gathered_side_by_side(heads: Heads, dtype: str) -> None:
    shape = (30, heads.layers, 2, heads.kv_heads, heads.block_size, heads.head_dim)
    pool = torch.randn(shape, device="cuda").to(DTYPES[dtype])
    blocks = torch.randperm(30)[:11].cuda()
    for layer in range(heads.layers):
        out = torch.full((2, heads.kv_heads, 11 * heads.block_size, heads.head_dim), torch.nan, device="cuda")
        out = out.to(DTYPES[dtype])
        stride = (pool.stride(0) * pool.element_size()).to_bytes(8, "little")
        run(launches.gather_tiles(heads, 11, dtype), out, pool[0, layer], ints(blocks), stride)
        assert torch.equal(out, pool[blocks, layer].permute(1, 2, 0, 3, 4).reshape(out.shape))
