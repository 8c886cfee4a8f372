// Whole KV blocks: copies between two pools over two lists of ids, and zeroing. A block is BLOCK_BYTES contiguous bytes,
// all layers. blockIdx.y is the place in the lists, blockIdx.x a piece of PIECE bytes, so that one launch moves any number.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int UNROLL = 4;
constexpr int PIECE = THREADS * UNROLL * 16;
static_assert(BLOCK_BYTES % 16 == 0, "blocks must be whole 16-byte pieces");

// to[to_ids[i]] = from[from_ids[i]]. A null list counts 0, 1, 2, ...: gather into, or scatter out of, a staging buffer.
// Either pool may be another process's or another card's. No block may be named twice in to_ids.
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
