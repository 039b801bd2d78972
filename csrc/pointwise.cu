// What stands between the matrix products of a transformer block, one read and one write each.
//
//     add_norm:   sum = x + residual,  norm = (sum - mean) / sqrt(variance + eps) * gamma + beta      over each row
//     bias_gelu:  out = gelu(y + bias),  gelu(z) = z / 2 (1 + erf(z / sqrt 2)),  or its tanh form
//
// Shapes: x, residual, sum, norm [R, D], gamma, beta [D], y, out [R, F], bias [F], all halves; D and F multiples of 8, D
// at most 1024. Arithmetic and statistics are float32, the variance is taken in a second pass over registers; norm is that
// of the sum before it is rounded.
//
// Bytes: add_norm 8 R D, bias_gelu 4 R F. At 64 rows, D 384, F 1536: 0.2 and 0.4 MB, 3 and 6 us at 68 GB/s.
// Instructions (sm_87): about 370 a row of add_norm at D 384; 17 a value of bias_gelu, 11 in its tanh form. These use the
// GPU's approximate exp2 and reciprocal: errors of 1e-6, where a half has steps of 5e-4. One warp owns a row of add_norm,
// so nothing is exchanged but by shuffles.

#include "device.cuh"

namespace {

constexpr int WARPS = 4, GELU_THREADS = 64;  // rows in a block of add_norm; chunks of 8 columns in one of bias_gelu

__device__ inline float warp_sum(float x) {
    for (int lanes = 16; lanes; lanes /= 2) x += shuffle_xor(x, lanes);
    return x;
}

// C: chunks of 256 columns, 8 for each lane.
template <int C>
__global__ void __launch_bounds__(32 * WARPS)
    add_norm_kernel(const half_t *x, const half_t *residual, const half_t *gamma, const half_t *beta, half_t *sum,
                    half_t *norm, int rows, int width, float eps) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;  // a whole warp
    const int64_t base = (int64_t)row * width;
    float value[C][8], total = 0;
#pragma unroll
    for (int c = 0; c < C; ++c) {
        int column = 256 * c + 8 * lane;
        Half8 a{}, b{};
        if (column < width) {
            a = *(const Half8 *)(x + base + column);
            b = *(const Half8 *)(residual + base + column);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            value[c][i] = to_float(a.x[i]) + to_float(b.x[i]);  // 0 beyond the row
            total += value[c][i];
        }
    }
    const float mean = warp_sum(total) / width;
    float squares = 0;
#pragma unroll
    for (int c = 0; c < C; ++c)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float d = value[c][i] - mean;
            squares += 256 * c + 8 * lane < width ? d * d : 0.f;
        }
    const float scale = 1 / sqrtf(warp_sum(squares) / width + eps);
#pragma unroll
    for (int c = 0; c < C; ++c) {
        int column = 256 * c + 8 * lane;
        if (column >= width) continue;
        Half8 g = *(const Half8 *)(gamma + column), b = *(const Half8 *)(beta + column), plain, normed;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            plain.x[i] = to_half(value[c][i]);
            normed.x[i] = to_half((value[c][i] - mean) * scale * to_float(g.x[i]) + to_float(b.x[i]));
        }
        *(Half8 *)(sum + base + column) = plain;
        *(Half8 *)(norm + base + column) = normed;
    }
}

// z Phi(z), Phi the normal distribution function, as max(z, 0) - |z| Phi(-|z|), so that nothing cancels. Phi's tail is
// Abramowitz and Stegun 7.1.26 (off by at most 8e-8); the tanh form is z / (1 + exp(-2 y)), y what tanh is taken of.
__device__ inline float gelu(float z, bool tanh_form) {
    if (tanh_form) return z * fast_reciprocal(1 + fast_exp2(z * (-2.3022082f - 0.10294324f * z * z)));
    float size = fabsf(z), t = fast_reciprocal(1 + 0.23164189f * size);
    float series = t * (0.12741480f + t * (-0.14224837f + t * (0.71070687f + t * (-0.72657601f + t * 0.53070271f))));
    return fmaxf(z, 0.f) - size * series * fast_exp2(-0.72134752f * z * z);
}

// A thread takes the same 8 columns of row blockIdx.y and of every gridDim.y-th row behind it.
__global__ void __launch_bounds__(GELU_THREADS)
    bias_gelu_kernel(const half_t *y, const half_t *bias, half_t *out, int rows, int width, bool tanh_form) {
    const int column = 8 * (blockIdx.x * GELU_THREADS + threadIdx.x);
    if (column >= width) return;
    const Half8 b = *(const Half8 *)(bias + column);
    int64_t place = (int64_t)blockIdx.y * width + column;
    for (int row = blockIdx.y; row < rows; row += gridDim.y, place += (int64_t)gridDim.y * width) {
        Half8 v = *(const Half8 *)(y + place);
#pragma unroll
        for (int i = 0; i < 8; ++i) v.x[i] = to_half(gelu(to_float(v.x[i]) + to_float(b.x[i]), tanh_form));
        *(Half8 *)(out + place) = v;
    }
}

}  // namespace

extern "C" const char *add_norm(const void *x, const void *residual, const void *gamma, const void *beta, void *sum,
                                void *norm, int rows, int width, float eps, void *stream) {
    auto kernel = width <= 256   ? add_norm_kernel<1>
                  : width <= 512 ? add_norm_kernel<2>
                  : width <= 768 ? add_norm_kernel<3>
                                 : add_norm_kernel<4>;
    return launch(kernel, dim3((rows + WARPS - 1) / WARPS), 32 * WARPS, stream, (const half_t *)x,
                  (const half_t *)residual, (const half_t *)gamma, (const half_t *)beta, (half_t *)sum, (half_t *)norm,
                  rows, width, eps);
}

extern "C" const char *bias_gelu(const void *y, const void *bias, void *out, int rows, int width, bool tanh_form,
                                 void *stream) {
    const int across = (width / 8 + GELU_THREADS - 1) / GELU_THREADS;
    return launch(bias_gelu_kernel, dim3(across, rows < 4096 ? rows : 4096), GELU_THREADS, stream, (const half_t *)y,
                  (const half_t *)bias, (half_t *)out, rows, width, tanh_form);
}
