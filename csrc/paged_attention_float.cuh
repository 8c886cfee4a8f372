// float32 decode attention, with the arguments and the grid of paged_attention.cu: plain, and meant for parity tests.
//
// One block per row and query head at a time, one token per warp at a time; order of sums depends on the row alone.
#pragma once

#include "attention_plan.cuh"

constexpr int LANE_DIMS = HEAD_DIM / WARP;

extern "C" __global__ void __launch_bounds__(WARPS* WARP, 4)
    paged_attention(const float* __restrict__ q, const float* __restrict__ cache, float* __restrict__ out,
                    const int* __restrict__ tables, const int* __restrict__ plan, float* __restrict__ partials,
                    int64_t block_stride, int q_stride, int table_stride, int rows, int kv_heads, float scale,
                    float softcap, int planned, Ahead behind) {
    __shared__ float tops[WARPS], totals[WARPS], sums[WARPS][HEAD_DIM];
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, heads = kv_heads * GROUP;
    wait_for_inputs();
    const Item* items = reinterpret_cast<const Item*>(plan + HEADER + gridDim.x * RECORD);
    const int unit_heads = kv_heads * UNITS_PER_KV_HEAD, filled = plan[2], empty = plan[3];
    for (int i = blockIdx.x; i < empty; i += gridDim.x) {
        float* result = out + int64_t(items[rows * unit_heads - 1 - i].row) * heads * HEAD_DIM;
        for (int d = thread; d < heads * HEAD_DIM; d += WARPS * WARP) result[d] = 0;
    }
    for (int work = blockIdx.x; work < filled * unit_heads * UNIT_HEADS; work += gridDim.x) {
        const Item at = items[work / UNIT_HEADS];
        const int head = first_head(at.head) + work % UNIT_HEADS;
        if (head / GROUP != at.head / UNITS_PER_KV_HEAD) continue;  // a group's last unit head may have fewer
        float* result = out + (int64_t(at.row) * heads + head) * HEAD_DIM;
        float query[LANE_DIMS], sum[LANE_DIMS] = {};
#pragma unroll
        for (int d = 0; d < LANE_DIMS; d++) query[d] = q[int64_t(at.row) * q_stride + head * HEAD_DIM + d * WARP + lane];
        float top = -INFINITY, total = 0;
#pragma unroll 1
        for (int token = first_visible(at.length) + warp; token < at.length; token += WARPS) {
            const int64_t id = tables[int64_t(at.row) * table_stride + token / BLOCK_SIZE];
            const float* key = cache + id * block_stride + (head / GROUP * BLOCK_SIZE + token % BLOCK_SIZE) * HEAD_DIM;
            const float* value = key + kv_heads * BLOCK_SIZE * HEAD_DIM;
            float logit = 0;
#pragma unroll
            for (int d = 0; d < LANE_DIMS; d++) logit += query[d] * key[d * WARP + lane];
            logit = warp_sum(logit) * scale;
            if (SOFTCAP) logit = softcap * tanhf(logit / softcap);
            const float higher = fmaxf(top, logit), decay = expf(top - higher), weight = expf(logit - higher);
            top = higher;
            total = total * decay + weight;
#pragma unroll
            for (int d = 0; d < LANE_DIMS; d++) sum[d] = sum[d] * decay + weight * value[d * WARP + lane];
        }
        __syncthreads();  // the last reader of `sums` is done
        if (lane == 0) tops[warp] = top, totals[warp] = total;
#pragma unroll
        for (int d = 0; d < LANE_DIMS; d++) sums[warp][d * WARP + lane] = sum[d];
        __syncthreads();
        for (int d = thread; d < HEAD_DIM; d += WARPS * WARP) {
            float high = tops[0], all = 0, value = 0;
            for (int w = 1; w < WARPS; w++) high = fmaxf(high, tops[w]);
            for (int w = 0; w < WARPS; w++) {
                const float decay = expf(tops[w] - high);
                all += decay * totals[w];
                value += decay * sums[w][d];
            }
            result[d] = value / all;
        }
    }
}
