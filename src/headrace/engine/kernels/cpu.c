/* Float32 kernels for CPUs: what surrounds the matrix products of a decoder step.
 *
 * Every result depends on its own row alone: each sum runs in an order fixed by positions, never
 * by how rows are packed into a step or shared out between threads. Vectors are GCC's; a compiler
 * without them, or without OpenMP, fails to build this and the plain kernels are used.
 */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));

enum { LANES = 8, ALONE = 1 << 14 }; /* less work than ALONE floats is not worth a second thread */

static inline v8 load(const float *from) {
    v8 v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(float *to, v8 v) { memcpy(to, &v, sizeof v); }

static inline v8 load_some(const float *from, int count) {
    v8 v = {0};
    memcpy(&v, from, (size_t)count * sizeof(float));
    return v;
}

static inline v8 all(float x) { return (v8){x, x, x, x, x, x, x, x}; }

static inline i8 indices(int first) {
    return (i8){0, 1, 2, 3, 4, 5, 6, 7} + (i8){first, first, first, first, first, first, first, first};
}

static inline v8 where(i8 mask, v8 yes, v8 no) {
    return (v8)((mask & (i8)yes) | (~mask & (i8)no));
}

static inline float sum(v8 v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* Eight vectors to the vector of their sums. */
static inline v8 sums(const v8 *a) {
    v8 pairs[4], fours[2];
    for (int i = 0; i < 4; i++) {
        v8 x = a[2 * i], y = a[2 * i + 1];
        pairs[i] = __builtin_shufflevector(x, y, 0, 8, 2, 10, 4, 12, 6, 14) +
                   __builtin_shufflevector(x, y, 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 2; i++) {
        v8 x = pairs[2 * i], y = pairs[2 * i + 1];
        fours[i] = __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13) +
                   __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    return __builtin_shufflevector(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

/* exp(x) to about two units in the last place: 2^n times a polynomial of the rest, with Cephes'
 * coefficients. 0 below -87, infinity above 88; NaN stays NaN. */
static inline v8 exponential(v8 x) {
    const v8 magic = all(12582912.0f), low = all(-87.0f), high = all(88.0f);
    i8 under = x < low, over = x > high;
    v8 inside = where(under, low, where(over, high, x));
    v8 n = (inside * all(1.44269504088896341f) + magic) - magic;
    v8 r = inside - n * all(0.693359375f);
    r = r + n * all(2.12194440e-4f);
    v8 p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * (r * r) + r + all(1.0f);
    i8 power = (__builtin_convertvector(n, i8) + 127) << 23;
    v8 result = p * (v8)power;
    return where(under, all(0.0f), where(over, all(INFINITY), result));
}

/* x * weight / rms(x) of one row; `out` may be `x`. */
static inline void norm_row(float *out, const float *x, const float *weight, int width, float eps) {
    v8 squares = {0};
    int i = 0;
    for (; i + LANES <= width; i += LANES) {
        v8 v = load(x + i);
        squares += v * v;
    }
    if (i < width) {
        v8 v = load_some(x + i, width - i);
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(sum(squares) / (float)width + eps);
    for (i = 0; i + LANES <= width; i += LANES)
        store(out + i, load(x + i) * all(scale) * load(weight + i));
    for (; i < width; i++) out[i] = x[i] * scale * weight[i];
}

/* Adds `delta` to x unless it is null, and normalises the sum into `out`. All [rows, width]. */
void headrace_rms_norm(float *out, float *x, const float *delta, const float *weight, int64_t rows,
                       int width, float eps) {
#pragma omp parallel for schedule(static) if (rows * width > ALONE)
    for (int64_t row = 0; row < rows; row++) {
        float *own = x + row * width;
        if (delta != NULL) {
            const float *add = delta + row * width;
            for (int i = 0; i < width; i++) own[i] += add[i];
        }
        norm_row(out + row * width, own, weight, width, eps);
    }
}

static inline v8 silu_mul(v8 gate, v8 up) {
    return gate / (all(1.0f) + exponential(-gate)) * up;
}

/* silu(gate) * up of [rows, 2 * width], gate before up, into [rows, width]. */
void headrace_silu_mul(float *out, const float *gate_up, int64_t rows, int width) {
#pragma omp parallel for schedule(static) if (rows * width > ALONE)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * width, *up = gate + width;
        float *own = out + row * width;
        int i = 0;
        for (; i + LANES <= width; i += LANES)
            store(own + i, silu_mul(load(gate + i), load(up + i)));
        if (i < width) {
            v8 last = silu_mul(load_some(gate + i, width - i), load_some(up + i, width - i));
            memcpy(own + i, &last, (size_t)(width - i) * sizeof(float));
        }
    }
}

/* Asks for memory that is needed soon: blocks lie far apart, where no hardware foresees them. */
static inline void prefetch(const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(from + i, 0, 2);
}

/* Normalises (where weights are given) and rotates (where tables are given) the queries and keys
 * of qkv [rows, heads + 2 * kv_heads, dim] in place, and stores keys and values in the cache.
 * Row r has position positions[r]; its vectors go to slots[r] + plane * block_size, in vectors. */
void headrace_rotate_and_store(float *qkv, float *cache, const float *query_norm,
                               const float *key_norm, float eps, const float *cosine,
                               const float *sine, const int64_t *positions, const int64_t *slots,
                               int64_t rows, int heads, int kv_heads, int dim, int block_size) {
    int planes = heads + 2 * kv_heads, half = dim / 2;
#pragma omp parallel for schedule(static) if (rows * planes * dim > ALONE)
    for (int64_t row = 0; row < rows; row++) {
        float *own = qkv + row * planes * dim;
        if (row + 1 < rows)
            for (int plane = 0; plane < 2 * kv_heads; plane++)
                prefetch(cache + (slots[row + 1] + (int64_t)plane * block_size) * dim, dim);
        for (int head = 0; head < heads + kv_heads; head++) {
            float *x = own + head * dim;
            const float *weight = head < heads ? query_norm : key_norm;
            if (weight != NULL) norm_row(x, x, weight, dim, eps);
            if (cosine == NULL) continue;
            const float *c = cosine + positions[row] * half, *s = sine + positions[row] * half;
            for (int i = 0; i < half; i++) {
                float a = x[i], b = x[i + half];
                x[i] = a * c[i] - b * s[i];
                x[i + half] = b * c[i] + a * s[i];
            }
        }
        for (int plane = 0; plane < 2 * kv_heads; plane++)
            memcpy(cache + (slots[row] + (int64_t)plane * block_size) * dim,
                   own + (heads + plane) * dim, (size_t)dim * sizeof(float));
    }
}

/* Scores of one query against `count` keys that lie together. */
static inline void score(float *to, const float *query, const float *keys, int count, int dim) {
    for (int first = 0; first < count; first += LANES) {
        int some = count - first < LANES ? count - first : LANES;
        const float *at[LANES];
        for (int k = 0; k < LANES; k++)
            at[k] = keys + (int64_t)(first + (k < some ? k : some - 1)) * dim;
        v8 products[LANES] = {{0}};
        int d = 0;
        for (; d + LANES <= dim; d += LANES) {
            v8 q = load(query + d);
            for (int k = 0; k < LANES; k++) products[k] += q * load(at[k] + d);
        }
        if (d < dim) {
            v8 q = load_some(query + d, dim - d);
            for (int k = 0; k < LANES; k++) products[k] += q * load_some(at[k] + d, dim - d);
        }
        v8 result = sums(products);
        memcpy(to + first, &result, (size_t)some * sizeof(float));
    }
}

/* Scores of keys [first, end) to exp(scale * (score - best)), hidden ones and those of the same
 * vector before and after to 0. Returns their sum, whose order is fixed by absolute positions. */
static inline float weigh(float *scores, int first, int end, float scale) {
    int from = first / LANES * LANES, to = (end + LANES - 1) / LANES * LANES;
    v8 best = all(-INFINITY), total = {0};
    for (int k = from; k < to; k += LANES) {
        i8 at = indices(k);
        v8 s = where((at >= first) & (at < end), load(scores + k), all(-INFINITY));
        best = where(s > best, s, best);
    }
    float highest = best[0];
    for (int i = 1; i < LANES; i++) highest = best[i] > highest ? best[i] : highest;
    for (int k = from; k < to; k += LANES) {
        i8 at = indices(k);
        v8 weight = exponential((load(scores + k) - all(highest)) * all(scale));
        weight = where((at >= first) & (at < end), weight, all(0.0f));
        total += weight;
        store(scores + k, weight);
    }
    return sum(total);
}

/* Adds weights[k] * values[k] over `count` keys that lie together, in their order. `wide` vectors
 * of the head at once; constant at each call, so that they stay in registers. */
static inline __attribute__((always_inline)) void blend(float *sums, const float *weights,
                                                        const float *values, int count, int dim,
                                                        const int wide) {
    v8 own[LANES];
    for (int i = 0; i < wide; i++) own[i] = load(sums + i * LANES);
    for (int k = 0; k < count; k++) {
        v8 weight = all(weights[k]);
        for (int i = 0; i < wide; i++) own[i] += weight * load(values + (int64_t)k * dim + i * LANES);
    }
    for (int i = 0; i < wide; i++) store(sums + i * LANES, own[i]);
}

static inline void blend_row(float *sums, const float *weights, const float *values, int count,
                             int dim) {
    int d = 0;
    for (; d + 8 * LANES <= dim; d += 8 * LANES)
        blend(sums + d, weights, values + d, count, dim, 8);
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        blend(sums + d, weights, values + d, count, dim, 2);
    for (; d + LANES <= dim; d += LANES) blend(sums + d, weights, values + d, count, dim, 1);
    if (d < dim) {
        v8 own = load_some(sums + d, dim - d);
        for (int k = 0; k < count; k++)
            own += all(weights[k]) * load_some(values + (int64_t)k * dim + d, dim - d);
        memcpy(sums + d, &own, (size_t)(dim - d) * sizeof(float));
    }
}

/* Consecutive rows of one sequence: the first row, how many, its position, its block table. */
typedef struct {
    int32_t row, tokens, position, table;
} Tile;

/* One tile and KV head. `scratch` holds, for each query row, scores of all keys and a sum. */
static void attend(float *out, const float *qkv, const float *cache, const Tile *tile,
                   const int32_t *tables, int head, int heads, int kv_heads, int dim,
                   int block_size, int64_t block_stride, int window, float *scratch) {
    const int group = heads / kv_heads, planes = heads + 2 * kv_heads, rows = tile->tokens * group;
    const int keys = tile->position + tile->tokens, room = (keys + LANES - 1) / LANES * LANES;
    const int first = window > 0 && tile->position + 1 > window ? tile->position + 1 - window : 0;
    const int begin = first / block_size, blocks = (keys + block_size - 1) / block_size;
    const int64_t size = (int64_t)block_size * dim;
    const int32_t *table = tables + tile->table;
    const float scale = 1.0f / sqrtf((float)dim);
    float *blended = scratch + (int64_t)rows * room;
    float totals[rows];

    for (int b = begin; b < blocks; b++) {
        const float *block = cache + (table[b] * block_stride + head) * size;
        if (b + 1 < blocks) prefetch(cache + (table[b + 1] * block_stride + head) * size, size);
        int count = keys - b * block_size < block_size ? keys - b * block_size : block_size;
        for (int r = 0; r < rows; r++) {
            const float *query = qkv + ((int64_t)(tile->row + r / group) * planes + head * group +
                                        r % group) * dim;
            score(scratch + (int64_t)r * room + b * block_size, query, block, count, dim);
        }
    }
    for (int r = 0; r < rows; r++) {
        int end = tile->position + r / group + 1;
        int start = window > 0 && end > window ? end - window : 0;
        float *scores = scratch + (int64_t)r * room;
        totals[r] = weigh(scores, start, end, scale);
        /* What the tile reads for its other rows weighs nothing in this one. */
        int from = start / LANES * LANES, to = (end + LANES - 1) / LANES * LANES;
        for (int k = begin * block_size; k < from; k++) scores[k] = 0.0f;
        for (int k = to; k < keys; k++) scores[k] = 0.0f;
    }
    memset(blended, 0, (size_t)rows * (size_t)dim * sizeof(float));
    for (int b = begin; b < blocks; b++) {
        const float *block = cache + (table[b] * block_stride + kv_heads + head) * size;
        if (b + 1 < blocks)
            prefetch(cache + (table[b + 1] * block_stride + kv_heads + head) * size, size);
        int count = keys - b * block_size < block_size ? keys - b * block_size : block_size;
        for (int r = 0; r < rows; r++)
            blend_row(blended + (int64_t)r * dim, scratch + (int64_t)r * room + b * block_size,
                      block, count, dim);
    }
    for (int r = 0; r < rows; r++) {
        float *own = out + ((int64_t)(tile->row + r / group) * heads + head * group + r % group) * dim;
        float inverse = 1.0f / totals[r];
        for (int d = 0; d < dim; d++) own[d] = blended[(int64_t)r * dim + d] * inverse;
    }
}

/* Causal attention of qkv [rows, heads + 2 * kv_heads, dim] over one layer of the paged cache,
 * into [rows, heads, dim]. `window` 0 sees everything. Each thread has `room` floats of scratch. */
void headrace_attention(float *out, const float *qkv, const float *cache, const Tile *tiles,
                        int64_t count, const int32_t *tables, int heads, int kv_heads, int dim,
                        int block_size, int64_t block_stride, int window, float *scratch,
                        int64_t room) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t item = 0; item < count * kv_heads; item++)
        attend(out, qkv, cache, tiles + item / kv_heads, tables, (int)(item % kv_heads), heads,
               kv_heads, dim, block_size, block_stride, window,
               scratch + omp_get_thread_num() * room);
}
