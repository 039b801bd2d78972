// The few instructions that C++ has no word for, as functions. The kernels use these and nothing else of the device, so
// that the same kernel source runs on a CPU: with EMULATE defined, emulation.h gives every function here a host twin.
#pragma once
#ifdef EMULATE
#include "emulation.h"
#else
#include <cuda_fp16.h>

#include <cstdint>

typedef __half half_t;

// An array in shared memory; under emulation it is filled with NaN or large numbers before each block.
#define SHARED(type, name, count) __shared__ __align__(128) type name[count]

__device__ inline float to_float(half_t x) { return __half2float(x); }
__device__ inline half_t to_half(float x) { return __float2half_rn(x); }

// Two floats rounded to halves, the first one in the low 16 bits.
__device__ inline uint32_t pack2(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}

__device__ inline float from_bits(uint32_t bits, half_t) { return __half2float(__ushort_as_half(bits)); }
__device__ inline float from_bits(uint32_t bits, float) { return __uint_as_float(bits); }
__device__ inline uint32_t mul_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }

// 2^x, off by at most a factor of 1 + 2^-22; exactly 0 for -inf.
__device__ inline float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2(x), off by at most 2^-22 for x in [1/2, 2] and by a factor of 1 + 2^-22 elsewhere.
__device__ inline float fast_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, off by at most a factor of 1 + 2^-22; 0 for inf.
__device__ inline float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <class T>
__device__ inline T shuffle_xor(T x, int lanes) {
    return __shfl_xor_sync(0xffffffffu, x, lanes);
}

// Bit i: what lane i says.
__device__ inline uint32_t vote(bool x) { return __ballot_sync(0xffffffffu, x); }

__device__ inline uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Copy 16 bytes into shared memory, or 16 zero bytes if !valid, without waiting. Lands at the latest in copy_wait.
__device__ inline void copy_async16(void *shared, const void *global, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

// The copies since the last commit become a group.
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most N groups of this thread are under way. Other threads' copies need a __syncthreads() after it.
template <int N>
__device__ inline void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Four 8 x 8 matrices of halves: lane 8 i + r gives the address of row r of matrix i; lane t receives of each matrix
// columns 2 (t % 4) and the next of row t / 4, or with _transposed rows 2 (t % 4) and the next of column t / 4.
__device__ inline void load_matrix4(uint32_t *fragment, const half_t *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ inline void load_matrix4_transposed(uint32_t *fragment, const half_t *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c [16 x 8] float += a [16 x 16] half * b [16 x 8] half, spread over a warp as the PTX manual draws m16n8k16.
__device__ inline void multiply_add_16x8x16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Start a kernel on a stream; nullptr, or what is wrong.
template <class... P, class... A>
const char *launch(void (*kernel)(P...), dim3 grid, int threads, void *stream, A... arguments) {
    kernel<<<grid, threads, 0, (cudaStream_t)stream>>>(arguments...);
    cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
#endif

// Kernels that take halves or floats read and write both by the same names.
__device__ inline float to_float(float x) { return x; }
__device__ inline void put(half_t &to, float x) { to = to_half(x); }
__device__ inline void put(float &to, float x) { to = x; }

struct alignas(16) Half8 {  // what a lane loads or stores at once
    half_t x[8];
};
struct alignas(16) Float8 {
    float x[8];
};
