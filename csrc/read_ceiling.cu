// How fast this card reads: every block streams 16-byte loads over its share, and nothing is written.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(512)
    read_ceiling(const uint4* __restrict__ from, int64_t count, uint32_t* __restrict__ never) {
    uint32_t sum = 0;
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 7 * step < count; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = load_stream(from + i + j * step);
#pragma unroll
        for (int j = 0; j < 8; j++) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < count; i += step) sum ^= load_stream(from + i).x;
    if (sum == 0x9e3779b9u) *never = sum;  // keeps the loads
}
