// Decode attention through block tables: one new token per row against all its K and V.
//
// A persistent grid takes equal shares of the step's work (attention_plan.cuh). Every warp streams its part of a
// block's share, 16 tokens at a time, through its own ring of shared memory and does not wait for the others: at the
// end of an item it leaves its sums in a buffer and goes on, and one of them, in turn, adds up all.
// Products run with K as the tall operand, so that the query heads of one KV head are the 8 columns. What is not a
// whole row goes to `partials`, and whichever block finishes last merges them, always in order: the result does not
// depend on who that was.
#include "attention_plan.cuh"

#if DTYPE == 0
#include "paged_attention_float.cuh"
#else
#include "mma.cuh"

#ifndef FLIGHT  // stages that are on their way while a warp attends
#define FLIGHT (STAGES - 1)
#endif
#ifndef LETS_EARLY  // 1: the next kernel may start as soon as this one has its inputs
#define LETS_EARLY 0
#endif

constexpr int FIRST = STAGES > FLIGHT + 1 ? STAGES : FLIGHT;  // and before it has its inputs, when the memory idles
static_assert(FLIGHT < STAGES, "a stage is refilled while the next one is attended to");
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int CHUNKS = HEAD_DIM / 8;         // of 16 bytes in a row
constexpr int HALF_BYTES = SUB * ROW_BYTES;  // K or V of a warp's tokens
constexpr int WARP_BYTES = 2 * HALF_BYTES;
constexpr int STAGE_BYTES = WARPS * WARP_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int COPIES = CHUNKS / 2;                          // by each lane, for K and again for V
constexpr int SUM_ROW = HEAD_DIM + 4;                       // floats; the 4 keep a warp's stores apart in the banks
constexpr int BUFFER = WARPS * UNIT_HEADS * (SUM_ROW + 2);  // floats: a block's sums, then (maximum, total)
constexpr int PARTIAL = UNIT_HEADS * HEAD_DIM + (2 * UNIT_HEADS + 3) / 4 * 4;  // floats: sums, then (maximum, total)
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NOTHING = -1e30f;  // a maximum over no logit; finite, so that differences are
// A maximum may lag this far (log2) behind before sums are rescaled: weights stay under 2^8, exact ratios are kept.
constexpr float SLACK = 8.0f;

// Up to this many bytes K and V leave the L2 first, so that what else lies there need not be written back meanwhile.
// Longer streams run faster when they may use all of it (H200: 4% at 1 GiB, and 4% slower at 128 MiB).
constexpr int EVICT_FIRST_UNITS = (384 << 20) / (2 * SUB * ROW_BYTES);

// Chunks of 16 bytes trade places within a row, so that 8 rows of one chunk lie in 8 different groups of banks.
__device__ __forceinline__ int swizzle(int row) { return CHUNKS % 8 == 0 ? row & 7 : (row >> 1) & 3; }

__device__ __forceinline__ Item load_now(const Item* p) {
    const int4 item = load_now(reinterpret_cast<const int4*>(p));
    return {item.x, item.y, item.z, item.w};
}

// A place in a block's units.
struct Cursor {
    int number, sub, left;  // of its item, the item's next unit, units from there on
    Item item;

    // Skips units; `item_of` tells an item by its number.
    template <typename Items>
    __device__ __forceinline__ void advance(int units, Items item_of) {
        sub += units, left -= units;
        while (left > 0 && sub >= end_unit(item.length)) {
            sub -= end_unit(item.length);
            item = item_of(++number);
            sub += first_unit(item.length);
        }
    }
};

// What a warp keeps of the row and unit head it is in: O^T, running maxima (log2) and totals of query heads 2t and 2t
// + 1.
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

// Copies a warp's 16 tokens of K and of V. Tokens outside [low, high) become zeros: 0 x NaN is NaN. Short on code, not
// only on time: a small batch runs most instructions once, and fetches each of them from memory.
__device__ __forceinline__ void load_tokens(uint32_t ring, const elem* keys, int64_t values_after, int low, int high,
                                            int lane, uint64_t policy) {
    const char* k = reinterpret_cast<const char*>(keys) + lane * 16;
    const char* v = k + values_after * 2;
    if (low <= 0 && high >= SUB) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int row = (i * WARP + lane) / CHUNKS, chunk = (i * WARP + lane) % CHUNKS;
            const uint32_t to = ring + row * ROW_BYTES + ((chunk ^ swizzle(row)) << 4);
            copy16(to, k + i * WARP * 16, policy);
            copy16(to + HALF_BYTES, v + i * WARP * 16, policy);
        }
        return;
    }
#pragma unroll 1
    for (int i = lane; i < SUB * CHUNKS; i += WARP) {
        const int row = i / CHUNKS, chunk = i % CHUNKS, bytes = row >= low && row < high ? 16 : 0;
        const uint32_t to = ring + row * ROW_BYTES + ((chunk ^ swizzle(row)) << 4);
        copy16_or_zero(to, k, bytes, policy);
        copy16_or_zero(to + HALF_BYTES, v, bytes, policy);
        k += WARP * 16, v += WARP * 16;
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

// The blocks over which one row and unit head is split. What the first has of it, its end, lies in the block's second
// slot of `partials`, and what the others have, their beginning, in their first slot.
struct Split {
    int first, last;
    __device__ __forceinline__ int slot(int block) const { return block == first ? 2 * block + 1 : 2 * block; }
};

// Publishes what the block wrote before its last barrier, and sees what earlier arrivals published.
__device__ __forceinline__ int arrive(int* counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// `threads` threads merge all parts of a row and unit head, in order, with the loads of MERGE_BATCH parts in flight.
constexpr int MERGE_BATCH = HEAD_DIM > 128 || COLUMNS > 1 || WARPS > 8 ? 8 : 16;

__device__ __forceinline__ void merge(elem* out, const float* partials, Split split, int heads, int thread,
                                      int threads) {
#pragma unroll 1
    for (int e = thread * 4; e < heads * HEAD_DIM; e += threads * 4) {
        const float* from = partials + int64_t(split.slot(split.first)) * PARTIAL + e;
        const int to_weight = UNIT_HEADS * HEAD_DIM + e / HEAD_DIM * 2 - e;
        float4 sum = __ldcg(reinterpret_cast<const float4*>(from));
        const float2 first = __ldcg(reinterpret_cast<const float2*>(from + to_weight));
        float top = first.x, total = first.y;
        from += PARTIAL;  // the next block's first slot
#pragma unroll 1
        for (int left = split.last - split.first; left > 0; left -= MERGE_BATCH) {
            float2 weights[MERGE_BATCH];
            float4 sums[MERGE_BATCH];
#pragma unroll
            for (int j = 0; j < MERGE_BATCH; j++) {
                weights[j] = {NOTHING, 0};
                sums[j] = {0, 0, 0, 0};
                if (j < left) {
                    weights[j] = __ldcg(reinterpret_cast<const float2*>(from + j * 2 * PARTIAL + to_weight));
                    sums[j] = __ldcg(reinterpret_cast<const float4*>(from + j * 2 * PARTIAL));
                }
            }
            float higher = top;
#pragma unroll
            for (int j = 0; j < MERGE_BATCH; j++) higher = fmaxf(higher, weights[j].x);
            const float decay = exp2_fast(top - higher);
            total *= decay, sum.x *= decay, sum.y *= decay, sum.z *= decay, sum.w *= decay;
            top = higher;
#pragma unroll
            for (int j = 0; j < MERGE_BATCH; j++) {
                const float weight = exp2_fast(weights[j].x - top);
                total += weight * weights[j].y;
                sum.x += weight * sums[j].x, sum.y += weight * sums[j].y;
                sum.z += weight * sums[j].z, sum.w += weight * sums[j].w;
            }
            from += MERGE_BATCH * 2 * PARTIAL;
        }
        const float r = 1 / total;
        store4(out + e, sum.x * r, sum.y * r, sum.z * r, sum.w * r);
    }
}

// A warp's sums of one row and unit head go to the block's buffer.
__device__ __forceinline__ void leave(Sums& sums, float* buffer, int warp, int lane) {
    float2* weights = reinterpret_cast<float2*>(buffer + WARPS * UNIT_HEADS * SUM_ROW) + warp * UNIT_HEADS;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = sums.total[n][h];
#pragma unroll
            for (int d = 4; d < WARP; d *= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
            const int head = n * 8 + lane % 4 * 2 + h;
            if (head >= UNIT_HEADS) continue;
            if (lane < 4) weights[head] = {sums.top[n][h], total};
            float* to = buffer + (warp * UNIT_HEADS + head) * SUM_ROW + lane / 4;
#pragma unroll
            for (int m = 0; m < HEAD_DIM / 16; m++)
                to[m * 16] = sums.out[n][m][h], to[m * 16 + 8] = sums.out[n][m][h + 2];
        }
    }
}

// Adds up what the warps left, by `threads` threads: into the result when the block had all of it, else into a partial.
__device__ __forceinline__ void add_up(const float* buffer, bool whole, elem* result, float* partial, int heads,
                                       int thread, int threads) {
    const float2* weights = reinterpret_cast<const float2*>(buffer + WARPS * UNIT_HEADS * SUM_ROW);
#pragma unroll 1
    for (int e = thread * 4; e < UNIT_HEADS * HEAD_DIM; e += threads * 4) {
        const int head = e / HEAD_DIM, dim = e % HEAD_DIM;
        float top = NOTHING, total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, weights[w * UNIT_HEADS + head].x);
        float4 sum = {0, 0, 0, 0};
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float2 weight = weights[w * UNIT_HEADS + head];
            const float decay = exp2_fast(weight.x - top);
            const float4 v = *reinterpret_cast<const float4*>(buffer + (w * UNIT_HEADS + head) * SUM_ROW + dim);
            total += decay * weight.y;
            sum.x += decay * v.x, sum.y += decay * v.y, sum.z += decay * v.z, sum.w += decay * v.w;
        }
        if (!whole) {
            *reinterpret_cast<float4*>(partial + e) = sum;
            if (dim == 0) *reinterpret_cast<float2*>(partial + UNIT_HEADS * HEAD_DIM + 2 * head) = {top, total};
        } else if (head < heads) {
            const float r = 1 / total;
            store4(result + e, sum.x * r, sum.y * r, sum.z * r, sum.w * r);
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS* WARP, CTAS)
    paged_attention(const elem* q,                   // [rows][q_stride], of which kv_heads * GROUP * HEAD_DIM are read
                    const elem* __restrict__ cache,  // this layer of block 0: [2, kv_heads, BLOCK_SIZE, HEAD_DIM]
                    elem* __restrict__ out,          // [rows, kv_heads * GROUP, HEAD_DIM]
                    const int* __restrict__ tables,  // [rows, table_stride] block ids
                    int* __restrict__ plan,          // see attention_plan.cuh
                    float* __restrict__ partials,    // [2 * grid][PARTIAL]
                    int64_t block_stride,            // elements between one block and the next
                    int q_stride, int table_stride, int rows, int kv_heads, float scale, float softcap,
                    int planned,  // 1: the plan was whole before the kernel before this one began
                    const __grid_constant__ Ahead behind) {
    extern __shared__ __align__(128) unsigned char memory[];
    float* buffers = reinterpret_cast<float*>(memory + RING_BYTES);  // [BUFFERS][BUFFER]
    __shared__ uint64_t full[BUFFERS], empty_again[BUFFERS];
    __shared__ bool is_last;
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, block = blockIdx.x;
    const int unit_heads = kv_heads * UNITS_PER_KV_HEAD;
    const uint32_t ring = shared_address(memory) + warp * WARP_BYTES;
    scale *= LOG2E;

    if (thread < BUFFERS) init_barrier(full + thread, WARPS * WARP), init_barrier(empty_again + thread, WARP);
    __syncthreads();
    if (!planned) wait_for_inputs();
    const Record* records = reinterpret_cast<const Record*>(plan + HEADER);
    const Record* record = records + block;
    const Item* items = reinterpret_cast<const Item*>(records + gridDim.x);
    int* counters = const_cast<int*>(reinterpret_cast<const int*>(items + rows * unit_heads + 1));
    // Everything that the first copies need is asked for at once and lies together.
    const int4 start = load_now(reinterpret_cast<const int4*>(record));
    const Item its_item = load_now(&record->first);
    Item next_item = load_now(&record->next);
    const int4 header = load_now(reinterpret_cast<const int4*>(plan));
    const int ahead = record->ids[min(lane, STAGES - 1) * WARPS + warp];
    const int share = header.y, empty = header.w;
    const uint64_t first = evict_first(), unchanged = evict_unchanged();
    const uint64_t policy = header.x < EVICT_FIRST_UNITS ? first : unchanged;
    const int count = start.z;

    // Warp w takes the block's units w, w + WARPS, ... whatever rows and heads they are of; copies run FLIGHT ahead.
    Cursor loads = {start.x, start.y, count, its_item};
    const auto next_of = [&](int number) {
        const Item item = next_item;
        next_item = items[number + 1];
        return item;
    };
    loads.advance(warp, next_of);
    int next_id = __shfl_sync(0xffffffffu, ahead, 0), write_stage = 0, read_stage = 0;
    // Only the unit with a row's newest token needs what the kernel before this one writes; `early`: which of the loads
    // before that it is, else 0.
    const auto load = [&](int early) {
        if (loads.left > 0) {
            const int token = loads.sub * SUB;
            const int row = loads.item.head / UNITS_PER_KV_HEAD * BLOCK_SIZE + token % BLOCK_SIZE;
            if (early > 0 && loads.item.length - token <= SUB) wait_for_inputs();
            load_tokens(ring + write_stage * STAGE_BYTES, cache + int64_t(next_id) * block_stride + row * HEAD_DIM,
                        kv_heads * BLOCK_SIZE * HEAD_DIM, first_visible(loads.item.length) - token,
                        loads.item.length - token, lane, policy);
            const int number = loads.number;
            loads.advance(WARPS, next_of);
            // Queries that are met on the way are asked for now: by then they are near.
            if (early == 0 && loads.number != number && lane * 128 < UNIT_HEADS * ROW_BYTES)
                prefetch(reinterpret_cast<const char*>(q + int64_t(loads.item.row) * q_stride +
                                                       first_head(loads.item.head) * HEAD_DIM) +
                         lane * 128);
            if (early > 0 && early < STAGES)
                next_id = __shfl_sync(0xffffffffu, ahead, early);
            else if (loads.left > 0)
                next_id = tables[int64_t(loads.item.row) * table_stride + loads.sub * SUB / BLOCK_SIZE];
        }
        commit_copies();
        write_stage = write_stage == STAGES - 1 ? 0 : write_stage + 1;
    };
#pragma unroll 1
    for (int i = 1; i <= FIRST; i++) load(i);
    int spare = FIRST - FLIGHT;  // stages to be used before the first is filled again
    wait_for_inputs();
    if (LETS_EARLY) let_next_start();

    if (count > 0) {
        // The item that the warp is in, from the block's first unit of it.
        Cursor at = {start.x, start.y, count, its_item};
        Query query;
        Sums sums;
#pragma unroll 1
        for (int left = 0;; left++) {  // items that the warp is done with
            const int head = at.item.head;
            const int units = min(end_unit(at.item.length) - at.sub, at.left);
            int unit = (warp - (count - at.left)) & (WARPS - 1);
            if (unit < units)
                query.load(q + int64_t(at.item.row) * q_stride + first_head(head) * HEAD_DIM, head % UNITS_PER_KV_HEAD,
                           lane);
            sums.clear();
#pragma unroll 1
            for (; unit < units; unit += WARPS) {
                wait_copies<FLIGHT - 1>();
                __syncwarp();
                if (FIRST == FLIGHT || --spare < 0) load(0);
                const int token = (at.sub + unit) * SUB;
                attend(sums, query, ring + read_stage * STAGE_BYTES, first_visible(at.item.length) - token,
                       at.item.length - token, scale, softcap, lane);
                read_stage = read_stage == STAGES - 1 ? 0 : read_stage + 1;
            }

            Split split = {block, block};
            if (share > 0) {
                const int first = first_unit(at.item.length);
                const int begin = block * share + count - at.left - (at.sub - first);
                split = {begin / share, (begin + end_unit(at.item.length) - first - 1) / share};
            }
            const bool whole = split.first == split.last, ends = units == at.left;
            const int use = left / BUFFERS;
            float* buffer = buffers + left % BUFFERS * BUFFER;
            if (use > 0) wait_at(empty_again + left % BUFFERS, use - 1 & 1);
            leave(sums, buffer, warp, lane);
            arrive_at(full + left % BUFFERS);
            if (ends || warp == left % WARPS) {
                wait_at(full + left % BUFFERS, use & 1);
                const int helper = ends ? thread : lane,
                          helpers = ends ? WARPS * WARP : WARP;  // all are free at the end
                const int heads = min(UNIT_HEADS, GROUP - head % UNITS_PER_KV_HEAD * UNIT_HEADS);
                elem* result = out + (int64_t(at.item.row) * kv_heads * GROUP + first_head(head)) * HEAD_DIM;
                add_up(buffer, whole, result, partials + int64_t(split.slot(block)) * PARTIAL, heads, helper, helpers);
                if (ends)
                    __syncthreads();
                else
                    __syncwarp();
                if (!ends) arrive_at(empty_again + left % BUFFERS);
                if (!whole) {
                    int merges = 0;
                    if (helper == 0) {
                        int* counter = counters + at.number;
                        merges = arrive(counter) == split.last - split.first;
                        if (merges) *counter = 0;  // for the next layer
                        if (ends) is_last = merges;
                    }
                    if (ends) __syncthreads();
                    merges = ends ? is_last : __shfl_sync(0xffffffffu, merges, 0);
                    if (merges) merge(result, partials, split, heads, helper, helpers);
                }
            }
            if (ends) break;
            at.advance(units, [&](int number) { return items[number]; });
        }
    }
    fetch_ahead(behind, block, gridDim.x);
    let_next_start();
    const int row_chunks = kv_heads * GROUP * CHUNKS;
    for (int e = block; e < empty; e += gridDim.x) {
        elem* to = out + int64_t(items[rows * unit_heads - 1 - e].row) * row_chunks * 8;
#pragma unroll 1
        for (int i = thread; i < row_chunks; i += WARPS * WARP)
            reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
    }
}
#endif
