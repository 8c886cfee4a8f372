// Products of few rows with a weight that is read once: out[m, n] = sum over k of x[m, k] * w[n, k], w as [out, in].
// Optionally RMSNorm of x comes first (NORM) and one of several endings last (EPILOGUE), so that a decode layer is four
// of these and attention. The sum of squares is taken from the pieces of x that pass by anyway and applied at the end.
//
// Tensor cores see w as their 16-row operand and x^T as the 8-column one: a block owns TILES tiles of 16 rows of w and
// all of K, which its warps share out in chunks of 64. Each thread copies exactly the 16-byte pieces of w that it will
// feed to its own lane (K may be permuted, as long as x is permuted alike), through a ring in shared memory that no
// other thread reads: nothing waits for anybody before the sums of the warps meet at the end.
//
// Settings: N outputs, K, TILES, M_TILES (8 rows of x each), WARPS, STAGES, NORM, EPILOGUE, DTYPE.
// With EPILOGUE 2, w holds N gate rows and then N up rows, and TILES counts both.
#include "common.cuh"
#include "rope.cuh"

#define STORE 0     // out = product
#define RESIDUAL 1  // out += product
#define SILU 2      // out = silu(gate product) * up product
#define ROPE 3      // out = product with Q and K rotated; K and V also go to their blocks
#define LOGITS 4    // out = product, in float32

constexpr int CHUNK = 64;
constexpr int THREADS = WARPS * WARP;
constexpr int ROWS = M_TILES * 8;
static_assert(K % CHUNK == 0 && N % 16 == 0, "K must be a multiple of 64 and N of 16");
#if EPILOGUE == SILU
constexpr int OUT_TILES = TILES / 2;
static_assert(TILES % 2 == 0, "gate and up tiles come in pairs");
#else
constexpr int OUT_TILES = TILES;
#endif
constexpr int OUT = OUT_TILES * 16;  // outputs of a block

struct Args {
    const elem* w;
    const elem* x;
    const elem* norm;  // [K]
    const elem* bias;  // [N] or null; [2 N] with SILU
    void* out;
    int rows;
    float eps;
};

// Row of w at which tile `tile` of this block begins. Tiles past the end repeat the last one; nobody stores them.
__device__ __forceinline__ int tile_row(int tile) {
    const int half = tile / OUT_TILES;
    const int n = min((int(blockIdx.x) * OUT_TILES + tile % OUT_TILES) * 16, N - 16);
    return half * N + n;
}

// a and b are the products of outputs n and n + 1 of row m; with SILU, c and d those of the up rows.
__device__ __forceinline__ void finish(const Args& args, const RopeArgs& rope, int m, int n, float a, float b, float c,
                                       float d) {
    if (args.bias != nullptr) {
        a += to_float(args.bias[n]);
        b += to_float(args.bias[n + 1]);
#if EPILOGUE == SILU
        c += to_float(args.bias[N + n]);
        d += to_float(args.bias[N + n + 1]);
#endif
    }
    const size_t at = size_t(m) * N + n;
#if EPILOGUE == LOGITS
    *reinterpret_cast<float2*>(static_cast<float*>(args.out) + at) = make_float2(a, b);
#else
    elem* out = static_cast<elem*>(args.out) + at;
#if EPILOGUE == RESIDUAL
    a += to_float(out[0]);
    b += to_float(out[1]);
#elif EPILOGUE == SILU
    a = a / (1.f + expf(-a)) * c;
    b = b / (1.f + expf(-b)) * d;
#elif EPILOGUE == ROPE
    rotate_and_write(rope, m, n, a, b);
#endif
    Pair pair{from_float<elem>(a), from_float<elem>(b)};
    *reinterpret_cast<Pair*>(out) = pair;
#endif
}

#if DTYPE != 0

constexpr int SLOTS = 4 * TILES + 2 * NORM;  // 16-byte pieces of a chunk that one thread holds
constexpr int STEPS = (K / CHUNK + WARPS - 1) / WARPS;
#if DTYPE == 2
constexpr float NORM_SHIFT = 16.f;  // x * norm may leave float16's range before it is divided by its root mean square
#else
constexpr float NORM_SHIFT = 1.f;
#endif

__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
#if DTYPE == 1
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// x * norm in place, and the sum of x squared.
__device__ __forceinline__ float normalize(uint4& x, const uint4& norm) {
    elem* v = reinterpret_cast<elem*>(&x);
    const elem* g = reinterpret_cast<const elem*>(&norm);
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        const float one = to_float(v[i]);
        squares = fmaf(one, one, squares);
        v[i] = from_float<elem>(one * to_float(g[i]) * (1.f / NORM_SHIFT));
    }
    return squares;
}

__device__ __forceinline__ void body(const Args& args, const RopeArgs& rope) {
    extern __shared__ __align__(16) unsigned char ring[];
    const int tid = threadIdx.x, warp = tid / WARP, lane = tid % WARP, g = lane / 4, t = lane % 4;
    const int first_row = blockIdx.y * ROWS;
    const uint32_t slots = uint32_t(__cvta_generic_to_shared(ring)) + tid * 16;

    auto fetch = [&](int step) {
        const int chunk = step * WARPS + warp;
        if (step < STEPS && chunk < K / CHUNK) {
            uint32_t to = slots + (step % STAGES) * (SLOTS * THREADS * 16);
            const elem* from = args.w + chunk * CHUNK + t * 8;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const elem* row = from + size_t(tile_row(tile) + g) * K;
#pragma unroll
                for (int i = 0; i < 4; ++i, to += THREADS * 16) copy16(to, row + (i & 1) * 32 + (i >> 1) * 8 * size_t(K));
            }
#if NORM
            copy16(to, args.norm + chunk * CHUNK + t * 8);
            copy16(to + THREADS * 16, args.norm + chunk * CHUNK + t * 8 + 32);
#endif
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    uint4 next[M_TILES][2];
    auto fetch_x = [&](int step) {
        const int chunk = min(step * WARPS + warp, K / CHUNK - 1);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
            const elem* row = args.x + size_t(min(first_row + i * 8 + g, args.rows - 1)) * K + chunk * CHUNK + t * 8;
            next[i][0] = *reinterpret_cast<const uint4*>(row);
            next[i][1] = *reinterpret_cast<const uint4*>(row + 32);
        }
    };

    float sums[TILES][M_TILES][4] = {};
    float squares[M_TILES] = {};
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) fetch(step);
    let_next_start();
    wait_for_inputs();
    fetch_x(0);
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
        fetch(step + STAGES - 1);
        uint4 x[M_TILES][2];
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) x[i][0] = next[i][0], x[i][1] = next[i][1];
        if (step + 1 < STEPS) fetch_x(step + 1);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        if (step * WARPS + warp >= K / CHUNK) break;
        const uint4* mine = reinterpret_cast<const uint4*>(ring) + (step % STAGES) * (SLOTS * THREADS) + tid;
#if NORM
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                squares[i] += normalize(x[i][half], mine[(4 * TILES + half) * THREADS]);
#endif
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 low = mine[(tile * 4 + half) * THREADS], high = mine[(tile * 4 + 2 + half) * THREADS];
#pragma unroll
                for (int i = 0; i < M_TILES; ++i) {
                    mma(sums[tile][i], low.x, high.x, low.y, high.y, x[i][half].x, x[i][half].y);
                    mma(sums[tile][i], low.z, high.z, low.w, high.w, x[i][half].z, x[i][half].w);
                }
            }
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();  // the ring becomes the meeting place: [warp][row of x][row of w]

    float* meeting = reinterpret_cast<float*>(ring);
    constexpr int PITCH = TILES * 16 + 2;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                meeting[(warp * ROWS + i * 8 + 2 * t + (j & 1)) * PITCH + tile * 16 + g + (j >> 1) * 8] = sums[tile][i][j];
#if NORM
    float* all_squares = meeting + WARPS * ROWS * PITCH;  // [warp][row]
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
        float sum = squares[i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (t == 0) all_squares[warp * ROWS + i * 8 + g] = sum;
    }
#endif
    __syncthreads();
    for (int at = tid; at < ROWS * OUT / 2; at += THREADS) {
        const int row = at / (OUT / 2), column = at % (OUT / 2) * 2, m = first_row + row;
        const int n = blockIdx.x * OUT + column;
        if (m >= args.rows || n >= N) continue;
        float2 low = make_float2(0.f, 0.f), high = make_float2(0.f, 0.f);
        float scale = 1.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float2* from = reinterpret_cast<const float2*>(meeting + (w * ROWS + row) * PITCH + column);
            low.x += from[0].x, low.y += from[0].y;
#if EPILOGUE == SILU
            high.x += from[OUT / 2].x, high.y += from[OUT / 2].y;
#endif
        }
#if NORM
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += all_squares[w * ROWS + row];
        scale = rsqrtf(sum / K + args.eps) * NORM_SHIFT;
#endif
        finish(args, rope, m, n, low.x * scale, low.y * scale, high.x * scale, high.y * scale);
    }
}

#else  // float32: held to the CPU's tokens, not to a speed. A warp owns two outputs, its lanes share out K.

__device__ __forceinline__ void body(const Args& args, const RopeArgs& rope) {
    wait_for_inputs();
    let_next_start();
    const int lane = threadIdx.x % WARP, n = (blockIdx.x * WARPS + threadIdx.x / WARP) * 2;
    constexpr int WEIGHTS = EPILOGUE == SILU ? 4 : 2;
    if (n >= N) return;
    for (int m = blockIdx.y * ROWS; m < min(args.rows, int(blockIdx.y + 1) * ROWS); ++m) {
        float sums[4] = {}, squares = 0.f;
        for (int k = lane; k < K; k += WARP) {
            float x = args.x[size_t(m) * K + k];
            squares = fmaf(x, x, squares);
            if (NORM) x *= args.norm[k];
#pragma unroll
            for (int i = 0; i < WEIGHTS; ++i)
                sums[i] = fmaf(x, args.w[size_t((i / 2) * N + n + i % 2) * K + k], sums[i]);
        }
        const float scale = NORM ? 1.f / sqrtf(warp_sum(squares) / K + args.eps) : 1.f;
#pragma unroll
        for (int i = 0; i < WEIGHTS; ++i) sums[i] = warp_sum(sums[i]) * scale;
        if (lane == 0) finish(args, rope, m, n, sums[0], sums[1], sums[2], sums[3]);
    }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    gemv(const elem* w, const elem* x, const elem* norm, const elem* bias, void* out, int rows, float eps
#if EPILOGUE == ROPE
         ,
         RopeArgs rope) {
#else
    ) {
    const RopeArgs rope{};
#endif
    body(Args{w, x, norm, bias, out, rows, eps}, rope);
}
