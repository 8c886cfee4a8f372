// RMSNorm of rows of HIDDEN elements, optionally after adding `delta` to the residual stream, and the embedding that a
// step begins with. One block per row, which it keeps in registers between its two passes.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int PIECES = (HIDDEN / VEC + THREADS - 1) / THREADS;
static_assert(HIDDEN % VEC == 0, "a row must be whole 16-byte pieces");

// x [rows, HIDDEN] += delta, if there is one; out = x / rms(x) * weight. As on the CPU, x / rms(x) is rounded to the
// element type before the weight multiplies it.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(elem* x, const elem* delta, const elem* weight, elem* out, float eps) {
    __shared__ float scratch[THREADS / WARP];
    const size_t row = size_t(blockIdx.x) * HIDDEN;
    Vec kept[PIECES];
    float squares = 0.f;
    wait_for_inputs();
    let_next_start();
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int at = (i * THREADS + threadIdx.x) * VEC;
        if (at >= HIDDEN) break;
        kept[i] = load16(x + row + at);
        if (delta != nullptr) {
            const Vec more = load16(delta + row + at);
#pragma unroll
            for (int j = 0; j < VEC; ++j) kept[i].v[j] = from_float<elem>(to_float(kept[i].v[j]) + to_float(more.v[j]));
            store16(x + row + at, kept[i]);
        }
#pragma unroll
        for (int j = 0; j < VEC; ++j) squares = fmaf(to_float(kept[i].v[j]), to_float(kept[i].v[j]), squares);
    }
    const float scale = 1.f / sqrtf(block_sum(squares, scratch) / HIDDEN + eps);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int at = (i * THREADS + threadIdx.x) * VEC;
        if (at >= HIDDEN) break;
        const Vec g = load16(weight + at);
        Vec result;
#pragma unroll
        for (int j = 0; j < VEC; ++j)
            result.v[j] = from_float<elem>(rounded(to_float(kept[i].v[j]) * scale) * to_float(g.v[j]));
        store16(out + row + at, result);
    }
}

// out [rows, HIDDEN] = table[tokens]; an empty row (token below 0) becomes zeros.
extern "C" __global__ void __launch_bounds__(THREADS) embed(const elem* table, const int* tokens, elem* out) {
    wait_for_inputs();
    let_next_start();
    const int token = tokens[blockIdx.x];
    for (int at = threadIdx.x * VEC; at < HIDDEN; at += THREADS * VEC) {
        Vec v{};
        if (token >= 0) v = load16(table + size_t(token) * HIDDEN + at);
        store16(out + size_t(blockIdx.x) * HIDDEN + at, v);
    }
}
