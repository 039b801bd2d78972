// Attention without a causal mask, forward, in FP16 with float32 sums; head size 64.
//
//     out[b,l,h] = sum_m p[m] v[b,m,h],  p = softmax over the visible keys m of  scale * q[b,l,h] . k[b,m,h]
//     lse[b,h,l] = log sum_m exp(scale * q . k)          natural logarithm; written only where lse is not null
//
// Shapes: q, k, v [B, L, H, 64] and out [B, L, H, 64] by strides of batch, position and head, in halves, so that the
// packed projection [B, L, 3, H, 64] needs no copy; see [B, L] bytes, 0 for a key that nobody looks at, or null; lse
// [B, H, L] floats. A row whose keys are all hidden gives 0, and lse -inf. Pointers and strides: multiples of 16 bytes.
//
// Flops: 4 B H L^2 64. Bytes from memory: 8 B L H 64 (q, k, v, out once); a block of 16 W query rows reads k and v again
// from the L2 cache. Batch 1, length 64, 6 heads: 6.3 MFLOP and 0.2 MB, 3 us at 68 GB/s: the launch costs more.
//
// One block is W warps of 16 query rows of one head. Keys come in tiles of 64, two in flight (cp.async); both products
// run on tensor cores (mma.m16n8k16), and the scores stay in registers, where an accumulator of the first product is
// already an operand of the second. Softmax is that of FlashAttention-2 (arXiv:2307.08691, algorithm 1): a running
// maximum and sum per row, in powers of two. Shared memory: 16-byte chunks, swizzled so that ldmatrix has no conflicts;
// 34, 36 or 40 KB for W 1, 2 or 4.
//
// Letters: g = lane / 4 is the row of a lane's accumulators (and g + 8), t = lane % 4 their column pair.

#include "device.cuh"

namespace {

constexpr int HEAD = 64, KEYS = 64;  // head size; keys in a tile

struct Attention {
    const half_t *q, *k, *v;
    const uint8_t *see;
    half_t *out;
    float *lse;
    int heads, length;
    int64_t batch_stride, row_stride, head_stride;  // of q, k, v
    int64_t out_batch, out_row, out_head;
    float scale_log2;  // scale * log2(e)
};

// Where chunk c (8 halves) of row r lies in a tile of shared memory.
__device__ inline int place(int r, int c) { return r * HEAD + ((c ^ (r & 7)) << 3); }

// Begin to copy rows first .. first + rows - 1 into shared memory; those past the end become 0.
template <int THREADS>
__device__ inline void load_rows(half_t *tile, const half_t *from, int first, int rows, const Attention &a) {
    for (int i = threadIdx.x; i < rows * 8; i += THREADS) {
        int r = i / 8, c = i % 8, row = first + r;
        bool valid = row < a.length;
        copy_async16(tile + place(r, c), from + (valid ? row * a.row_stride + c * 8 : 0), valid);
    }
}

template <int W>
__global__ void __launch_bounds__(32 * W) attention_kernel(Attention a) {
    constexpr int ROWS = 16 * W, THREADS = 32 * W;
    SHARED(half_t, shared, (ROWS + 4 * KEYS) * HEAD);
    half_t *q_tile = shared, *k_tiles = shared + ROWS * HEAD, *v_tiles = k_tiles + 2 * KEYS * HEAD;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.x * ROWS, head = blockIdx.y, batch = blockIdx.z;
    const int64_t base = batch * a.batch_stride + head * a.head_stride;
    const uint8_t *see = a.see ? a.see + (int64_t)batch * a.length : nullptr;

    load_rows<THREADS>(q_tile, a.q + base, first, ROWS, a);
    load_rows<THREADS>(k_tiles, a.k + base, 0, KEYS, a);
    load_rows<THREADS>(v_tiles, a.v + base, 0, KEYS, a);
    copy_commit();

    uint32_t q[4][4];  // the warp's 16 query rows as operands, 16 columns each
    float out[8][4] = {}, most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
    const int tiles = (a.length + KEYS - 1) / KEYS;
    for (int tile = 0; tile < tiles; ++tile) {
        const half_t *k_tile = k_tiles + (tile & 1) * KEYS * HEAD, *v_tile = v_tiles + (tile & 1) * KEYS * HEAD;
        if (tile + 1 < tiles) {
            int other = ((tile + 1) & 1) * KEYS * HEAD;
            load_rows<THREADS>(k_tiles + other, a.k + base, (tile + 1) * KEYS, KEYS, a);
            load_rows<THREADS>(v_tiles + other, a.v + base, (tile + 1) * KEYS, KEYS, a);
            copy_commit();
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        __syncthreads();  // this tile has landed for all threads
        if (tile == 0)
            for (int i = 0; i < 4; ++i) load_matrix4(q[i], q_tile + place(warp * 16 + lane % 16, 2 * i + lane / 16));

        float score[8][4] = {};  // [8 keys][rows g, g + 8 by columns 2 t, 2 t + 1]
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                uint32_t k[4];
                load_matrix4(k, k_tile + place(n * 8 + lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
                multiply_add_16x8x16(score[n], q[i], k[0], k[1]);
                multiply_add_16x8x16(score[n + 1], q[i], k[2], k[3]);
            }

        float now[2] = {most[0], most[1]};
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int key = tile * KEYS + n * 8 + t * 2 + (e & 1);
                bool visible = key < a.length && (!see || see[key]);
                score[n][e] = visible ? score[n][e] * a.scale_log2 : -INFINITY;
                now[e / 2] = fmaxf(now[e / 2], score[n][e]);
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            now[r] = fmaxf(now[r], shuffle_xor(now[r], 1));
            now[r] = fmaxf(now[r], shuffle_xor(now[r], 2));
            float reference = now[r] == -INFINITY ? 0.f : now[r];  // nothing visible yet: 2^(-inf - 0) = 0, not NaN
            float rescale = fast_exp2(most[r] - reference);
            most[r] = now[r];
            now[r] = reference;
            sum[r] *= rescale;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                out[n][2 * r] *= rescale;
                out[n][2 * r + 1] *= rescale;
            }
        }

        uint32_t p[8][2];
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float left = fast_exp2(score[n][2 * r] - now[r]), right = fast_exp2(score[n][2 * r + 1] - now[r]);
                sum[r] += left + right;
                p[n][r] = pack2(left, right);
            }
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // 16 keys at a time
            uint32_t keys[4] = {p[2 * i][0], p[2 * i][1], p[2 * i + 1][0], p[2 * i + 1][1]};
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                uint32_t v[4];
                load_matrix4_transposed(v, v_tile + place(i * 16 + lane % 16, n + lane / 16));
                multiply_add_16x8x16(out[n], keys, v[0], v[1]);
                multiply_add_16x8x16(out[n + 1], keys, v[2], v[3]);
            }
        }
        __syncthreads();  // all have read this tile; the next round overwrites it
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += shuffle_xor(sum[r], 1);
        sum[r] += shuffle_xor(sum[r], 2);
        int row = first + warp * 16 + g + 8 * r;
        if (row >= a.length) continue;
        float scale = sum[r] > 0 ? 1 / sum[r] : 0.f;
        half_t *to = a.out + batch * a.out_batch + row * a.out_row + head * a.out_head + t * 2;
#pragma unroll
        for (int n = 0; n < 8; ++n)
            *(uint32_t *)(to + n * 8) = pack2(out[n][2 * r] * scale, out[n][2 * r + 1] * scale);
        if (a.lse && t == 0)
            a.lse[((int64_t)batch * a.heads + head) * a.length + row] = most[r] * 0.69314718f + logf(sum[r]);
    }
}

}  // namespace

// warps: 1, 2 or 4. Returns nullptr, or what CUDA says is wrong.
extern "C" const char *attention(const void *q, const void *k, const void *v, const void *see, void *out, void *lse,
                                 int batch, int length, int heads, int64_t batch_stride, int64_t row_stride,
                                 int64_t head_stride, int64_t out_batch, int64_t out_row, int64_t out_head,
                                 float scale, int warps, void *stream) {
    Attention a{(const half_t *)q, (const half_t *)k, (const half_t *)v, (const uint8_t *)see, (half_t *)out,
                (float *)lse,      heads,             length,            batch_stride,         row_stride,
                head_stride,       out_batch,         out_row,           out_head,             scale * 1.44269504f};
    dim3 grid((length + 16 * warps - 1) / (16 * warps), heads, batch);
    auto kernel = warps == 1 ? attention_kernel<1> : warps == 2 ? attention_kernel<2> : attention_kernel<4>;
    return launch(kernel, grid, 32 * warps, stream, a);
}
