/* AVX-512 with VNNI: one vpdpbusd multiplies 16 rows x 4 inputs by four broadcast activations. */
#include "isa.h"

#ifdef FT_X86
#include <immintrin.h>
#include <math.h>

#include "matmul_x86.h"
#include "quantize.h"

FT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

/* ---- codes ---- */

FT_INLINE __m512i load(const void *p) { return _mm512_loadu_si512(p); }

/* Field of `width` bits at bit `from` of every byte, moved to bit `to`. */
FT_INLINE __m512i field(__m512i bytes, int from, int width, int to) {
    __m512i mask = _mm512_set1_epi8((char)(((1 << width) - 1) << to));
    __m512i moved = from >= to ? _mm512_srli_epi16(bytes, from - to) : _mm512_slli_epi16(bytes, to - from);
    return _mm512_and_si512(moved, mask);
}

FT_INLINE __m512i code_vector(const uint8_t *p, int planes, int high_shift, int v) {
    __m512i c = _mm512_setzero_si512();
    if (planes & FT_NIBBLE) {
        c = field(load(p + 64 * (v % 4)), 4 * (v / 4), 4, 0);
        p += 256;
    }
    if (planes & FT_TWO_BIT) {
        c = _mm512_or_si512(c, field(load(p + 64 * (v / 4)), 2 * (v % 4), 2, planes & FT_NIBBLE ? 4 : 0));
        p += 128;
    }
    if (planes & FT_ONE_BIT) {
        c = _mm512_or_si512(c, field(load(p), v, 1, high_shift));
    }
    return c;
}

FT_INLINE void unpack_codes(const ft_layout *l, const uint8_t *chunk, int blocks, int planes, int high_shift,
                            uint8_t *out) {
    __m512i table = _mm512_setzero_si512();
    if (planes == FT_NIBBLE && l->codes != NULL) {
        table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)l->codes));
    }
    for (int b = 0; b < blocks; b++, chunk += l->code_bytes, out += FT_CODE_BYTES) {
        FT_UNROLL
        for (int v = 0; v < 8; v++) {
            __m512i c = planes & FT_BYTE ? load(chunk + 64 * v) : code_vector(chunk, planes, high_shift, v);
            if (planes == FT_NIBBLE && l->codes != NULL) {
                c = _mm512_shuffle_epi8(table, c);
            }
            _mm512_store_si512(out + 64 * v, c);
        }
    }
}

static void unpack_chunk_codes(const ft_layout *l, const uint8_t *chunk, int blocks, uint8_t *out) {
    switch (l->planes) {
    case FT_NIBBLE: unpack_codes(l, chunk, blocks, FT_NIBBLE, 0, out); break;
    case FT_NIBBLE | FT_ONE_BIT: unpack_codes(l, chunk, blocks, FT_NIBBLE | FT_ONE_BIT, 4, out); break;
    case FT_NIBBLE | FT_TWO_BIT: unpack_codes(l, chunk, blocks, FT_NIBBLE | FT_TWO_BIT, 0, out); break;
    case FT_TWO_BIT: unpack_codes(l, chunk, blocks, FT_TWO_BIT, 0, out); break;
    case FT_TWO_BIT | FT_ONE_BIT: unpack_codes(l, chunk, blocks, FT_TWO_BIT | FT_ONE_BIT, 2, out); break;
    default: unpack_codes(l, chunk, blocks, FT_BYTE, 0, out); break;
    }
}

/* ---- scales: each byte field lies 16 rows wide, so one conversion serves a group ---- */

FT_INLINE __m512 halves(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
FT_INLINE __m512i bytes_u(const uint8_t *p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
FT_INLINE __m512i bytes_s(const uint8_t *p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}
FT_INLINE void put_scaled(float *out, __m512 d, __m512i integer) {
    _mm512_store_ps(out, _mm512_mul_ps(d, _mm512_cvtepi32_ps(integer)));
}
FT_INLINE __m512 negated(__m512 d) {
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(d), _mm512_set1_epi32(INT32_MIN)));
}

static void scales_q2k(const uint8_t *s, float *scale, float *min) {
    __m512 d = halves(s + 256), dmin = negated(halves(s + 288));
    for (int j = 0; j < 16; j++) {
        __m512i both = bytes_u(s + 16 * j);
        put_scaled(scale + 16 * j, d, _mm512_and_si512(both, _mm512_set1_epi32(15)));
        put_scaled(min + 16 * j, dmin, _mm512_srli_epi32(both, 4));
    }
}

static void scales_q3k(const uint8_t *s, float *scale) {
    uint8_t integers[256];
    __m512 d = halves(s + 192);
    __m512i high = load(s + 128), bias = _mm512_set1_epi8(32);
    FT_UNROLL
    for (int t = 0; t < 4; t++) { /* sub-blocks 4t .. 4t + 3 */
        __m512i low = field(load(s + 64 * (t % 2)), 4 * (t / 2), 4, 0);
        __m512i six = _mm512_or_si512(low, field(high, 2 * t, 2, 4));
        _mm512_storeu_si512(integers + 64 * t, _mm512_sub_epi8(six, bias));
    }
    for (int j = 0; j < 16; j++) {
        put_scaled(scale + 16 * j, d, bytes_s(integers + 16 * j));
    }
}

static void scales_k4(const uint8_t *s, float *scale, float *min) {
    uint8_t integers[256];
    __m512 d = halves(s + 192), dmin = negated(halves(s + 224));
    __m512i a = load(s), b = load(s + 64), c = load(s + 128);
    _mm512_storeu_si512(integers, field(a, 0, 6, 0));
    _mm512_storeu_si512(integers + 64, _mm512_or_si512(field(c, 0, 4, 0), field(a, 6, 2, 4)));
    _mm512_storeu_si512(integers + 128, field(b, 0, 6, 0));
    _mm512_storeu_si512(integers + 192, _mm512_or_si512(field(c, 4, 4, 0), field(b, 6, 2, 4)));
    for (int j = 0; j < 8; j++) {
        put_scaled(scale + 16 * j, d, bytes_u(integers + 16 * j));
        put_scaled(min + 16 * j, dmin, bytes_u(integers + 128 + 16 * j));
    }
}

static void scales_q6k(const uint8_t *s, float *scale) {
    __m512 d = halves(s + 256);
    for (int j = 0; j < 16; j++) {
        put_scaled(scale + 16 * j, d, bytes_s(s + 16 * j));
    }
}

static void scales_iq4xs(const uint8_t *s, float *scale) {
    __m512 d = halves(s + 64);
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(s + 96)));
    FT_UNROLL
    for (int j = 0; j < 8; j++) {
        __m512i low = _mm512_srli_epi32(bytes_u(s + 16 * (j / 2)), 4 * (j % 2));
        __m512i top = _mm512_and_si512(_mm512_srli_epi32(high, 2 * j), _mm512_set1_epi32(3));
        low = _mm512_and_si512(low, _mm512_set1_epi32(15));
        low = _mm512_or_si512(low, _mm512_slli_epi32(top, 4));
        put_scaled(scale + 16 * j, d, _mm512_sub_epi32(low, _mm512_set1_epi32(32)));
    }
}

static void scales_mxfp4(const uint8_t *s, int blocks, float *scale) {
    for (int b = 0; b < blocks; b++) {
        __m512i e = bytes_u(s + 16 * b);
        __m512i bits = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
        __mmask16 subnormal = _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2));
        bits = _mm512_mask_sllv_epi32(bits, subnormal, _mm512_set1_epi32(0x00200000), e);
        _mm512_store_si512(scale + 16 * b, bits);
    }
}

static void scales_f16(const ft_layout *l, const uint8_t *s, int blocks, float *scale, float *min) {
    for (int b = 0; b < blocks; b++, s += l->scale_bytes) {
        _mm512_store_ps(scale + 16 * b, halves(s));
        if (l->has_min) {
            _mm512_store_ps(min + 16 * b, halves(s + 32));
        }
    }
}

static void unpack(const ft_layout *l, const uint8_t *chunk, int blocks, ft_panel *panel, int at) {
    const uint8_t *s = chunk + (int64_t)blocks * l->code_bytes;
    float *scale = panel->scale + at * l->scales_per_block * FT_GROUP;
    float *min = panel->min + at * l->scales_per_block * FT_GROUP;
    unpack_chunk_codes(l, chunk, blocks, panel->codes + at * FT_CODE_BYTES);
    switch (l->type) {
    case FT_Q2_K: scales_q2k(s, scale, min); break;
    case FT_Q3_K: scales_q3k(s, scale); break;
    case FT_Q4_K:
    case FT_Q5_K: scales_k4(s, scale, min); break;
    case FT_Q6_K: scales_q6k(s, scale); break;
    case FT_IQ4_XS: scales_iq4xs(s, scale); break;
    case FT_MXFP4: scales_mxfp4(s, blocks, scale); break;
    default: scales_f16(l, s, blocks, scale, min); break;
    }
}

/* ---- tiles ---- */

FT_INLINE __m512i four(const int8_t *q) {
    int32_t word;
    memcpy(&word, q, 4);
    return _mm512_set1_epi32(word);
}

/* sum[i] += `count` vectors of row i's inputs from `at` on. All rows take a vector of codes before the next
 * one does: a chain of vpdpbusd waits 5 cycles a link, and the processor looks ahead over a few rows only. */
FT_INLINE void add_products(const uint8_t *codes, const int8_t *const *q, int at, int count, int rows, __m512i *sum) {
    FT_UNROLL
    for (int v = 0; v < count; v++) {
        __m512i c = _mm512_load_si512(codes + 64 * v);
        FT_UNROLL
        for (int i = 0; i < rows; i++) {
            sum[i] = _mm512_dpbusd_epi32(sum[i], c, four(q[i] + at + 4 * v));
        }
    }
}

/* One block of all rows: acc[i] += side scale * (scale * sum + minimum terms). */
FT_INLINE void add_block(const uint8_t *codes, const int8_t *const *q, int at, const float *scale, const float *min,
                         const ft_side *side, int rows, int scales, int has_min, __m512 *acc) {
    const __m512 first_scale = _mm512_load_ps(scale), unbias = _mm512_mul_ps(first_scale, _mm512_set1_ps(-FT_BIAS));
    __m512i sum[FT_TILE];
    __m512 t[FT_TILE];
    FT_UNROLL
    for (int i = 0; i < rows; i++) {
        sum[i] = _mm512_set1_epi32(has_min ? FT_BIAS_BITS : side[FT_TILE + i].i);
    }
    add_products(codes, q, at, 8 / scales, rows, sum);
    FT_UNROLL
    for (int i = 0; i < rows; i++) {
        t[i] = _mm512_fmadd_ps(_mm512_castsi512_ps(sum[i]), first_scale, unbias);
    }
    if (scales == 2) {
        FT_UNROLL
        for (int i = 0; i < rows; i++) {
            sum[i] = has_min ? _mm512_setzero_si512() : _mm512_set1_epi32(side[2 * FT_TILE + i].i);
        }
        add_products(codes + FT_CODE_BYTES / 2, q, at + 16, 4, rows, sum);
        FT_UNROLL
        for (int i = 0; i < rows; i++) {
            t[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i]), _mm512_load_ps(scale + 16), t[i]);
        }
    }
    FT_UNROLL
    for (int i = 0; i < rows; i++) {
        FT_UNROLL
        for (int s = 0; s < has_min * scales; s++) {
            __m512 row = _mm512_set1_ps(side[(1 + s) * FT_TILE + i].f);
            t[i] = _mm512_fmadd_ps(_mm512_load_ps(min + 16 * s), row, t[i]);
        }
        acc[i] = _mm512_fmadd_ps(t[i], _mm512_set1_ps(side[i].f), acc[i]);
    }
}

FT_INLINE void tile_rows(const ft_tile *t, int rows, int scales, int has_min) {
    __m512 acc[FT_TILE];
    const int8_t *q[FT_TILE];
    const uint8_t *codes = t->panel->codes;
    const float *scale = t->panel->scale, *min = t->panel->min;
    const ft_side *side = t->side;
    FT_UNROLL
    for (int i = 0; i < rows; i++) {
        acc[i] = _mm512_load_ps(t->acc + 16 * i);
        q[i] = t->q[i];
    }
    const char *ahead = (const char *)t->ahead;
    for (int b = 0; b < t->blocks; b++) {
        for (int i = 0; i < t->ahead_lines; i++) {
            _mm_prefetch(ahead + 64 * i, _MM_HINT_T1);
        }
        ahead += t->ahead_step;
        add_block(codes, q, FT_BLOCK * b, scale, min, side, rows, scales, has_min, acc);
        codes += FT_CODE_BYTES;
        scale += 16 * scales;
        min += 16 * scales;
        side += (1 + scales) * FT_TILE;
    }
    FT_UNROLL
    for (int i = 0; i < rows; i++) {
        _mm512_store_ps(t->acc + 16 * i, acc[i]);
    }
}

/* Row counts are rounded up to a compiled one: the extra rows repeat the last and are not stored. */
FT_INLINE void tile_any(const ft_tile *t, int scales, int has_min) {
    switch (t->rows) {
    case 1: tile_rows(t, 1, scales, has_min); break;
    case 2: tile_rows(t, 2, scales, has_min); break;
    case 3:
    case 4: tile_rows(t, 4, scales, has_min); break;
    case 5:
    case 6: tile_rows(t, 6, scales, has_min); break;
    default: tile_rows(t, 8, scales, has_min); break;
    }
}

static void tile(const ft_layout *l, const ft_tile *t) {
    if (l->scales_per_block == 1) {
        if (l->has_min) {
            tile_any(t, 1, 1);
        } else {
            tile_any(t, 1, 0);
        }
    } else if (l->has_min) {
        tile_any(t, 2, 1);
    } else {
        tile_any(t, 2, 0);
    }
}

/* ---- float weights ---- */

FT_INLINE __m512 weights_at(int type, const uint8_t *group, int64_t k) {
    if (type == FT_F32) {
        return _mm512_loadu_ps(group + 64 * k);
    }
    if (type == FT_F16) {
        return halves(group + 32 * k);
    }
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(group + 32 * k)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

FT_INLINE void float_rows(int type, const uint8_t *group, int cols, const float *const *x, int rows, float *out) {
    __m512 even[FT_TILE], odd[FT_TILE];
    FT_UNROLL
    for (int i = 0; i < rows; i++) {
        even[i] = odd[i] = _mm512_setzero_ps();
    }
    int64_t pair_bytes = type == FT_F32 ? 128 : 64;
    for (int k = 0; k + 1 < cols; k += 2) {
        const char *ahead = (const char *)group + k / 2 * pair_bytes + FT_PREFETCH_BYTES;
        _mm_prefetch(ahead, _MM_HINT_T1);
        _mm_prefetch(ahead + pair_bytes - 64, _MM_HINT_T1);
        __m512 w0 = weights_at(type, group, k), w1 = weights_at(type, group, k + 1);
        FT_UNROLL
        for (int i = 0; i < rows; i++) {
            even[i] = _mm512_fmadd_ps(w0, _mm512_set1_ps(x[i][k]), even[i]);
            odd[i] = _mm512_fmadd_ps(w1, _mm512_set1_ps(x[i][k + 1]), odd[i]);
        }
    }
    FT_UNROLL
    for (int i = 0; i < rows; i++) {
        if (cols % 2 == 1) {
            even[i] = _mm512_fmadd_ps(weights_at(type, group, cols - 1), _mm512_set1_ps(x[i][cols - 1]), even[i]);
        }
        _mm512_store_ps(out + 16 * i, _mm512_add_ps(even[i], odd[i]));
    }
}

FT_INLINE void float_any(int type, const uint8_t *group, int cols, const float *const *x, int rows, float *out) {
    switch (rows) {
    case 1: float_rows(type, group, cols, x, 1, out); break;
    case 2: float_rows(type, group, cols, x, 2, out); break;
    case 3:
    case 4: float_rows(type, group, cols, x, 4, out); break;
    default: float_rows(type, group, cols, x, 8, out); break;
    }
}

static void float_tile(const ft_matrix *w, const uint8_t *group, const float *const *x, int rows, float *acc) {
    switch (w->type) {
    case FT_F32: float_any(FT_F32, group, w->cols, x, rows, acc); break;
    case FT_F16: float_any(FT_F16, group, w->cols, x, rows, acc); break;
    default: float_any(FT_BF16, group, w->cols, x, rows, acc); break;
    }
}

/* ---- activations ---- */

static void quantize_block(const float *x, int8_t *q, float *scale, int16_t *sums) {
    __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    __m512 size_a = _mm512_abs_ps(a), size_b = _mm512_abs_ps(b), top = _mm512_set1_ps(FT_LARGEST);
    __mmask16 finite =
        _mm512_cmp_ps_mask(size_a, top, _CMP_LE_OQ) & _mm512_cmp_ps_mask(size_b, top, _CMP_LE_OQ);
    float most = _mm512_reduce_max_ps(_mm512_max_ps(size_a, size_b));
    if (finite != 0xffff || most < FT_TINY) {
        ft_quantize_block(x, FT_BLOCK, q, scale, sums);
        return;
    }
    __m512 inverse = _mm512_set1_ps(127.0f / most);
    __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
    *scale = most / 127.0f;
    __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(qb), _mm512_cvtepi32_epi8(qa));
    _mm256_storeu_si256((__m256i *)q, bytes);
    /* Sums of 8 bytes each, of q + 128; then of 16. */
    __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    __m256i halves_sum = _mm256_add_epi64(eights, _mm256_shuffle_epi32(eights, 0x4e));
    sums[0] = (int16_t)(_mm256_cvtsi256_si32(halves_sum) - 16 * 128);
    sums[1] = (int16_t)(_mm_cvtsi128_si32(_mm256_extracti128_si256(halves_sum, 1)) - 16 * 128);
}

void ft_quantize_avx512(const ft_acts *a, int r0, int r1) { ft_quantize_rows(quantize_block, a, r0, r1); }

const ft_ops ft_avx512_ops = {unpack, tile, float_tile, FT_BIAS_BITS};

static void matmul(const ft_matrix *w, const ft_acts *a, int r0, int r1, float *y, int64_t ldy, int g0, int g1,
                   void *scratch) {
    ft_matmul_run(&ft_avx512_ops, w, a, r0, r1, y, ldy, g0, g1, scratch);
}

FT_TARGET_END

const ft_kernels ft_avx512_kernels = {"avx512-vnni", ft_quantize_avx512, matmul};
#endif
