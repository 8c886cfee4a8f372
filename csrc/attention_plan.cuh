// What the planner writes once a step and every layer's attention reads: who works on what.
//
// The work is a line of units, row after row, head after head, 16 tokens after 16 tokens; a unit is SUB tokens of one
// row and one "unit head" (a KV head with up to UNIT_HEADS of the query heads that share it; which one comes first
// differs by row). A row's unit head is an item. Block c of the persistent grid takes units [c * share, (c + 1) * share)
// of the line or, with a share of 0, whole items, which are then listed block after block. The buffer, in int32:
//
//   header   units, share, filled rows, empty rows, 0 ...
//   records  [grid][RECORD]: where the block begins, see Record
//   items    [rows * unit heads + 1][4]: see Item; before the last, which is looked at and never used, from the back
//            one for each empty row
//   counters [rows * unit heads]: arrivals of split items, 0 between launches
#pragma once

#include "common.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef GROUP  // query heads per KV head
#define GROUP 4
#endif
#ifndef BLOCK_SIZE
#define BLOCK_SIZE 16
#endif
#ifndef WINDOW  // tokens that a query sees, itself included; 0 is all
#define WINDOW 0
#endif
#ifndef SOFTCAP  // 1: logits become softcap * tanh(logit / softcap)
#define SOFTCAP 0
#endif
#ifndef STAGES
#define STAGES 2  // 16 tokens each, in a warp's ring
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef BUFFERS  // rows and heads that a block's warps may be apart
#define BUFFERS 2
#endif
#ifndef CTAS  // blocks per multiprocessor
#define CTAS 2
#endif

constexpr int SUB = 16;  // tokens that one warp reads at a time: never more than one block's
constexpr int COLUMNS = GROUP <= 8 || HEAD_DIM > 128 ? 1 : 2;  // of 8 query heads each
constexpr int UNIT_HEADS = GROUP < 8 * COLUMNS ? GROUP : 8 * COLUMNS;
constexpr int UNITS_PER_KV_HEAD = (GROUP + UNIT_HEADS - 1) / UNIT_HEADS;

constexpr int HEADER = 32;
constexpr int RECORD = 64;

__host__ __device__ __forceinline__ int first_visible(int length) {
    return WINDOW > 0 && length > WINDOW ? length - WINDOW : 0;
}
// The units of a row that have visible tokens are [first_unit, end_unit).
__host__ __device__ __forceinline__ int first_unit(int length) { return first_visible(length) / SUB; }
__host__ __device__ __forceinline__ int end_unit(int length) { return (length + SUB - 1) / SUB; }

// The first query head of a unit head.
__host__ __device__ __forceinline__ int first_head(int unit_head) {
    return unit_head / UNITS_PER_KV_HEAD * GROUP + unit_head % UNITS_PER_KV_HEAD * UNIT_HEADS;
}

struct __align__(16) Item {
    int row, head, length, unused;  // `head` is a unit head
};

struct Record {
    int item, sub, count, unused;  // the block's first item, its next unit, units to do
    Item first, next;              // that item, and the one after it
    int ids[RECORD - 12];          // block ids of the first STAGES * WARPS units
};
static_assert(STAGES * WARPS <= RECORD - 12, "a record holds the ids of the first steps");
static_assert(BLOCK_SIZE % SUB == 0 && (BLOCK_SIZE & (BLOCK_SIZE - 1)) == 0, "block sizes are 16, 32, 64 or 128");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 256, "head dims are multiples of 32 up to 256");

// Weights of the products behind the attention, which it brings into the L2 meanwhile: their latency, not their bytes,
// is what a small model waits for.
struct Ahead {
    unsigned long long at[4];  // addresses; 0: none
    int bytes[4];              // multiples of 16
};

// A block's share of them, by its first four threads.
__device__ __forceinline__ void fetch_ahead(const Ahead& what, int block, int grid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (threadIdx.x >= 4) return;
    const unsigned long long at = what.at[threadIdx.x];
    const int bytes = what.bytes[threadIdx.x], share = ((bytes + grid - 1) / grid + 15) & ~15;
    const int first = min(block * share, bytes), count = min(share, bytes - first);
    if (at != 0 && count > 0)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at + first), "r"(count) : "memory");
#endif
}
