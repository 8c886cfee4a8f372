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

struct Place {  // of a row's K and V
    int position, block;
};

#ifdef HEAD_DIM

// Where the block id is that a row writes to.
__device__ __forceinline__ const int* block_of(const RopeArgs& args, int row, int position) {
    const int table = args.table_rows == nullptr ? row : args.table_rows[row];
    return args.tables + size_t(table) * args.table_width + position / BLOCK_SIZE;
}

// Where the cosine and sine are for elements n and n + 1 of a row of qkv.
__device__ __forceinline__ const float2* rotation_of(const RopeArgs& args, int position, int n) {
    return args.rotation + size_t(position) * (HEAD_DIM / 2) + n % HEAD_DIM / 2;
}

// Where element d of KV head `head` goes; half 0 is K, 1 is V.
__device__ __forceinline__ elem* kv_place(const RopeArgs& args, const Place& place, int half, int head, int d) {
    const size_t tile = ((size_t(place.block) * LAYERS + args.layer) * 2 + half) * KV_HEADS + head;
    return args.pool + (tile * BLOCK_SIZE + place.position % BLOCK_SIZE) * HEAD_DIM + d;
}

// a and b are elements n and n + 1 (n even) of a row of qkv [HEADS + 2 * KV_HEADS, HEAD_DIM].
__device__ __forceinline__ void rotate_and_write(const RopeArgs& args, const Place& place, int n, float2 r, float& a,
                                                 float& b) {
    if (place.position < 0) return;
    const int head = n / HEAD_DIM;
    if (head < HEADS + KV_HEADS) {
        const float x = a, y = b;
        a = x * r.x - y * r.y;
        b = x * r.y + y * r.x;
    }
    if (head >= HEADS) {
        const int kv = head - HEADS;
        *reinterpret_cast<Pair*>(kv_place(args, place, kv / KV_HEADS, kv % KV_HEADS, n % HEAD_DIM)) =
            Pair{from_float<elem>(a), from_float<elem>(b)};
    }
}

#endif
