// Rotation of Q and K and the place of a token's K and V in the pool, for rope_write.cu and for gemv.cu's ending.
// Settings: HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS. A rotary pair is two adjacent elements.
#pragma once

#include "common.cuh"

struct Pair {
    elem a, b;
};

// Passed by value: 48 bytes, in this order.
struct RopeArgs {
    const float2* rotation;  // [positions, HEAD_DIM / 2]: cosine and sine
    const int* positions;    // [rows]; -1: an empty row, which writes to no block
    const int* tables;       // [rows or more, table_width] block ids
    const int* table_rows;   // [rows]: which table a row has; null: its own number
    elem* pool;              // [blocks, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    int table_width;
    int layer;
};

#ifdef HEAD_DIM

// Where element d of KV head `head` goes; half 0 is K, 1 is V.
__device__ __forceinline__ elem* kv_place(const RopeArgs& args, int row, int position, int half, int head, int d) {
    const int table = args.table_rows == nullptr ? row : args.table_rows[row];
    const int block = args.tables[size_t(table) * args.table_width + position / BLOCK_SIZE];
    const size_t tile = ((size_t(block) * LAYERS + args.layer) * 2 + half) * KV_HEADS + head;
    return args.pool + (tile * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM + d;
}

// a and b are elements n and n + 1 (n even) of a row of qkv [HEADS + 2 * KV_HEADS, HEAD_DIM].
__device__ __forceinline__ void rotate_and_write(const RopeArgs& args, int row, int n, float& a, float& b) {
    const int head = n / HEAD_DIM, d = n % HEAD_DIM, position = args.positions[row];
    if (position < 0) return;
    if (head < HEADS + KV_HEADS) {
        const float2 r = args.rotation[size_t(position) * (HEAD_DIM / 2) + d / 2];
        const float x = a, y = b;
        a = x * r.x - y * r.y;
        b = x * r.y + y * r.x;
    }
    if (head >= HEADS) {
        const int kv = head - HEADS;
        Pair pair{from_float<elem>(a), from_float<elem>(b)};
        *reinterpret_cast<Pair*>(kv_place(args, row, position, kv / KV_HEADS, kv % KV_HEADS, d)) = pair;
    }
}

#else
__device__ __forceinline__ void rotate_and_write(const RopeArgs&, int, int, float&, float&) {}
#endif
