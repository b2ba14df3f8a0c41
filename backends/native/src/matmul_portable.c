/* Kernels in portable C: the definition every other instruction set is compared with, bit for bit. */
#include <math.h>

#include "matmul.h"
#include "quantize.h"

static void unpack(const ft_layout *l, const uint8_t *chunk, int blocks, ft_panel *panel, int at) {
    int s = at * l->scales_per_block * FT_GROUP;
    ft_unpack_codes(l, chunk, blocks, panel->codes + at * FT_CODE_BYTES);
    ft_unpack_scales(l, chunk, blocks, panel->scale + s, panel->min + s);
}

/* sums[lane] += codes . q over vectors [v0, v1) of a block. */
static void dot(const uint8_t *codes, const int8_t *q, int v0, int v1, int32_t *sums) {
    for (int v = v0; v < v1; v++) {
        for (int lane = 0; lane < FT_GROUP; lane++) {
            const uint8_t *c = codes + 64 * v + 4 * lane;
            const int8_t *x = q + 4 * v;
            sums[lane] += c[0] * x[0] + c[1] * x[1] + c[2] * x[2] + c[3] * x[3];
        }
    }
}

static void tile_row_block(const ft_layout *l, const uint8_t *codes, const int8_t *q, const float *scale,
                           const float *min, const ft_side *side, float *acc) {
    int scales = l->scales_per_block;
    float t[FT_GROUP] = {0};
    for (int s = 0; s < scales; s++) {
        int32_t sums[FT_GROUP];
        for (int lane = 0; lane < FT_GROUP; lane++) {
            sums[lane] = l->has_min ? 0 : side[(1 + s) * FT_TILE].i;
        }
        dot(codes, q, s * 4, scales == 2 ? s * 4 + 4 : 8, sums);
        for (int lane = 0; lane < FT_GROUP; lane++) {
            float w = scale[s * FT_GROUP + lane];
            t[lane] = s == 0 ? (float)sums[lane] * w : fmaf((float)sums[lane], w, t[lane]);
        }
    }
    for (int s = 0; l->has_min && s < scales; s++) {
        for (int lane = 0; lane < FT_GROUP; lane++) {
            t[lane] = fmaf(min[s * FT_GROUP + lane], side[(1 + s) * FT_TILE].f, t[lane]);
        }
    }
    for (int lane = 0; lane < FT_GROUP; lane++) {
        acc[lane] = fmaf(t[lane], side[0].f, acc[lane]);
    }
}

static void tile(const ft_layout *l, const ft_tile *t) {
    int scale_words = l->scales_per_block * FT_GROUP, side_words = (1 + l->scales_per_block) * FT_TILE;
    for (int b = 0; b < t->blocks; b++) {
        for (int i = 0; i < t->rows; i++) {
            tile_row_block(l, t->panel->codes + b * FT_CODE_BYTES, t->q[i] + b * FT_BLOCK,
                           t->panel->scale + b * scale_words, t->panel->min + b * scale_words,
                           t->side + b * side_words + i, t->acc + i * FT_GROUP);
        }
    }
}

static float weight_at(int32_t type, const uint8_t *group, int64_t i) {
    float f;
    if (type == FT_F32) {
        memcpy(&f, group + 4 * i, 4);
        return f;
    }
    uint16_t h = ft_load_u16(group + 2 * i);
    return type == FT_F16 ? ft_f32_of_f16(h) : ft_f32_of_bf16(h);
}

static void float_tile(const ft_matrix *w, const uint8_t *group, const float *const *x, int rows, float *acc) {
    for (int i = 0; i < rows; i++) {
        float sums[2][FT_GROUP] = {{0}};
        for (int k = 0; k < w->cols; k++) {
            for (int lane = 0; lane < FT_GROUP; lane++) {
                float weight = weight_at(w->type, group, (int64_t)k * FT_GROUP + lane);
                sums[k & 1][lane] = fmaf(weight, x[i][k], sums[k & 1][lane]);
            }
        }
        for (int lane = 0; lane < FT_GROUP; lane++) {
            acc[i * FT_GROUP + lane] = sums[0][lane] + sums[1][lane];
        }
    }
}

static const ft_ops ops = {unpack, tile, float_tile, 0};

static void matmul(const ft_matrix *w, const ft_acts *a, int r0, int r1, float *y, int64_t ldy, int g0, int g1,
                   void *scratch) {
    ft_matmul_run(&ops, w, a, r0, r1, y, ldy, g0, g1, scratch);
}

const ft_kernels ft_portable_kernels = {"portable", ft_quantize_portable, matmul};
