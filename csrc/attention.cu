// Attention without a causal mask, forward, in FP16 with float32 sums; head size 64.
//
//     out[b,l,h] = sum_m p[m] v[b,m,h],  p = softmax over the visible keys m of  scale * q[b,l,h] . k[b,m,h]
//     lse[b,h,l] = log sum_m exp(scale * q . k)          natural logarithm; written only where lse is not null
//
// Shapes: q, k, v [B, L, H, 64] and out [B, L, H, 64] by strides of batch, position and head, in halves, so that the
// packed projection [B, L, 3, H, 64] needs no copy; see [B, L] bytes, 0 for a key that nobody looks at, or null; lse
// [B, H, L] floats. A row whose keys are all hidden gives 0, and lse -inf. Pointers and strides: multiples of 16 bytes.
// cos_sin [L, 64] floats, or null: RoPE (arXiv:2104.09864) turns the pairs (x_d, x_{d+32}) of q and k at position l by
// the angle whose cosine is cos_sin[l, d] and whose sine is cos_sin[l, d + 32], in float32, rounded to halves.
//
// Flops: 4 B H L^2 64. Bytes from memory: 8 B L H 64 (q, k, v, out once); a block of 16 W query rows reads k and v again
// from the L2 cache. Batch 1, length 64, 6 heads: 6.3 MFLOP and 0.2 MB, 3 us at 68 GB/s: the launch costs more.
// Instructions of a warp (sm_87, W 4): 422 a tile, 48 more where some of its keys are hidden, 140 more for RoPE, which
// once turns the queries, too; about 250 before the first tile and after the last.
//
// One block is W warps of 16 query rows of one head. Keys come in tiles of 64, two in flight (cp.async); both products
// run on tensor cores (mma.m16n8k16), and the scores stay in registers, where an accumulator of the first product is
// already an operand of the second. Softmax is that of FlashAttention-2 (arXiv:2307.08691, algorithm 1): a running
// maximum and sum per row, in powers of two. Shared memory: 16-byte chunks, swizzled so that ldmatrix has no conflicts;
// 34, 36 or 40 KB for W 1, 2 or 4. Tiles behind the last visible key, such as padding, are neither loaded nor computed.
//
// Letters: g = lane / 4 is the row of a lane's accumulators (and g + 8), t = lane % 4 their column pair.

#include "device.cuh"

namespace {

constexpr int HEAD = 64, KEYS = 64;  // head size; keys in a tile

struct Attention {
    const half_t *q, *k, *v;
    const uint8_t *see;
    const float *cos_sin;
    half_t *out;
    float *lse;
    int heads, length;
    int64_t batch_stride, row_stride, head_stride;  // of q, k, v
    int64_t out_batch, out_row, out_head;
    float scale_log2;  // scale * log2(e)
};

// Where chunk c (8 halves) of row r lies in a tile of shared memory.
__device__ inline int place(int r, int c) { return r * HEAD + ((c ^ (r & 7)) << 3); }

// A thread's share of a tile: chunks c and c + 4, which RoPE pairs, of row r and of every 8 W-th row behind it. Four
// threads share a row, and the next four take the row 4 further, so that eight threads always write to different banks.
template <int W>
struct Share {
    int r, c;
    __device__ Share()
        : r(threadIdx.x / 32 * 8 + threadIdx.x / 4 % 2 * 4 + threadIdx.x / 8 % 4), c(threadIdx.x % 4) {}

    // Begin to copy ROWS rows into a tile. `from` is this thread's first chunk; rows past the end become 0.
    template <int ROWS>
    __device__ void load(half_t *tile, const half_t *from, int first, const Attention &a) const {
        const int left = a.length - first - r;
#pragma unroll
        for (int i = 0; i < ROWS; i += 8 * W) {
            copy_async16(tile + place(r, c) + i * HEAD, from, i < left);
            copy_async16(tile + place(r, c + 4) + i * HEAD, from + 32, i < left);
            from += 8 * W * a.row_stride;
        }
    }

    // RoPE on what this thread itself has copied, so that it needs no barrier in between.
    template <int ROWS>
    __device__ void rotate(half_t *tile, int first, const Attention &a) const {
        const int left = a.length - first - r;
        const float *table = a.cos_sin + (first + r) * HEAD + c * 8;
#pragma unroll
        for (int i = 0; i < ROWS; i += 8 * W) {
            if (i >= left) break;
            Half8 *low = (Half8 *)(tile + place(r, c) + i * HEAD), *high = (Half8 *)(tile + place(r, c + 4) + i * HEAD);
            Float8 cos = *(const Float8 *)(table + i * HEAD), sin = *(const Float8 *)(table + i * HEAD + 32);
            Half8 x = *low, y = *high, turned_x, turned_y;
#pragma unroll
            for (int d = 0; d < 8; ++d) {
                float p = to_float(x.x[d]), q = to_float(y.x[d]);
                turned_x.x[d] = to_half(p * cos.x[d] - q * sin.x[d]);
                turned_y.x[d] = to_half(q * cos.x[d] + p * sin.x[d]);
            }
            *low = turned_x;
            *high = turned_y;
        }
    }
};

// Bit i: key first + i exists and is visible; the same in all lanes.
__device__ inline uint32_t visible_keys(const uint8_t *see, int first, int length) {
    int key = first + threadIdx.x % 32;
    return vote(key < length && (!see || see[key]));
}

template <int W>
__global__ void __launch_bounds__(32 * W) attention_kernel(Attention a) {
    constexpr int ROWS = 16 * W, TILE = KEYS * HEAD;
    SHARED(half_t, shared, (ROWS + 4 * KEYS) * HEAD);
    half_t *q_tile = shared, *k_tiles = shared + ROWS * HEAD, *v_tiles = k_tiles + 2 * TILE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.x * ROWS, head = blockIdx.y, batch = blockIdx.z;
    const uint8_t *see = a.see ? a.see + (int64_t)batch * a.length : nullptr;

    const Share<W> share;
    const int64_t begin = batch * a.batch_stride + head * a.head_stride + share.c * 8;
    const half_t *k_from = a.k + begin + share.r * a.row_stride, *v_from = a.v + begin + share.r * a.row_stride;
    share.template load<ROWS>(q_tile, a.q + begin + (first + share.r) * a.row_stride, first, a);
    share.template load<KEYS>(k_tiles, k_from, 0, a);
    share.template load<KEYS>(v_tiles, v_from, 0, a);
    copy_commit();

    // padding stands behind a row: the tiles of keys that it fills are left out
    int tiles = (a.length + KEYS - 1) / KEYS;
    while (tiles > 1 && !visible_keys(see, (tiles - 1) * KEYS, a.length) &&
           !visible_keys(see, (tiles - 1) * KEYS + 32, a.length))
        --tiles;

    uint32_t q[4][4];  // the warp's 16 query rows as operands, 16 columns each
    float out[8][4] = {}, most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
    for (int tile = 0; tile < tiles; ++tile) {
        half_t *k_tile = k_tiles + (tile & 1) * TILE, *v_tile = v_tiles + (tile & 1) * TILE;
        const uint32_t visible[2] = {visible_keys(see, tile * KEYS, a.length),
                                     visible_keys(see, tile * KEYS + 32, a.length)};
        if (tile + 1 < tiles) {
            k_from += KEYS * a.row_stride;
            v_from += KEYS * a.row_stride;
            share.template load<KEYS>(k_tiles + (~tile & 1) * TILE, k_from, (tile + 1) * KEYS, a);
            share.template load<KEYS>(v_tiles + (~tile & 1) * TILE, v_from, (tile + 1) * KEYS, a);
            copy_commit();
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        if (a.cos_sin) {
            if (tile == 0) share.template rotate<ROWS>(q_tile, first, a);
            share.template rotate<KEYS>(k_tile, tile * KEYS, a);
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

        if ((visible[0] & visible[1]) != 0xffffffffu) {  // some of these keys are hidden
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (!((visible[n / 4] >> 2 * t) & 1u << (n % 4 * 8 + e % 2))) score[n][e] = -INFINITY;
        }

        float reference[2];  // of the exponents: the largest score so far, times scale_log2
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = -INFINITY;
#pragma unroll
            for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(most[r], fmaxf(top, shuffle_xor(top, 2)) * a.scale_log2);
            reference[r] = top == -INFINITY ? 0.f : top;  // nothing visible yet: 2^(-inf - 0) = 0, not NaN
            float rescale = fast_exp2(most[r] - reference[r]);
            most[r] = top;
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
                float left = fast_exp2(score[n][2 * r] * a.scale_log2 - reference[r]);
                float right = fast_exp2(score[n][2 * r + 1] * a.scale_log2 - reference[r]);
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
        float scale = sum[r] > 0 ? fast_reciprocal(sum[r]) : 0.f;
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
extern "C" const char *attention(const void *q, const void *k, const void *v, const void *see, const void *cos_sin,
                                 void *out, void *lse, int batch, int length, int heads, int64_t batch_stride,
                                 int64_t row_stride, int64_t head_stride, int64_t out_batch, int64_t out_row,
                                 int64_t out_head, float scale, int warps, void *stream) {
    Attention a{(const half_t *)q, (const half_t *)k, (const half_t *)v, (const uint8_t *)see,
                (const float *)cos_sin, (half_t *)out, (float *)lse, heads, length, batch_stride, row_stride,
                head_stride, out_batch, out_row, out_head, scale * 1.44269504f};
    dim3 grid((length + 16 * warps - 1) / (16 * warps), heads, batch);
    auto kernel = warps == 1 ? attention_kernel<1> : warps == 2 ? attention_kernel<2> : attention_kernel<4>;
    return launch(kernel, grid, 32 * warps, stream, a);
}
