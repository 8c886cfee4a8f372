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
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap* map, int k, int row, uint64_t* barrier,
                                         uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], "
        "[%2], %5;" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(row), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void copy_box(void* to, const TensorMap* map, int k, int row, uint64_t* barrier,
                                         uint64_t policy) {
    copy_box(shared_address(to), map, k, row, barrier, policy);
}

// What lies at `own` in the shared memory of the block of that rank.
__device__ __forceinline__ uint32_t address_in(int rank, const void* own) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
    return address;
}

// All threads of a cluster: afterwards everybody sees what the others wrote.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Four floats from the shared memory of a block of the cluster.
__device__ __forceinline__ float4 read_four(uint32_t address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// A tile of 128-byte rows at a multiple of 1024 bytes, as a matrix instruction names it; + 2 for each further 16 of K.
__device__ __forceinline__ uint64_t tile_of(uint32_t address) {
    return uint64_t(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// The sums of an instruction, 16 at a time, as the assembler's operands.
#define SUMS_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_1 SUMS_0 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_2 SUMS_1 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS_3 SUMS_2 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_4 SUMS_3 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define SUMS_5 SUMS_4 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS_6 SUMS_5 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define SUMS_7 SUMS_6 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(16 * i), FOUR(16 * i + 4), FOUR(16 * i + 8), FOUR(16 * i + 12)

#if COLS == 8
#define SHAPE "m64n8k16"
#define RESULTS "%0, %1, %2, %3"
#define OPERANDS "%4, %5"
#define ADDS "%6"
#define REGISTERS FOUR(0)
#elif COLS == 16
#define SHAPE "m64n16k16"
#define RESULTS "%0, %1, %2, %3, %4, %5, %6, %7"
#define OPERANDS "%8, %9"
#define ADDS "%10"
#define REGISTERS FOUR(0), FOUR(4)
#elif COLS == 32
#define SHAPE "m64n32k16"
#define RESULTS SUMS_0
#define OPERANDS "%16, %17"
#define ADDS "%18"
#define REGISTERS SIXTEEN(0)
#elif COLS == 64
#define SHAPE "m64n64k16"
#define RESULTS SUMS_1
#define OPERANDS "%32, %33"
#define ADDS "%34"
#define REGISTERS SIXTEEN(0), SIXTEEN(1)
#elif COLS == 96
#define SHAPE "m64n96k16"
#define RESULTS SUMS_2
#define OPERANDS "%48, %49"
#define ADDS "%50"
#define REGISTERS SIXTEEN(0), SIXTEEN(1), SIXTEEN(2)
#elif COLS == 128
#define SHAPE "m64n128k16"
#define RESULTS SUMS_3
#define OPERANDS "%64, %65"
#define ADDS "%66"
#define REGISTERS SIXTEEN(0), SIXTEEN(1), SIXTEEN(2), SIXTEEN(3)
#elif COLS == 160
#define SHAPE "m64n160k16"
#define RESULTS SUMS_4
#define OPERANDS "%80, %81"
#define ADDS "%82"
#define REGISTERS SIXTEEN(0), SIXTEEN(1), SIXTEEN(2), SIXTEEN(3), SIXTEEN(4)
#elif COLS == 192
#define SHAPE "m64n192k16"
#define RESULTS SUMS_5
#define OPERANDS "%96, %97"
#define ADDS "%98"
#define REGISTERS SIXTEEN(0), SIXTEEN(1), SIXTEEN(2), SIXTEEN(3), SIXTEEN(4), SIXTEEN(5)
#elif COLS == 224
#define SHAPE "m64n224k16"
#define RESULTS SUMS_6
#define OPERANDS "%112, %113"
#define ADDS "%114"
#define REGISTERS SIXTEEN(0), SIXTEEN(1), SIXTEEN(2), SIXTEEN(3), SIXTEEN(4), SIXTEEN(5), SIXTEEN(6)
#elif COLS == 256
#define SHAPE "m64n256k16"
#define RESULTS SUMS_7
#define OPERANDS "%128, %129"
#define ADDS "%130"
#define REGISTERS \
    SIXTEEN(0), SIXTEEN(1), SIXTEEN(2), SIXTEEN(3), SIXTEEN(4), SIXTEEN(5), SIXTEEN(6), SIXTEEN(7)
#endif

#if DTYPE == 1
#define ELEMENTS "bf16.bf16"
#else
#define ELEMENTS "f16.f16"
#endif

// d [64, COLS] += a [64, 16] b [16, COLS], by 4 warps; d = that, unless it adds: sums that nobody else sets may stay under
// way across branches. Nothing is done before finish_products says so.
__device__ __forceinline__ void multiply(float (&d)[COLS / 2], uint64_t a, uint64_t b, bool adds = true) {
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, " ADDS ", 0; wgmma.mma_async.sync.aligned." SHAPE ".f32." ELEMENTS
                 " {" RESULTS "}, " OPERANDS ", adds, 1, 1, 0, 0; }"
                 : REGISTERS
                 : "l"(a), "l"(b), "r"(int(adds)));
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void finish_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
