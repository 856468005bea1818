/* Decode on a CPU in float32: matrices of few rows, norms, rotary embedding, gates and paged attention.

   Plain C with the vector types of GCC and Clang, built on first use by native.py for the machine at hand. OpenMP's
   runtime is the one torch has loaded: its threads are warm, and two pools would fight for the cores.
   Every function has its plain-torch reference in ops.py or reference.py. Elements of a row are neighbours; `*_step` is
   the distance of rows, in floats. `threads` is the most that may run: little work stays on the caller's. */

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
/* A tile is some rows of input with 4 or 2 rows of the matrix, its sums in registers: 16 of them with AVX2, else 32. */
#if WIDTH == 8
#define FEW 2 /* rows of input that go with 4 of the matrix */
#define MANY 6 /* with 2 */
#else
#define FEW 4
#define MANY 8
#endif
#define BLOCK 24 /* rows of the matrix that stay in cache while every tile of input passes over them */
#define KEYS 64 /* of a context that are scored before their values are added up */
#define GROUP 16 /* query heads that share a pass over the keys */
#define WORTH_A_THREAD 8192 /* floats to work on before a second thread pays */

int omp_get_thread_num(void); /* Clang comes without omp.h */
int omp_get_num_threads(void);

typedef int64_t i64;
typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef float anywhere __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define LOAD(p) (*(const anywhere *)(p))
#define STORE(p, v) (*(anywhere *)(p) = (v))
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
/* Of a and b in runs of h lanes: a's even runs beside b's even runs, and the same of the odd ones. */
#define EVEN(j, h) ((j) / (h) % 2 ? WIDTH + (j) - (h) : (j))
#define ODD(j, h) (EVEN(j, h) + (h))
#define LANE(j, h) (j)
#define ADD_RUNS(a, b, h) (SHUFFLE(a, b, LANES(EVEN, h)) + SHUFFLE(a, b, LANES(ODD, h)))

/* Lane i of the result is the sum of the lanes of a[i]. */
INLINE vec sum_each(vec *a) {
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

INLINE vec load_some(const float *p, i64 count) {
    vec v = {0};
    memcpy(&v, p, 4 * count);
    return v;
}

INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* e^x to about an ulp, as 2^n * e^r with |r| <= ln(2) / 2; held within the range of normal floats. */
INLINE vec exponential(vec x) {
    vec zero = {0}, low = zero - 87.3f, high = zero + 88.3f;
    vec shift = zero + 12582912.0f; /* 1.5 * 2^23: a sum with it is rounded to whole numbers */
    x = choose(x < low, low, choose(x > high, high, x));
    vec whole = x * 1.44269504f + shift, n = whole - shift;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (vec)((ivec)p + ((ivec)whole << 23));
}

/* --- y[M, N] = x[M, K] w[N, K]^T + bias ------------------------------------------------------------------------- */

/* M rows of x with C rows of w, both constants here. `fetch` floats further lies what the next tile reads, or 0. */
INLINE void tile(const int M, const int C, float *y, i64 y_step, const float *x, i64 x_step, const float *w,
                 const float *bias, i64 depth, i64 fetch) {
    vec total[MANY * 4 + WIDTH];
    for (int i = 0; i < M * C; i++) total[i] = (vec){0};
    i64 k = 0;
    for (; k + WIDTH <= depth; k += WIDTH) {
        vec column[4];
        for (int c = 0; c < C; c++) {
            column[c] = LOAD(w + c * depth + k);
            if (fetch) __builtin_prefetch(w + c * depth + k + fetch);
        }
        for (int m = 0; m < M; m++) {
            vec row = LOAD(x + m * x_step + k);
            for (int c = 0; c < C; c++) total[m * C + c] += row * column[c];
        }
    }
    if (k < depth)
        for (int m = 0; m < M; m++) {
            vec row = load_some(x + m * x_step + k, depth - k);
            for (int c = 0; c < C; c++) total[m * C + c] += row * load_some(w + c * depth + k, depth - k);
        }
    for (int i = M * C; i % WIDTH; i++) total[i] = (vec){0};
    for (int at = 0; at < M * C; at += WIDTH) {
        vec sums = sum_each(total + at);
        for (int i = at; i < MIN(at + WIDTH, M * C); i++)
            y[i / C * y_step + i % C] = sums[i - at] + (bias ? bias[i % C] : 0.0f);
    }
}

#define TILE(M) case M: if (M <= most) tile(M, C, y, y_step, x, x_step, w, bias, depth, fetch); break;
INLINE void tile_of(i64 rows, const int most, const int C, float *y, i64 y_step, const float *x, i64 x_step,
                    const float *w, const float *bias, i64 depth, i64 fetch) {
    switch (rows) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) }
}

static void few_by_4(i64 rows, float *y, i64 y_step, const float *x, i64 x_step, const float *w, const float *bias,
                     i64 depth, i64 fetch) {
    tile_of(rows, FEW, 4, y, y_step, x, x_step, w, bias, depth, fetch);
}

static void many_by_2(i64 rows, float *y, i64 y_step, const float *x, i64 x_step, const float *w, const float *bias,
                      i64 depth, i64 fetch) {
    tile_of(rows, MANY, 2, y, y_step, x, x_step, w, bias, depth, fetch);
}

static void many_by_1(i64 rows, float *y, i64 y_step, const float *x, i64 x_step, const float *w, const float *bias,
                      i64 depth, i64 fetch) {
    tile_of(rows, MANY, 1, y, y_step, x, x_step, w, bias, depth, fetch);
}

void yalis_linear(float *y, const float *x, i64 x_step, const float *w, const float *bias, i64 rows, i64 out, i64 depth,
                  i64 threads) {
    const i64 wide = rows <= FEW ? 4 : 2, tall = MIN(rows, MANY), block = rows <= MANY ? wide : BLOCK;
    threads = MAX(1, MIN(threads, out * depth / WORTH_A_THREAD));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        /* Each thread streams its own stretch of the matrix. */
        i64 blocks = (out + block - 1) / block, id = omp_get_thread_num(), team = omp_get_num_threads();
        i64 end = MIN(out, blocks * (id + 1) / team * block);
        for (i64 b = blocks * id / team * block; b < end; b += block)
            for (i64 m = 0; m < rows; m += tall)
                for (i64 n = b, stop = MIN(b + block, end), step; n < stop; n += step) {
                    step = n + wide <= stop ? wide : 1;
                    (step == 4 ? few_by_4 : step == 2 ? many_by_2 : many_by_1)(
                        MIN(tall, rows - m), y + m * out + n, out, x + m * x_step, x_step, w + n * depth,
                        bias ? bias + n : 0, depth, m ? 0 : wide * depth);
                }
    }
}

/* --- rows: lookup, sum, norm, gate, rotary embedding ------------------------------------------------------------- */

/* y[count, width] = the rows of x that are named. */
void yalis_take(float *y, const float *x, i64 x_step, const i64 *rows, i64 count, i64 width) {
    for (i64 r = 0; r < count; r++) memcpy(y + r * width, x + rows[r] * x_step, 4 * width);
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
        vec v = load_some(x + i, some);
        total[0] += v * v;
    }
    return sum(total[0] + total[1] + total[2] + total[3]);
}

/* y = x / rms(x) * weight; x [rows, inner, cols], the inner rows one after another (heads of a token). */
void yalis_rms_norm(float *y, const float *x, i64 x_step, const float *weight, double eps, i64 rows, i64 inner,
                    i64 cols, i64 threads) {
    threads = MAX(1, MIN(threads, rows * inner * cols / WORTH_A_THREAD));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (i64 r = 0; r < rows * inner; r++) {
        const float *from = x + r / inner * x_step + r % inner * cols;
        float *restrict to = y + r * cols;
        float scale = 1.0f / sqrtf(sum_of_squares(from, cols) / (float)cols + (float)eps);
        for (i64 i = 0; i < cols; i++) to[i] = from[i] * scale * weight[i];
    }
}

INLINE vec silu(vec x) { return x / (1.0f + exponential(-x)); }

/* y[rows, cols] = silu(x[:, :cols]) * x[:, cols:] */
void yalis_silu_gate(float *y, const float *x, i64 x_step, i64 rows, i64 cols, i64 threads) {
    threads = MAX(1, MIN(threads, 4 * rows * cols / WORTH_A_THREAD));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        i64 id = omp_get_thread_num(), team = omp_get_num_threads();
        for (i64 r = 0; r < rows; r++) {
            const float *gate = x + r * x_step, *up = gate + cols;
            float *to = y + r * cols;
            i64 i = cols * id / team, end = cols * (id + 1) / team;
            for (; i + WIDTH <= end; i += WIDTH) STORE(to + i, silu(LOAD(gate + i)) * LOAD(up + i));
            if (i < end) {
                vec last = silu(load_some(gate + i, end - i)) * load_some(up + i, end - i);
                memcpy(to + i, &last, 4 * (end - i));
            }
        }
    }
}

/* y[rows, heads, dim]: the first `turned` of each head, element i with i + turned / 2; the sine of the first half comes
   negated. The rest is copied. */
void yalis_rotate(float *y, const float *x, i64 x_step, const float *cos, const float *sin, i64 angle_step, i64 rows,
                  i64 heads, i64 dim, i64 turned, i64 threads) {
    const i64 half = turned / 2;
    threads = MAX(1, MIN(threads, rows * heads * dim / WORTH_A_THREAD));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (i64 r = 0; r < rows; r++) {
        const float *c = cos + r * angle_step, *s = sin + r * angle_step;
        for (i64 h = 0; h < heads; h++) {
            const float *from = x + r * x_step + h * dim;
            float *restrict to = y + (r * heads + h) * dim;
            for (i64 i = 0; i < half; i++) to[i] = from[i] * c[i] + from[i + half] * s[i];
            for (i64 i = half; i < turned; i++) to[i] = from[i] * c[i] + from[i - half] * s[i];
            for (i64 i = turned; i < dim; i++) to[i] = from[i];
        }
    }
}

/* --- the paged cache, [blocks, block_size, kv_heads, dim] --------------------------------------------------------- */

/* A token's keys and values, [tokens, width] each, to its slot; a negative one is nowhere. */
void yalis_write(float *k_cache, float *v_cache, const float *k, i64 k_step, const float *v, i64 v_step,
                 const i64 *slots, i64 tokens, i64 width) {
    for (i64 t = 0; t < tokens; t++) {
        if (slots[t] < 0)
            continue;
        memcpy(k_cache + slots[t] * width, k + t * k_step, 4 * width);
        memcpy(v_cache + slots[t] * width, v + t * v_step, 4 * width);
    }
}

/* out = out * fade + the values, from their i-th element on, by their weights; U vectors of them. */
INLINE void mix(const int U, float *out, const float *const *values, i64 i, const float *weights, i64 count,
                float fade) {
    vec total[4];
    for (int u = 0; u < U; u++) {
        total[u] = (vec){0};
        if (fade > 0) total[u] = LOAD(out + u * WIDTH) * fade; /* before the first keys, out holds anything */
    }
    for (i64 j = 0; j < count; j++)
        for (int u = 0; u < U; u++) total[u] += LOAD(values[j] + i + u * WIDTH) * weights[j];
    for (int u = 0; u < U; u++) STORE(out + u * WIDTH, total[u]);
}

/* One query's softmax over `count` more keys; `best` and `weight` are its highest score and sum of weights so far. The
   list of keys goes on with valid ones to a whole vector. */
static void attend_some(float *out, const float *q, const float *const *keys, const float *const *values, i64 count,
                        i64 dim, float scale, float softcap, float *best, float *weight) {
    float scores[KEYS];
    vec zero = {0}, top = zero - INFINITY, total = zero;
    for (i64 j = 0; j < count; j += WIDTH) {
        vec parts[WIDTH];
        for (int u = 0; u < WIDTH; u++) parts[u] = zero;
        i64 i = 0;
        for (; i + WIDTH <= dim; i += WIDTH) {
            vec part = LOAD(q + i);
            for (int u = 0; u < WIDTH; u++) parts[u] += part * LOAD(keys[j + u] + i);
        }
        if (i < dim) {
            vec part = load_some(q + i, dim - i);
            for (int u = 0; u < WIDTH; u++) parts[u] += part * load_some(keys[j + u] + i, dim - i);
        }
        vec score = sum_each(parts) * scale;
        if (softcap > 0)
            for (int u = 0; u < WIDTH; u++) score[u] = softcap * tanhf(score[u] / softcap);
        if (j + WIDTH > count) {
            ivec lane = {LANES(LANE, 0)};
            score = choose(lane < (int32_t)(count - j), score, zero - INFINITY);
        }
        STORE(scores + j, score);
        top = choose(score > top, score, top);
    }
    float before = *best;
    for (int u = 0; u < WIDTH; u++) *best = MAX(*best, top[u]);
    float fade = *weight > 0 ? expf(before - *best) : 0.0f;
    for (i64 j = 0; j < count; j += WIDTH) {
        vec weights = exponential(LOAD(scores + j) - *best);
        STORE(scores + j, weights);
        total += weights;
    }
    *weight = *weight * fade + sum(total);
    i64 i = 0;
    for (; i + 4 * WIDTH <= dim; i += 4 * WIDTH) mix(4, out + i, values, i, scores, count, fade);
    for (; i + WIDTH <= dim; i += WIDTH) mix(1, out + i, values, i, scores, count, fade);
    for (; i < dim; i++) {
        float one = fade > 0 ? out[i] * fade : 0.0f;
        for (i64 j = 0; j < count; j++) one += values[j][i] * scores[j];
        out[i] = one;
    }
}

/* One new token for each sequence: out and q are [sequences, heads, dim], tables [sequences, most blocks]; `window` and
   `softcap` are 0 where there is none. A pass over the keys serves all the query heads that share them. */
void yalis_attend(float *out, const float *q, i64 q_step, const float *k_cache, const float *v_cache,
                  const int32_t *tables, i64 table_step, const int32_t *contexts, i64 sequences, i64 heads,
                  i64 kv_heads, i64 dim, i64 block_size, i64 window, double scale, double softcap, i64 threads) {
    const i64 group = heads / kv_heads;
    i64 work = 0;
    for (i64 s = 0; s < sequences; s++) work += contexts[s] * heads * dim;
    threads = MAX(1, MIN(threads, work / WORTH_A_THREAD));
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (i64 task = 0; task < sequences * kv_heads; task++) {
        const i64 s = task / kv_heads, kv = task % kv_heads, end = contexts[s];
        const i64 start = window && end > window ? end - window : 0;
        const int32_t *table = tables + s * table_step;
        for (i64 first = 0; first < group; first += GROUP) {
            const i64 size = MIN(GROUP, group - first), head = kv * group + first;
            float *to = out + (s * heads + head) * dim;
            float best[GROUP], weight[GROUP] = {0};
            for (i64 g = 0; g < size; g++) best[g] = -INFINITY;
            for (i64 at = start; at < end; at += KEYS) {
                const i64 count = MIN(KEYS, end - at);
                const float *keys[KEYS], *values[KEYS];
                for (i64 j = 0; j < count; j++) {
                    i64 slot = (i64)table[(at + j) / block_size] * block_size + (at + j) % block_size;
                    keys[j] = k_cache + (slot * kv_heads + kv) * dim;
                    values[j] = v_cache + (slot * kv_heads + kv) * dim;
                    for (i64 i = 0; i < dim; i += 16) {
                        __builtin_prefetch(keys[j] + i);
                        __builtin_prefetch(values[j] + i);
                    }
                }
                for (i64 j = count; j % WIDTH; j++) keys[j] = keys[count - 1];
                for (i64 g = 0; g < size; g++)
                    attend_some(to + g * dim, q + s * q_step + (head + g) * dim, keys, values, count, dim, scale,
                                softcap, best + g, weight + g);
            }
            for (i64 g = 0; g < size; g++)
                for (i64 i = 0; i < dim; i++) to[g * dim + i] /= weight[g];
        }
    }
}

/* --- a recorded step ---------------------------------------------------------------------------------------------- */

typedef union {
    void *p;
    i64 i;
    double f;
} value;

typedef struct {
    i64 function; /* its place in the switch below, which is that of native.py's list */
    value of[17];
} call;

static void carry_out(const call *c) {
    const value *v = c->of;
    switch (c->function) {
    case 0: yalis_linear(v[0].p, v[1].p, v[2].i, v[3].p, v[4].p, v[5].i, v[6].i, v[7].i, v[8].i); break;
    case 1: yalis_take(v[0].p, v[1].p, v[2].i, v[3].p, v[4].i, v[5].i); break;
    case 2: yalis_add(v[0].p, v[1].p, v[2].p, v[3].i); break;
    case 3: yalis_rms_norm(v[0].p, v[1].p, v[2].i, v[3].p, v[4].f, v[5].i, v[6].i, v[7].i, v[8].i); break;
    case 4: yalis_silu_gate(v[0].p, v[1].p, v[2].i, v[3].i, v[4].i, v[5].i); break;
    case 5:
        yalis_rotate(v[0].p, v[1].p, v[2].i, v[3].p, v[4].p, v[5].i, v[6].i, v[7].i, v[8].i, v[9].i, v[10].i);
        break;
    case 6: yalis_write(v[0].p, v[1].p, v[2].p, v[3].i, v[4].p, v[5].i, v[6].p, v[7].i, v[8].i); break;
    case 7:
        yalis_attend(v[0].p, v[1].p, v[2].i, v[3].p, v[4].p, v[5].p, v[6].i, v[7].p, v[8].i, v[9].i, v[10].i,
                     v[11].i, v[12].i, v[13].i, v[14].f, v[15].f, v[16].i);
        break;
    }
}

void yalis_replay(const call *calls, i64 count) {
    for (i64 i = 0; i < count; i++) carry_out(calls + i);
}

static i64 monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* The same, for whoever profiles: times[i] is when call i began, times[count] when the last one ended. */
void yalis_replay_timed(const call *calls, i64 count, i64 *times) {
    for (i64 i = 0; i < count; i++) {
        times[i] = monotonic_ns();
        carry_out(calls + i);
    }
    times[count] = monotonic_ns();
}
