// The host's changes to a decode batch's state, as the first kernel of a step's graph: like `apply` of advance.cu, but
// from the entry of a ring of pinned host memory that belongs to this step, so that one graph serves every step.
#include "common.cuh"

constexpr int THREADS = 1024;  // as many ints come with the first look at the host's memory, which takes microseconds

// state[to + i] = entry[from + i] for each run; an entry holds [runs], then (to, from, length) of each, then values. One
// block, a warp per run. `began`, if there is one, gets the card's clock in nanoseconds.
extern "C" __global__ void __launch_bounds__(THREADS)
    next_changes(int* state, const int* ring, int entry_ints, int entries, const unsigned* step, unsigned long long* began) {
    __shared__ int head[THREADS];
    const int thread = threadIdx.x, lane = thread % WARP;
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    wait_for_inputs();
    let_next_start();
    const int* changes = ring + size_t(*step % entries) * entry_ints;
    head[thread] = changes[thread];
    if (began != nullptr && thread == 0) *began = now;
    __syncthreads();
    auto at = [&](int i) { return i < THREADS ? head[i] : changes[i]; };
    for (int run = thread / WARP; run < head[0]; run += THREADS / WARP) {
        const int to = at(1 + 3 * run), from = at(2 + 3 * run), length = at(3 + 3 * run);
        for (int i = lane; i < length; i += WARP) state[to + i] = at(from + i);
    }
}
