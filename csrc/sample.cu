// One token per row of logits [rows, VOCAB], as engine/sampler.py chooses it: logit bias, min_tokens mask, repetition,
// frequency and presence penalties, temperature, top_k, top_p, min_p, one draw. Greedy rows end after the first pass.
//
// No sort over the vocabulary: top_k and top_p are a cut, found with a histogram of distances from the best logit and a
// sort of the few tokens in the bin through which the cut goes. Weights are integers (2^46 for the best token, 2^30 or
// 2^28 where a cut is sought), so sums do not depend on the order in which they are taken: the same token every time.
// One block per row; each warp owns a contiguous piece of the vocabulary, so that ids ascend by warp, round and lane.
// Settings: VOCAB, DTYPE (of the logits).
#include "common.cuh"
#include "philox.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP;
constexpr int BINS = 2048;
constexpr int LISTED = 2048;  // a bin with at most so many tokens is sorted
constexpr int STEP = VOCAB % VEC == 0 ? VEC : 1;
constexpr int ROUNDS = (VOCAB + WARPS * WARP * STEP - 1) / (WARPS * WARP * STEP);
constexpr int NONE = 0x7fffffff;
// A cut's weights are added up in two halves of so many bits, whose sums over the whole vocabulary fit 32 bits each.
constexpr int HALF_BITS = VOCAB <= 1 << 17 ? 15 : 14;
static_assert(VOCAB <= 1 << 18, "weights could overflow");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int AT_ONCE = 2;  // rounds; 4 would spill registers
#else
constexpr int AT_ONCE = 4;
#endif
constexpr unsigned FULL = 0xffffffffu;

// 64 bytes a row, in device memory. `counts` has, for rows with penalties, one word per id of the vocabulary:
// the times it was emitted, and the top bit if it was in the prompt.
struct Row {
    float temperature, top_p, min_p;
    int top_k;
    float repetition, frequency, presence;
    int min_tokens;
    unsigned long long seed;
    int biases;       // how many entries of its row of bias_ids and bias_values count
    int ends;         // how many entries of its row of end_ids count: ids masked below min_tokens
    int uses_counts;  // 0: penalties are off
    int unused[3];
};

struct Cut {  // what is kept: nearer than `key`, or as near with an id up to `last`
    unsigned key;
    int last;
};

struct Shared {
    unsigned counts[BINS];
    unsigned high[BINS], low[BINS];  // halves of weights
    unsigned long long list[LISTED];  // key << 32 | id
    unsigned long long sums[WARPS];
    unsigned long long values[WARPS];
    int listed;
    int bin;
    unsigned long long base, total;
    Cut cut;
    int token;
};

struct Source {  // the row as it came, or its adjusted copy
    const elem* raw;
    const float* adjusted;
    float best, inverse;  // one over the temperature

    __device__ __forceinline__ void load(int id, float (&v)[STEP]) const {
        if (adjusted != nullptr) {
#pragma unroll
            for (int i = 0; i < STEP; ++i) v[i] = adjusted[id + i];
        } else if constexpr (STEP == VEC) {
            const Vec read = load16(raw + id);
#pragma unroll
            for (int i = 0; i < STEP; ++i) v[i] = to_float(read.v[i]);
        } else {
            v[0] = to_float(raw[id]);
        }
    }
    __device__ __forceinline__ float value(int id) const { return adjusted != nullptr ? adjusted[id] : to_float(raw[id]); }
    // How far below the best token, after temperature: 0 is the best, infinite is masked.
    __device__ __forceinline__ float distance(float v) const {
        const float d = (best - v) * inverse;
        return d != d ? 0.f : d;  // infinite logits, of a broken model, must still give some id
    }
};

// In 2^-26 steps up to 64; all that is further is as far, and weighs nothing.
__device__ __forceinline__ unsigned key_of(float distance) {
    return __float2uint_rz(fminf(distance * 67108864.f, 4294967040.f));
}
__device__ __forceinline__ float likelihood(float distance) {  // 1 for the best token
    float v;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(distance * -1.44269504f));
    return v;
}
// In 46 bits; in two steps, because conversions to 64 bits are slow.
__device__ __forceinline__ unsigned long long weight_of(float likelihood) {
    const float scaled = likelihood * 8388608.f;
    const unsigned high = __float2uint_rz(scaled), low = __float2uint_rz((scaled - float(high)) * 8388608.f);
    return (unsigned long long)high << 23 | low;
}
__device__ __forceinline__ unsigned cut_weight(float distance) {
    return __float2uint_rn(likelihood(distance) * float(1 << 2 * HALF_BITS));
}
__device__ __forceinline__ bool kept(const Cut& cut, unsigned key, int id) {
    return key < cut.key || (key == cut.key && id <= cut.last);
}

// each(id, value) over this warp's piece of the vocabulary, ids ascending by round, lane and call.
template <typename Each> __device__ __forceinline__ void over_row(const Source& source, Each each) {
    const int first = threadIdx.x / WARP * (ROUNDS * WARP * STEP) + threadIdx.x % WARP * STEP;
#pragma unroll AT_ONCE
    for (int round = 0; round < ROUNDS; ++round) {
        const int id = first + round * WARP * STEP;
        if (id >= VOCAB) break;
        float v[STEP];
        source.load(id, v);
#pragma unroll
        for (int i = 0; i < STEP; ++i) each(id + i, v[i]);
    }
}

template <typename T> __device__ __forceinline__ T warp_scan(T v) {  // inclusive
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        const T other = __shfl_up_sync(FULL, v, d);
        if (threadIdx.x % WARP >= d) v += other;
    }
    return v;
}

// Inclusive scan over the block, one value a thread.
__device__ __forceinline__ unsigned long long block_scan(unsigned long long v, Shared& s) {
    v = warp_scan(v);
    if (threadIdx.x % WARP == WARP - 1) s.sums[threadIdx.x / WARP] = v;
    __syncthreads();
    if (threadIdx.x < WARP) s.sums[threadIdx.x] = warp_scan(s.sums[threadIdx.x]);
    __syncthreads();
    if (threadIdx.x >= WARP) v += s.sums[threadIdx.x / WARP - 1];
    __syncthreads();
    return v;
}

// The lowest id at which the running sum of amount(id, value), ids ascending, exceeds target(total).
template <typename Amount, typename Target>
__device__ __forceinline__ int locate(const Source& source, Shared& s, Amount amount, Target target) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    unsigned long long sum = 0;
    over_row(source, [&](int id, float v) { sum += amount(id, v); });
    sum = warp_sum(sum);
    if (lane == 0) s.sums[warp] = sum;
    if (threadIdx.x == 0) s.token = NONE;
    __syncthreads();
    const unsigned long long inclusive = warp_scan(s.sums[lane]);
    const unsigned long long total = __shfl_sync(FULL, inclusive, WARP - 1);
    const unsigned long long wanted = target(total);
    const unsigned over = __ballot_sync(FULL, inclusive > wanted);
    const int owner = over == 0 ? WARPS - 1 : __ffs(over) - 1;
    unsigned long long running = owner == 0 ? 0 : __shfl_sync(FULL, inclusive, owner - 1);
    __syncthreads();
    if (warp == owner) {
        for (int round = 0; round < ROUNDS; ++round) {
            const int id = warp * (ROUNDS * WARP * STEP) + (round * WARP + lane) * STEP;
            float v[STEP];
            unsigned long long all = 0;
            if (id < VOCAB) {
                source.load(id, v);
#pragma unroll
                for (int i = 0; i < STEP; ++i) all += amount(id + i, v[i]);
            }
            const unsigned long long upto = running + warp_scan(all);
            const unsigned found = __ballot_sync(FULL, upto > wanted);
            if (found != 0) {
                if (lane == __ffs(found) - 1) {
                    unsigned long long at = upto - all;
                    int pick = id;
                    while ((at += amount(pick, source.value(pick))) <= wanted) ++pick;
                    s.token = pick;
                }
                break;
            }
            running = __shfl_sync(FULL, upto, WARP - 1);
        }
    }
    __syncthreads();
    return s.token;
}

// Ascending; n is at most LISTED.
__device__ __forceinline__ void sort_list(Shared& s, int n) {
    int size = 2;
    while (size < n) size *= 2;
    for (int i = threadIdx.x; i < size; i += THREADS)
        if (i >= n) s.list[i] = ~0ull;
    for (int k = 2; k <= size; k *= 2) {
        for (int j = k / 2; j > 0; j /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                const int low = 2 * i - (i & (j - 1)), high = low + j;
                const bool up = (low & k) == 0;
                const unsigned long long a = s.list[low], b = s.list[high];
                if ((a > b) == up) s.list[low] = b, s.list[high] = a;
            }
        }
    }
    __syncthreads();
}

// The cut that keeps, of what `cut` keeps, the nearest tokens until `target` is reached: a number of tokens (ties of the
// last one stay), or with by_weight the part top_p of all their weight (of ties, the lowest ids stay).
template <bool by_weight>
__device__ __forceinline__ Cut narrowed(const Source& source, Shared& s, const Cut cut, int top_k, float top_p) {
    unsigned low = 0;  // keys from here on
    int shift = 21;    // of a bin's width
    unsigned long long base = 0, target = top_k;
    while (true) {
        for (int i = threadIdx.x; i < BINS; i += THREADS) s.counts[i] = 0, s.high[i] = 0, s.low[i] = 0;
        if (threadIdx.x == 0) s.bin = 0, s.listed = 0;
        __syncthreads();
        over_row(source, [&](int id, float v) {
            const float d = source.distance(v);
            const unsigned key = key_of(d), bin = (key - low) >> shift;
            if (key < low || bin >= BINS || !kept(cut, key, id)) return;
            if (by_weight) {
                const unsigned weight = cut_weight(d);
                if (weight == 0) return;
                atomicAdd(&s.low[bin], weight & ((1u << HALF_BITS) - 1));
                if (const unsigned high = weight >> HALF_BITS) atomicAdd(&s.high[bin], high);
            }
            atomicAdd(&s.counts[bin], 1u);
        });
        __syncthreads();
        const int mine = threadIdx.x * 2;
        auto amount = [&](int bin) {
            return by_weight ? ((unsigned long long)s.high[bin] << HALF_BITS) + s.low[bin] : s.counts[bin];
        };
        const unsigned long long a = amount(mine), b = amount(mine + 1);
        const unsigned long long upto = block_scan(a + b, s);
        if (threadIdx.x == THREADS - 1) s.total = upto;
        __syncthreads();
        if (by_weight && low == 0 && shift == 21) target = (unsigned long long)ceil(double(top_p) * double(s.total));
        // The last bin that has tokens and before which the target is not reached.
        const unsigned long long before = base + upto - a - b;
        if (s.counts[mine] != 0 && before < target) atomicMax(&s.bin, mine);
        if (s.counts[mine + 1] != 0 && before + a < target) atomicMax(&s.bin, mine + 1);
        __syncthreads();
        const int bin = s.bin, n = s.counts[bin];
        if (mine == (bin & ~1)) s.base = before + (bin & 1 ? a : 0);
        __syncthreads();
        base = s.base;
        low += unsigned(bin) << shift;
        if (n <= LISTED) break;
        if (shift == 0) {  // more equal tokens than the list holds
            if (!by_weight) return Cut{low, NONE};
            const unsigned long long each = max(amount(bin) / n, 1ull);
            const unsigned long long wanted = (target - base + each - 1) / each - 1;
            const unsigned key = low;
            return Cut{key, locate(
                                source, s,
                                [&](int id, float v) { return key_of(source.distance(v)) == key && kept(cut, key, id) ? 1ull : 0ull; },
                                [&](unsigned long long total) { return wanted < total ? wanted : total - 1; })};
        }
        shift = shift == 21 ? 10 : 0;
        __syncthreads();
    }
    over_row(source, [&](int id, float v) {
        const float d = source.distance(v);
        const unsigned key = key_of(d);
        if (key >= low && (key - low) >> shift == 0 && kept(cut, key, id) && (!by_weight || cut_weight(d) != 0))
            s.list[atomicAdd(&s.listed, 1)] = (unsigned long long)key << 32 | unsigned(id);
    });
    __syncthreads();
    const int n = s.listed;
    sort_list(s, n);
    if (!by_weight) {
        const int place = int(min(target - base, (unsigned long long)n)) - 1;
        return Cut{unsigned(s.list[place] >> 32), NONE};
    }
    unsigned long long own[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int at = threadIdx.x * 2 + i;
        if (at < n) own[i] = cut_weight(source.distance(source.value(int(s.list[at] & 0xffffffffu))));
    }
    const unsigned long long before = base + block_scan(own[0] + own[1], s) - own[0] - own[1];
    if (threadIdx.x == 0) s.bin = 0;
    __syncthreads();
    if (threadIdx.x * 2 < n && before < target) atomicMax(&s.bin, int(threadIdx.x) * 2);
    if (threadIdx.x * 2 + 1 < n && before + own[0] < target) atomicMax(&s.bin, int(threadIdx.x) * 2 + 1);
    __syncthreads();
    const unsigned long long last = s.list[s.bin];
    __syncthreads();
    return Cut{unsigned(last >> 32), int(last & 0xffffffffu)};
}

// The best value and the lowest id that has it, known to every thread.
__device__ __forceinline__ int best_of(const Source& source, Shared& s, float& best) {
    float value = -INFINITY;
    int id = NONE;
    over_row(source, [&](int at, float v) {
        if (v > value || (v == value && id == NONE)) value = v, id = at;
    });
    auto merge = [&](float v, int at) {
        if (v > value || (v == value && at < id)) value = v, id = at;
    };
    for (int round = 0; round < 2; ++round) {
#pragma unroll
        for (int d = WARP / 2; d > 0; d /= 2) {
            const float v = __shfl_xor_sync(FULL, value, d);
            const int at = __shfl_xor_sync(FULL, id, d);
            merge(v, at);
        }
        if (round == 1) break;
        if (threadIdx.x % WARP == 0) s.values[threadIdx.x / WARP] = (unsigned long long)__float_as_uint(value) << 32 | unsigned(id);
        __syncthreads();
        value = __uint_as_float(unsigned(s.values[threadIdx.x % WARP] >> 32));
        id = int(s.values[threadIdx.x % WARP] & 0xffffffffu);
        __syncthreads();
    }
    best = value;
    return id == NONE ? 0 : id;
}

// Writes the changed row to `to`, in the order of engine/sampler.py.
__device__ __forceinline__ void adjust(const Row& row, const elem* from, float* to, const unsigned* counts, const int* bias_ids,
                                       const float* bias_values, const int* end_ids, bool masks) {
    for (int id = threadIdx.x; id < VOCAB; id += THREADS) to[id] = to_float(from[id]);
    __syncthreads();
    for (int i = threadIdx.x; i < row.biases; i += THREADS)
        if (unsigned(bias_ids[i]) < VOCAB) to[bias_ids[i]] += bias_values[i];
    __syncthreads();
    if (masks)
        for (int i = threadIdx.x; i < row.ends; i += THREADS)
            if (unsigned(end_ids[i]) < VOCAB) to[end_ids[i]] = -INFINITY;
    __syncthreads();
    if (row.uses_counts) {
        for (int id = threadIdx.x; id < VOCAB; id += THREADS) {
            const unsigned seen = counts[id], emitted = seen & 0x7fffffffu;
            if (seen == 0) continue;
            float v = to[id];
            v = v > 0 ? __fdiv_rn(v, row.repetition) : __fmul_rn(v, row.repetition);
            if (emitted != 0)
                v = __fsub_rn(v, __fadd_rn(__fmul_rn(row.frequency, float(emitted)), row.presence));
            to[id] = v;
        }
    }
    __syncthreads();
}

// tokens[row] for every row whose position is not below 0. `indices` is the index of the token to be chosen. `adjusted`
// [rows, VOCAB] is scratch, `counts` [rows, VOCAB]; both may be null while no row asks for penalties, biases or min_tokens.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample(const elem* logits, const Row* params, const int* positions, const int* indices, const unsigned* counts,
           const int* bias_ids, const float* bias_values, int bias_width, const int* end_ids, int end_width,
           float* adjusted, int* tokens) {
    __shared__ Shared s;
    wait_for_inputs();
    let_next_start();
    const int r = blockIdx.x;
    if (positions[r] < 0) return;
    const Row row = params[r];
    const int index = indices[r];
    Source source{logits + size_t(r) * VOCAB, nullptr, 0.f, 1.f};
    const bool masks = index < row.min_tokens && row.ends > 0;
    if (row.biases > 0 || masks || row.uses_counts) {
        float* to = adjusted + size_t(r) * VOCAB;
        adjust(row, source.raw, to, counts + size_t(r) * VOCAB, bias_ids + size_t(r) * bias_width,
               bias_values + size_t(r) * bias_width, end_ids + size_t(r) * end_width, masks);
        source.adjusted = to;
    }
    int token = best_of(source, s, source.best);
    if (row.temperature != 0.f) {
        source.inverse = 1.f / fmaxf(row.temperature, 1e-5f);
        Cut cut{0xffffffffu, NONE};
        if (row.top_k > 0 && row.top_k < VOCAB) cut = narrowed<false>(source, s, cut, row.top_k, 1.f);
        if (row.top_p < 1.f) cut = narrowed<true>(source, s, cut, 0, row.top_p);
        const uint64_t draw = philox_draw(row.seed, index);
        const bool all = cut.key == 0xffffffffu;
        token = locate(
            source, s,
            [&](int id, float v) {
                const float d = source.distance(v), p = likelihood(d);
                return (all || kept(cut, key_of(d), id)) && p >= row.min_p ? weight_of(p) : 0ull;
            },
            [&](unsigned long long total) { return __umul64hi(draw, total); });
    }
    if (threadIdx.x == 0) tokens[r] = token;
}
