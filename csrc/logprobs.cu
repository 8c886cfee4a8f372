// For some rows of logits [rows, VOCAB], what engine/sampler.py reports of one token each: its log probability, its rank,
// and the k best tokens with theirs, the lower id first among equals. Sums are in float64.
//
// One block per report. The k best are found one after another, each the best below the one before: a row stays in the
// caches, and k is at most 20. Settings: VOCAB, DTYPE (of the logits).
#include "common.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP;

// Values in ascending order of logits, and of descending ids among equals: no two are the same.
__device__ __forceinline__ unsigned long long key_of(float v, int id) {
    const unsigned bits = __float_as_uint(v == 0.f ? 0.f : v);  // -0 equals 0
    const unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (unsigned long long)ordered << 32 | (0xffffffffu - unsigned(id));
}

__device__ __forceinline__ unsigned long long block_max(unsigned long long v, unsigned long long* scratch) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) v = max(v, __shfl_xor_sync(0xffffffffu, v, d));
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = v;
    __syncthreads();
    v = scratch[threadIdx.x % WARPS];
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) v = max(v, __shfl_xor_sync(0xffffffffu, v, d));
    __syncthreads();
    return v;
}

// The best key below `limit`; 0 if there is none.
__device__ __forceinline__ unsigned long long best_below(const elem* row, unsigned long long limit,
                                                         unsigned long long* scratch) {
    unsigned long long best = 0;
    for (int id = threadIdx.x; id < VOCAB; id += THREADS) {
        const unsigned long long key = key_of(to_float(row[id]), id);
        if (key < limit && key > best) best = key;
    }
    return block_max(best, scratch);
}

// out [reports, 3 + 2 k]: token, rank, bits of the log probability, then (id, bits) of each of the k best.
// Report r is about row rows[r] and about tokens[r], or tokens[rows[r]] with `by_row`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    logprobs(const elem* logits, const int* rows, const int* tokens, int by_row, int k, int* out) {
    __shared__ unsigned long long keys[WARPS];
    __shared__ double sums[WARPS];
    __shared__ int counts[WARPS];
    wait_for_inputs();
    const int r = blockIdx.x, at = rows[r];
    const elem* row = logits + size_t(at) * VOCAB;
    const int token = min(max(tokens[by_row ? at : r], 0), VOCAB - 1);
    const float chosen = to_float(row[token]);
    const unsigned long long own = key_of(chosen, token), first = best_below(row, ~0ull, keys);
    const float best = to_float(row[0xffffffffu - unsigned(first)]);
    double sum = 0;
    int before = 0;
    for (int id = threadIdx.x; id < VOCAB; id += THREADS) {
        const float v = to_float(row[id]);
        sum += double(expf(v - best));
        before += key_of(v, id) > own;
    }
    sum = block_sum(sum, sums);
    before = block_sum(before, counts);
    const double normalizer = double(best) + log(sum);
    int* report = out + size_t(r) * (3 + 2 * k);
    if (threadIdx.x == 0) {
        report[0] = token;
        report[1] = before + 1;
        report[2] = __float_as_int(float(double(chosen) - normalizer));
    }
    unsigned long long key = first;
    for (int i = 0; i < k; ++i) {
        if (i > 0) key = best_below(row, key, keys);
        const int id = key == 0 ? 0 : int(0xffffffffu - unsigned(key));
        if (threadIdx.x == 0) {
            report[3 + 2 * i] = id;
            report[4 + 2 * i] = __float_as_int(float(double(to_float(row[id])) - normalizer));
        }
    }
}
