// Whole KV blocks over lists of ids: copies, copies with a digest, digests alone, and zeroing. A block is BLOCK_BYTES
// contiguous bytes, all layers. Either pool may be another process's or, across NVLink, another card's.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int UNROLL = 4;
constexpr int PIECE = THREADS * UNROLL * 16;
static_assert(BLOCK_BYTES % 16 == 0, "blocks must be whole 16-byte pieces");

// to[to_ids[i]] = from[from_ids[i]]. A null list counts 0, 1, 2, ...: gather into, or scatter out of, a staging buffer.
// No block may be named twice in to_ids. blockIdx.y is the place in the lists, blockIdx.x a piece of PIECE bytes.
extern "C" __global__ void __launch_bounds__(THREADS)
    copy_blocks(unsigned char* to, const unsigned char* from, const int* to_ids, const int* from_ids) {
    wait_for_inputs();
    const int i = blockIdx.y;
    const size_t target = size_t(to_ids == nullptr ? i : to_ids[i]) * BLOCK_BYTES;
    const size_t source = size_t(from_ids == nullptr ? i : from_ids[i]) * BLOCK_BYTES;
    uint4 held[UNROLL];
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
        const size_t at = size_t(blockIdx.x) * PIECE + (j * THREADS + threadIdx.x) * 16;
        if (at < BLOCK_BYTES) held[j] = __ldcs(reinterpret_cast<const uint4*>(from + source + at));
    }
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
        const size_t at = size_t(blockIdx.x) * PIECE + (j * THREADS + threadIdx.x) * 16;
        if (at < BLOCK_BYTES) __stcs(reinterpret_cast<uint4*>(to + target + at), held[j]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) zero_blocks(unsigned char* pool, const int* ids) {
    wait_for_inputs();
    const size_t target = size_t(ids[blockIdx.y]) * BLOCK_BYTES;
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
        const size_t at = size_t(blockIdx.x) * PIECE + (j * THREADS + threadIdx.x) * 16;
        if (at < BLOCK_BYTES) *reinterpret_cast<uint4*>(pool + target + at) = make_uint4(0, 0, 0, 0);
    }
}

// ---- with digests -------------------------------------------------------------------------------------------------

// engine.kv_digest.block_sum: over the block's 64-bit words w[i], with key k[i] = (i + 1) * GOLDEN and x = w[i] ^ k[i],
// the sum of low32(x) * high32(x) + w[i], modulo 2^64. Sums are added up in any order.
constexpr unsigned long long GOLDEN = 0x9E3779B97F4A7C15ull;
constexpr int WIDE = 512;  // threads; two blocks of them fill half a multiprocessor and hide even NVLink's latency
constexpr int STEP = WIDE * UNROLL * 16;
constexpr int STEPS = (BLOCK_BYTES + STEP - 1) / STEP;  // of a block

__device__ __forceinline__ unsigned long long absorbed(unsigned long long sum, unsigned low, unsigned high,
                                                       unsigned long long key) {
    const unsigned long long word = (unsigned long long)high << 32 | low;
    return (unsigned long long)(low ^ unsigned(key)) * (high ^ unsigned(key >> 32)) + sum + word;
}

__device__ __forceinline__ void load_step(uint4 (&held)[UNROLL], const unsigned char* block, int step) {
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
        const size_t at = size_t(step) * STEP + (j * WIDE + threadIdx.x) * 16;
        held[j] = BLOCK_BYTES % STEP == 0 || at < BLOCK_BYTES ? __ldcg(reinterpret_cast<const uint4*>(block + at))
                                                              : make_uint4(0, 0, 0, 0);
    }
}

// Stores what was loaded, unless `block` is null, and returns the sum with it.
__device__ __forceinline__ unsigned long long settle_step(const uint4 (&held)[UNROLL], unsigned char* block, int step,
                                                          unsigned long long sum) {
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
        const size_t at = size_t(step) * STEP + (j * WIDE + threadIdx.x) * 16;
        if (BLOCK_BYTES % STEP == 0 || at < BLOCK_BYTES) {
            if (block != nullptr) __stcs(reinterpret_cast<uint4*>(block + at), held[j]);
            const unsigned long long key = (at / 8 + 1) * GOLDEN;
            sum = absorbed(sum, held[j].x, held[j].y, key);
            sum = absorbed(sum, held[j].z, held[j].w, key + GOLDEN);
        }
    }
    return sum;
}

// The thread block's sum of one step. `scratch` is another one than the step before had: one barrier is enough.
__device__ __forceinline__ void add_up(unsigned long long* total, unsigned long long sum, unsigned long long* scratch) {
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x < WARP) {
        sum = warp_sum(threadIdx.x < WIDE / WARP ? scratch[threadIdx.x] : 0ull);
        if (threadIdx.x == 0) atomicAdd(total, sum);
    }
}

// Thread blocks take the steps of all blocks by turns, so that neighbours read and write neighbouring memory, and any
// number of them may be launched: how many is how much of the card the copy may take. While one step is digested and
// stored, the next one is under way, and the ids of the one after it.
template <bool COPIES>
__device__ __forceinline__ void digest_steps(unsigned char* to, const unsigned char* from, const int* to_ids,
                                             const int* from_ids, unsigned long long* sums, int count) {
    __shared__ unsigned long long scratch[2][WIDE / WARP];
    const int all = count * STEPS, stride = gridDim.x;
    int at = blockIdx.x;
    if (at >= all) return;
    const auto clamped = [&](int step) { return min(step, all - 1) / STEPS; };
    const unsigned char* source = from + size_t(from_ids[at / STEPS]) * BLOCK_BYTES;
    int target = COPIES ? to_ids[at / STEPS] : 0;
    int next_source = from_ids[clamped(at + stride)], next_target = COPIES ? to_ids[clamped(at + stride)] : 0;
    uint4 held[UNROLL], coming[UNROLL];
    load_step(held, source, at % STEPS);
    for (int turn = 0; at < all; at += stride, turn ^= 1) {
        const int next = at + stride, i = at / STEPS;
        if (next < all) load_step(coming, from + size_t(next_source) * BLOCK_BYTES, next % STEPS);
        const int here = target;
        target = next_target;
        next_source = from_ids[clamped(next + stride)];
        if (COPIES) next_target = to_ids[clamped(next + stride)];
        const unsigned long long sum =
            settle_step(held, COPIES ? to + size_t(here) * BLOCK_BYTES : nullptr, at % STEPS, 0);
        add_up(sums + i, sum, scratch[turn]);
#pragma unroll
        for (int j = 0; j < UNROLL; ++j) held[j] = coming[j];
    }
}

// to[to_ids[i]] = from[from_ids[i]]; sums[i], which are zero before, get the sum of what was copied.
extern "C" __global__ void __launch_bounds__(WIDE, 2)
    copy_and_digest(unsigned char* to, const unsigned char* from, const int* to_ids, const int* from_ids,
                    unsigned long long* sums, int count) {
    wait_for_inputs();
    digest_steps<true>(to, from, to_ids, from_ids, sums, count);
}

extern "C" __global__ void __launch_bounds__(WIDE, 2)
    digest_blocks(const unsigned char* pool, const int* ids, unsigned long long* sums, int count) {
    wait_for_inputs();
    digest_steps<false>(nullptr, pool, nullptr, ids, sums, count);
}
