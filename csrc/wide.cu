// Products of 65 to 256 rows with a weight that is read once, on Hopper: out[m, n] = sum over k of x[m, k] * w[n, k],
// w as [out, in]. The endings of gemv.cu, and its norm of x before, whose gain must have been multiplied into w: the
// norm is applied at the end. Its sums of squares come, in pieces, from whoever wrote x; RESIDUAL writes them.
//
// One wave: a block owns COLS rows of w and TILES tiles of 64 rows of x, shared out over GROUPS warpgroups, and there
// are almost as many blocks as multiprocessors. x is the tall operand, so that a thread has gate and up of the same
// output. Sums may take so many registers that none are left for warps that only copy: the first thread starts the
// copies, STAGES stages of 64 of K ahead, those of w before the kernel before this one has ended. SPLIT blocks of a
// cluster have a part of K each; at the end every one of them adds up a part of the outputs from all, through the
// others' shared memory. Clusters of more than 2 would leave multiprocessors without work: an H200 holds 66 of 2, 30
// of 4.
//
// Settings: COLS, TILES, GROUPS, STAGES, SPLIT, NORM, EPILOGUE, DTYPE. With EPILOGUE 2, w holds N gate rows and then
// N up rows; half of COLS are of these, half of those.
#include "hopper.cuh"
#include "rope.cuh"

#define STORE 0     // out = product
#define RESIDUAL 1  // out += product
#define SILU 2      // out = silu(gate product) * up product
#define ROPE 3      // out = product with Q and K rotated; K and V also go to their blocks

constexpr int ROWS = TILES * 64;
constexpr int THREADS = GROUPS * 128;
constexpr int MINE = TILES / GROUPS;  // tiles of a warpgroup
constexpr int OUT = EPILOGUE == SILU ? COLS / 2 : COLS;
constexpr int X_BYTES = ROWS * 128, STAGE_BYTES = X_BYTES + COLS * 128;
static_assert(TILES % GROUPS == 0, "rows that cannot be shared out this way");
static_assert((EPILOGUE == SILU) == (SPLIT == 1), "only SILU leaves the registers directly");

struct Args {
    const elem* bias;  // [N] or null; with SILU there is none
    void* out;
    float* squares;  // [pieces, rows]: sums of squares of x with NORM, of out with RESIDUAL; null: not wanted
    int rows, outputs, chunks, pieces;  // chunks: 64s of K that one block has
    float eps;
};

struct Shared {
    uint64_t full[STAGES], empty[STAGES];
    float scales[NORM ? ROWS : 1];
    Place places[EPILOGUE == ROPE ? ROWS : 1];
};

// Of the block: its part of K, its tile of w.
__device__ __forceinline__ int part() { return blockIdx.x % SPLIT; }
__device__ __forceinline__ int tile() { return blockIdx.x / SPLIT; }

struct Copies {  // what the first thread starts
    const TensorMap *w, *x;
    Shared& s;
    uint32_t ring;
    int first, outputs;  // K of the first chunk

    __device__ __forceinline__ void of_w(int i, int stage) const {
        const uint32_t to = ring + stage * STAGE_BYTES + X_BYTES;
        const int k = first + i * 64;
        expect_bytes(&s.full[stage], STAGE_BYTES);
        copy_box(to, w, k, tile() * OUT, &s.full[stage], evict_first());
        if (EPILOGUE == SILU) copy_box(to + OUT * 128, w, k, outputs + tile() * OUT, &s.full[stage], evict_first());
    }
    __device__ __forceinline__ void of_x(int i, int stage) const {
        copy_box(ring + stage * STAGE_BYTES, x, first + i * 64, blockIdx.y * ROWS, &s.full[stage], evict_unchanged());
    }
};

// What an ending must know of the rows of x, which every thread may read after the next meeting.
__device__ __forceinline__ void know_rows(const Args& args, const RopeArgs& rope, Shared& s) {
    for (int row = threadIdx.x; row < ROWS; row += THREADS) {
        [[maybe_unused]] const int m = blockIdx.y * ROWS + row;
#if NORM
        float square = 0.f;
        if (m < args.rows)
#pragma unroll 32
            for (int i = 0; i < args.pieces; ++i) square += args.squares[i * args.rows + m];
        s.scales[row] = rsqrtf(square / (args.chunks * SPLIT * 64) + args.eps);
#endif
#if EPILOGUE == ROPE
        Place place{-1, 0};
        if (m < args.rows) place.position = rope.positions[m];
        if (place.position >= 0) place.block = *block_of(rope, m, place.position);
        s.places[row] = place;
#endif
    }
}

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

__device__ __forceinline__ float scale_of(const Shared& s, int row) { return NORM ? s.scales[row] : 1.f; }

#if EPILOGUE == SILU

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
__device__ __forceinline__ void end(Sums& sums, const Args& args, Shared& s, char* ring) {
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
            const float scale = scale_of(s, first + row);
#pragma unroll
            for (int b = 0; b < OUT / 8; ++b) {
                const float* gate = &sums[t][b * 4 + h * 2];
                const float* up = &sums[t][(b + OUT / 8) * 4 + h * 2];
                float a[2] = {gate[0] * scale, gate[1] * scale};
                silu(a);
                a[0] *= up[0] * scale, a[1] *= up[1] * scale;
                *reinterpret_cast<uint32_t*>(own + row * PITCH + b * 16 + pair * 2) = packed(a[0], a[1]);
            }
        }
        __syncwarp();
        for (int i = lane; i < 16 * PIECES; i += WARP) {
            const int m = blockIdx.y * ROWS + first + i / PIECES, n = tile() * OUT + i % PIECES * VEC;
            if (m < args.rows && n < args.outputs)
                store16(static_cast<elem*>(args.out) + size_t(m) * args.outputs + n,
                        *reinterpret_cast<const Vec*>(own + i / PIECES * PITCH + i % PIECES * 16));
        }
        __syncwarp();
    }
}

#else

constexpr int PITCH = COLS + 8;  // floats; the 8 keep a warp's stores apart in the banks
constexpr int QUADS = COLS / 4;
constexpr int ENDINGS = (ROWS * QUADS + THREADS * SPLIT - 1) / (THREADS * SPLIT);  // of 4 outputs, by each thread
constexpr int BATCH = 16 / SPLIT;                                                 // that are under way at a time

struct alignas(8) Quad {
    elem v[4];
};

// What an ending needs from memory, fetched while the blocks wait for each other.
struct Early {
    Quad old;
    float2 rotation[2];
};

// Where a thread's i-th ending is: row of x and output. False if there is none.
__device__ __forceinline__ bool ending(const Args& args, int i, int& local, int& m, int& n) {
    const int at = part() * THREADS + int(threadIdx.x) + i * THREADS * SPLIT;
    local = at / QUADS;
    m = blockIdx.y * ROWS + local;
    n = tile() * OUT + at % QUADS * 4;
    return at < ROWS * QUADS && m < args.rows && n < args.outputs;
}

__device__ __forceinline__ void fetch_early(const Args& args, const RopeArgs& rope, const Shared& s, Early& early,
                                            int local, int m, int n) {
#if EPILOGUE == RESIDUAL
    early.old = *reinterpret_cast<const Quad*>(static_cast<const elem*>(args.out) + size_t(m) * args.outputs + n);
#elif EPILOGUE == ROPE
    const int position = s.places[local].position;
    if (position < 0 || n >= (HEADS + KV_HEADS) * HEAD_DIM) return;
    early.rotation[0] = *rotation_of(rope, position, n);
    early.rotation[1] = *rotation_of(rope, position, n + 2);
#endif
}

// a are the products of outputs n to n + 3 of row m.
__device__ __forceinline__ void finish(const Args& args, const RopeArgs& rope, const Shared& s, int local, int m, int n,
                                       float (&a)[4], const Early& early) {
    if (args.bias != nullptr) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] += to_float(args.bias[n + i]);
    }
#if EPILOGUE == ROPE
    rotate_and_write(rope, s.places[local], n, early.rotation[0], a[0], a[1]);
    rotate_and_write(rope, s.places[local], n + 2, early.rotation[1], a[2], a[3]);
#endif
    Quad result;
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (EPILOGUE == RESIDUAL) a[i] += to_float(early.old.v[i]);
        result.v[i] = from_float<elem>(a[i]);
        square = fmaf(to_float(result.v[i]), to_float(result.v[i]), square);
    }
#if EPILOGUE == RESIDUAL
    if ((QUADS == WARP || QUADS == WARP / 2) && args.squares != nullptr) {  // so many lanes have a row of a tile
        const uint32_t lanes = QUADS == WARP ? 0xffffffffu : 0xffffu << threadIdx.x % WARP / QUADS * QUADS;
#pragma unroll
        for (int d = QUADS / 2; d > 0; d /= 2) square += __shfl_xor_sync(lanes, square, d);
        if (threadIdx.x % QUADS == 0) args.squares[tile() * args.rows + m] = square;
    }
#endif
    *reinterpret_cast<Quad*>(static_cast<elem*>(args.out) + size_t(m) * args.outputs + n) = result;
}

__device__ __forceinline__ void end(Sums& sums, const Args& args, const RopeArgs& rope, Shared& s, char* ring) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncthreads();  // nobody reads the ring any more, and no copy is under way to it
    float* meeting = reinterpret_cast<float*>(ring);  // [row of x][row of w]
#pragma unroll
    for (int t = 0; t < MINE; ++t) {
        float* to = meeting + ((warp / 4 * MINE + t) * 64 + warp % 4 * 16 + lane / 4) * PITCH + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < COLS / 2; j += 2)
            *reinterpret_cast<float2*>(to + j / 2 % 2 * 8 * PITCH + j / 4 * 8) =
                make_float2(sums[t][j], sums[t][j + 1]);
    }
    Early early[ENDINGS];
#pragma unroll
    for (int i = 0; i < ENDINGS; ++i) {
        int local, m, n;
        if (ending(args, i, local, m, n)) fetch_early(args, rope, s, early[i], local, m, n);
    }
    uint32_t meetings[SPLIT];
#pragma unroll
    for (int r = 0; r < SPLIT; ++r) meetings[r] = address_in(r, meeting);
    meet_cluster();
#pragma unroll
    for (int batch = 0; batch < ENDINGS; batch += BATCH) {
        float4 read[BATCH][SPLIT];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            int local, m, n;
            if (batch + i >= ENDINGS || !ending(args, batch + i, local, m, n)) continue;
#pragma unroll
            for (int r = 0; r < SPLIT; ++r)
                read[i][r] = read_four(meetings[r] + (local * PITCH + n - tile() * OUT) * int(sizeof(float)));
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            int local, m, n;
            if (batch + i >= ENDINGS || !ending(args, batch + i, local, m, n)) continue;
            float a[4] = {};
#pragma unroll
            for (int r = 0; r < SPLIT; ++r)
                a[0] += read[i][r].x, a[1] += read[i][r].y, a[2] += read[i][r].z, a[3] += read[i][r].w;
            const float scale = scale_of(s, local);
#pragma unroll
            for (int j = 0; j < 4; ++j) a[j] *= scale;
            finish(args, rope, s, local, m, n, a, early[batch + i]);
        }
    }
    // Nobody leaves while its sums are being read.
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

#endif

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, 1)
    wide(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x, const elem* bias, void* out,
         float* squares, int rows, int outputs, int chunks, int pieces, float eps
#if EPILOGUE == ROPE
         ,
         RopeArgs rope) {
#else
    ) {
    const RopeArgs rope{};
#endif
    extern __shared__ char dynamic[];
    __shared__ Shared s;
    char* ring = dynamic + (-shared_address(dynamic) & 1023);
    const Args args{bias, out, squares, rows, outputs, chunks, pieces, eps};
    const Copies copies{&w, &x, s, shared_address(ring), part() * chunks * 64, outputs};
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
    know_rows(args, rope, s);
    Sums sums;
    multiply_all(sums, copies, chunks);
#if EPILOGUE == SILU
    end(sums, args, s, ring);
#else
    end(sums, args, rope, s, ring);
#endif
}
