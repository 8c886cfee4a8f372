// Products of few rows with a weight that is read once: out[m, n] = sum over k of x[m, k] * w[n, k], w as [out, in].
// Optionally RMSNorm of x comes first (NORM) and one of several endings last (EPILOGUE), so that a decode layer is four
// of these and attention. The sum of squares is taken from the pieces of x that pass by anyway and applied at the end.
//
// Tensor cores see w as their 16-row operand and x^T as the 8-column one: a block owns TILES tiles of 16 rows of w and
// all of K, which its warps share out in chunks. Each thread loads exactly the 16-byte pieces of w and x that it feeds to
// its own lane (K may be permuted, as long as x is permuted alike), STAGES chunks ahead and straight into registers:
// nothing waits for anybody before the sums of the warps meet at the end. (Asynchronous copies of such pieces into shared
// memory cost a multiprocessor 38 cycles for each 512 bytes, more than the memory needs.) Whatever else the ending reads
// is fetched meanwhile. All but x and what the ending reads is fetched before the kernel before this one has ended.
// Blocks begin at different places of K: all reading the same piece of x at once would queue up at one slice of the L2.
//
// Settings: N outputs, K, TILES, M_TILES (8 rows of x each), WARPS, STAGES (chunks that a warp has under way), CHUNK (32 or
// 64 of K), NORM, EPILOGUE, DTYPE. With EPILOGUE 2, w holds N gate rows and then N up rows, and TILES counts both.
#include "common.cuh"
#include "rope.cuh"

#define STORE 0     // out = product
#define RESIDUAL 1  // out += product
#define SILU 2      // out = silu(gate product) * up product
#define ROPE 3      // out = product with Q and K rotated; K and V also go to their blocks
#define LOGITS 4    // out = product, in float32

constexpr int THREADS = WARPS * WARP;
constexpr int ROWS = M_TILES * 8;
constexpr int OUT_TILES = EPILOGUE == SILU ? TILES / 2 : TILES;
constexpr int OUT = OUT_TILES * 16;  // outputs of a block; the last block repeats some of its neighbour's
[[maybe_unused]] constexpr int CHUNKS = K / CHUNK;
static_assert(K % CHUNK == 0 && N % 16 == 0 && OUT <= N && (EPILOGUE != SILU || TILES % 2 == 0),
              "a product that cannot be cut this way");

struct Args {
    const elem* w;
    const elem* x;
    const elem* norm;  // [K]
    const elem* bias;  // [N] or null; [2 N] with SILU
    void* out;
    int rows;
    float eps;
};

__device__ __forceinline__ int first_output() { return min(int(blockIdx.x) * OUT, N - OUT); }

// a and b are the products of outputs n and n + 1 of row m; with SILU, c and d those of the up rows. `old` is what was
// in out, `place` where the row's K and V go.
__device__ __forceinline__ void finish(const Args& args, const RopeArgs& rope, int m, int n, float a, float b, float c,
                                       float d, float2 old, const Place& place, float2 rotation) {
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
#if EPILOGUE == RESIDUAL
    a += old.x;
    b += old.y;
#elif EPILOGUE == SILU
    a = a / (1.f + expf(-a)) * c;
    b = b / (1.f + expf(-b)) * d;
#elif EPILOGUE == ROPE
    rotate_and_write(rope, place, n, rotation, a, b);
#endif
    *reinterpret_cast<Pair*>(static_cast<elem*>(args.out) + at) = Pair{from_float<elem>(a), from_float<elem>(b)};
#endif
}

#if DTYPE != 0

constexpr int HALVES = CHUNK / 32;  // 16-byte pieces of a chunk of one row that one thread holds
constexpr int STEPS = (CHUNKS + WARPS - 1) / WARPS;
#if DTYPE == 2
constexpr float NORM_SHIFT = NORM ? 16.f : 1.f;  // x * norm may leave float16's range before it is divided by its root mean square
#else
[[maybe_unused]] constexpr float NORM_SHIFT = 1.f;
#endif

template <int BYTES> __device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from), "n"(BYTES)
                 : "memory");
}
// Where it stands, and not where the value is first needed.
__device__ __forceinline__ uint4 load_early(const void* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ float2 read_pair(const float* from) { return *reinterpret_cast<const float2*>(from); }

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

#if DTYPE == 1
using elem2 = __nv_bfloat162;
__device__ __forceinline__ float2 unpacked(elem2 v) { return __bfloat1622float2(v); }
#else
using elem2 = __half2;
__device__ __forceinline__ float2 unpacked(elem2 v) { return __half22float2(v); }
#endif

// x * norm in place, and the sum of x squared.
__device__ __forceinline__ float normalize(uint4& x, const uint4& norm) {
    elem2* v = reinterpret_cast<elem2*>(&x);
    const elem2* gain = reinterpret_cast<const elem2*>(&norm);
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 both = unpacked(v[i]);
        squares = fmaf(both.x, both.x, fmaf(both.y, both.y, squares));
#if DTYPE == 2
        v[i] = __hmul2(__hmul2(v[i], __float2half2_rn(1.f / NORM_SHIFT)), gain[i]);
#else
        v[i] = __hmul2(v[i], gain[i]);
#endif
    }
    return squares;
}

// What a block's ending needs from memory, fetched before its sums are there.
struct Early {
#if EPILOGUE == RESIDUAL
    elem2 old[ROWS * OUT / 2];
#elif EPILOGUE == ROPE
    float2 rotation[ROWS * OUT / 2];
    Place places[ROWS];
#endif
    int none;
};

__device__ __forceinline__ void fetch_early(const Args& args, const RopeArgs& rope, Early& early, int first_row) {
#if EPILOGUE == RESIDUAL || EPILOGUE == ROPE
    for (int at = threadIdx.x; at < ROWS * OUT / 2; at += THREADS) {
        const int m = first_row + at / (OUT / 2), n = first_output() + at % (OUT / 2) * 2;
        if (m >= args.rows) break;
#if EPILOGUE == RESIDUAL
        copy_async<4>(&early.old[at], static_cast<const elem*>(args.out) + size_t(m) * N + n);
#else
        copy_async<8>(&early.rotation[at], rotation_of(rope, max(rope.positions[m], 0), n));
#endif
    }
#if EPILOGUE == ROPE
    const int m = first_row + threadIdx.x;
    if (threadIdx.x < ROWS && m < args.rows) {
        const int position = rope.positions[m];
        early.places[threadIdx.x].position = position;
        if (position >= 0) copy_async<4>(&early.places[threadIdx.x].block, block_of(rope, m, position));
    }
#endif
#endif
}

__device__ __forceinline__ void body(const Args& args, const RopeArgs& rope) {
    extern __shared__ __align__(16) float meeting[];  // [warp][row of x][row of w], then [warp][row of x]
    __shared__ Early early;
    const int tid = threadIdx.x, warp = tid / WARP, lane = tid % WARP, g = lane / 4, t = lane % 4;
    const int first_row = blockIdx.y * ROWS;
    const elem* w = args.w + size_t(first_output() + g) * K + t * 8;
    const elem* x[M_TILES];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) x[i] = args.x + size_t(min(first_row + i * 8 + g, args.rows - 1)) * K + t * 8;
    const int turned = blockIdx.x * CHUNKS / gridDim.x + warp;

    struct Stage {
        uint4 w[TILES][2][HALVES], x[M_TILES][HALVES], norm[NORM ? HALVES : 1];
    } stages[STAGES];
    auto inside = [&](int step) { return step < STEPS && (CHUNKS % WARPS == 0 || step * WARPS + warp < CHUNKS); };
    auto place = [&](int step) {  // in K
        const int chunk = step * WARPS + turned;
        return (chunk < CHUNKS ? chunk : chunk - CHUNKS) * CHUNK;
    };
    auto fetch_w = [&](Stage& to, int step) {
        const int k = place(step);
#pragma unroll
        for (int i = 0; i < HALVES; ++i) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    to.w[tile][j][i] = load_stream(
                        w + k + (size_t(tile / OUT_TILES) * N + tile % OUT_TILES * 16 + j * 8) * K + i * 32);
            if (NORM) to.norm[i] = load_early(args.norm + k + t * 8 + i * 32);
        }
    };
    auto fetch_x = [&](Stage& to, int step) {
        const int k = place(step);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int half = 0; half < HALVES; ++half) to.x[i][half] = load_early(x[i] + k + half * 32);
    };

    float sums[TILES][M_TILES][4] = {};
    [[maybe_unused]] float squares[M_TILES] = {};
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
        if (inside(s)) fetch_w(stages[s], s);
    let_next_start();
    wait_for_inputs();
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
        if (inside(s)) fetch_x(stages[s], s);
    fetch_early(args, rope, early, first_row);
#pragma unroll 1
    for (int first = 0; first < STEPS; first += STAGES) {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            if (!inside(first + s)) continue;
            Stage& now = stages[s];
#if NORM
#pragma unroll
            for (int i = 0; i < M_TILES; ++i)
#pragma unroll
                for (int half = 0; half < HALVES; ++half) squares[i] += normalize(now.x[i][half], now.norm[half]);
#endif
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int half = 0; half < HALVES; ++half) {
                    const uint4 low = now.w[tile][0][half], high = now.w[tile][1][half];
#pragma unroll
                    for (int i = 0; i < M_TILES; ++i) {
                        mma(sums[tile][i], low.x, high.x, low.y, high.y, now.x[i][half].x, now.x[i][half].y);
                        mma(sums[tile][i], low.z, high.z, low.w, high.w, now.x[i][half].z, now.x[i][half].w);
                    }
                }
            if (inside(first + s + STAGES)) {
                fetch_w(now, first + s + STAGES);
                fetch_x(now, first + s + STAGES);
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");  // of fetch_early

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
        const int row = at / (OUT / 2), offset = at % (OUT / 2) * 2, m = first_row + row;
        const int n = first_output() + offset;
        if (m >= args.rows) break;
        if (n < int(blockIdx.x) * OUT) continue;  // the neighbour's
        float2 low = make_float2(0.f, 0.f), high = make_float2(0.f, 0.f);
        float scale = 1.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float* from = meeting + (w * ROWS + row) * PITCH + offset;
            const float2 first = read_pair(from);
            low.x += first.x, low.y += first.y;
#if EPILOGUE == SILU
            const float2 second = read_pair(from + OUT);
            high.x += second.x, high.y += second.y;
#endif
        }
#if NORM
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float2 both = read_pair(all_squares + w * ROWS + (row & ~1));
            sum += row & 1 ? both.y : both.x;
        }
        scale = rsqrtf(sum / K + args.eps) * NORM_SHIFT;
#endif
        float2 old = make_float2(0.f, 0.f), rotation = old;
        Place place{};
#if EPILOGUE == RESIDUAL
        old = unpacked(early.old[at]);
#elif EPILOGUE == ROPE
        rotation = early.rotation[at];
        place = early.places[row];
#endif
        finish(args, rope, m, n, low.x * scale, low.y * scale, high.x * scale, high.y * scale, old, place, rotation);
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
        if (lane != 0) continue;
        float2 old = make_float2(0.f, 0.f), rotation = old;
        Place place{};
#if EPILOGUE == RESIDUAL
        old = *reinterpret_cast<const float2*>(static_cast<const float*>(args.out) + size_t(m) * N + n);
#elif EPILOGUE == ROPE
        place.position = rope.positions[m];
        if (place.position >= 0) {
            place.block = *block_of(rope, m, place.position);
            rotation = *rotation_of(rope, place.position, n);
        }
#endif
        finish(args, rope, m, n, sums[0], sums[1], sums[2], sums[3], old, place, rotation);
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
