/* Sixteen float lanes in AVX-512, AVX2, NEON or plain C, with the same bits in each.
 *
 * Every operation is one IEEE operation per lane and sums are folded in one fixed tree, so code
 * written over `v16` gives identical results whatever FT_VEC selects (512, 256, 128 for NEON, or 0).
 */
#ifndef FT_VEC16_H
#define FT_VEC16_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "isa.h"

#if FT_VEC == 512
#include <immintrin.h>
typedef __m512 v16;
FT_INLINE v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
FT_INLINE void v_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
FT_INLINE v16 v_set1(float a) { return _mm512_set1_ps(a); }
FT_INLINE v16 v_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
FT_INLINE v16 v_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
FT_INLINE v16 v_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
FT_INLINE v16 v_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
FT_INLINE v16 v_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
FT_INLINE v16 v_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
FT_INLINE v16 v_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
FT_INLINE v16 v_zero_below(v16 x, v16 limit, v16 y) { /* x < limit ? 0 : y */
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
}
/* a * 2^n where t = n + 1.5 * 2^23 */
FT_INLINE v16 v_scale_by_power(v16 a, v16 t) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}
FT_INLINE v16 v_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
FT_INLINE void v_store_f16(uint16_t *p, v16 a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
#elif FT_VEC == 256
#include <immintrin.h>
typedef struct { __m256 lo, hi; } v16;
#define FT_PAIR(expr_lo, expr_hi) ((v16){(expr_lo), (expr_hi)})
FT_INLINE v16 v_load(const float *p) { return FT_PAIR(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
FT_INLINE void v_store(float *p, v16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
FT_INLINE v16 v_set1(float a) { return FT_PAIR(_mm256_set1_ps(a), _mm256_set1_ps(a)); }
FT_INLINE v16 v_add(v16 a, v16 b) {
    return FT_PAIR(_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi));
}
FT_INLINE v16 v_sub(v16 a, v16 b) {
    return FT_PAIR(_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi));
}
FT_INLINE v16 v_mul(v16 a, v16 b) {
    return FT_PAIR(_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi));
}
FT_INLINE v16 v_div(v16 a, v16 b) {
    return FT_PAIR(_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi));
}
FT_INLINE v16 v_fma(v16 a, v16 b, v16 c) {
    return FT_PAIR(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}
FT_INLINE v16 v_max(v16 a, v16 b) {
    return FT_PAIR(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi));
}
FT_INLINE v16 v_min(v16 a, v16 b) {
    return FT_PAIR(_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi));
}
FT_INLINE v16 v_zero_below(v16 x, v16 limit, v16 y) {
    return FT_PAIR(_mm256_and_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_NLT_UQ), y.lo),
                   _mm256_and_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_NLT_UQ), y.hi));
}
FT_INLINE __m256 ft_scale_half(__m256 a, __m256 t) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
FT_INLINE v16 v_scale_by_power(v16 a, v16 t) {
    return FT_PAIR(ft_scale_half(a.lo, t.lo), ft_scale_half(a.hi, t.hi));
}
FT_INLINE v16 v_load_f16(const uint16_t *p) {
    return FT_PAIR(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                   _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
FT_INLINE void v_store_f16(uint16_t *p, v16 a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
#elif FT_VEC == 128
#include <arm_neon.h>
typedef struct { float32x4_t q[4]; } v16;
#define FT_QUARTERS(expr)                          \
    v16 out;                                       \
    for (int i = 0; i < 4; i++) out.q[i] = (expr); \
    return out
FT_INLINE v16 v_load(const float *p) { FT_QUARTERS(vld1q_f32(p + 4 * i)); }
FT_INLINE void v_store(float *p, v16 a) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.q[i]);
}
FT_INLINE v16 v_set1(float a) { FT_QUARTERS(vdupq_n_f32(a)); }
FT_INLINE v16 v_add(v16 a, v16 b) { FT_QUARTERS(vaddq_f32(a.q[i], b.q[i])); }
FT_INLINE v16 v_sub(v16 a, v16 b) { FT_QUARTERS(vsubq_f32(a.q[i], b.q[i])); }
FT_INLINE v16 v_mul(v16 a, v16 b) { FT_QUARTERS(vmulq_f32(a.q[i], b.q[i])); }
FT_INLINE v16 v_div(v16 a, v16 b) { FT_QUARTERS(vdivq_f32(a.q[i], b.q[i])); }
FT_INLINE v16 v_fma(v16 a, v16 b, v16 c) { FT_QUARTERS(vfmaq_f32(c.q[i], a.q[i], b.q[i])); }
/* Not vmaxq and vminq: x86 returns the second operand where one is NaN. */
FT_INLINE v16 v_max(v16 a, v16 b) {
    FT_QUARTERS(vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]));
}
FT_INLINE v16 v_min(v16 a, v16 b) {
    FT_QUARTERS(vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]));
}
FT_INLINE v16 v_zero_below(v16 x, v16 limit, v16 y) {
    FT_QUARTERS(vbslq_f32(vcltq_f32(x.q[i], limit.q[i]), vdupq_n_f32(0.0f), y.q[i]));
}
FT_INLINE v16 v_scale_by_power(v16 a, v16 t) {
    FT_QUARTERS(vreinterpretq_f32_s32(vaddq_s32(
        vreinterpretq_s32_f32(a.q[i]), vshlq_n_s32(vreinterpretq_s32_f32(t.q[i]), 23))));
}
FT_INLINE v16 v_load_f16(const uint16_t *p) {
    FT_QUARTERS(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
FT_INLINE void v_store_f16(uint16_t *p, v16 a) {
    for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.q[i])));
}
#else
typedef struct { float f[16]; } v16;
#define FT_LANES(expr)                              \
    v16 out;                                        \
    for (int i = 0; i < 16; i++) out.f[i] = (expr); \
    return out
FT_INLINE uint32_t ft_bits(float a) {
    uint32_t u;
    memcpy(&u, &a, 4);
    return u;
}
FT_INLINE float ft_float(uint32_t u) {
    float a;
    memcpy(&a, &u, 4);
    return a;
}
FT_INLINE float ft_from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return ft_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    /* The exponent bias differs by 112; the multiplication also normalises subnormals, exactly. */
    return ft_float(sign | ft_bits(ft_float(rest << 13) * 0x1p112f));
}
FT_INLINE uint16_t ft_to_f16(float a) {
    uint32_t u = ft_bits(a), sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (u < 0x38800000) /* subnormal: let the float adder round to a multiple of 2^-24 */
        return (uint16_t)(sign | (ft_bits(ft_float(u) + 0.5f) - 0x3f000000));
    u += 0xfff + (u >> 13 & 1); /* round to nearest even */
    return (uint16_t)(sign | (u - 0x38000000) >> 13);
}
FT_INLINE v16 v_load(const float *p) { FT_LANES(p[i]); }
FT_INLINE void v_store(float *p, v16 a) { memcpy(p, a.f, sizeof a.f); }
FT_INLINE v16 v_set1(float a) { FT_LANES(a); }
FT_INLINE v16 v_add(v16 a, v16 b) { FT_LANES(a.f[i] + b.f[i]); }
FT_INLINE v16 v_sub(v16 a, v16 b) { FT_LANES(a.f[i] - b.f[i]); }
FT_INLINE v16 v_mul(v16 a, v16 b) { FT_LANES(a.f[i] * b.f[i]); }
FT_INLINE v16 v_div(v16 a, v16 b) { FT_LANES(a.f[i] / b.f[i]); }
FT_INLINE v16 v_fma(v16 a, v16 b, v16 c) { FT_LANES(fmaf(a.f[i], b.f[i], c.f[i])); }
FT_INLINE v16 v_max(v16 a, v16 b) { FT_LANES(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
FT_INLINE v16 v_min(v16 a, v16 b) { FT_LANES(a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }
FT_INLINE v16 v_zero_below(v16 x, v16 limit, v16 y) { FT_LANES(x.f[i] < limit.f[i] ? 0.0f : y.f[i]); }
FT_INLINE v16 v_scale_by_power(v16 a, v16 t) {
    FT_LANES(ft_float(ft_bits(a.f[i]) + (ft_bits(t.f[i]) << 23)));
}
FT_INLINE v16 v_load_f16(const uint16_t *p) { FT_LANES(ft_from_f16(p[i])); }
FT_INLINE void v_store_f16(uint16_t *p, v16 a) {
    for (int i = 0; i < 16; i++) p[i] = ft_to_f16(a.f[i]);
}
#endif

/* The first n lanes from memory, `fill` in the others; and the first n lanes to memory. */
FT_INLINE v16 v_load_part(const float *p, int n, float fill) {
    float lanes[16];
    for (int i = 0; i < 16; i++) lanes[i] = i < n ? p[i] : fill;
    return v_load(lanes);
}
FT_INLINE void v_store_part(float *p, int n, v16 a) {
    float lanes[16];
    v_store(lanes, a);
    memcpy(p, lanes, (size_t)n * sizeof(float));
}
/* Lanes folded in halves: i with i + 8, then i + 4, i + 2, i + 1. */
#if FT_VEC == 512 || FT_VEC == 256
#if FT_VEC == 512
FT_INLINE __m256 ft_low_half(v16 a) { return _mm512_castps512_ps256(a); }
FT_INLINE __m256 ft_high_half(v16 a) { return _mm512_extractf32x8_ps(a, 1); }
#else
FT_INLINE __m256 ft_low_half(v16 a) { return a.lo; }
FT_INLINE __m256 ft_high_half(v16 a) { return a.hi; }
#endif
#define FT_FOLD(a, op256, op128)                                              \
    const __m256 eight = op256(ft_low_half(a), ft_high_half(a));              \
    __m128 x = op128(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
    x = op128(x, _mm_movehl_ps(x, x));                                        \
    return _mm_cvtss_f32(op128(x, _mm_movehdup_ps(x)))
FT_INLINE float v_sum(v16 a) { FT_FOLD(a, _mm256_add_ps, _mm_add_ps); }
FT_INLINE float v_largest(v16 a) { FT_FOLD(a, _mm256_max_ps, _mm_max_ps); }
#else
FT_INLINE float v_sum(v16 a) {
    float f[16];
    v_store(f, a);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) f[i] += f[i + half];
    return f[0];
}
FT_INLINE float v_largest(v16 a) {
    float f[16];
    v_store(f, a);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) f[i] = f[i] > f[i + half] ? f[i] : f[i + half];
    return f[0];
}
#endif

/* e^x within about one unit in the last place; 0 below -87.3, finite above 88.3.
 * Source: Cephes expf, S. Moshier (range reduction constants and polynomial). */
FT_INLINE v16 v_exp(v16 x) {
    const v16 low = v_set1(-87.33654f), magic = v_set1(12582912.0f);
    v16 y = v_max(v_min(x, v_set1(88.37626f)), low);
    v16 t = v_fma(y, v_set1(1.44269504f), magic);
    v16 n = v_sub(t, magic);
    v16 r = v_fma(n, v_set1(-0.693359375f), y);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    v16 p = v_fma(v_set1(1.9875691500e-4f), r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_fma(p, v_mul(r, r), v_add(r, v_set1(1.0f)));
    return v_zero_below(x, low, v_scale_by_power(p, t));
}

#endif
