// The state of a decode batch, which lives on the card: `apply` makes the host's changes to it before a step, `advance`
// moves every row on by the token just sampled and reports to the host, `count` keeps the tables of penalties.
// Settings: BLOCK_SIZE, VOCAB.
#include "common.cuh"

// Row state, one int per row each. An empty row has position -1 and length 0, and every kernel passes it over.
struct State {
    int* tokens;         // fed to the next step
    int* positions;      // where its K and V will be written; -1: empty
    int* lengths;        // how many positions it sees, itself among them; 0: empty
    int* indices;        // of the token that the next step samples
    int* remaining;      // tokens that may still be sampled
    const int* tables;   // [rows, table_width] block ids, -1 where there is none yet
    const int* end_ids;  // [rows, end_width]
    const int* ends;     // how many of them count
    unsigned* counts;    // [rows, VOCAB] or null
    const int* counted;  // [rows]: whether a row's counts are kept; null with counts
    int table_width;
    int end_width;
};

// What a row did. All but EMITTED leave the row empty; the host joins it again if it goes on.
#define EMITTED 1
#define ENDED 2      // an end token
#define EXHAUSTED 4  // `remaining` reached 0
#define STALLED 8    // no block for the next position

// Returns what row r did.
__device__ __forceinline__ int moved_on(const State& state, int r, int token, int position) {
    int did = EMITTED;
    if (state.counts != nullptr && state.counted[r]) state.counts[size_t(r) * VOCAB + token] += 1;
    for (int i = 0; i < state.ends[r]; ++i)
        if (state.end_ids[size_t(r) * state.end_width + i] == token) did |= ENDED;
    const int left = state.remaining[r] - 1, next = position + 1, block = next / BLOCK_SIZE;
    if (left <= 0) did |= EXHAUSTED;
    if (did == EMITTED && (block >= state.table_width || state.tables[size_t(r) * state.table_width + block] < 0))
        did |= STALLED;
    state.remaining[r] = left;
    state.indices[r] += 1;
    state.tokens[r] = did == EMITTED ? token : -1;
    state.positions[r] = did == EMITTED ? next : -1;
    state.lengths[r] = did == EMITTED ? next + 1 : 0;
    return did;
}

// One ring entry: HEADER + 2 * rows ints. The header is the step's number, an unused word, and 64 bits of nanoseconds
// each when the step began and ended; then come the tokens, then what each row did. The ring is pinned memory of the host,
// who reads an entry after the step has ended.
constexpr int HEADER = 8;

extern "C" __global__ void __launch_bounds__(1024)
    advance(const int* sampled, State state, int rows, int* ring, int ring_entries, unsigned* step,
            const unsigned long long* began) {
    wait_for_inputs();
    let_next_start();
    const unsigned number = *step;
    int* entry = ring + size_t(number % ring_entries) * (HEADER + 2 * rows);
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        const int position = state.positions[r];
        int token = -1, did = 0;
        if (position >= 0) {
            token = sampled[r];
            did = moved_on(state, r, token, position);
        }
        entry[HEADER + r] = token;
        entry[HEADER + rows + r] = did;
    }
    __syncthreads();  // all know the step's number
    if (threadIdx.x == 0) {
        unsigned long long start = began == nullptr ? 0 : *began, end;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
        *step = number + 1;
        entry[0] = int(number);
        entry[2] = int(start & 0xffffffffu);
        entry[3] = int(start >> 32);
        entry[4] = int(end & 0xffffffffu);
        entry[5] = int(end >> 32);
    }
}

// state[to + i] = changes[from + i] for each run; `changes` holds [runs], then (to, from, length) of each, then values.
// All row state lives in one array of ints, so that whatever changed travels in one copy. One block per run.
extern "C" __global__ void __launch_bounds__(128) apply(int* state, const int* changes) {
    wait_for_inputs();
    for (int run = blockIdx.x; run < changes[0]; run += gridDim.x) {
        const int to = changes[1 + 3 * run], from = changes[2 + 3 * run], length = changes[3 + 3 * run];
        for (int i = threadIdx.x; i < length; i += blockDim.x) state[to + i] = changes[from + i];
    }
}

// Starts a row's table of penalties: all zero, then the prompt's ids marked, then each emitted id counted. One block.
extern "C" __global__ void __launch_bounds__(1024)
    count(unsigned* counts, const int* prompt, int prompt_length, const int* output, int output_length) {
    wait_for_inputs();
    for (int i = threadIdx.x; i < VOCAB; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < prompt_length; i += blockDim.x)
        if (unsigned(prompt[i]) < VOCAB) atomicOr(&counts[prompt[i]], 0x80000000u);
    for (int i = threadIdx.x; i < output_length; i += blockDim.x)
        if (unsigned(output[i]) < VOCAB) atomicAdd(&counts[output[i]], 1u);
}
