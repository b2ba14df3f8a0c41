/* Activation quantization in portable C; see quantize.h. */
#include "quantize.h"

#include <math.h>
#include <string.h>

void ft_quantize_block(const float *x, int count, int8_t *q, float *scale, int16_t *sums) {
    float most = 0.0f;
    int finite = 1;
    for (int j = 0; j < count; j++) {
        float size = fabsf(x[j]);
        most = size > most ? size : most;
        finite &= size <= FT_LARGEST; /* false for NaN too */
    }
    memset(q, 0, FT_BLOCK);
    sums[0] = sums[1] = 0;
    /* A NaN scale makes every output of the row NaN: an overflow upstream is seen, not hidden. */
    *scale = finite ? 0.0f : NAN;
    if (!finite || most < FT_TINY) {
        return;
    }
    float inverse = 127.0f / most;
    *scale = most / 127.0f;
    for (int j = 0; j < count; j++) {
        q[j] = (int8_t)lrintf(x[j] * inverse);
        sums[j / 16] += q[j];
    }
}

void ft_quantize_rows(ft_quantize_block_fn *block, const ft_acts *a, int r0, int r1) {
    for (int r = r0; r < r1; r++) {
        const float *x = a->x + r * a->ldx;
        for (int b = 0; b < a->blocks; b++, x += FT_BLOCK) {
            int64_t i = (int64_t)r * a->blocks + b;
            int left = a->cols - b * FT_BLOCK;
            if (left >= FT_BLOCK) {
                block(x, a->q + i * FT_BLOCK, a->scale + i, a->sum16 + 2 * i);
            } else {
                ft_quantize_block(x, left, a->q + i * FT_BLOCK, a->scale + i, a->sum16 + 2 * i);
            }
        }
    }
}

static void whole_block(const float *x, int8_t *q, float *scale, int16_t *sums) {
    ft_quantize_block(x, FT_BLOCK, q, scale, sums);
}

void ft_quantize_portable(const ft_acts *a, int r0, int r1) { ft_quantize_rows(whole_block, a, r0, r1); }
