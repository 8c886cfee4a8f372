// gate_up of 65 to 256 rows with a weight that is read once, on Hopper: out[m, n] = silu(sum over k of x[m, k] * w[n, k])
// * (sum over k of x[m, k] * w[outputs + n, k]), w as [2 * outputs, inputs].
//
// One wave: a block owns COLS rows of w, half of them gate and half up, and TILES tiles of 64 rows of x, shared out over
// GROUPS warpgroups, and there are almost as many blocks as multiprocessors. x is the tall operand, so that a thread has
// gate and up of the same output. Sums may take so many registers that none are left for warps that only copy: the first
// thread starts the copies, STAGES stages of 64 of K ahead, those of w before the kernel before this one has ended.
//
// Settings: COLS, TILES, GROUPS, STAGES, DTYPE.
#include "hopper.cuh"

constexpr int ROWS = TILES * 64;
constexpr int THREADS = GROUPS * 128;
constexpr int MINE = TILES / GROUPS;  // tiles of a warpgroup
constexpr int OUT = COLS / 2;
constexpr int X_BYTES = ROWS * 128, STAGE_BYTES = X_BYTES + COLS * 128;
static_assert(TILES % GROUPS == 0, "rows that cannot be shared out this way");

struct Shared {
    uint64_t full[STAGES], empty[STAGES];
};

struct Copies {  // what the first thread starts
    const TensorMap *w, *x;
    Shared& s;
    uint32_t ring;
    int outputs;

    __device__ __forceinline__ void of_w(int i, int stage) const {
        const uint32_t to = ring + stage * STAGE_BYTES + X_BYTES;
        expect_bytes(&s.full[stage], STAGE_BYTES);
        copy_box(to, w, i * 64, blockIdx.x * OUT, &s.full[stage], evict_first());
        copy_box(to + OUT * 128, w, i * 64, outputs + blockIdx.x * OUT, &s.full[stage], evict_first());
    }
    __device__ __forceinline__ void of_x(int i, int stage) const {
        copy_box(ring + stage * STAGE_BYTES, x, i * 64, blockIdx.y * ROWS, &s.full[stage], evict_unchanged());
    }
};

using Sums = float[MINE][COLS / 2];

__device__ __forceinline__ void multiply_all(Sums& sums, const Copies& copies, int chunks) {
    const int group = threadIdx.x / 128;
    Shared& s = copies.s;
    int stage = 0, parity = 0;
#pragma unroll 1
    for (int i = 0; i < chunks; ++i) {
        wait_long(&s.full[stage], parity);
        const uint32_t at = copies.ring + stage * STAGE_BYTES;
        const uint64_t x = tile_of(at + group * MINE * 64 * 128), w = tile_of(at + X_BYTES);
        begin_products();
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int t = 0; t < MINE; ++t)
                multiply(sums[t], x + t * (64 * 128 / 16) + k * 2, w + k * 2, (i | k) != 0);
        commit_products();
        finish_products<1>();  // those of the stage before
        __syncwarp();
        const int next = i - 1 + STAGES;  // goes to the stage before
        if (i > 0 && next < chunks) {
            const int before = (stage == 0 ? STAGES : stage) - 1;
            if (threadIdx.x % WARP == 0) arrive_at(&s.empty[before]);
            if (threadIdx.x == 0) {
                wait_long(&s.empty[before], parity ^ (stage == 0));
                copies.of_w(next, before);
                copies.of_x(next, before);
            }
            __syncwarp();
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    finish_products<0>();
}

// silu of both; one division for the two, because the special functions are what an ending waits for.
__device__ __forceinline__ void silu(float (&v)[2]) {
    float e[2], inverse;
#pragma unroll
    for (int i = 0; i < 2; ++i) e[i] = 1.f + exp2_fast(fminf(v[i] * -1.4426950408889634f, 60.f));  // a finite product
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(e[0] * e[1]));
    v[0] *= inverse * e[1], v[1] *= inverse * e[0];
}

// Each thread has gate and up of the same output. A warp's 16 rows pass through its own part of the ring, so that whole
// pieces of rows go to memory.
__device__ __forceinline__ void end(Sums& sums, elem* out, int rows, int outputs, char* ring) {
    constexpr int PITCH = OUT * 2 + 16;  // bytes; the 16 keep a warp's stores apart in the banks
    constexpr int PIECES = OUT / VEC;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, pair = lane % 4 * 2;
    char* own = ring + warp * 16 * PITCH;
    __syncthreads();  // the ring is idle
#pragma unroll
    for (int t = 0; t < MINE; ++t) {
        const int first = (warp / 4 * MINE + t) * 64 + warp % 4 * 16;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = lane / 4 + h * 8;
#pragma unroll
            for (int b = 0; b < OUT / 8; ++b) {
                const float* gate = &sums[t][b * 4 + h * 2];
                const float* up = &sums[t][(b + OUT / 8) * 4 + h * 2];
                float a[2] = {gate[0], gate[1]};
                silu(a);
                *reinterpret_cast<uint32_t*>(own + row * PITCH + b * 16 + pair * 2) = packed(a[0] * up[0], a[1] * up[1]);
            }
        }
        __syncwarp();
        for (int i = lane; i < 16 * PIECES; i += WARP) {
            const int m = blockIdx.y * ROWS + first + i / PIECES, n = blockIdx.x * OUT + i % PIECES * VEC;
            if (m < rows && n < outputs)
                store16(out + size_t(m) * outputs + n,
                        *reinterpret_cast<const Vec*>(own + i / PIECES * PITCH + i % PIECES * 16));
        }
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wide(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x, elem* out, int rows, int outputs,
         int chunks) {  // 64s of K
    extern __shared__ char dynamic[];
    __shared__ Shared s;
    char* ring = dynamic + (-shared_address(dynamic) & 1023);
    const Copies copies{&w, &x, s, shared_address(ring), outputs};
    const int ahead = min(STAGES, chunks);
    if (threadIdx.x == 0) {
        fetch_map(&w), fetch_map(&x);
        for (int i = 0; i < STAGES; ++i) init_barrier(&s.full[i], 1), init_barrier(&s.empty[i], GROUPS * 4);
        publish_barriers();
        for (int i = 0; i < ahead; ++i) copies.of_w(i, i);
        let_next_start();
    }
    __syncthreads();  // every barrier is there
    wait_for_inputs();
    if (threadIdx.x == 0)
        for (int i = 0; i < ahead; ++i) copies.of_x(i, i);
    __syncwarp();
    Sums sums;
    multiply_all(sums, copies, chunks);
    end(sums, out, rows, outputs, ring);
}
