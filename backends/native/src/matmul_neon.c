/* NEON with dot product (Armv8.2: Apple silicon, Graviton 2, Cortex-A76 and later). Codes are kept signed. */
#include "matmul_neon.h"

#ifdef FT_NEON
#include <arm_neon.h>

#include "quantize.h"

#if defined(__clang__)
FT_TARGET_BEGIN("dotprod")
#else
FT_TARGET_BEGIN("arch=armv8.2-a+dotprod")
#endif

static void halves(const uint8_t *p, int lane0, int lane1, float *out) {
    (void)lane0, (void)lane1; /* always a whole group here */
    for (int i = 0; i < 16; i += 4) {
        vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 2 * i))));
    }
}

#include "scales.h"

/* ---- codes ---- */

/* Field of `width` bits at bit `from` of every byte, moved to bit `to`. */
FT_INLINE uint8x16_t field(uint8x16_t bytes, int from, int width, int to) {
    uint8x16_t moved = vshlq_u8(bytes, vdupq_n_s8((int8_t)(to - from)));
    return vandq_u8(moved, vdupq_n_u8((uint8_t)(((1 << width) - 1) << to)));
}

FT_INLINE uint8x16_t quarter_vector(const uint8_t *p, int planes, int high_shift, int v) {
    uint8x16_t c = vdupq_n_u8(0);
    if (planes & FT_BYTE) {
        return vld1q_u8(p + 64 * v);
    }
    if (planes & FT_NIBBLE) {
        c = field(vld1q_u8(p + 64 * (v % 4)), 4 * (v / 4), 4, 0);
        p += 256;
    }
    if (planes & FT_TWO_BIT) {
        c = vorrq_u8(c, field(vld1q_u8(p + 64 * (v / 4)), 2 * (v % 4), 2, planes & FT_NIBBLE ? 4 : 0));
        p += 128;
    }
    if (planes & FT_ONE_BIT) {
        c = vorrq_u8(c, field(vld1q_u8(p), v, 1, high_shift));
    }
    return c;
}

FT_INLINE void unpack_codes(const ft_layout *l, const uint8_t *chunk, int blocks, int planes, int high_shift,
                            uint8_t *out) {
    uint8x16_t centre = vdupq_n_u8((uint8_t)l->offset), table = l->codes ? vld1q_u8(l->codes) : centre;
    for (int b = 0; b < blocks; b++, chunk += l->code_bytes, out += FT_CODE_BYTES) {
        FT_UNROLL
        for (int v = 0; v < 8; v++) {
            for (int i = 0; i < 64; i += 16) {
                uint8x16_t c = quarter_vector(chunk + i, planes, high_shift, v);
                if (planes == FT_NIBBLE && l->codes != NULL) {
                    c = vqtbl1q_u8(table, c);
                }
                vst1q_u8(out + 64 * v + i, vsubq_u8(c, centre));
            }
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

/* ---- tiles: two rows share each load of 16 rows x 4 inputs ---- */

#define PAIR 2

typedef struct sums {
    int32x4_t row[PAIR][4]; /* four lanes each */
} sums;

/* Vectors [v, v + 4) of a block against 16 activations of each row. */
FT_INLINE void dot16(const uint8_t *codes, int8x16_t q0, int8x16_t q1, sums *s) {
    FT_UNROLL
    for (int i = 0; i < 4; i++) {
        const int8_t *w = (const int8_t *)codes + 16 * i;
        int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 64), w2 = vld1q_s8(w + 128), w3 = vld1q_s8(w + 192);
        s->row[0][i] = vdotq_laneq_s32(s->row[0][i], w0, q0, 0);
        s->row[1][i] = vdotq_laneq_s32(s->row[1][i], w0, q1, 0);
        s->row[0][i] = vdotq_laneq_s32(s->row[0][i], w1, q0, 1);
        s->row[1][i] = vdotq_laneq_s32(s->row[1][i], w1, q1, 1);
        s->row[0][i] = vdotq_laneq_s32(s->row[0][i], w2, q0, 2);
        s->row[1][i] = vdotq_laneq_s32(s->row[1][i], w2, q1, 2);
        s->row[0][i] = vdotq_laneq_s32(s->row[0][i], w3, q0, 3);
        s->row[1][i] = vdotq_laneq_s32(s->row[1][i], w3, q1, 3);
    }
}

FT_INLINE void pair_block(const uint8_t *codes, const int8_t *const *q, const float *scale, const float *min,
                          const ft_side *side, int scales, int has_min, float *acc) {
    sums first, second;
    memset(&first, 0, sizeof first);
    memset(&second, 0, sizeof second);
    dot16(codes, vld1q_s8(q[0]), vld1q_s8(q[1]), &first);
    dot16(codes + 256, vld1q_s8(q[0] + 16), vld1q_s8(q[1] + 16), scales == 2 ? &second : &first);
    FT_UNROLL
    for (int i = 0; i < 4; i++) {
        FT_UNROLL
        for (int r = 0; r < PAIR; r++) {
            float *out = acc + r * FT_GROUP + 4 * i;
            float32x4_t t = vmulq_f32(vcvtq_f32_s32(first.row[r][i]), vld1q_f32(scale + 4 * i));
            if (scales == 2) {
                t = vfmaq_f32(t, vcvtq_f32_s32(second.row[r][i]), vld1q_f32(scale + 16 + 4 * i));
            }
            for (int s = 0; s < has_min * scales; s++) {
                t = vfmaq_n_f32(t, vld1q_f32(min + 16 * s + 4 * i), side[(1 + s) * FT_TILE + r].f);
            }
            vst1q_f32(out, vfmaq_n_f32(vld1q_f32(out), t, side[r].f));
        }
    }
}

FT_INLINE void tile_rows(const ft_tile *t, int scales, int has_min) {
    const uint8_t *ahead = t->ahead;
    for (int b = 0; b < t->blocks; b++) {
        const uint8_t *codes = t->panel->codes + b * FT_CODE_BYTES;
        const float *scale = t->panel->scale + b * scales * FT_GROUP, *min = t->panel->min + b * scales * FT_GROUP;
        const ft_side *side = t->side + b * (1 + scales) * FT_TILE;
        for (int i = 0; i < t->ahead_lines; i++) {
            __builtin_prefetch(ahead + 64 * i, 0, 2);
        }
        ahead += t->ahead_step;
        for (int r = 0; r < t->rows; r += PAIR) {
            const int8_t *q[PAIR] = {t->q[r] + b * FT_BLOCK, t->q[r + 1] + b * FT_BLOCK};
            pair_block(codes, q, scale, min, side + r, scales, has_min, t->acc + r * FT_GROUP);
        }
    }
}

static void tile(const ft_layout *l, const ft_tile *t) {
    if (l->scales_per_block == 1) {
        if (l->has_min) {
            tile_rows(t, 1, 1);
        } else {
            tile_rows(t, 1, 0);
        }
    } else if (l->has_min) {
        tile_rows(t, 2, 1);
    } else {
        tile_rows(t, 2, 0);
    }
}

/* ---- float weights ---- */

FT_INLINE float32x4_t weights_at(int type, const uint8_t *group, int64_t k, int i) {
    if (type == FT_F32) {
        return vreinterpretq_f32_u8(vld1q_u8(group + 64 * k + 16 * i));
    }
    uint8x8_t bits = vld1_u8(group + 32 * k + 8 * i);
    if (type == FT_F16) {
        return vcvt_f32_f16(vreinterpret_f16_u8(bits));
    }
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(bits), 16));
}

FT_INLINE void float_pair(int type, const uint8_t *group, int cols, const float *const *x, float *out) {
    float32x4_t s[PAIR][2][4]; /* [row][k % 2][lanes / 4] */
    memset(s, 0, sizeof s);
    int64_t pair_bytes = type == FT_F32 ? 128 : 64;
    for (int k = 0; k < cols; k += 2) {
        const uint8_t *ahead = group + k / 2 * pair_bytes + FT_PREFETCH_BYTES;
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + pair_bytes - 64, 0, 2);
        int last = k + 1 < cols ? 2 : 1;
        for (int odd = 0; odd < last; odd++) {
            FT_UNROLL
            for (int i = 0; i < 4; i++) {
                float32x4_t w = weights_at(type, group, k + odd, i);
                s[0][odd][i] = vfmaq_n_f32(s[0][odd][i], w, x[0][k + odd]);
                s[1][odd][i] = vfmaq_n_f32(s[1][odd][i], w, x[1][k + odd]);
            }
        }
    }
    for (int i = 0; i < PAIR * 4; i++) {
        vst1q_f32(out + 4 * i, vaddq_f32(s[i / 4][0][i % 4], s[i / 4][1][i % 4]));
    }
}

static void float_tile(const ft_matrix *w, const uint8_t *group, const float *const *x, int rows, float *acc) {
    for (int r = 0; r < rows; r += PAIR) {
        switch (w->type) {
        case FT_F32: float_pair(FT_F32, group, w->cols, x + r, acc + r * FT_GROUP); break;
        case FT_F16: float_pair(FT_F16, group, w->cols, x + r, acc + r * FT_GROUP); break;
        default: float_pair(FT_BF16, group, w->cols, x + r, acc + r * FT_GROUP); break;
        }
    }
}

/* ---- activations ---- */

FT_INLINE int16x8_t rounded(float32x4_t a, float32x4_t b, float inverse) {
    int16x4_t low = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(a, inverse)));
    return vcombine_s16(low, vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(b, inverse))));
}

static void quantize_block(const float *x, int8_t *q, float *scale, int16_t *sums) {
    float32x4_t v[8], most = vdupq_n_f32(0);
    uint32x4_t finite = vdupq_n_u32(~0u);
    for (int i = 0; i < 8; i++) {
        v[i] = vld1q_f32(x + 4 * i);
        finite = vandq_u32(finite, vcleq_f32(vabsq_f32(v[i]), vdupq_n_f32(FT_LARGEST)));
        most = vmaxq_f32(most, vabsq_f32(v[i]));
    }
    float biggest = vmaxvq_f32(most);
    if (vminvq_u32(finite) == 0 || biggest < FT_TINY) {
        ft_quantize_block(x, FT_BLOCK, q, scale, sums);
        return;
    }
    float inverse = 127.0f / biggest;
    *scale = biggest / 127.0f;
    for (int i = 0; i < 2; i++) {
        int16x8_t a = rounded(v[4 * i], v[4 * i + 1], inverse), b = rounded(v[4 * i + 2], v[4 * i + 3], inverse);
        vst1q_s8(q + 16 * i, vcombine_s8(vqmovn_s16(a), vqmovn_s16(b)));
        sums[i] = vaddvq_s16(vaddq_s16(a, b));
    }
}

static void quantize(const ft_acts *a, int r0, int r1) { ft_quantize_rows(quantize_block, a, r0, r1); }

static const ft_ops ops = {unpack, tile, float_tile, 0};

static void matmul(const ft_matrix *w, const ft_acts *a, int r0, int r1, float *y, int64_t ldy, int g0, int g1,
                   void *scratch) {
    ft_matmul_run(&ops, w, a, r0, r1, y, ldy, g0, g1, scratch);
}

FT_TARGET_END

const ft_kernels ft_neon_kernels = {"neon-dotprod", quantize, matmul};
#endif
