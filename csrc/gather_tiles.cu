// K and V of one layer out of a sequence's blocks, side by side, as attention over a whole prompt wants them:
// [2, kv_heads, blocks * block_size, head_dim]. Settings: TILES of a block and layer (2 * kv_heads), TILE_BYTES each.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int BYTES = TILES * TILE_BYTES;
static_assert(TILE_BYTES % 16 == 0, "tiles must be whole 16-byte pieces");

// `layer` is the layer's K in block 0; one thread block per block of the sequence.
extern "C" __global__ void __launch_bounds__(THREADS)
    gather_tiles(unsigned char* out, const unsigned char* layer, const int* ids, long long block_stride) {
    wait_for_inputs();
    const size_t i = blockIdx.x, blocks = gridDim.x;
    const unsigned char* block = layer + size_t(ids[i]) * block_stride;
#pragma unroll 4
    for (int at = threadIdx.x * 16; at < BYTES; at += THREADS * 16) {
        const uint4 piece = *reinterpret_cast<const uint4*>(block + at);
        *reinterpret_cast<uint4*>(out + (at / TILE_BYTES * blocks + i) * TILE_BYTES + at % TILE_BYTES) = piece;
    }
}
