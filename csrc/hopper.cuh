// What Hopper has for products: copies of whole tiles by the tensor copy engine, and matrix instructions of a warpgroup
// that read their operands from shared memory. Settings: COLS, the columns of such an instruction, and DTYPE.
#pragma once

#include "mma.cuh"

struct alignas(64) TensorMap {  // as cuTensorMapEncodeTiled writes it
    uint64_t opaque[16];
};

// Spends its time in the hardware, not in a loop.
__device__ __forceinline__ void wait_long(uint64_t* barrier, int parity) {
    asm volatile(
        "{ .reg .pred done; again%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again%=; }" ::"r"(
            shared_address(barrier)),
        "r"(parity)
        : "memory");
}
// An arrival that also announces bytes of copies: the phase completes once they are there.
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
// What was set up by ordinary stores, barriers above all, is seen by the copy engine and by the cluster.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void fetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A box of a matrix whose rows lie along K, from row and k on. 128-byte rows; 16-byte pieces change places within 8 rows.
__device__ __forceinline__ void copy_box(void* to, const TensorMap* map, int k, int row, uint64_t* barrier,
                                         uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], "
        "[%2], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(row), "l"(policy)
        : "memory");
}

// A tile of 128-byte rows at a multiple of 1024 bytes, as a matrix instruction names it; + 2 for each further 16 of K.
__device__ __forceinline__ uint64_t tile_of(uint32_t address) {
    return uint64_t(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#if COLS == 8
#define SHAPE "m64n8k16"
#define RESULTS "{%0, %1, %2, %3}"
#define OPERANDS "%4, %5"
#define REGISTERS "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#elif COLS == 16
#define SHAPE "m64n16k16"
#define RESULTS "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define OPERANDS "%8, %9"
#define REGISTERS "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#elif COLS == 32
#define SHAPE "m64n32k16"
#define RESULTS "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define OPERANDS "%16, %17"
#define REGISTERS "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
                  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#elif COLS == 64
#define SHAPE "m64n64k16"
#define RESULTS "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
                "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define OPERANDS "%32, %33"
#define REGISTERS "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
                  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
                  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
                  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#elif COLS == 128
#define SHAPE "m64n128k16"
#define RESULTS "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
                "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
                "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
                "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define OPERANDS "%64, %65"
#define REGISTERS "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
                  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
                  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
                  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
                  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
                  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
                  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
                  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#endif

#if DTYPE == 1
#define ELEMENTS "bf16.bf16"
#else
#define ELEMENTS "f16.f16"
#endif

// d [64, COLS] += a [64, 16] b [16, COLS], by 4 warps. Nothing is done before finish_products says so.
__device__ __forceinline__ void multiply(float (&d)[COLS / 2], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." ELEMENTS " " RESULTS ", " OPERANDS ", 1, 1, 1, 0, 0;"
                 : REGISTERS
                 : "l"(a), "l"(b));
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void finish_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
