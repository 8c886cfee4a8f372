// What every kernel shares: the element type chosen by -DDTYPE, 16-byte accesses, reductions, and the two calls that
// let a kernel start while the one before it still runs. Kernels take raw pointers; sizes come by -D or as arguments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

// DTYPE: 0 float32, 1 bfloat16, 2 float16; the order of engine.config.DTYPES.
#ifndef DTYPE
#define DTYPE 1
#endif
#if DTYPE == 0
using elem = float;
#elif DTYPE == 1
using elem = __nv_bfloat16;
#else
using elem = __half;
#endif

constexpr int WARP = 32;
constexpr int VEC = 16 / int(sizeof(elem));  // elements in 16 bytes

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
template <typename T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float<float>(float v) { return v; }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }
template <> __device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }

// What a value becomes when it is stored and read again.
__device__ __forceinline__ float rounded(float v) { return to_float(from_float<elem>(v)); }

// 16 bytes as elements.
struct alignas(16) Vec {
    elem v[VEC];
};

__device__ __forceinline__ Vec load16(const elem* p) { return *reinterpret_cast<const Vec*>(p); }
__device__ __forceinline__ void store16(elem* p, const Vec& v) { *reinterpret_cast<Vec*>(p) = v; }

// Bytes that are read once: they pass the L1 and are the first to leave the L2.
__device__ __forceinline__ uint4 load_stream(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// Programmatic dependent launch. Every kernel calls wait_for_inputs() before it reads what its predecessor writes, and
// before it writes itself. Weights may be read before it, K and V of earlier steps, and the plan of attention once another
// layer's attention has waited for it. A kernel that skipped it would let its successor overtake its predecessor. Both are
// nothing when a kernel is launched without the attribute, and on cards before Hopper.
__device__ __forceinline__ void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <typename T> __device__ __forceinline__ T warp_sum(T v) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

// Sum over the block, known to every thread. `scratch` holds one value per warp and may be used again after it.
template <typename T> __device__ __forceinline__ T block_sum(T v, T* scratch) {
    const int warps = blockDim.x / WARP;
    v = warp_sum(v);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = v;
    __syncthreads();
    T total = threadIdx.x % WARP < warps ? scratch[threadIdx.x % WARP] : T(0);
    total = warp_sum(total);
    __syncthreads();
    return total;
}
