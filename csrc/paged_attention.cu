// Decode attention through block tables: one new token per row against all its K and V.
//
// A persistent grid takes equal shares of the step's tiles (attention_plan.cuh). Every warp streams 16 tokens of a tile
// through its own ring of shared memory, with no barrier before a piece (the tiles of one row and unit head in this
// block) ends. Products run with K as the tall operand, so that the query heads of one KV head are the 8 columns. A
// piece that is not the whole row goes to `partials`, and whichever block finishes last merges them, always in order:
// the result does not depend on who that was.
#include "attention_plan.cuh"

#if DTYPE == 0
#include "paged_attention_float.cuh"
#else
#include "mma.cuh"

constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int CHUNKS = HEAD_DIM / 8;                // of 16 bytes in a row
constexpr int HALF_BYTES = SUB * ROW_BYTES;         // K or V of a warp's tokens
constexpr int WARP_BYTES = 2 * HALF_BYTES;
constexpr int STAGE_BYTES = WARPS * WARP_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int COPIES = CHUNKS / 2;                  // by each lane, for K and again for V
constexpr int COLUMN_HEADS = UNIT_HEADS < 8 ? UNIT_HEADS : 8;
constexpr int MERGE_ROW = HEAD_DIM + 4;             // floats; the 4 keep a warp's stores apart in the banks
constexpr int PARTIAL = UNIT_HEADS * HEAD_DIM + (2 * UNIT_HEADS + 3) / 4 * 4;  // floats: sums, maxima, totals
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NOTHING = -1e30f;  // a maximum over no logit; finite, so that differences are
// A maximum may lag this far (log2) behind before sums are rescaled: weights stay under 2^8, exact ratios are kept.
constexpr float SLACK = 8.0f;

// Chunks of 16 bytes trade places within a row, so that 8 rows of one chunk lie in 8 different groups of banks.
__device__ __forceinline__ int swizzle(int row) { return CHUNKS % 8 == 0 ? row & 7 : (row >> 1) & 3; }

struct Cursor {
    int slot, head, tile;
    int4 row, next;  // row, length, first tile, tiles

    __device__ __forceinline__ void start(const int* record, const int4* rows, int filled) {
        const int4 at = reinterpret_cast<const int4*>(record)[0];
        slot = at.x, head = at.y, tile = at.z;
        row = reinterpret_cast<const int4*>(record)[1];
        next = rows[min(slot + 1, filled - 1)];
    }
    __device__ __forceinline__ bool at_last_tile() const { return tile + 1 == row.z + row.w; }
    __device__ __forceinline__ void advance(const int4* rows, int filled, int unit_heads) {
        tile++;
        if (tile < row.z + row.w) return;
        if (++head == unit_heads) {
            head = 0, slot++;
            row = next;
            next = rows[min(slot + 1, filled - 1)];
        }
        tile = row.z;
    }
    // The first of this warp's tokens, and how many there are; 0 or fewer is none.
    __device__ __forceinline__ int token() const { return tile * TILE + int(threadIdx.x) / WARP * SUB; }
};

// What a warp keeps of the piece it is in: O^T, running maxima (log2) and totals of query heads 2t and 2t + 1.
struct Sums {
    float out[COLUMNS][HEAD_DIM / 16][4];
    float top[COLUMNS][2], total[COLUMNS][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            top[n][0] = top[n][1] = NOTHING;
            total[n][0] = total[n][1] = 0;
#pragma unroll
            for (int m = 0; m < HEAD_DIM / 16; m++) out[n][m][0] = out[n][m][1] = out[n][m][2] = out[n][m][3] = 0;
        }
    }
};

// Q^T of one unit head, as B operands.
struct Query {
    uint32_t part[COLUMNS][HEAD_DIM / 16][2];

    __device__ __forceinline__ void load(const elem* q, int part_of_group, int lane) {
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            const int head = n * 8 + lane / 4;  // of the unit
            const bool there = head < UNIT_HEADS && part_of_group * UNIT_HEADS + head < GROUP;
            const uint32_t* pairs = reinterpret_cast<const uint32_t*>(q + head * HEAD_DIM) + lane % 4;
#pragma unroll
            for (int k = 0; k < HEAD_DIM / 16; k++) {
                part[n][k][0] = there ? pairs[k * 8] : 0;
                part[n][k][1] = there ? pairs[k * 8 + 4] : 0;
            }
        }
    }
};

// Copies a warp's 16 tokens of K and of V. Tokens outside [low, high) become zeros: 0 x NaN is NaN.
__device__ __forceinline__ void load_tokens(uint32_t ring, const elem* keys, const elem* values, int low, int high, int lane,
                                            uint64_t policy) {
    const int chunk = lane % CHUNKS, row = lane / CHUNKS;  // of copy 0, where CHUNKS divides 32
    const char* k = reinterpret_cast<const char*>(keys) + lane * 16;
    const char* v = reinterpret_cast<const char*>(values) + lane * 16;
    const bool whole = low <= 0 && high >= SUB;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const char* from = half ? v : k;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int r = WARP % CHUNKS == 0 ? row + i * (WARP / CHUNKS) : (i * WARP + lane) / CHUNKS;
            const int c = WARP % CHUNKS == 0 ? chunk : (i * WARP + lane) % CHUNKS;
            const uint32_t to = ring + half * HALF_BYTES + r * ROW_BYTES + ((c ^ swizzle(r)) << 4);
            if (whole) copy16(to, from + i * WARP * 16, policy);
            else copy16_or_zero(to, from + i * WARP * 16, r >= low && r < high ? 16 : 0, policy);
        }
    }
}

// Attends to the 16 tokens at `ring`, of which [low, high) are visible.
__device__ __forceinline__ void attend(Sums& sums, const Query& query, uint32_t ring, int low, int high, float scale,
                                       float softcap, int lane) {
    float logit[2][COLUMNS][4] = {};  // [16 tokens][8 heads], in two chains
    const int key_row = lane % 16;
    const uint32_t key_base = ring + key_row * ROW_BYTES, key_lane = (lane / 16 ^ swizzle(key_row)) << 4;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        uint32_t a[4];
        load_matrices(a, key_base + ((k * 32) ^ key_lane));
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) mma(logit[k % 2][n], a, query.part[n][k]);
    }
    uint32_t weights[COLUMNS][2];
    const int token = lane / 4;
    const bool whole = low <= 0 && high >= SUB;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
        float s[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            s[j] = (logit[0][n][j] + logit[1][n][j]) * scale;
            if (SOFTCAP) s[j] = softcap * LOG2E * tanhf(s[j] / (softcap * LOG2E));
            const int t = token + j / 2 * 8;
            if (!whole && (t < low || t >= high)) s[j] = -INFINITY;
        }
        const float high0 = fmaxf(s[0], s[2]), high1 = fmaxf(s[1], s[3]);
        if (__any_sync(0xffffffffu, high0 > sums.top[n][0] + SLACK || high1 > sums.top[n][1] + SLACK)) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = h ? high1 : high0;
#pragma unroll
                for (int d = 4; d < WARP; d *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
                top = fmaxf(top, sums.top[n][h]);
                const float decay = exp2_fast(sums.top[n][h] - top);
                sums.top[n][h] = top;
                sums.total[n][h] *= decay;
#pragma unroll
                for (int m = 0; m < HEAD_DIM / 16; m++) sums.out[n][m][h] *= decay, sums.out[n][m][h + 2] *= decay;
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            s[j] = exp2_fast(s[j] - sums.top[n][j % 2]);
            sums.total[n][j % 2] += s[j];
        }
        weights[n][0] = transposed(packed(s[0], s[1]));
        weights[n][1] = transposed(packed(s[2], s[3]));
    }
    const int value_row = lane % 8 + lane / 16 * 8;
    const uint32_t value_base = ring + HALF_BYTES + value_row * ROW_BYTES;
    const uint32_t value_lane = (lane / 8 % 2 ^ swizzle(value_row)) << 4;
#pragma unroll
    for (int m = 0; m < HEAD_DIM / 16; m++) {
        uint32_t a[4];
        load_matrices_transposed(a, value_base + ((m * 32) ^ value_lane));
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) mma(sums.out[n][m], a, weights[n]);
    }
}

__device__ __forceinline__ void store4(elem* to, float a, float b, float c, float d) {
    *reinterpret_cast<uint2*>(to) = make_uint2(packed(a, b), packed(c, d));
}

// Where the pieces of one row and unit head are: the first block's in its second slot, the others' in their first.
struct Split {
    int first, last;  // blocks
    __device__ __forceinline__ int slot(int block) const { return block == first ? 2 * block + 1 : 2 * block; }
};

// One block merges all pieces of a row and unit head, in order.
__device__ void merge(elem* out, const float* partials, Split split, int heads, int thread) {
    for (int e = thread * 4; e < heads * HEAD_DIM; e += WARPS * WARP * 4) {
        const int head = e / HEAD_DIM;
        const float* tops = partials + UNIT_HEADS * HEAD_DIM + head;
        float top = NOTHING;
#pragma unroll 8
        for (int c = split.first; c <= split.last; c++) top = fmaxf(top, __ldcg(tops + int64_t(split.slot(c)) * PARTIAL));
        float total = 0;
        float4 sum = {0, 0, 0, 0};
#pragma unroll 8
        for (int c = split.first; c <= split.last; c++) {
            const float* from = partials + int64_t(split.slot(c)) * PARTIAL;
            const float4 v = __ldcg(reinterpret_cast<const float4*>(from + e));
            const float decay = exp2_fast(__ldcg(from + UNIT_HEADS * HEAD_DIM + head) - top);
            total += decay * __ldcg(from + UNIT_HEADS * HEAD_DIM + UNIT_HEADS + head);
            sum.x += decay * v.x, sum.y += decay * v.y, sum.z += decay * v.z, sum.w += decay * v.w;
        }
        const float r = 1 / total;
        store4(out + e, sum.x * r, sum.y * r, sum.z * r, sum.w * r);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS* WARP, CTAS)
    paged_attention(const elem* __restrict__ q,      // [rows][q_stride], of which kv_heads * GROUP * HEAD_DIM are read
                    const elem* __restrict__ cache,  // this layer of block 0: [2, kv_heads, BLOCK_SIZE, HEAD_DIM]
                    elem* __restrict__ out,          // [rows, kv_heads * GROUP, HEAD_DIM]
                    const int* __restrict__ tables,  // [rows, table_stride] block ids
                    int* __restrict__ plan,          // see attention_plan.cuh
                    float* __restrict__ partials,    // [2 * grid][PARTIAL]
                    int64_t block_stride,            // elements between one block and the next
                    int q_stride, int table_stride, int rows, int kv_heads, float scale, float softcap) {
    extern __shared__ __align__(128) unsigned char memory[];
    float* merged = reinterpret_cast<float*>(memory + RING_BYTES);  // [WARPS][COLUMN_HEADS][MERGE_ROW]
    __shared__ float warp_top[WARPS][8], warp_total[WARPS][8];
    __shared__ bool is_last;
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, block = blockIdx.x;
    const int unit_heads = kv_heads * UNITS_PER_KV_HEAD;
    const uint32_t ring = shared_address(memory) + warp * WARP_BYTES;
    const uint64_t policy = evict_first();
    scale *= LOG2E;

    wait_for_inputs();
    const int* records = plan + HEADER;
    const int* record = records + block * RECORD;
    const int4* row_of = reinterpret_cast<const int4*>(records + gridDim.x * RECORD);
    int* counters = const_cast<int*>(reinterpret_cast<const int*>(row_of + rows));
    const int4 header = *reinterpret_cast<const int4*>(plan);
    const int share = header.y, filled = header.z, empty = header.w;
    const int count = record[3];

    if (count > 0) {
        Cursor loads;
        loads.start(record, row_of, filled);
        int ahead = lane < STAGES ? record[8 + lane * WARPS + warp] : 0;

        auto load = [&](int stage, int id) {
            const int token = loads.token(), high = loads.row.y - token;
            if (high <= 0) return;
            const int low = WINDOW ? first_visible(loads.row.y) - token : 0;
            if (WINDOW && low >= SUB) return;
            const int kv = loads.head / UNITS_PER_KV_HEAD;
            const elem* keys = cache + int64_t(id) * block_stride + (kv * BLOCK_SIZE + token % BLOCK_SIZE) * HEAD_DIM;
            load_tokens(ring + stage * STAGE_BYTES, keys, keys + kv_heads * BLOCK_SIZE * HEAD_DIM, low, high, lane, policy);
        };
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) {
            const int id = __shfl_sync(0xffffffffu, ahead, s);
            if (s < count) {
                load(s, id);
                loads.advance(row_of, filled, unit_heads);
            }
            commit_copies();
        }
        int next_id = __shfl_sync(0xffffffffu, ahead, STAGES - 1);
        int read_stage = 0, write_stage = STAGES - 1;

        Cursor at;
        at.start(record, row_of, filled);
        Query query;
        Sums sums;
        bool fresh = true;
        for (int i = 0; i < count; i++) {
            if (fresh) {
                const int kv = at.head / UNITS_PER_KV_HEAD, part = at.head % UNITS_PER_KV_HEAD;
                query.load(q + int64_t(at.row.x) * q_stride + (kv * GROUP + part * UNIT_HEADS) * HEAD_DIM, part, lane);
                sums.clear();
                fresh = false;
            }
            wait_copies<STAGES - 2>();
            __syncwarp();
            if (i + STAGES - 1 < count) {
                load(write_stage, next_id);
                loads.advance(row_of, filled, unit_heads);
                const int token = loads.token();
                if (i + STAGES < count && token < loads.row.y)
                    next_id = tables[int64_t(loads.row.x) * table_stride + token / BLOCK_SIZE];
            }
            commit_copies();
            write_stage = write_stage == STAGES - 1 ? 0 : write_stage + 1;

            const int token = at.token(), high = at.row.y - token;
            const int low = WINDOW ? first_visible(at.row.y) - token : 0;
            if (high > 0 && low < SUB) attend(sums, query, ring + read_stage * STAGE_BYTES, low, high, scale, softcap, lane);
            read_stage = read_stage == STAGES - 1 ? 0 : read_stage + 1;

            if (at.at_last_tile() || i + 1 == count) {
                // The piece ends: its four warps become one, which is the result or a partial.
                const int piece_start = block * share + i - (at.tile - at.row.z);  // of the row's first tile
                const Split split = {piece_start / share, (piece_start + at.row.w - 1) / share};
                const bool whole = split.first == split.last;
                const int part = at.head % UNITS_PER_KV_HEAD;
                const int first_head = at.head / UNITS_PER_KV_HEAD * GROUP + part * UNIT_HEADS;
                const int heads = min(UNIT_HEADS, GROUP - part * UNIT_HEADS);
                elem* result = out + (int64_t(at.row.x) * kv_heads * GROUP + first_head) * HEAD_DIM;
                float* partial = partials + int64_t(split.slot(block)) * PARTIAL;
#pragma unroll
                for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
                    for (int h = 0; h < 2; h++)
#pragma unroll
                        for (int d = 4; d < WARP; d *= 2)
                            sums.total[n][h] += __shfl_xor_sync(0xffffffffu, sums.total[n][h], d);
                    __syncthreads();  // the last reader of `merged` is done
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const int head = lane % 4 * 2 + h;
                        if (lane < 4) warp_top[warp][head] = sums.top[n][h], warp_total[warp][head] = sums.total[n][h];
                        if (head < COLUMN_HEADS) {
                            float* to = merged + (warp * COLUMN_HEADS + head) * MERGE_ROW + lane / 4;
#pragma unroll
                            for (int m = 0; m < HEAD_DIM / 16; m++)
                                to[m * 16] = sums.out[n][m][h], to[m * 16 + 8] = sums.out[n][m][h + 2];
                        }
                    }
                    __syncthreads();
                    for (int e = thread * 4; e < COLUMN_HEADS * HEAD_DIM; e += WARPS * WARP * 4) {
                        const int head = e / HEAD_DIM, dim = e % HEAD_DIM;
                        float top = NOTHING, total = 0;
#pragma unroll
                        for (int w = 0; w < WARPS; w++) top = fmaxf(top, warp_top[w][head]);
                        float4 sum = {0, 0, 0, 0};
#pragma unroll
                        for (int w = 0; w < WARPS; w++) {
                            const float decay = exp2_fast(warp_top[w][head] - top);
                            const float4 v =
                                *reinterpret_cast<const float4*>(merged + (w * COLUMN_HEADS + head) * MERGE_ROW + dim);
                            total += decay * warp_total[w][head];
                            sum.x += decay * v.x, sum.y += decay * v.y, sum.z += decay * v.z, sum.w += decay * v.w;
                        }
                        const int unit_head = n * 8 + head;
                        if (whole) {
                            const float r = 1 / total;
                            if (unit_head < heads)
                                store4(result + unit_head * HEAD_DIM + dim, sum.x * r, sum.y * r, sum.z * r, sum.w * r);
                        } else if (unit_head < UNIT_HEADS) {
                            *reinterpret_cast<float4*>(partial + unit_head * HEAD_DIM + dim) = sum;
                            if (dim == 0) {
                                partial[UNIT_HEADS * HEAD_DIM + unit_head] = top;
                                partial[UNIT_HEADS * HEAD_DIM + UNIT_HEADS + unit_head] = total;
                            }
                        }
                    }
                }
                if (!whole) {
                    __threadfence();
                    __syncthreads();
                    if (thread == 0) {
                        int* counter = counters + at.slot * unit_heads + at.head;
                        is_last = atomicAdd(counter, 1) == split.last - split.first;
                        if (is_last) *counter = 0;  // for the next layer
                    }
                    __syncthreads();
                    if (is_last) {
                        __threadfence();
                        merge(result, partials, split, heads, thread);
                    }
                }
                fresh = true;
            }
            at.advance(row_of, filled, unit_heads);
        }
    }
    let_next_start();
    const int row_chunks = kv_heads * GROUP * CHUNKS;
    for (int e = block; e < empty; e += gridDim.x) {
        elem* to = out + int64_t(row_of[rows - 1 - e].x) * row_chunks * 8;
        for (int i = thread; i < row_chunks; i += WARPS * WARP) reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
    }
}
#endif
