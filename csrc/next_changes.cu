// The host's changes to a decode batch's state, as the first kernel of a step's graph: like `apply` of advance.cu, but
// from the entry of a ring of pinned host memory that belongs to this step, so that one graph serves every step.
#include "common.cuh"

// state[to + i] = entry[from + i] for each run; an entry holds [runs], then (to, from, length) of each, then values.
extern "C" __global__ void __launch_bounds__(128)
    next_changes(int* state, const int* ring, int entry_ints, int entries, const unsigned* step) {
    wait_for_inputs();
    let_next_start();
    const int* changes = ring + size_t(*step % entries) * entry_ints;
    for (int run = blockIdx.x; run < changes[0]; run += gridDim.x) {
        const int to = changes[1 + 3 * run], from = changes[2 + 3 * run], length = changes[3 + 3 * run];
        for (int i = threadIdx.x; i < length; i += blockDim.x) state[to + i] = changes[from + i];
    }
}
