/* Bodies of the row-wise kernels; included once per instruction set with FT_VEC and FT_NAME set. */
#include "rows.h"
#include "vec16.h"

#define FT_MAX_FINITE_F16 65504.0f

/* Of a key block, so that it stays in the first level while many queries pass over it. */
#define STRIP_TILES 4
#define STRIP_DIMS 64

/* Hardware stops fetching ahead at every page, so a cache read for few queries would wait for memory at each:
 * 4.2 us per block of 128 keys of 64 dims on one core, 2.3 with the next ones fetched in time. */
#define PAGE_HALVES 2048
#define ROWS_AHEAD 32

static float sum_of_squares(const float *x, int n) {
    v16 acc = v_set1(0.0f);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        v16 a = v_load(x + i);
        acc = v_fma(a, a, acc);
    }
    if (i < n) {
        v16 a = v_load_part(x + i, n - i, 0.0f);
        acc = v_fma(a, a, acc);
    }
    return v_sum(acc);
}

static void rms_norm(const float *x, float *y, const float *weight, int n, float eps) {
    const v16 inverse = v_set1(1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps));
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        v16 a = v_mul(v_load(x + i), inverse);
        v_store(y + i, weight ? v_mul(a, v_load(weight + i)) : a);
    }
    if (i < n) {
        v16 a = v_mul(v_load_part(x + i, n - i, 0.0f), inverse);
        v_store_part(y + i, n - i, weight ? v_mul(a, v_load_part(weight + i, n - i, 0.0f)) : a);
    }
}

/* Apply `expr` of lanes a (from x) and b (from y) to all n elements of x. */
#define FT_MAP(x, y, n, expr)                              \
    int i = 0;                                             \
    for (; i + 16 <= (n); i += 16) {                       \
        v16 a = v_load((x) + i), b = v_load((y) + i);      \
        v_store((x) + i, expr);                            \
        (void)b;                                           \
    }                                                      \
    if (i < (n)) {                                         \
        v16 a = v_load_part((x) + i, (n)-i, 0.0f);         \
        v16 b = v_load_part((y) + i, (n)-i, 0.0f);         \
        v_store_part((x) + i, (n)-i, expr);                \
        (void)b;                                           \
    }

static void add(float *dst, const float *x, int n) { FT_MAP(dst, x, n, v_add(a, b)) }
static void multiply(float *x, const float *y, int n) { FT_MAP(x, y, n, v_mul(a, b)) }
static void add_scaled(float *dst, const float *x, float factor, int n) {
    const v16 f = v_set1(factor);
    FT_MAP(dst, x, n, v_fma(b, f, a))
}
static void scale(float *x, float factor, int n) {
    const v16 f = v_set1(factor);
    FT_MAP(x, x, n, v_mul(a, f))
}

FT_INLINE v16 sigmoid_times(v16 x, v16 exponent) { /* x / (1 + e^exponent) */
    return v_div(x, v_add(v_set1(1.0f), v_exp(exponent)));
}
FT_INLINE v16 silu(v16 x) { return sigmoid_times(x, v_sub(v_set1(0.0f), x)); }
/* 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3) */
FT_INLINE v16 gelu_tanh(v16 x) {
    v16 cube = v_mul(v_mul(x, x), x);
    v16 u = v_mul(v_set1(0.79788456f), v_fma(v_set1(0.044715f), cube, x));
    return sigmoid_times(x, v_mul(v_set1(-2.0f), u));
}
static void activate(int activation, float *gate, const float *up, int n) {
    if (activation == FT_SILU) {
        FT_MAP(gate, up, n, v_mul(silu(a), b))
    } else {
        FT_MAP(gate, up, n, v_mul(gelu_tanh(a), b))
    }
}

FT_INLINE v16 tanh16(v16 x) { /* 1 - 2 / (e^2x + 1) */
    v16 e = v_add(v_exp(v_add(x, x)), v_set1(1.0f));
    return v_sub(v_set1(1.0f), v_div(v_set1(2.0f), e));
}
static void softcap(float *x, float cap, int n) {
    const v16 c = v_set1(cap);
    FT_MAP(x, x, n, v_mul(c, tanh16(v_div(a, c))))
}

static float largest(const float *x, int n) {
    v16 best = v_set1(-INFINITY);
    int i = 0;
    for (; i + 16 <= n; i += 16) best = v_max(best, v_load(x + i));
    if (i < n) best = v_max(best, v_load_part(x + i, n - i, -INFINITY));
    return v_largest(best);
}

static void softmax(float *x, int n) {
    const v16 max = v_set1(largest(x, n));
    v16 sum = v_set1(0.0f);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        v16 e = v_exp(v_sub(v_load(x + i), max));
        sum = v_add(sum, e);
        v_store(x + i, e);
    }
    if (i < n) {
        v16 e = v_exp(v_sub(v_load_part(x + i, n - i, -INFINITY), max));
        sum = v_add(sum, e);
        v_store_part(x + i, n - i, e);
    }
    scale(x, 1.0f / v_sum(sum), n);
}

static int argmax(const float *x, int n) {
    v16 total = v_set1(0.0f);
    int from = 0;
    for (; from + 16 <= n; from += 16) total = v_add(total, v_load(x + from));
    if (from < n) total = v_add(total, v_load_part(x + from, n - from, 0.0f));
    const float sum = v_sum(total);
    for (int i = 0; sum != sum && i < n; i++)
        if (x[i] != x[i]) return i;
    const float best = largest(x, n);
    for (int i = 0; i < n; i++)
        if (x[i] == best) return i;
    return 0;
}

FT_INLINE void rotate_pair(float *a, float *b, float c, float s) {
    float x = *a, y = *b;
    *a = fmaf(x, c, -(y * s));
    *b = fmaf(y, c, x * s);
}
static void rotate(float *x, const float *cosine, const float *sine, int pairs, int interleaved) {
    if (interleaved) {
        for (int i = 0; i < pairs; i++) rotate_pair(x + 2 * i, x + 2 * i + 1, cosine[i], sine[i]);
        return;
    }
    int i = 0;
    for (; i + 16 <= pairs; i += 16) {
        v16 a = v_load(x + i), b = v_load(x + pairs + i), c = v_load(cosine + i), s = v_load(sine + i);
        v_store(x + i, v_fma(a, c, v_sub(v_set1(-0.0f), v_mul(b, s))));
        v_store(x + pairs + i, v_fma(b, c, v_mul(a, s)));
    }
    for (; i < pairs; i++) rotate_pair(x + i, x + pairs + i, cosine[i], sine[i]);
}

FT_INLINE v16 load_part_or_all(const float *x, int n) {
    return n >= 16 ? v_load(x) : v_load_part(x, n, 0.0f);
}
FT_INLINE v16 finite_f16(v16 a) {
    return v_max(v_min(a, v_set1(FT_MAX_FINITE_F16)), v_set1(-FT_MAX_FINITE_F16));
}
static void store_key(const float *x, void *tile, int lane, int dim, int is_f32) {
    if (is_f32) {
        float *out = (float *)tile + lane;
        for (int d = 0; d < dim; d++) out[d * FT_KEY_TILE] = x[d];
        return;
    }
    uint16_t *out = (uint16_t *)tile + lane, half[16];
    for (int d = 0; d < dim; d += 16) {
        int n = dim - d < 16 ? dim - d : 16;
        v_store_f16(half, finite_f16(load_part_or_all(x + d, n)));
        for (int i = 0; i < n; i++) out[(d + i) * FT_KEY_TILE] = half[i];
    }
}
static void store_value(const float *x, void *row, int dim, int is_f32) {
    if (is_f32) {
        memcpy(row, x, (size_t)dim * sizeof(float));
        return;
    }
    uint16_t half[16];
    for (int d = 0; d < dim; d += 16) {
        int n = dim - d < 16 ? dim - d : 16;
        v_store_f16(half, finite_f16(load_part_or_all(x + d, n)));
        memcpy((uint16_t *)row + d, half, (size_t)n * sizeof(uint16_t));
    }
}

FT_INLINE v16 load_kv(const void *p, int64_t at, int is_f32) {
    return is_f32 ? v_load((const float *)p + at) : v_load_f16((const uint16_t *)p + at);
}

/* Scores of `queries` queries on `tiles` tiles from tile t on: one chain over the dims per key. */
FT_INLINE void score_tiles(const ft_attend *a, int q0, int t, const int queries, const int tiles,
                           const int is_f32) {
    const float *q = a->q + (int64_t)q0 * a->dim_padded;
    v16 acc[FT_QUERIES][8];
    for (int i = 0; i < queries; i++)
        for (int j = 0; j < tiles; j++) acc[i][j] = v_set1(0.0f);
    for (int d = 0; d < a->dim; d++) {
        v16 k[8];
        for (int j = 0; j < tiles; j++)
            k[j] = load_kv(a->k, ((t + j) * a->dim + d) * FT_KEY_TILE, is_f32);
        if (!is_f32 && d % 2 == 0) /* of the next tiles; 32 bytes each */
            for (int j = 0; j < tiles; j++)
                FT_PREFETCH((const uint16_t *)a->k + ((t + tiles + j) * a->dim + d) * FT_KEY_TILE);
        for (int i = 0; i < queries; i++) {
            v16 x = v_set1(q[i * a->dim_padded + d]);
            for (int j = 0; j < tiles; j++) acc[i][j] = v_fma(x, k[j], acc[i][j]);
        }
    }
    for (int i = 0; i < queries; i++)
        for (int j = 0; j < tiles; j++)
            v_store(a->weights + (q0 + i) * FT_KEY_BLOCK + (t + j) * FT_KEY_TILE, acc[i][j]);
}

FT_INLINE void score(const ft_attend *a, int q0, int t0, int t1, const int queries, const int tiles,
                     const int is_f32) {
    int t = t0;
    for (; t + tiles <= t1; t += tiles) score_tiles(a, q0, t, queries, tiles, is_f32);
    for (; t < t1; t++) score_tiles(a, q0, t, queries, 1, is_f32);
}

/* Weighted sum of the values, `columns` vectors of dims at a time: one chain over the keys per dim. */
FT_INLINE void weigh_columns(const ft_attend *a, int q0, int t0, int t1, int d, const int queries,
                             const int columns, const int is_f32) {
    const float *weights = a->weights + q0 * FT_KEY_BLOCK;
    v16 acc[FT_QUERIES][8];
    for (int i = 0; i < queries; i++)
        for (int j = 0; j < columns; j++) acc[i][j] = v_set1(0.0f);
    for (int t = t0 * FT_KEY_TILE; t < t1 * FT_KEY_TILE; t++) {
        v16 v[8];
        for (int j = 0; j < columns; j++)
            v[j] = load_kv(a->v, (int64_t)t * a->dim_padded + d + 16 * j, is_f32);
        if (!is_f32)
            for (int j = 0; j < columns; j += 2)
                FT_PREFETCH((const uint16_t *)a->v + (int64_t)(t + ROWS_AHEAD) * a->dim_padded + d + 16 * j);
        for (int i = 0; i < queries; i++) {
            v16 w = v_set1(weights[i * FT_KEY_BLOCK + t]);
            for (int j = 0; j < columns; j++) acc[i][j] = v_fma(w, v[j], acc[i][j]);
        }
    }
    for (int i = 0; i < queries; i++)
        for (int j = 0; j < columns; j++)
            v_store(a->out.acc + (int64_t)(q0 + i) * a->dim_padded + d + 16 * j, acc[i][j]);
}

FT_INLINE void weigh(const ft_attend *a, int q0, int t0, int t1, int d0, int d1, const int queries,
                     const int columns, const int is_f32) {
    int d = d0;
    for (; d + 16 * columns <= d1; d += 16 * columns)
        weigh_columns(a, q0, t0, t1, d, queries, columns, is_f32);
    for (; d < d1; d += 16) weigh_columns(a, q0, t0, t1, d, queries, 1, is_f32);
}

/* Scores of query i to weights exp(score - max); invisible positions get weight 0. */
static void soften(const ft_attend *a, int i, int t0, int t1) {
    float *w = a->weights + i * FT_KEY_BLOCK;
    const int from = t0 * FT_KEY_TILE, to = t1 * FT_KEY_TILE;
    for (int j = from; j < a->begin[i] && j < to; j++) w[j] = -INFINITY;
    for (int j = a->end[i] > from ? a->end[i] : from; j < to; j++) w[j] = -INFINITY;
    v16 best = v_set1(-INFINITY);
    for (int j = from; j < to; j += 16) best = v_max(best, v_load(w + j));
    a->out.max[i] = v_largest(best);
    const v16 max = v_set1(a->out.max[i] == -INFINITY ? 0.0f : a->out.max[i]);
    v16 sum = v_set1(0.0f);
    for (int j = from; j < to; j += 16) {
        v16 e = v_exp(v_sub(v_load(w + j), max));
        sum = v_add(sum, e);
        v_store(w + j, e);
    }
    a->out.sum[i] = v_sum(sum);
}

/* How many accumulators fit in registers decides the width; it never changes a sum's order. */
#define FT_BY_QUERIES(call, queries, is_f32, ...)                          \
    switch (queries) {                                                     \
    case 1: call(__VA_ARGS__, 1, FT_WIDTH_1, is_f32); break;               \
    case 2: call(__VA_ARGS__, 2, FT_WIDTH_2, is_f32); break;               \
    case 3: call(__VA_ARGS__, 3, FT_WIDTH_4, is_f32); break;               \
    case 4: call(__VA_ARGS__, 4, FT_WIDTH_4, is_f32); break;               \
    default: call(__VA_ARGS__, FT_QUERIES, FT_WIDTH_8, is_f32); break;     \
    }

static void score_some(const ft_attend *a, int q0, int t0, int t1, int queries) {
    if (a->is_f32) {
        FT_BY_QUERIES(score, queries, 1, a, q0, t0, t1)
    } else {
        FT_BY_QUERIES(score, queries, 0, a, q0, t0, t1)
    }
}
static void weigh_some(const ft_attend *a, int q0, int t0, int t1, int d0, int d1, int queries) {
    if (a->is_f32) {
        FT_BY_QUERIES(weigh, queries, 1, a, q0, t0, t1, d0, d1)
    } else {
        FT_BY_QUERIES(weigh, queries, 0, a, q0, t0, t1, d0, d1)
    }
}
static int some_queries(int left) { return left >= FT_QUERIES ? FT_QUERIES : left >= 4 ? 4 : left; }

static void widen_run(const void *halves, float *out, int from, int to) {
    const uint16_t *in = (const uint16_t *)halves;
    for (int i = from; i < to; i += 16) {
        FT_PREFETCH(in + i + PAGE_HALVES);
        v_store(out + i, v_load_f16(in + i));
    }
}

/* Tiles [t0, t1) of keys and values as floats: many queries would convert each of them again. */
static ft_attend widen(const ft_attend *a, int t0, int t1) {
    ft_attend wide = *a;
    float *k = a->wide, *v = a->wide + FT_KEY_BLOCK * a->dim;
    widen_run(a->k, k, t0 * FT_KEY_TILE * a->dim, t1 * FT_KEY_TILE * a->dim);
    widen_run(a->v, v, t0 * FT_KEY_TILE * a->dim_padded, t1 * FT_KEY_TILE * a->dim_padded);
    wide.k = k;
    wide.v = v;
    wide.is_f32 = 1;
    return wide;
}

/* All queries pass over a strip of the block before the next strip: it stays in the first level. */
static void attend_strips(const ft_attend *a, int t0, int t1, int strip_tiles, int strip_dims) {
    for (int t = t0; t < t1; t += strip_tiles) {
        const int end = t + strip_tiles < t1 ? t + strip_tiles : t1;
        for (int q0 = 0, n; q0 < a->queries; q0 += n) {
            n = some_queries(a->queries - q0);
            score_some(a, q0, t, end, n);
        }
    }
    for (int i = 0; i < a->queries; i++) soften(a, i, t0, t1);
    for (int d = 0; d < a->dim_padded; d += strip_dims) {
        const int end = d + strip_dims < a->dim_padded ? d + strip_dims : a->dim_padded;
        for (int q0 = 0, n; q0 < a->queries; q0 += n) {
            n = some_queries(a->queries - q0);
            weigh_some(a, q0, t0, t1, d, end, n);
        }
    }
}

static void attend(const ft_attend *a) {
    int first = FT_KEY_BLOCK, last = 0;
    for (int i = 0; i < a->queries; i++) {
        if (a->begin[i] < first) first = a->begin[i];
        if (a->end[i] > last) last = a->end[i];
    }
    const int t0 = first / FT_KEY_TILE, t1 = (last + FT_KEY_TILE - 1) / FT_KEY_TILE;
    if (a->queries <= FT_QUERIES) {
        for (int i = 0; i < PAGE_HALVES; i += 32) /* while the keys are read */
            FT_PREFETCH((const uint16_t *)a->v + t0 * FT_KEY_TILE * a->dim_padded + i);
        attend_strips(a, t0, t1, FT_KEY_BLOCK / FT_KEY_TILE, a->dim_padded);
        return;
    }
    const ft_attend many = a->is_f32 ? *a : widen(a, t0, t1);
    attend_strips(&many, t0, t1, STRIP_TILES, STRIP_DIMS);
}

static void merge(const ft_pieces *to, const ft_pieces *from, int queries, int dim_padded) {
    for (int first = 0; first < queries; first += 16) {
        const int n = queries - first < 16 ? queries - first : 16;
        const v16 old_max = v_load_part(to->max + first, n, 0.0f);
        const v16 new_max = v_load_part(from->max + first, n, 0.0f), top = v_max(old_max, new_max);
        float keep[16], take[16], max[16];
        v_store(keep, v_exp(v_sub(old_max, top)));
        v_store(take, v_exp(v_sub(new_max, top)));
        v_store(max, top);
        for (int q = first; q < first + n; q++) {
            if (from->max[q] == -INFINITY) continue; /* nothing of the block is visible */
            const v16 old = v_set1(keep[q - first]), fresh = v_set1(take[q - first]);
            float *acc = to->acc + (int64_t)q * dim_padded;
            const float *piece = from->acc + (int64_t)q * dim_padded;
            to->max[q] = max[q - first];
            to->sum[q] = fmaf(from->sum[q], take[q - first], to->sum[q] * keep[q - first]);
            FT_MAP(acc, piece, dim_padded, v_fma(b, fresh, v_mul(a, old)))
        }
    }
}

const ft_rows FT_NAME = {
    .name = FT_LABEL, .rms_norm = rms_norm, .add = add, .add_scaled = add_scaled, .scale = scale,
    .multiply = multiply, .activate = activate, .softcap = softcap, .softmax = softmax,
    .argmax = argmax, .rotate = rotate, .store_key = store_key, .store_value = store_value,
    .attend = attend, .merge = merge,
};
