// Splits a step's attention over the persistent grid from lengths that only the device knows.
//
// One block of 1024 threads, once a step and before the first layer; see attention_plan.cuh for what it writes. Shared
// memory: (rows + 1) ints. Every length may change between two replays of a graph.
#include "attention_plan.cuh"

constexpr int THREADS = 1024;

struct Pair {
    int tiles, filled;
};

// Sum over the threads before this one, and over all of them.
__device__ __forceinline__ Pair exclusive(Pair mine, Pair* scratch, Pair& total) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Pair sum = mine;
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        const int tiles = __shfl_up_sync(0xffffffffu, sum.tiles, d), filled = __shfl_up_sync(0xffffffffu, sum.filled, d);
        if (lane >= d) sum.tiles += tiles, sum.filled += filled;
    }
    if (lane == WARP - 1) scratch[warp] = sum;
    __syncthreads();
    Pair before = {0, 0};
    total = {0, 0};
    for (int w = 0; w < THREADS / WARP; w++) {
        if (w == warp) before = total;
        total.tiles += scratch[w].tiles, total.filled += scratch[w].filled;
    }
    __syncthreads();
    return {before.tiles + sum.tiles - mine.tiles, before.filled + sum.filled - mine.filled};
}

// Units per block. When all rows are equally long, a share that ends with a row's tiles needs fewer merges: worth 8% of
// the blocks, because the memory, not the blocks, is the limit.
__device__ int share_of(int units, int grid, int shortest, int longest) {
    const int even = max((units + grid - 1) / grid, 1);
    if (shortest != longest || even == 1) return even;
    const int limit = even + even * 8 / 100;
    if (even >= longest) {
        const int whole = (even + longest - 1) / longest * longest;
        return whole <= limit ? whole : even;
    }
    for (int parts = longest / even; parts > 0 && longest / parts <= limit; parts--)
        if (longest % parts == 0) return longest / parts;
    return even;
}

struct Place {
    int slot, head, tile;  // tile counts from the row's first
    int4 row;
};

__device__ __forceinline__ Place place_of(int unit, const int* before, const int4* rows, int filled, int unit_heads) {
    const int tile = unit / unit_heads;
    int low = 0, high = filled;  // before[low] <= tile < before[high]
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (before[middle] <= tile) low = middle;
        else high = middle;
    }
    const int4 row = rows[low];
    const int rest = unit - before[low] * unit_heads;
    return {low, rest / row.w, rest % row.w, row};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    plan_attention(const int* __restrict__ lengths,  // [rows]; 0 is an empty row
                   const int* __restrict__ tables,   // [rows, table_stride] block ids
                   int* __restrict__ plan,           // see attention_plan.cuh
                   int rows, int table_stride, int kv_heads, int grid) {
    extern __shared__ int before[];  // tiles of the filled rows before each
    __shared__ Pair scratch[THREADS / WARP];
    __shared__ int shortest, longest, share;
    const int thread = threadIdx.x, unit_heads = kv_heads * UNITS_PER_KV_HEAD;
    int* records = plan + HEADER;
    int4* row_of = reinterpret_cast<int4*>(records + grid * RECORD);
    int* counters = reinterpret_cast<int*>(row_of + rows);
    wait_for_inputs();
    let_next_start();
    if (thread == 0) shortest = INT_MAX, longest = 0;
    __syncthreads();

    Pair sum = {0, 0};
    for (int base = 0; base < rows; base += THREADS) {
        const int row = base + thread;
        const int length = row < rows ? max(lengths[row], 0) : 0;
        const int first = first_visible(length) / TILE;
        const int tiles = (length + TILE - 1) / TILE - first;
        Pair total;
        Pair mine = exclusive({length > 0 ? tiles : 0, length > 0}, scratch, total);
        mine.tiles += sum.tiles, mine.filled += sum.filled;
        if (length > 0) {
            before[mine.filled] = mine.tiles;
            row_of[mine.filled] = make_int4(row, length, first, tiles);
            atomicMin(&shortest, tiles);
            atomicMax(&longest, tiles);
        } else if (row < rows) {
            row_of[rows - 1 - (row - mine.filled)] = make_int4(row, 0, 0, 0);
        }
        sum.tiles += total.tiles, sum.filled += total.filled;
    }
    __syncthreads();
    const int units = sum.tiles * unit_heads;
    if (thread == 0) {
        share = share_of(units, grid, shortest, longest);
        *reinterpret_cast<int4*>(plan) = make_int4(units, share, sum.filled, rows - sum.filled);
    }
    for (int i = thread; i < rows * unit_heads; i += THREADS) counters[i] = 0;
    __syncthreads();

    for (int i = thread; i < grid * STAGES; i += THREADS) {
        const int block = i / STAGES, stage = i % STAGES;
        int* record = records + block * RECORD;
        const int start = block * share;
        const int count = min(max(units - start, 0), share);
        if (stage >= count) {
            if (stage == 0) record[3] = 0;
            continue;
        }
        const Place at = place_of(start + stage, before, row_of, sum.filled, unit_heads);
        if (stage == 0) {
            reinterpret_cast<int4*>(record)[0] = make_int4(at.slot, at.head, at.tile + at.row.z, count);
            reinterpret_cast<int4*>(record)[1] = at.row;
        }
        const int* table = tables + int64_t(at.row.x) * table_stride;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            const int token = (at.tile + at.row.z) * TILE + warp * SUB;
            record[8 + stage * WARPS + warp] = token < at.row.y ? table[token / BLOCK_SIZE] : 0;
        }
    }
}
