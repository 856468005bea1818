/* CPU kernels of a decode step in float32: skinny GEMM, mixture of experts, RMSNorm, rotary embedding, gated
   activation, paged attention, and the top_p filter of sampling.

   Plain C with the vector extensions of GCC and Clang, compiled on first use by native.py for the host CPU. It uses the
   OpenMP runtime that torch has loaded, so that both share one thread pool.
   Every function has a plain-torch reference in ops.py or reference.py. Rows are contiguous; `*_stride` is the distance
   between rows, in floats. `threads` is the maximum; small inputs run on the calling thread alone. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
/* Register tile of the GEMM: MR rows of x by NR rows of w, accumulated in vector registers. There are 16 of them with
   AVX2, and 32 with AVX-512 and NEON. */
#if WIDTH == 8
#define MR_NR4 2 /* MR where NR is 4 */
#define MR_NR2 6 /* MR where NR is 2 */
#else
#define MR_NR4 4
#define MR_NR2 8
#endif
#define NC 24 /* rows of w that stay in cache while all rows of x pass over them */
#define EXPERT_ROWS (4 * NC) /* rows of an expert's w that one thread takes at a time */
#define MAX_EXPERTS 4096 /* as in moe.py */
#define KEY_TILE 64 /* keys of a context that are scored before their values are accumulated */
#define HEAD_TILE 16 /* query heads that share one pass over the keys */
#define MIN_FLOATS_PER_THREAD 8192 /* less work than this does not pay for another thread */

int omp_get_thread_num(void); /* declared here because Clang may lack omp.h */
int omp_get_num_threads(void);

typedef int64_t i64;
typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef float unaligned_vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define LOAD(p) (*(const unaligned_vec *)(p))
#define STORE(p, v) (*(unaligned_vec *)(p) = (v))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

#if WIDTH == 16
#define LANES(F, h) F(0, h), F(1, h), F(2, h), F(3, h), F(4, h), F(5, h), F(6, h), F(7, h), F(8, h), F(9, h), \
    F(10, h), F(11, h), F(12, h), F(13, h), F(14, h), F(15, h)
#elif WIDTH == 8
#define LANES(F, h) F(0, h), F(1, h), F(2, h), F(3, h), F(4, h), F(5, h), F(6, h), F(7, h)
#else
#define LANES(F, h) F(0, h), F(1, h), F(2, h), F(3, h)
#endif
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
/* Split a and b into runs of h lanes. EVEN interleaves their even runs, ODD their odd runs; ADD_RUNS adds the two. */
#define EVEN(j, h) ((j) / (h) % 2 ? WIDTH + (j) - (h) : (j))
#define ODD(j, h) (EVEN(j, h) + (h))
#define LANE(j, h) (j)
#define ADD_RUNS(a, b, h) (SHUFFLE(a, b, LANES(EVEN, h)) + SHUFFLE(a, b, LANES(ODD, h)))

/* Lane i of the result is the sum of the lanes of a[i]. */
INLINE vec sum_lanes_of_each(vec *a) {
#if WIDTH >= 16
    for (int i = 0; i < 8; i++) a[i] = ADD_RUNS(a[i], a[i + 8], 8);
#endif
#if WIDTH >= 8
    for (int i = 0; i < 4; i++) a[i] = ADD_RUNS(a[i], a[i + 4], 4);
#endif
    for (int i = 0; i < 2; i++) a[i] = ADD_RUNS(a[i], a[i + 2], 2);
    return ADD_RUNS(a[0], a[1], 1);
}

INLINE float sum(vec v) {
    float total = 0;
    for (int i = 0; i < WIDTH; i++) total += v[i];
    return total;
}

INLINE vec load_partial(const float *p, i64 count) {
    vec v = {0};
    memcpy(&v, p, 4 * count);
    return v;
}

INLINE vec select_lanes(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* e^x to about 1 ulp, as 2^n * e^r with |r| <= ln(2) / 2. x is clamped so that the result is a normal float. */
INLINE vec exponential(vec x) {
    vec zero = {0}, low = zero - 87.3f, high = zero + 88.3f;
    vec shift = zero + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = select_lanes(x < low, low, select_lanes(x > high, high, x));
    vec shifted = x * 1.44269504f + shift, n = shifted - shift;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (vec)((ivec)p + ((ivec)shifted << 23));
}

/* --- y[M, N] = x[M, K] w[N, K]^T + bias ------------------------------------------------------------------------- */

/* Register tile: y[MR, NR] = x[MR, :] w[NR, :]^T + bias. MR and NR are compile-time constants after inlining.
   `prefetch` is the distance in floats to the weights of the next tile, or 0. */
INLINE void tile(const int MR, const int NR, float *y, i64 y_stride, const float *x, i64 x_stride, const float *w,
                 const float *bias, i64 K, i64 prefetch) {
    vec acc[MR_NR2 * 4 + WIDTH];
    for (int i = 0; i < MR * NR; i++) acc[i] = (vec){0};
    i64 k = 0;
    for (; k + WIDTH <= K; k += WIDTH) {
        vec column[4];
        for (int c = 0; c < NR; c++) {
            column[c] = LOAD(w + c * K + k);
            if (prefetch) __builtin_prefetch(w + c * K + k + prefetch);
        }
        for (int m = 0; m < MR; m++) {
            vec row = LOAD(x + m * x_stride + k);
            for (int c = 0; c < NR; c++) acc[m * NR + c] += row * column[c];
        }
    }
    if (k < K)
        for (int m = 0; m < MR; m++) {
            vec row = load_partial(x + m * x_stride + k, K - k);
            for (int c = 0; c < NR; c++) acc[m * NR + c] += row * load_partial(w + c * K + k, K - k);
        }
    for (int i = MR * NR; i % WIDTH; i++) acc[i] = (vec){0};
    for (int first = 0; first < MR * NR; first += WIDTH) {
        vec sums = sum_lanes_of_each(acc + first);
        for (int i = first; i < MIN(first + WIDTH, MR * NR); i++)
            y[i / NR * y_stride + i % NR] = sums[i - first] + (bias ? bias[i % NR] : 0.0f);
    }
}

#define TILE(MR) case MR: if (MR <= max_rows) tile(MR, NR, y, y_stride, x, x_stride, w, bias, K, prefetch); break;
/* Call tile() with MR = rows as a constant; max_rows limits the cases that are compiled. */
INLINE void dispatch_tile(i64 rows, const int max_rows, const int NR, float *y, i64 y_stride, const float *x,
                          i64 x_stride, const float *w, const float *bias, i64 K, i64 prefetch) {
    switch (rows) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) }
}

static void tile_nr4(i64 rows, float *y, i64 y_stride, const float *x, i64 x_stride, const float *w, const float *bias,
                     i64 K, i64 prefetch) {
    dispatch_tile(rows, MR_NR4, 4, y, y_stride, x, x_stride, w, bias, K, prefetch);
}

static void tile_nr2(i64 rows, float *y, i64 y_stride, const float *x, i64 x_stride, const float *w, const float *bias,
                     i64 K, i64 prefetch) {
    dispatch_tile(rows, MR_NR2, 2, y, y_stride, x, x_stride, w, bias, K, prefetch);
}

static void tile_nr1(i64 rows, float *y, i64 y_stride, const float *x, i64 x_stride, const float *w, const float *bias,
                     i64 K, i64 prefetch) {
    dispatch_tile(rows, MR_NR2, 1, y, y_stride, x, x_stride, w, bias, K, prefetch);
}

/* Rows first..end of w, in blocks of `block` rows. With `rows`, row m of the product is row rows[m] of y. */
INLINE void multiply(float *y, i64 y_stride, const i64 *rows, const float *x, i64 x_stride, const float *w,
                     const float *bias, i64 M, i64 K, i64 first, i64 end) {
    const i64 nr = M <= MR_NR4 ? 4 : 2, mr = MIN(M, MR_NR2), block = M <= MR_NR2 ? nr : NC;
    for (i64 b = first; b < end; b += block)
        for (i64 m = 0; m < M; m += mr)
            for (i64 n = b, block_end = MIN(b + block, end), step; n < block_end; n += step) {
                float tile[MR_NR2 * 4], *dst = rows ? tile : y + m * y_stride + n;
                step = n + nr <= block_end ? nr : 1;
                (step == 4 ? tile_nr4 : step == 2 ? tile_nr2 : tile_nr1)(
                    MIN(mr, M - m), dst, rows ? step : y_stride, x + m * x_stride, x_stride, w + n * K,
                    bias ? bias + n : 0, K, m ? 0 : nr * K);
                if (rows)
                    for (i64 i = 0; i < MIN(mr, M - m); i++)
                        memcpy(y + rows[m + i] * y_stride + n, tile + i * step, 4 * step);
            }
}

/* Up to MR_NR2 rows of x need one pass over w. For more, w is processed in blocks of NC rows, which stay in cache while
   the tiles of x pass over them. `bias` may be null. */
void yalis_linear(float *y, const float *x, i64 x_stride, const float *w, const float *bias, i64 M, i64 N, i64 K,
                  i64 threads) {
    const i64 block = M <= MR_NR4 ? 4 : M <= MR_NR2 ? 2 : NC;
    threads = MAX(1, MIN(threads, N * K / MIN_FLOATS_PER_THREAD));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        /* Each thread streams a contiguous range of the rows of w. */
        i64 blocks = (N + block - 1) / block, thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
        i64 end = MIN(N, blocks * (thread + 1) / num_threads * block);
        multiply(y, N, 0, x, x_stride, w, bias, M, K, blocks * thread / num_threads * block, end);
    }
}

/* --- mixture of experts ------------------------------------------------------------------------------------------- */

/* Leave the scores of the `top_groups` best of `groups` equal groups, by the sum of their two best; others become -inf. */
static void mask_groups(float *scores, i64 count, i64 groups, i64 top_groups) {
    float sums[MAX_EXPERTS];
    const i64 size = count / groups;
    for (i64 g = 0; g < groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (i64 e = g * size; e < (g + 1) * size; e++) {
            second = MAX(second, MIN(first, scores[e]));
            first = MAX(first, scores[e]);
        }
        sums[g] = first + second;
    }
    for (i64 g = 0; g < groups; g++) {
        i64 better = 0;
        for (i64 o = 0; o < groups; o++) better += sums[o] > sums[g] || (sums[o] == sums[g] && o < g);
        for (i64 e = g * size; better >= top_groups && e < (g + 1) * size; e++) scores[e] = -INFINITY;
    }
}

/* The top_k experts of each row of logits[rows, count], best first, and their weights. The score of an expert is its
   share of the softmax of all logits, its sigmoid (`scoring` 1), or its share of the softmax of the chosen (`scoring` 2).
   `correction` [count], which may be null, is added for the choice only. Of equal scores the lower index is first. */
void yalis_route(float *weights, i64 *experts, const float *logits, i64 stride, const float *correction, i64 rows,
                 i64 count, i64 top_k, i64 scoring, i64 renormalize, i64 groups, i64 top_groups, double scale) {
    for (i64 r = 0; r < rows; r++, logits += stride, weights += top_k, experts += top_k) {
        uint8_t taken[MAX_EXPERTS] = {0};
        float scores[MAX_EXPERTS], choice[MAX_EXPERTS], top = logits[0], total = 0;
        for (i64 e = 1; e < count; e++) top = MAX(top, logits[e]);
        for (i64 e = 0; e < count; e++) {
            scores[e] = scoring == 1 ? 1.0f / (1.0f + expf(-logits[e])) : expf(logits[e] - top);
            total += scores[e];
        }
        for (i64 e = 0; e < count; e++) {
            if (scoring == 0) scores[e] /= total;
            choice[e] = correction ? scores[e] + correction[e] : scoring == 1 || groups > 1 ? scores[e] : logits[e];
        }
        if (top_groups < groups) mask_groups(choice, count, groups, top_groups);
        total = 0;
        for (i64 k = 0; k < top_k; k++) {
            i64 best = -1; /* the first free one if all are NaN */
            for (i64 e = 0; e < count; e++)
                if (!taken[e] && (best < 0 || choice[e] > choice[best])) best = e;
            taken[best] = 1;
            experts[k] = best;
            total += weights[k] = scores[best];
        }
        if (scoring == 1) total += 1e-20f; /* sigmoids may all be near zero */
        const float factor = (float)scale / (renormalize || scoring == 2 ? total : 1.0f);
        for (i64 k = 0; k < top_k; k++) weights[k] *= factor;
    }
}

/* y[p] = x[p / per_row] w[experts[p]]^T + bias[experts[p]] for each pair p, and zeros if its expert is negative.
   w is [count, N, K]; `bias` [count, N] may be null. Matrices that no pair has are not read. Work memory:
   `gathered` [pairs, K], and `groups` [pairs + 2 * count + 1]. */
void yalis_expert_linear(float *y, float *gathered, i64 *groups, const float *x, i64 x_stride, const float *w,
                         const float *bias, const i64 *experts, i64 pairs, i64 per_row, i64 count, i64 N, i64 K,
                         i64 threads) {
    /* Counting sort: the pairs of the t-th expert in use, used[t], are order[starts[used[t]]..starts[used[t] + 1]]. */
    i64 *starts = groups, *used = groups + count + 1, *order = used + count, num_used = 0;
    memset(starts, 0, 8 * (count + 1));
    for (i64 p = 0; p < pairs; p++)
        if (experts[p] >= 0) starts[experts[p]]++;
    for (i64 e = 0, end = 0; e <= count; e++) { /* to the end of each group, which the next loop moves to its start */
        if (e < count && starts[e]) used[num_used++] = e;
        starts[e] = end += e < count ? starts[e] : 0;
    }
    for (i64 p = pairs - 1; p >= 0; p--)
        if (experts[p] >= 0) order[--starts[experts[p]]] = p;
    const i64 parts = (N + EXPERT_ROWS - 1) / EXPERT_ROWS;
    threads = MAX(1, MIN(threads, num_used * N * K / MIN_FLOATS_PER_THREAD));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (i64 i = 0; i < pairs; i++) {
            if (i < starts[count]) memcpy(gathered + i * K, x + order[i] / per_row * x_stride, 4 * K);
            if (experts[i] < 0) memset(y + i * N, 0, 4 * N);
        }
        /* Groups differ in size, so a thread that is done takes the next part of a matrix. */
#pragma omp for schedule(dynamic)
        for (i64 task = 0; task < num_used * parts; task++) {
            const i64 e = used[task / parts], first = task % parts * EXPERT_ROWS;
            multiply(y, N, order + starts[e], gathered + starts[e] * K, K, w + e * N * K, bias ? bias + e * N : 0,
                     starts[e + 1] - starts[e], K, first, MIN(N, first + EXPERT_ROWS));
        }
    }
}

/* y[rows, cols] = sum over k of weights[:, k] * x[:, k], x being [rows, top_k, cols], plus `shared` [rows, cols] if it is
   not null, times the sigmoid of `gate` [rows] if that is not null. */
void yalis_combine(float *y, const float *x, const float *weights, const float *shared, const float *gate,
                   i64 gate_stride, i64 rows, i64 top_k, i64 cols, i64 threads) {
    threads = MAX(1, MIN(threads, rows * top_k * cols / MIN_FLOATS_PER_THREAD));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (i64 r = 0; r < rows; r++) {
        float *restrict dst = y + r * cols;
        for (i64 i = 0; i < cols; i++) dst[i] = x[r * top_k * cols + i] * weights[r * top_k];
        for (i64 k = 1; k < top_k; k++)
            for (i64 i = 0; i < cols; i++) dst[i] += x[(r * top_k + k) * cols + i] * weights[r * top_k + k];
        const float scale = gate ? 1.0f / (1.0f + expf(-gate[r * gate_stride])) : 1.0f;
        if (shared)
            for (i64 i = 0; i < cols; i++) dst[i] += shared[r * cols + i] * scale;
    }
}

/* --- row operations: gather, add, RMSNorm, gated activation, rotary embedding ------------------------------------- */

/* y[count, width] = x[rows] */
void yalis_gather_rows(float *y, const float *x, i64 x_stride, const i64 *rows, i64 count, i64 width) {
    for (i64 r = 0; r < count; r++) memcpy(y + r * width, x + rows[r] * x_stride, 4 * width);
}

void yalis_add(float *restrict y, const float *a, const float *b, i64 count) {
    for (i64 i = 0; i < count; i++) y[i] = a[i] + b[i];
}

INLINE float sum_of_squares(const float *x, i64 cols) {
    vec total[4] = {{0}};
    i64 i = 0;
    for (; i + 4 * WIDTH <= cols; i += 4 * WIDTH)
        for (int u = 0; u < 4; u++) total[u] += LOAD(x + i + u * WIDTH) * LOAD(x + i + u * WIDTH);
    for (i64 some; i < cols; i += some) {
        some = MIN(WIDTH, cols - i);
        vec v = load_partial(x + i, some);
        total[0] += v * v;
    }
    return sum(total[0] + total[1] + total[2] + total[3]);
}

/* y = x / rms(x) * weight over the last dimension of x [rows, inner, cols]. The inner rows (heads of a token) are
   contiguous; x_stride is the distance between outer rows. */
void yalis_rms_norm(float *y, const float *x, i64 x_stride, const float *weight, double eps, i64 rows, i64 inner,
                    i64 cols, i64 threads) {
    threads = MAX(1, MIN(threads, rows * inner * cols / MIN_FLOATS_PER_THREAD));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (i64 r = 0; r < rows * inner; r++) {
        const float *src = x + r / inner * x_stride + r % inner * cols;
        float *restrict dst = y + r * cols;
        float scale = 1.0f / sqrtf(sum_of_squares(src, cols) / (float)cols + (float)eps);
        for (i64 i = 0; i < cols; i++) dst[i] = src[i] * scale * weight[i];
    }
}

/* y = x with RMSNorm over the first q_cols of each row and over the next k_cols; the other columns are copied. */
void yalis_joint_norm(float *y, const float *x, i64 x_stride, const float *weight, double eps, i64 rows, i64 q_cols,
                      i64 k_cols, i64 cols, i64 threads) {
    threads = MAX(1, MIN(threads, rows * cols / MIN_FLOATS_PER_THREAD));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (i64 r = 0; r < rows; r++) {
        const i64 ends[] = {q_cols, q_cols + k_cols};
        const float *src = x + r * x_stride;
        float *restrict dst = y + r * cols;
        for (i64 part = 0, i = 0; part < 2; part++) {
            float squares = sum_of_squares(src + i, ends[part] - i);
            float scale = 1.0f / sqrtf(squares / (float)(ends[part] - i) + (float)eps);
            for (; i < ends[part]; i++) dst[i] = src[i] * scale * weight[i];
        }
        memcpy(dst + ends[1], src + ends[1], 4 * (cols - ends[1]));
    }
}

INLINE vec silu(vec x) { return x / (1.0f + exponential(-x)); }

/* y[rows, cols] = silu(x[:, :cols]) * x[:, cols:] */
void yalis_silu_gate(float *y, const float *x, i64 x_stride, i64 rows, i64 cols, i64 threads) {
    threads = MAX(1, MIN(threads, 4 * rows * cols / MIN_FLOATS_PER_THREAD));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        i64 id = omp_get_thread_num(), num_threads = omp_get_num_threads();
        for (i64 r = 0; r < rows; r++) {
            const float *gate = x + r * x_stride, *up = gate + cols;
            float *dst = y + r * cols;
            i64 i = cols * id / num_threads, end = cols * (id + 1) / num_threads;
            for (; i + WIDTH <= end; i += WIDTH) STORE(dst + i, silu(LOAD(gate + i)) * LOAD(up + i));
            if (i < end) {
                vec last = silu(load_partial(gate + i, end - i)) * load_partial(up + i, end - i);
                memcpy(dst + i, &last, 4 * (end - i));
            }
        }
    }
}

/* y[rows, cols] = gate * sigmoid(alpha * gate) * (up + 1), with gate = min(x[:, :cols], limit) and up = x[:, cols:]
   clamped to -limit..limit. */
void yalis_clamped_gate(float *y, const float *x, i64 x_stride, i64 rows, i64 cols, double alpha, double limit,
                        i64 threads) {
    const float a = (float)alpha, most = (float)limit;
    threads = MAX(1, MIN(threads, 4 * rows * cols / MIN_FLOATS_PER_THREAD));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (i64 r = 0; r < rows; r++) {
        const float *gates = x + r * x_stride, *ups = gates + cols;
        for (i64 i = 0; i < cols; i++) { /* the comparisons keep NaN */
            float gate = gates[i] > most ? most : gates[i];
            float up = ups[i] > most ? most : ups[i] < -most ? -most : ups[i];
            y[r * cols + i] = (up + 1.0f) * gate / (1.0f + expf(-a * gate));
        }
    }
}

/* Rotary embedding: y[rows, heads, dim]. The first `rotary_dim` elements of a head are rotated, element i with
   i + rotary_dim / 2; the sines of the first half are negated by the caller. The other elements are copied. */
void yalis_rotate(float *y, const float *x, i64 x_stride, const float *cos, const float *sin, i64 angle_stride,
                  i64 rows, i64 heads, i64 dim, i64 rotary_dim, i64 threads) {
    const i64 half = rotary_dim / 2;
    threads = MAX(1, MIN(threads, rows * heads * dim / MIN_FLOATS_PER_THREAD));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (i64 r = 0; r < rows; r++) {
        const float *c = cos + r * angle_stride, *s = sin + r * angle_stride;
        for (i64 h = 0; h < heads; h++) {
            const float *src = x + r * x_stride + h * dim;
            float *restrict dst = y + (r * heads + h) * dim;
            for (i64 i = 0; i < half; i++) dst[i] = src[i] * c[i] + src[i + half] * s[i];
            for (i64 i = half; i < rotary_dim; i++) dst[i] = src[i] * c[i] + src[i - half] * s[i];
            for (i64 i = rotary_dim; i < dim; i++) dst[i] = src[i];
        }
    }
}

/* --- paged KV cache, [blocks, block_size, kv_heads, dim] ---------------------------------------------------------- */

/* Write keys and values, [tokens, width] each, to the cache slots of their tokens; a negative slot is skipped. */
void yalis_write_kv(float *k_cache, float *v_cache, const float *k, i64 k_stride, const float *v, i64 v_stride,
                    const i64 *slots, i64 tokens, i64 width) {
    for (i64 t = 0; t < tokens; t++) {
        if (slots[t] < 0)
            continue;
        memcpy(k_cache + slots[t] * width, k + t * k_stride, 4 * width);
        memcpy(v_cache + slots[t] * width, v + t * v_stride, 4 * width);
    }
}

/* out = alpha * out + sum_j weights[j] * values[j], for U vectors of elements starting at element i of the values. */
INLINE void accumulate_values(const int U, float *out, const float *const *values, i64 i, const float *weights,
                              i64 count, float alpha) {
    vec total[4];
    for (int u = 0; u < U; u++) {
        total[u] = (vec){0};
        if (alpha > 0) total[u] = LOAD(out + u * WIDTH) * alpha; /* before the first tile, out is uninitialized */
    }
    for (i64 j = 0; j < count; j++)
        for (int u = 0; u < U; u++) total[u] += LOAD(values[j] + i + u * WIDTH) * weights[j];
    for (int u = 0; u < U; u++) STORE(out + u * WIDTH, total[u]);
}

/* One online-softmax step of one query over `count` keys. `max_score` and `sum_exp` are its running maximum and sum of
   exponentials; out is the unnormalized output. `keys` is padded with valid pointers to a multiple of WIDTH. */
static void softmax_step(float *out, const float *q, const float *const *keys, const float *const *values, i64 count,
                         i64 dim, float scale, float softcap, float *max_score, float *sum_exp) {
    float scores[KEY_TILE];
    vec zero = {0}, tile_max = zero - INFINITY, total = zero;
    for (i64 j = 0; j < count; j += WIDTH) {
        vec dots[WIDTH];
        for (int u = 0; u < WIDTH; u++) dots[u] = zero;
        i64 i = 0;
        for (; i + WIDTH <= dim; i += WIDTH) {
            vec q_part = LOAD(q + i);
            for (int u = 0; u < WIDTH; u++) dots[u] += q_part * LOAD(keys[j + u] + i);
        }
        if (i < dim) {
            vec q_part = load_partial(q + i, dim - i);
            for (int u = 0; u < WIDTH; u++) dots[u] += q_part * load_partial(keys[j + u] + i, dim - i);
        }
        vec score = sum_lanes_of_each(dots) * scale;
        if (softcap > 0)
            for (int u = 0; u < WIDTH; u++) score[u] = softcap * tanhf(score[u] / softcap);
        if (j + WIDTH > count) {
            ivec lane = {LANES(LANE, 0)};
            score = select_lanes(lane < (int32_t)(count - j), score, zero - INFINITY);
        }
        STORE(scores + j, score);
        tile_max = select_lanes(score > tile_max, score, tile_max);
    }
    float old_max = *max_score;
    for (int u = 0; u < WIDTH; u++) *max_score = MAX(*max_score, tile_max[u]);
    float alpha = *sum_exp > 0 ? expf(old_max - *max_score) : 0.0f;
    for (i64 j = 0; j < count; j += WIDTH) {
        vec weights = exponential(LOAD(scores + j) - *max_score);
        STORE(scores + j, weights);
        total += weights;
    }
    *sum_exp = *sum_exp * alpha + sum(total);
    i64 i = 0;
    for (; i + 4 * WIDTH <= dim; i += 4 * WIDTH) accumulate_values(4, out + i, values, i, scores, count, alpha);
    for (; i + WIDTH <= dim; i += WIDTH) accumulate_values(1, out + i, values, i, scores, count, alpha);
    for (; i < dim; i++) {
        float one = alpha > 0 ? out[i] * alpha : 0.0f;
        for (i64 j = 0; j < count; j++) one += values[j][i] * scores[j];
        out[i] = one;
    }
}

/* Decode attention, one query per sequence: out and q are [sequences, heads, dim], tables [sequences, max blocks];
   `window` and `softcap` are 0 and `sinks` [heads], a further logit of each softmax, is NULL if unused. Query heads that
   share a KV head are computed in one pass over its keys. */
void yalis_attend(float *out, const float *q, i64 q_stride, const float *k_cache, const float *v_cache,
                  const int32_t *tables, i64 table_stride, const int32_t *context_lens, i64 sequences, i64 heads,
                  i64 kv_heads, i64 dim, i64 block_size, i64 window, double scale, double softcap, i64 threads,
                  const float *sinks) {
    const i64 group = heads / kv_heads;
    i64 work = 0;
    for (i64 s = 0; s < sequences; s++) work += context_lens[s] * heads * dim;
    threads = MAX(1, MIN(threads, work / MIN_FLOATS_PER_THREAD));
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (i64 task = 0; task < sequences * kv_heads; task++) {
        const i64 s = task / kv_heads, kv = task % kv_heads, end = context_lens[s];
        const i64 start = window && end > window ? end - window : 0;
        const int32_t *table = tables + s * table_stride;
        for (i64 first_head = 0; first_head < group; first_head += HEAD_TILE) {
            const i64 num_heads = MIN(HEAD_TILE, group - first_head), head = kv * group + first_head;
            float *dst = out + (s * heads + head) * dim;
            float max_score[HEAD_TILE], sum_exp[HEAD_TILE] = {0};
            for (i64 g = 0; g < num_heads; g++) max_score[g] = -INFINITY;
            for (i64 first_key = start; first_key < end; first_key += KEY_TILE) {
                const i64 count = MIN(KEY_TILE, end - first_key);
                const float *keys[KEY_TILE], *values[KEY_TILE];
                for (i64 j = 0; j < count; j++) {
                    i64 slot = (i64)table[(first_key + j) / block_size] * block_size + (first_key + j) % block_size;
                    keys[j] = k_cache + (slot * kv_heads + kv) * dim;
                    values[j] = v_cache + (slot * kv_heads + kv) * dim;
                    for (i64 i = 0; i < dim; i += 16) {
                        __builtin_prefetch(keys[j] + i);
                        __builtin_prefetch(values[j] + i);
                    }
                }
                for (i64 j = count; j % WIDTH; j++) keys[j] = keys[count - 1];
                for (i64 g = 0; g < num_heads; g++)
                    softmax_step(dst + g * dim, q + s * q_stride + (head + g) * dim, keys, values, count, dim, scale,
                                 softcap, max_score + g, sum_exp + g);
            }
            for (i64 g = 0; g < num_heads; g++) {
                if (sinks) sum_exp[g] += expf(sinks[head + g] - max_score[g]);
                for (i64 i = 0; i < dim; i++) dst[g * dim + i] /= sum_exp[g];
            }
        }
    }
}

/* --- top_p ------------------------------------------------------------------------------------------------------ */

/* The lowest score of the smallest set of best tokens whose mass reaches top_p of the total; NaN if a score is NaN.
   Scores are at most 0, so a higher score has a smaller magnitude: a radix search over the bits of the magnitude, 12, 12
   and 7 at a time. Masses are integers, so their sums do not depend on the order. */
static float top_p_threshold(const float *scores, const float *probabilities, double top_p, i64 cols) {
    static const int bits[] = {12, 12, 7}, shifts[] = {19, 7, 0};
    const float one = 1099511627776.0f; /* 2^40, FIXED_POINT_ONE of sampling/filters.py */
    double goal = 0.0;
    i64 above = 0;
    uint32_t prefix = 0; /* the bits of the threshold found so far */
    for (int level = 0; level < 3; level++) {
        const int shift = shifts[level], bins = 1 << bits[level];
        i64 mass[4096] = {0};
        for (i64 i = 0; i < cols; i++) {
            uint32_t key;
            memcpy(&key, scores + i, 4);
            key &= 0x7fffffff;
            if (key > 0x7f800000) return NAN;
            if (key >> shift >> bits[level] == prefix)
                mass[(key >> shift) & (bins - 1)] += (i64)(probabilities[i] * one);
        }
        if (level == 0) {
            i64 total = 0;
            for (int bin = 0; bin < bins; bin++) total += mass[bin];
            if (total == 0) return -INFINITY;
            goal = top_p * (double)total;
        }
        int bin = 0;
        while (bin < bins - 1 && (double)(above + mass[bin]) < goal) above += mass[bin++];
        prefix = prefix << bits[level] | bin;
    }
    float threshold;
    memcpy(&threshold, &prefix, 4);
    return -threshold;
}

/* thresholds[rows] of scores[rows, cols] and probabilities = exp(scores), with top_p[rows]. */
void yalis_top_p_thresholds(float *thresholds, const float *scores, const float *probabilities, const double *top_p,
                            i64 rows, i64 cols, i64 threads) {
    threads = MAX(1, MIN(threads, rows * cols / MIN_FLOATS_PER_THREAD));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (i64 r = 0; r < rows; r++)
        thresholds[r] = top_p_threshold(scores + r * cols, probabilities + r * cols, top_p[r], cols);
}

/* --- replay of a recorded step ------------------------------------------------------------------------------------ */

typedef union {
    void *p;
    i64 i;
    double f;
} value;

typedef struct {
    i64 function; /* index into SIGNATURES of native.py, and case of the switch below */
    value args[18];
} call;

static void run_call(const call *c) {
    const value *v = c->args;
    switch (c->function) {
    case 0: yalis_linear(v[0].p, v[1].p, v[2].i, v[3].p, v[4].p, v[5].i, v[6].i, v[7].i, v[8].i); break;
    case 1: yalis_gather_rows(v[0].p, v[1].p, v[2].i, v[3].p, v[4].i, v[5].i); break;
    case 2: yalis_add(v[0].p, v[1].p, v[2].p, v[3].i); break;
    case 3: yalis_rms_norm(v[0].p, v[1].p, v[2].i, v[3].p, v[4].f, v[5].i, v[6].i, v[7].i, v[8].i); break;
    case 4: yalis_silu_gate(v[0].p, v[1].p, v[2].i, v[3].i, v[4].i, v[5].i); break;
    case 5:
        yalis_rotate(v[0].p, v[1].p, v[2].i, v[3].p, v[4].p, v[5].i, v[6].i, v[7].i, v[8].i, v[9].i, v[10].i);
        break;
    case 6: yalis_write_kv(v[0].p, v[1].p, v[2].p, v[3].i, v[4].p, v[5].i, v[6].p, v[7].i, v[8].i); break;
    case 7:
        yalis_attend(v[0].p, v[1].p, v[2].i, v[3].p, v[4].p, v[5].p, v[6].i, v[7].p, v[8].i, v[9].i, v[10].i,
                     v[11].i, v[12].i, v[13].i, v[14].f, v[15].f, v[16].i, v[17].p);
        break;
    case 8:
        yalis_route(v[0].p, v[1].p, v[2].p, v[3].i, v[4].p, v[5].i, v[6].i, v[7].i, v[8].i, v[9].i, v[10].i, v[11].i,
                    v[12].f);
        break;
    case 9:
        yalis_expert_linear(v[0].p, v[1].p, v[2].p, v[3].p, v[4].i, v[5].p, v[6].p, v[7].p, v[8].i, v[9].i, v[10].i,
                            v[11].i, v[12].i, v[13].i);
        break;
    case 10:
        yalis_combine(v[0].p, v[1].p, v[2].p, v[3].p, v[4].p, v[5].i, v[6].i, v[7].i, v[8].i, v[9].i);
        break;
    case 11:
        yalis_joint_norm(v[0].p, v[1].p, v[2].i, v[3].p, v[4].f, v[5].i, v[6].i, v[7].i, v[8].i, v[9].i);
        break;
    case 12: yalis_clamped_gate(v[0].p, v[1].p, v[2].i, v[3].i, v[4].i, v[5].f, v[6].f, v[7].i); break;
    }
}

void yalis_replay(const call *calls, i64 count) {
    for (i64 i = 0; i < count; i++) run_call(calls + i);
}

static i64 monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Replay with timestamps in ns for the profiler: times[i] is the start of call i, times[count] the end of the last. */
void yalis_replay_timed(const call *calls, i64 count, i64 *times) {
    for (i64 i = 0; i < count; i++) {
        times[i] = monotonic_ns();
        run_call(calls + i);
    }
    times[count] = monotonic_ns();
}
