// Splits a step's attention over the persistent grid from lengths that only the device knows.
//
// One block of 1024 threads, once a step and before the first layer; see attention_plan.cuh for what it writes. Shared
// memory: 20 bytes a row. Every length may change between two replays of a graph.
#include "attention_plan.cuh"

#ifndef MERGE  // units that a block reads in the time that a merge takes, where that is a matter of latency
#define MERGE 0
#endif

constexpr int THREADS = 1024;
constexpr int SHORTEST_SHARE = 2 * WARPS;  // of a longer row: less and merging costs more than it brings
constexpr int LONG_SHARE = 1600;           // so long that merges cost nothing beside it
constexpr int IDS = STAGES * WARPS, AT_ONCE = IDS <= 40 ? IDS : IDS / 2;  // block ids; registers hold no more at once
static_assert(IDS % AT_ONCE == 0, "all batches of ids are whole");

struct Pair {
    int units, filled;  // of one head
};

// Sum over the threads before this one, and over all of them.
__device__ __forceinline__ Pair exclusive(Pair mine, Pair* scratch, Pair& total) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Pair sum = mine;
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        const int units = __shfl_up_sync(0xffffffffu, sum.units, d),
                  filled = __shfl_up_sync(0xffffffffu, sum.filled, d);
        if (lane >= d) sum.units += units, sum.filled += filled;
    }
    if (lane == WARP - 1) scratch[warp] = sum;
    __syncthreads();
    Pair warps = scratch[lane];  // as many as lanes
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        const int units = __shfl_up_sync(0xffffffffu, warps.units, d),
                  filled = __shfl_up_sync(0xffffffffu, warps.filled, d);
        if (lane >= d) warps.units += units, warps.filled += filled;
    }
    const auto of = [&](int v, int w) { return __shfl_sync(0xffffffffu, v, w); };
    total = {of(warps.units, WARP - 1), of(warps.filled, WARP - 1)};
    const Pair before = {of(warps.units, (warp + WARP - 1) % WARP), of(warps.filled, (warp + WARP - 1) % WARP)};
    __syncthreads();
    return {(warp > 0 ? before.units : 0) + sum.units - mine.units,
            (warp > 0 ? before.filled : 0) + sum.filled - mine.filled};
}
static_assert(THREADS == WARP * WARP, "a warp adds up the warps");

// What a block may have where an even share is this much, if that saves merges: worth 8% of the blocks while shares are
// short, because the memory, not the blocks, is the limit.
__device__ int most_of(int even) { return even + even * 8 / 100; }

// Units per block. When all rows are equally long, shares of which some make up a row need fewer merges.
__device__ int share_of(int units, int grid, int shortest, int longest) {
    const int even = max((units + grid - 1) / grid, min(SHORTEST_SHARE, longest));
    if (shortest != longest || even >= longest || even == SHORTEST_SHARE || even > LONG_SHARE) return even;
    for (int parts = longest / even; parts > 0 && longest / parts <= most_of(even); parts--)
        if (longest % (parts * WARPS) == 0) return longest / parts;
    return even;
}

// Rows' heads per block, so that no row is split and nothing is merged: where no block has more by it than a merge is
// worth. Else 0.
__device__ int whole_heads(int units, int heads, int grid, int longest) {
    const int even = (units + grid - 1) / grid, each = (heads + grid - 1) / grid;
    const int merge = each == 1 ? MERGE * 3 / 2 : MERGE;  // fewer blocks leave each more of the memory
    return even <= LONG_SHARE && each * longest <= max(most_of(even), even + merge) ? each : 0;
}

// The filled row in which a unit lies.
__device__ __forceinline__ int slot_of(int unit, const int* before, int filled, int unit_heads) {
    const int in_head = unit / unit_heads;
    int low = 0, high = filled;  // before[low] <= in_head < before[high]
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (before[middle] <= in_head)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// Fills in a block's record.
__device__ __forceinline__ void write(Record* record, int start, int count, const int* before, const int4* rows,
                                      int filled, int unit_heads, const int* tables, int table_stride) {
    record->count = count;
    if (count == 0) return;
    int slot = slot_of(start, before, filled, unit_heads);
    int4 row = rows[slot];
    const int rest = start - before[slot] * unit_heads;
    int turn = rest / row.w, sub = row.z + rest % row.w;
    record->slot = slot, record->turn = turn, record->sub = sub;
    record->row = row, record->next = rows[min(slot + 1, filled - 1)];
#pragma unroll 1
    for (int first = 0; first < IDS; first += AT_ONCE) {
        int ids[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            ids[i] = first + i < count ? tables[int64_t(row.x) * table_stride + sub * SUB / BLOCK_SIZE] : 0;
            if (++sub < row.z + row.w) continue;
            if (++turn == unit_heads) turn = 0, row = rows[min(++slot, filled - 1)];
            sub = row.z;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) record->ids[first + i] = ids[i];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    plan_attention(const int* __restrict__ lengths,  // [rows]; 0 is an empty row
                   const int* __restrict__ tables,   // [rows, table_stride] block ids
                   int* __restrict__ plan,           // see attention_plan.cuh
                   int rows, int table_stride, int kv_heads, int grid) {
    extern __shared__ int4 filled_rows[];                     // [rows], as in the plan
    int* before = reinterpret_cast<int*>(filled_rows + rows);  // [rows]: units, of one head, of the filled rows before each
    __shared__ Pair scratch[THREADS / WARP];
    __shared__ int shortest, longest, share, heads_each;
    const int thread = threadIdx.x, unit_heads = kv_heads * UNITS_PER_KV_HEAD;
    Record* records = reinterpret_cast<Record*>(plan + HEADER);
    int4* row_of = reinterpret_cast<int4*>(records + grid);
    int* counters = reinterpret_cast<int*>(row_of + rows);
    wait_for_inputs();
    let_next_start();
    if (thread == 0) shortest = INT_MAX, longest = 0;
    __syncthreads();

    Pair sum = {0, 0};
    for (int base = 0; base < rows; base += THREADS) {
        const int row = base + thread;
        const int length = row < rows ? max(lengths[row], 0) : 0;
        const int first = first_visible(length) / SUB;
        const int units = (length + SUB - 1) / SUB - first;
        Pair total;
        Pair mine = exclusive({length > 0 ? units : 0, length > 0}, scratch, total);
        mine.units += sum.units, mine.filled += sum.filled;
        const int least = __reduce_min_sync(0xffffffffu, length > 0 ? units : INT_MAX),
                  most = __reduce_max_sync(0xffffffffu, length > 0 ? units : 0);
        if (thread % WARP == 0 && most > 0) atomicMin(&shortest, least), atomicMax(&longest, most);
        if (length > 0) {
            before[mine.filled] = mine.units;
            filled_rows[mine.filled] = row_of[mine.filled] = make_int4(row, length, first, units);
        } else if (row < rows) {
            row_of[rows - 1 - (row - mine.filled)] = make_int4(row, 0, 0, 0);
        }
        sum.units += total.units, sum.filled += total.filled;
    }
    __syncthreads();
    const int units = sum.units * unit_heads;
    if (thread == 0) {
        heads_each = whole_heads(units, sum.filled * unit_heads, grid, longest);
        share = heads_each > 0 ? 0 : share_of(units, grid, shortest, longest);
        *reinterpret_cast<int4*>(plan) = make_int4(units, share, sum.filled, rows - sum.filled);
    }
    for (int i = thread; i < rows * unit_heads; i += THREADS) counters[i] = 0;
    __syncthreads();
    for (int block = thread; block < grid; block += THREADS) {
        const auto first_of = [&](int of) {  // unit of a block
            if (heads_each == 0) return min(of * share, units);
            const int slot = of * heads_each / unit_heads, turn = of * heads_each % unit_heads;
            return slot < sum.filled ? before[slot] * unit_heads + turn * filled_rows[slot].w : units;
        };
        const int start = first_of(block);
        write(records + block, start, first_of(block + 1) - start, before, filled_rows, sum.filled, unit_heads, tables,
              table_stride);
    }
}
