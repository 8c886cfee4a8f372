// Philox4x32-10 as in engine/philox.py: the draw of token `index` of the request with this seed, and no state.
#pragma once

#include <cstdint>

// 53 random bits in the upper bits of a 64-bit word: the uniform number of engine/philox.py times 2^64.
__device__ __forceinline__ uint64_t philox_draw(uint64_t seed, uint32_t index) {
    uint32_t x0 = index, x1 = 0, x2 = 0, x3 = 0, k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t low = uint64_t(0xD2511F53u) * x0, high = uint64_t(0xCD9E8D57u) * x2;
        const uint32_t y0 = uint32_t(high >> 32) ^ x1 ^ k0, y2 = uint32_t(low >> 32) ^ x3 ^ k1;
        x0 = y0, x1 = uint32_t(high), x2 = y2, x3 = uint32_t(low);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return ((uint64_t(x1) << 32 | x0) >> 11) << 11;
}
