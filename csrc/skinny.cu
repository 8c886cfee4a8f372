// Products of 9 to some hundred rows with a weight that is read once, on Hopper: out[m, n] = sum over k of
// x[m, k] * w[n, k], w as [out, in]. The same endings as gemv.cu, and the same norm of x before it, whose gain must have
// been multiplied into w: the sum of squares is taken from the tiles of x that pass by and applied at the end.
//
// w is the tall operand: a block owns TILES tiles of 64 of its rows, shared out over GROUPS warpgroups, and COLS rows of
// x as columns. One more warp does nothing but start copies, STAGES stages ahead; those of w begin before the kernel
// before this one has ended. SPLIT blocks of a cluster have a part of K each; at the end every one of them adds up a part
// of the outputs from all, through the others' shared memory.
//
// Settings: COLS, TILES, GROUPS, STAGES, DEPTH (64s of K in a stage), SPLIT, NORM, EPILOGUE, DTYPE. With EPILOGUE 2, w holds N gate rows and then N
// up rows; half of the tiles are of these, half of those.
#include "hopper.cuh"
#include "rope.cuh"

#define STORE 0     // out = product
#define RESIDUAL 1  // out += product
#define SILU 2      // out = silu(gate product) * up product
#define ROPE 3      // out = product with Q and K rotated; K and V also go to their blocks
#define LOGITS 4    // out = product, in float32

constexpr int CONSUMERS = GROUPS * 128;
constexpr int THREADS = CONSUMERS + WARP;
constexpr int MINE = TILES / GROUPS;  // tiles of a warpgroup
constexpr int OUT = EPILOGUE == SILU ? TILES * 32 : TILES * 64;
constexpr int BOX = OUT < 64 ? OUT : 64;  // rows of w that are copied at a time
constexpr int TILE_BYTES = 64 * 128;
constexpr int PART_BYTES = TILES * TILE_BYTES + COLS * 128;  // of 64 of K
constexpr int STAGE_BYTES = DEPTH * PART_BYTES;
constexpr int PITCH = TILES * 64 + 4;  // floats; the 4 keep a warp's stores apart in the banks
constexpr int QUADS = OUT / 4;
constexpr int ENDINGS = (COLS * QUADS + CONSUMERS * SPLIT - 1) / (CONSUMERS * SPLIT);  // of 4 outputs, by each thread
constexpr int SQUARES = (COLS * 8 + CONSUMERS - 1) / CONSUMERS;
static_assert(TILES % GROUPS == 0 && OUT % BOX == 0, "a product that cannot be cut this way");

struct Args {
    const elem* bias;  // [N] or null; [2 N] with SILU
    void* out;
    int rows, outputs, chunks;  // chunks: stages of K that one block has
    float eps;
};

struct alignas(8) Quad {
    elem v[4];
};

// What an ending needs from memory, fetched while the products run.
struct Early {
    Quad old;
    float2 rotation[2];
    Place place;
};

__device__ __forceinline__ int rank() { return blockIdx.x % SPLIT; }

// Where a thread's i-th ending is: row of x and output. False if there is none.
__device__ __forceinline__ bool ending(const Args& args, int i, int& local, int& m, int& n) {
    const int at = rank() * CONSUMERS + int(threadIdx.x) + i * CONSUMERS * SPLIT;
    local = at / QUADS;
    m = blockIdx.x / SPLIT * COLS + local;
    n = blockIdx.y * OUT + at % QUADS * 4;
    return at < COLS * QUADS && m < args.rows && n < args.outputs;
}

__device__ __forceinline__ void fetch_early(const Args& args, const RopeArgs& rope, Early& early, int m, int n) {
#if EPILOGUE == RESIDUAL
    early.old = *reinterpret_cast<const Quad*>(static_cast<const elem*>(args.out) + size_t(m) * args.outputs + n);
#elif EPILOGUE == ROPE
    early.place.position = rope.positions[m];
    if (early.place.position < 0) return;
    early.place.block = *block_of(rope, m, early.place.position);
    early.rotation[0] = *rotation_of(rope, early.place.position, n);
    early.rotation[1] = *rotation_of(rope, early.place.position, n + 2);
#endif
}

// a are the products of outputs n to n + 3 of row m; with SILU, up those of the up rows.
__device__ __forceinline__ void finish(const Args& args, const RopeArgs& rope, int m, int n, float (&a)[4],
                                       float (&up)[4], const Early& early) {
    if (args.bias != nullptr) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] += to_float(args.bias[n + i]);
            if (EPILOGUE == SILU) up[i] += to_float(args.bias[args.outputs + n + i]);
        }
    }
    const size_t at = size_t(m) * args.outputs + n;
#if EPILOGUE == LOGITS
    *reinterpret_cast<float4*>(static_cast<float*>(args.out) + at) = make_float4(a[0], a[1], a[2], a[3]);
#else
#if EPILOGUE == ROPE
    rotate_and_write(rope, early.place, n, early.rotation[0], a[0], a[1]);
    rotate_and_write(rope, early.place, n + 2, early.rotation[1], a[2], a[3]);
#endif
    Quad result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (EPILOGUE == RESIDUAL) a[i] += to_float(early.old.v[i]);
        if (EPILOGUE == SILU) a[i] = a[i] / (1.f + expf(-a[i])) * up[i];
        result.v[i] = from_float<elem>(a[i]);
    }
    *reinterpret_cast<Quad*>(static_cast<elem*>(args.out) + at) = result;
#endif
}

__device__ __forceinline__ void meet_consumers() {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
}
// What lies at `own` in the shared memory of the block with that rank.
__device__ __forceinline__ uint32_t of_block(const void* own, int of_rank) {
    return SPLIT > 1 ? address_in(of_rank, own) : shared_address(own);
}
__device__ __forceinline__ float read_one(const float* own, int of_rank) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(of_block(own, of_rank)) : "memory");
    return v;
}

struct Shared {
    uint64_t full[STAGES], empty[STAGES];
    float squares[COLS];
};

// One thread's work: what it copies is used by everybody.
__device__ __forceinline__ void copy_all(const TensorMap* w, const TensorMap* x, const Args& args, Shared& s, char* ring) {
    const int first = rank() * args.chunks, column = blockIdx.x / SPLIT * COLS;
    const uint64_t often = evict_unchanged(), once = gridDim.x > SPLIT ? often : evict_first();
    auto place = [&](int i) { return (first + i) * 64 * DEPTH; };
    auto copy_w = [&](int i, int stage) {
        expect_bytes(&s.full[stage], STAGE_BYTES);
        char* to = ring + stage * STAGE_BYTES;
#pragma unroll
        for (int box = 0; box < TILES * 64 / BOX; ++box) {
            constexpr int EACH = OUT / BOX;  // of gate, then of up
            const int row = int(blockIdx.y) * OUT + box % EACH * BOX + box / EACH * args.outputs;
#pragma unroll
            for (int d = 0; d < DEPTH; ++d)
                copy_box(to + d * PART_BYTES + box * BOX * 128, w, place(i) + d * 64, row, &s.full[stage], once);
        }
    };
    auto copy_x = [&](int i, int stage) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            copy_box(ring + stage * STAGE_BYTES + d * PART_BYTES + TILES * TILE_BYTES, x, place(i) + d * 64, column,
                     &s.full[stage], often);
    };
    const int ahead = min(STAGES, args.chunks);
    for (int i = 0; i < ahead; ++i) copy_w(i, i);
    let_next_start();
    wait_for_inputs();
    for (int i = 0; i < ahead; ++i) copy_x(i, i);
    int stage = 0, parity = 0;
    for (int i = ahead; i < args.chunks; ++i) {
        wait_long(&s.empty[stage], parity);
        copy_w(i, stage);
        copy_x(i, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

__device__ __forceinline__ void multiply_all(const Args& args, const RopeArgs& rope, Shared& s, char* ring) {
    const int tid = threadIdx.x, group = tid / 128, lane = tid % WARP;
    float sums[MINE][COLS / 2] = {};
    [[maybe_unused]] float squares[SQUARES] = {};
    Early early[ENDINGS];
    wait_for_inputs();
#pragma unroll
    for (int i = 0; i < ENDINGS; ++i) {
        int local, m, n;
        early[i].place.position = -1;
        if (ending(args, i, local, m, n)) fetch_early(args, rope, early[i], m, n);
    }
    int stage = 0, parity = 0, before = -1;
#pragma unroll 1
    for (int i = 0; i < args.chunks; ++i) {
        wait_long(&s.full[stage], parity);
        const char* at = ring + stage * STAGE_BYTES;
        begin_products();
#pragma unroll
        for (int k = 0; k < 4 * DEPTH; ++k) {
            const char* part = at + k / 4 * PART_BYTES;
            const uint64_t x = tile_of(shared_address(part + TILES * TILE_BYTES)) + k % 4 * 2;
#pragma unroll
            for (int t = 0; t < MINE; ++t)
                multiply(sums[t], tile_of(shared_address(part + (group * MINE + t) * TILE_BYTES)) + k % 4 * 2, x);
        }
        commit_products();
#if NORM
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int p = 0; p < SQUARES; ++p) {
                const int piece = tid + p * CONSUMERS;
                if (COLS * 8 % CONSUMERS != 0 && piece >= COLS * 8) break;
                const Vec v = *reinterpret_cast<const Vec*>(at + d * PART_BYTES + TILES * TILE_BYTES + piece * 16);
#pragma unroll
                for (int j = 0; j < VEC; ++j) squares[p] = fmaf(to_float(v.v[j]), to_float(v.v[j]), squares[p]);
            }
#endif
        finish_products<1>();  // those of the stage before
        __syncwarp();
        if (before >= 0 && lane == 0) arrive_at(&s.empty[before]);
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    finish_products<0>();
    meet_consumers();  // nobody reads the ring any more
    float* meeting = reinterpret_cast<float*>(ring);  // [row of x][row of w]
#pragma unroll
    for (int t = 0; t < MINE; ++t) {
        float* to = meeting + (group * MINE + t) * 64 + tid % 128 / WARP * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < COLS / 2; ++j) to[(j / 4 * 8 + lane % 4 * 2 + j % 2) * PITCH + j / 2 % 2 * 8] = sums[t][j];
    }
#if NORM
#pragma unroll
    for (int p = 0; p < SQUARES; ++p) {
        const int piece = tid + p * CONSUMERS;
#pragma unroll
        for (int d = 1; d < 8; d *= 2) squares[p] += __shfl_xor_sync(0xffffffffu, squares[p], d);
        if (lane % 8 == 0 && piece < COLS * 8) s.squares[piece / 8] = squares[p];
    }
#endif
    if (SPLIT > 1)
        meet_cluster();
    else
        meet_consumers();
#pragma unroll
    for (int i = 0; i < ENDINGS; ++i) {
        int local, m, n;
        if (!ending(args, i, local, m, n)) continue;
        const float* from = meeting + local * PITCH + n - int(blockIdx.y) * OUT;
        float a[4] = {}, up[4] = {}, square = 0.f;
#pragma unroll
        for (int r = 0; r < SPLIT; ++r) {
            const float4 v = read_four(of_block(from, r));
            a[0] += v.x, a[1] += v.y, a[2] += v.z, a[3] += v.w;
#if EPILOGUE == SILU
            const float4 u = read_four(of_block(from + OUT, r));
            up[0] += u.x, up[1] += u.y, up[2] += u.z, up[3] += u.w;
#endif
            if (NORM) square += read_one(&s.squares[local], r);
        }
        if (NORM) {
            const float scale = rsqrtf(square / (args.chunks * SPLIT * DEPTH * 64) + args.eps);
#pragma unroll
            for (int j = 0; j < 4; ++j) a[j] *= scale, up[j] *= scale;
        }
        finish(args, rope, m, n, a, up, early[i]);
    }
}

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, 1)
    skinny(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x, const elem* bias, void* out, int rows,
           int outputs, int chunks, float eps
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
    const Args args{bias, out, rows, outputs, chunks, eps};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) init_barrier(&s.full[i], 1), init_barrier(&s.empty[i], GROUPS * 4);
        publish_barriers();
    }
    if (threadIdx.x == CONSUMERS) fetch_map(&w), fetch_map(&x);
    __syncthreads();
    if (threadIdx.x < CONSUMERS) {
        multiply_all(args, rope, s, ring);
    } else {
        if (threadIdx.x == CONSUMERS) copy_all(&w, &x, args, s, ring);
        __syncwarp();
        if (SPLIT > 1) meet_cluster();
    }
    if (SPLIT > 1) meet_cluster();  // nobody leaves while its sums are being read
}
