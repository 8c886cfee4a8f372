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
constexpr int IDS = STAGES * WARPS, AT_ONCE = IDS <= 32 ? IDS : IDS / 2;  // block ids; registers hold no more at once
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

// What a block may have beyond an even share for it that no item is split and nothing merged.
__device__ int worth_of_merges(int even, int items, int grid) {
    if (MERGE == 0) return most_of(even) - even;
    return items <= grid ? MERGE * 3 / 2 : MERGE;  // fewer blocks leave each more of the memory
}

// Whole items, those of the longest rows first, are dealt out to some of the blocks, back and forth: block c gets c,
// 2 * blocks - 1 - c, 2 * blocks + c, ... so that all have about as much (compare Graham 1969: longest first).
struct Deal {
    int items, blocks;

    // The block's item after `turn` others; not below `items`: none.
    __device__ __forceinline__ int item(int block, int turn) const {
        return block < blocks ? turn * blocks + (turn % 2 ? blocks - 1 - block : block) : items;
    }
    // Where the block's items begin when all are listed block after block.
    __device__ __forceinline__ int place(int block) const {
        const int turns = items / blocks, rest = items % blocks;
        return block * turns + (turns % 2 ? max(block - (blocks - rest), 0) : min(block, rest));
    }
};

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

// Fills in a block's record; `item_of` tells its items by turn.
template <typename Items>
__device__ __forceinline__ void write(Record* record, int first_item, int sub, int count, Items item_of,
                                      const int* tables, int table_stride) {
    record->count = count;
    if (count == 0) return;
    Item item = item_of(0);
    record->item = first_item, record->sub = sub;
    record->first = item, record->next = item_of(1);
    int turn = 0;
#pragma unroll 1
    for (int first = 0; first < IDS; first += AT_ONCE) {
        int ids[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            ids[i] = first + i < count ? tables[int64_t(item.row) * table_stride + sub * SUB / BLOCK_SIZE] : 0;
            if (++sub < end_unit(item.length)) continue;
            item = item_of(++turn);
            sub = first_unit(item.length);
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
    extern __shared__ int2 filled_rows[];                      // [rows]: row, length; in their order
    int2* by_slot = filled_rows + rows;                        // [rows]: the same as they are listed
    int* before = reinterpret_cast<int*>(by_slot + rows);      // [rows]: units, of one head, of the filled rows before each
    __shared__ Pair scratch[THREADS / WARP];
    __shared__ int shortest, longest, fullest[2];
    const int thread = threadIdx.x, unit_heads = kv_heads * UNITS_PER_KV_HEAD;
    Record* records = reinterpret_cast<Record*>(plan + HEADER);
    Item* listed = reinterpret_cast<Item*>(records + grid);
    int* counters = reinterpret_cast<int*>(listed + rows * unit_heads + 1);
    wait_for_inputs();
    let_next_start();
    if (thread == 0) shortest = INT_MAX, longest = fullest[0] = fullest[1] = 0;
    __syncthreads();

    Pair sum = {0, 0};
    for (int base = 0; base < rows; base += THREADS) {
        const int row = base + thread;
        const int length = row < rows ? max(lengths[row], 0) : 0;
        const int units = end_unit(length) - first_unit(length);
        Pair total;
        Pair mine = exclusive({units, length > 0}, scratch, total);
        mine.units += sum.units, mine.filled += sum.filled;
        const int least = __reduce_min_sync(0xffffffffu, length > 0 ? units : INT_MAX),
                  most = __reduce_max_sync(0xffffffffu, units);
        if (thread % WARP == 0 && most > 0) atomicMin(&shortest, least), atomicMax(&longest, most);
        if (length > 0) {
            before[mine.filled] = mine.units;
            filled_rows[mine.filled] = make_int2(row, length);
        } else if (row < rows) {
            listed[rows * unit_heads - 1 - (row - mine.filled)].row = row;
        }
        sum.units += total.units, sum.filled += total.filled;
    }
    __syncthreads();
    const int units = sum.units * unit_heads, filled = sum.filled, even = (units + grid - 1) / grid;
    const int items = filled * unit_heads, turns = max((items + grid - 1) / grid, 1);
    // The fewest blocks that can have as much as if all had some: multiprocessors that stay free are worth up to 10% of a
    // step (135M on an H200).
    const Deal fewest = {items, (items + turns - 1) / turns}, all = {items, grid};
    const bool sorted = filled <= THREADS && even <= LONG_SHARE;
    const auto units_of = [](int2 row) { return end_unit(row.y) - first_unit(row.y); };
    if (thread < filled && sorted) {
        int slot = thread;
        if (shortest < longest) {
            const int mine = units_of(filled_rows[thread]);
            slot = 0;
#pragma unroll 8
            for (int i = 0; i < filled; i++) slot += units_of(filled_rows[i]) + (i < thread) > mine;
        }
        by_slot[slot] = filled_rows[thread];
    }
    __syncthreads();
    // Rows start with different heads, so that blocks that walk through equal rows side by side do not all read the same
    // few kilobytes of every cache block at the same time.
    const auto item_at = [&](int number) {
        const int slot = number / unit_heads;
        const int2 row = by_slot[slot];
        return Item{row.x, (number + slot) % unit_heads, row.y, 0};
    };
    const auto dealt_to = [&](const Deal& deal, int block) {
        int found = 0;
        for (int turn = 0, number; (number = deal.item(block, turn)) < items; turn++)
            found += units_of(by_slot[number / unit_heads]);
        return found;
    };
    if (sorted)
        for (int block = thread; block < grid; block += THREADS)
            atomicMax(fullest, dealt_to(fewest, block)), atomicMax(fullest + 1, dealt_to(all, block));
    __syncthreads();
    const bool few = fullest[0] <= fullest[1] + WARPS;
    const Deal deal = few ? fewest : all;
    const bool dealt = sorted && fullest[few ? 0 : 1] <= even + worth_of_merges(even, items, grid);
    const int share = dealt ? 0 : share_of(units, grid, shortest, longest);
    if (thread == 0) *reinterpret_cast<int4*>(plan) = make_int4(units, share, filled, rows - filled);
    if (!dealt)
        for (int i = thread; i < filled; i += THREADS) by_slot[i] = filled_rows[i];
    for (int i = thread; i < rows * unit_heads; i += THREADS) counters[i] = 0;
    __syncthreads();
    for (int i = thread; i < items; i += THREADS) {
        const int turn = i / deal.blocks, at = i % deal.blocks, block = turn % 2 ? deal.blocks - 1 - at : at;
        listed[dealt ? deal.place(block) + turn : i] = item_at(i);
    }
    for (int block = thread; block < grid; block += THREADS) {
        int first_item = 0, sub = 0, count = 0;
        if (dealt) {
            count = dealt_to(deal, block);
            if (count > 0) {
                first_item = deal.place(block);
                sub = first_unit(item_at(block).length);
            }
        } else if (const int start = block * share; start < units) {
            const int slot = slot_of(start, before, filled, unit_heads), each = units_of(filled_rows[slot]);
            const int rest = start - before[slot] * unit_heads;
            first_item = slot * unit_heads + rest / each;
            sub = first_unit(filled_rows[slot].y) + rest % each;
            count = min(share, units - start);
        }
        const auto item_of = [&](int turn) {
            return item_at(min(dealt ? deal.item(block, turn) : first_item + turn, items - 1));
        };
        write(records + block, first_item, sub, count, item_of, tables, table_stride);
    }
}
