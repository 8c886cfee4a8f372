// Rotates the Q and K heads of qkv [rows, HEADS + 2 * KV_HEADS, HEAD_DIM] in place and writes K and V to their blocks,
// for products that did not end with it. One thread has 16 bytes of one head; a block has 256 of them.
#include "rope.cuh"

extern "C" __global__ void __launch_bounds__(256) rope_write(elem* qkv, int rows, RopeArgs args) {
    constexpr int WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM, PIECES = WIDTH / VEC;
    wait_for_inputs();
    let_next_start();
    const long long at = (long long)blockIdx.x * 256 + threadIdx.x;
    const int row = int(at / PIECES), n = int(at % PIECES) * VEC, head = n / HEAD_DIM;
    if (row >= rows) return;
    const int position = args.positions[row];
    if (position < 0) return;
    elem* place = qkv + size_t(row) * WIDTH + n;
    Vec v = load16(place);
    if (head < HEADS + KV_HEADS) {
        const float2* rotation = rotation_of(args, position, n);
#pragma unroll
        for (int i = 0; i < VEC; i += 2) {
            const float2 r = rotation[i / 2];
            const float x = to_float(v.v[i]), y = to_float(v.v[i + 1]);
            v.v[i] = from_float<elem>(x * r.x - y * r.y);
            v.v[i + 1] = from_float<elem>(x * r.y + y * r.x);
        }
        store16(place, v);
    }
    if (head >= HEADS) {
        const int kv = head - HEADS;
        const Place place{position, *block_of(args, row, position)};
        store16(kv_place(args, place, kv / KV_HEADS, kv % KV_HEADS, n % HEAD_DIM), v);
    }
}
