/* Activations to int8, per block of 32 inputs: scale = max |x| / 127, q = x / scale to nearest even.
 *
 * Every instruction set rounds the same products, so all of them give the same q, scale and sums.
 */
#ifndef FORETELL_QUANTIZE_H
#define FORETELL_QUANTIZE_H

#include "foretell.h"

/* Below this a block is zero: 127 / max would overflow. */
#define FT_TINY 1e-35f
#define FT_LARGEST 3.402823466e38f

typedef void ft_quantize_block_fn(const float *x, int8_t *q, float *scale, int16_t *sums);

void ft_quantize_portable(const ft_acts *a, int r0, int r1);
/* One block of `count` (<= 32) inputs on any processor. */
void ft_quantize_block(const float *x, int count, int8_t *q, float *scale, int16_t *sums);
/* Whole blocks by `block`, a row's short last one by ft_quantize_block. */
void ft_quantize_rows(ft_quantize_block_fn *block, const ft_acts *a, int r0, int r1);

#endif
