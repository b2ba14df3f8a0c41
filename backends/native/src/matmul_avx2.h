/* 256-bit kernels: 8 output rows per vector, two vectors per group; included by the AVX2 file and by the
 * AVX-VNNI file, which define FT_HAS_DPBUSD and the target.
 *
 * Without vpdpbusd, vpmaddubsw adds pairs of products in 16 bits. It cannot overflow here: |q| <= 127 and
 * codes are at most 63, or signed bytes taken as |w| <= 128 (2 * 127 * 128 = 32512 < 32768). Small codes let
 * several vectors be summed before the widening step.
 */
#include <immintrin.h>

#include "matmul_x86.h"
#include "quantize.h"

#define CACHE_HINT _MM_HINT_T1

static void halves(const uint8_t *p, int lane0, int lane1, float *out) {
    (void)lane0, (void)lane1; /* always a whole group here */
    _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)));
    _mm256_storeu_ps(out + 8, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16))));
}

#include "scales.h"

/* ---- codes ---- */

FT_INLINE __m256i load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

/* Field of `width` bits at bit `from` of every byte, moved to bit `to`. */
FT_INLINE __m256i field(__m256i bytes, int from, int width, int to) {
    __m256i mask = _mm256_set1_epi8((char)(((1 << width) - 1) << to));
    __m256i moved = from >= to ? _mm256_srli_epi16(bytes, from - to) : _mm256_slli_epi16(bytes, to - from);
    return _mm256_and_si256(moved, mask);
}

FT_INLINE __m256i half_vector(const uint8_t *p, int planes, int high_shift, int v) {
    __m256i c = _mm256_setzero_si256();
    if (planes & FT_BYTE) {
        return load(p + 64 * v);
    }
    if (planes & FT_NIBBLE) {
        c = field(load(p + 64 * (v % 4)), 4 * (v / 4), 4, 0);
        p += 256;
    }
    if (planes & FT_TWO_BIT) {
        c = _mm256_or_si256(c, field(load(p + 64 * (v / 4)), 2 * (v % 4), 2, planes & FT_NIBBLE ? 4 : 0));
        p += 128;
    }
    if (planes & FT_ONE_BIT) {
        c = _mm256_or_si256(c, field(load(p), v, 1, high_shift));
    }
    return c;
}

FT_INLINE void unpack_codes(const ft_layout *l, const uint8_t *chunk, int blocks, int planes, int high_shift,
                            uint8_t *out) {
    __m256i table = _mm256_setzero_si256(), centre = _mm256_setzero_si256();
    if (l->codes != NULL) {
        table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)l->codes));
    }
    if (IS_SIGNED(l)) {
        centre = _mm256_set1_epi8((char)l->offset);
    }
    for (int b = 0; b < blocks; b++, chunk += l->code_bytes, out += FT_CODE_BYTES) {
        FT_UNROLL
        for (int i = 0; i < 16; i++) {
            __m256i c = half_vector(chunk + 32 * (i % 2), planes, high_shift, i / 2);
            if (planes == FT_NIBBLE && l->codes != NULL) {
                c = _mm256_shuffle_epi8(table, c);
            }
            _mm256_store_si256((__m256i *)(out + 32 * i), _mm256_sub_epi8(c, centre));
        }
    }
}

static void unpack(const ft_layout *l, const uint8_t *chunk, int blocks, ft_panel *panel, int at) {
    uint8_t *out = panel->codes + at * FT_CODE_BYTES;
    int s = at * l->scales_per_block * FT_GROUP;
    switch (l->planes) {
    case FT_NIBBLE: unpack_codes(l, chunk, blocks, FT_NIBBLE, 0, out); break;
    case FT_NIBBLE | FT_ONE_BIT: unpack_codes(l, chunk, blocks, FT_NIBBLE | FT_ONE_BIT, 4, out); break;
    case FT_NIBBLE | FT_TWO_BIT: unpack_codes(l, chunk, blocks, FT_NIBBLE | FT_TWO_BIT, 0, out); break;
    case FT_TWO_BIT: unpack_codes(l, chunk, blocks, FT_TWO_BIT, 0, out); break;
    case FT_TWO_BIT | FT_ONE_BIT: unpack_codes(l, chunk, blocks, FT_TWO_BIT | FT_ONE_BIT, 2, out); break;
    default: unpack_codes(l, chunk, blocks, FT_BYTE, 0, out); break;
    }
    unpack_scales(l, chunk, blocks, 0, FT_GROUP, panel->scale + s, panel->min + s);
}

/* ---- tiles ---- */

FT_INLINE __m256i four(const int8_t *q) {
    int32_t word;
    memcpy(&word, q, 4);
    return _mm256_set1_epi32(word);
}

#if FT_HAS_DPBUSD
FT_INLINE __m256i dot(const uint8_t *codes, const int8_t *q, int count, int run, int start) {
    __m256i sum = _mm256_set1_epi32(start);
    (void)run;
    FT_UNROLL
    for (int v = 0; v < count; v++) {
        sum = _mm256_dpbusd_avx_epi32(sum, load(codes + 64 * v), four(q + 4 * v));
    }
    return sum;
}
#else
/* `run` vectors are summed in 16 bits; 0 marks signed bytes, widened one by one. */
FT_INLINE __m256i dot(const uint8_t *codes, const int8_t *q, int count, int run, int start) {
    __m256i sum = _mm256_set1_epi32(start), pairs = _mm256_setzero_si256(), one = _mm256_set1_epi16(1);
    FT_UNROLL
    for (int v = 0; v < count; v++) {
        __m256i c = load(codes + 64 * v), x = four(q + 4 * v);
        __m256i products = run == 0 ? _mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(x, c))
                                    : _mm256_maddubs_epi16(c, x);
        pairs = run == 0 || v % run == 0 ? products : _mm256_add_epi16(pairs, products);
        if (run == 0 || v % run == run - 1) {
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, one));
        }
    }
    return sum;
}
#endif

FT_INLINE void row_half(const uint8_t *codes, const int8_t *q, const float *scale, const float *min,
                        const ft_side *side, int scales, int has_min, int run, float *acc) {
    int count = 8 / scales, has_offset = !has_min && !(run == 0);
    __m256i sum = dot(codes, q, count, run, has_offset ? side[FT_TILE].i : 0);
    __m256 t = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_load_ps(scale));
    if (scales == 2) {
        sum = dot(codes + 64 * count, q + 16, count, run, has_offset ? side[2 * FT_TILE].i : 0);
        t = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_load_ps(scale + 16), t);
    }
    FT_UNROLL
    for (int s = 0; s < has_min * scales; s++) {
        t = _mm256_fmadd_ps(_mm256_load_ps(min + 16 * s), _mm256_set1_ps(side[(1 + s) * FT_TILE].f), t);
    }
    _mm256_store_ps(acc, _mm256_fmadd_ps(t, _mm256_set1_ps(side->f), _mm256_load_ps(acc)));
}

FT_INLINE void tile_rows(const ft_tile *t, int scales, int has_min, int run) {
    const char *ahead = (const char *)t->ahead;
    for (int b = 0; b < t->blocks; b++) {
        const uint8_t *codes = t->panel->codes + b * FT_CODE_BYTES;
        const float *scale = t->panel->scale + b * scales * FT_GROUP, *min = t->panel->min + b * scales * FT_GROUP;
        const ft_side *side = t->side + b * (1 + scales) * FT_TILE;
        for (int i = 0; i < t->ahead_lines; i++) {
            _mm_prefetch(ahead + 64 * i, CACHE_HINT);
        }
        ahead += t->ahead_step;
        for (int i = 0; i < t->rows; i++) {
            const int8_t *q = t->q[i] + b * FT_BLOCK;
            float *acc = t->acc + i * FT_GROUP;
            row_half(codes, q, scale, min, side + i, scales, has_min, run, acc);
            row_half(codes + 32, q, scale + 8, min + 8, side + i, scales, has_min, run, acc + 8);
        }
    }
}

/* The run of each kind: 2 * 127 * largest code * run stays below 32768. */
static void tile(const ft_layout *l, const ft_tile *t) {
    switch (l->type) {
    case FT_Q4_0: tile_rows(t, 1, 0, 8); break;
    case FT_Q4_1:
    case FT_Q4_K: tile_rows(t, 1, 1, 8); break;
    case FT_Q5_0:
    case FT_MXFP4: tile_rows(t, 1, 0, 4); break;
    case FT_Q5_1:
    case FT_Q5_K: tile_rows(t, 1, 1, 4); break;
    case FT_Q2_K: tile_rows(t, 2, 1, 4); break;
    case FT_Q3_K: tile_rows(t, 2, 0, 4); break;
    case FT_Q6_K: tile_rows(t, 2, 0, 2); break;
    default: tile_rows(t, 1, 0, FT_HAS_DPBUSD); break; /* 8-bit codes */
    }
}

/* ---- float weights ---- */

FT_INLINE __m256 weights_at(int type, const uint8_t *group, int64_t k, int half) {
    if (type == FT_F32) {
        return _mm256_loadu_ps((const float *)(group + 64 * k + 32 * half));
    }
    __m128i bits = _mm_loadu_si128((const __m128i *)(group + 32 * k + 16 * half));
    if (type == FT_F16) {
        return _mm256_cvtph_ps(bits);
    }
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

/* Two rows at a time: eight accumulators are what 16 registers allow. */
FT_INLINE void float_pair(int type, const uint8_t *group, int cols, const float *const *x, float *out) {
    __m256 sums[2][2][2]; /* [row][half][k % 2] */
    memset(sums, 0, sizeof sums);
    int64_t pair_bytes = type == FT_F32 ? 128 : 64;
    for (int k = 0; k < cols; k += 2) {
        const char *ahead = (const char *)group + k / 2 * pair_bytes + FT_PREFETCH_BYTES;
        _mm_prefetch(ahead, CACHE_HINT);
        _mm_prefetch(ahead + pair_bytes - 64, CACHE_HINT);
        int last = k + 1 < cols ? 2 : 1;
        for (int odd = 0; odd < last; odd++) {
            FT_UNROLL
            for (int i = 0; i < 4; i++) {
                __m256 w = weights_at(type, group, k + odd, i % 2);
                sums[i / 2][i % 2][odd] = _mm256_fmadd_ps(w, _mm256_set1_ps(x[i / 2][k + odd]), sums[i / 2][i % 2][odd]);
            }
        }
    }
    for (int i = 0; i < 4; i++) {
        _mm256_store_ps(out + 8 * i, _mm256_add_ps(sums[i / 2][i % 2][0], sums[i / 2][i % 2][1]));
    }
}

static void float_tile(const ft_matrix *w, const uint8_t *group, const float *const *x, int rows, float *acc) {
    for (int i = 0; i < rows; i += 2) {
        switch (w->type) {
        case FT_F32: float_pair(FT_F32, group, w->cols, x + i, acc + i * FT_GROUP); break;
        case FT_F16: float_pair(FT_F16, group, w->cols, x + i, acc + i * FT_GROUP); break;
        default: float_pair(FT_BF16, group, w->cols, x + i, acc + i * FT_GROUP); break;
        }
    }
}

/* ---- activations ---- */

FT_INLINE float largest(__m256 v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

FT_INLINE int16_t sum_of_bytes(__m128i q) {
    __m256i words = _mm256_madd_epi16(_mm256_cvtepi8_epi16(q), _mm256_set1_epi16(1));
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return (int16_t)_mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

static void quantize_block(const float *x, int8_t *q, float *scale, int16_t *sums) {
    __m256 sign = _mm256_set1_ps(-0.0f), top = _mm256_set1_ps(FT_LARGEST), most = _mm256_setzero_ps(), v[4];
    __m256 finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        __m256 size = _mm256_andnot_ps(sign, v[i]);
        finite = _mm256_and_ps(finite, _mm256_cmp_ps(size, top, _CMP_LE_OQ));
        most = _mm256_max_ps(most, size);
    }
    float biggest = largest(most);
    if (_mm256_movemask_ps(finite) != 0xff || biggest < FT_TINY) {
        ft_quantize_block(x, FT_BLOCK, q, scale, sums);
        return;
    }
    __m256 inverse = _mm256_set1_ps(127.0f / biggest);
    *scale = biggest / 127.0f;
    for (int i = 0; i < 2; i++) {
        __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(v[2 * i], inverse));
        __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(v[2 * i + 1], inverse));
        __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128((__m128i *)(q + 16 * i), bytes);
        sums[i] = sum_of_bytes(bytes);
    }
}

static void quantize(const ft_acts *a, int r0, int r1) { ft_quantize_rows(quantize_block, a, r0, r1); }

static const ft_ops ops = {unpack, tile, float_tile, 0};

static void matmul(const ft_matrix *w, const ft_acts *a, int r0, int r1, float *y, int64_t ldy, int g0, int g1,
                   void *scratch) {
    ft_matmul_run(&ops, w, a, r0, r1, y, ldy, g0, g1, scratch);
}
