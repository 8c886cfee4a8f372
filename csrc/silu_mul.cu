// out [rows, INNER] = silu(gate_up[:, :INNER]) * gate_up[:, INNER:], for products that did not end with it. One thread
// has 16 bytes of the result. As on the CPU, silu is rounded to the element type before the product.
#include "common.cuh"

static_assert(INNER % VEC == 0, "a row must be whole 16-byte pieces");

extern "C" __global__ void __launch_bounds__(256) silu_mul(const elem* gate_up, elem* out, int rows) {
    wait_for_inputs();
    let_next_start();
    const long long at = ((long long)blockIdx.x * 256 + threadIdx.x) * VEC;
    const long long row = at / INNER, column = at % INNER;
    if (row >= rows) return;
    const Vec gate = load16(gate_up + row * 2 * INNER + column), up = load16(gate_up + (row * 2 + 1) * INNER + column);
    Vec result;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        const float g = to_float(gate.v[i]);
        result.v[i] = from_float<elem>(rounded(g / (1.f + expf(-g))) * to_float(up.v[i]));
    }
    store16(out + at, result);
}
