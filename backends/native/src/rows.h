/* Row-wise kernels (norms, rotation, activation, attention) by instruction set.
 *
 * The same source is compiled once per instruction set over vec16.h, so all tables give equal bits.
 */
#ifndef FT_ROWS_H
#define FT_ROWS_H

#include <stdint.h>

#include "isa.h"

#define FT_KEY_TILE 16   /* positions whose keys lie interleaved, dimension by dimension */
#define FT_KEY_BLOCK 128 /* positions of one softmax block; blocks start at multiples of it */
#define FT_QUERIES 8     /* queries that share a value in a register */

enum ft_activation { FT_SILU = 0, FT_GELU_TANH = 1 };

/* Softmax of some queries over some positions: largest score, sum of e^(score - max), and the values
 * weighted by that. Pieces over ascending positions are merged. */
typedef struct ft_pieces {
    float *max, *sum, *acc; /* [queries], [queries], [queries, dim_padded] */
} ft_pieces;

/* One block of keys and values of one kv head, and some queries on it.
 * Keys lie [tile][dim][16], values [position][dim_padded]. */
typedef struct ft_attend {
    const float *q; /* [queries, dim_padded], multiplied by the scale already */
    int32_t queries, dim, dim_padded, is_f32;
    const void *k, *v;
    const int32_t *begin, *end; /* per query: visible positions of the block, 0 .. FT_KEY_BLOCK */
    float *weights;             /* scratch [queries, FT_KEY_BLOCK] */
    float *wide;                /* scratch [2, FT_KEY_BLOCK, dim_padded] */
    ft_pieces out;
} ft_attend;

typedef struct ft_rows {
    const char *name;
    /* y = x / sqrt(mean(x^2) + eps) * weight; weight may be NULL, y may be x. */
    void (*rms_norm)(const float *x, float *y, const float *weight, int n, float eps);
    /* dst += x */
    void (*add)(float *dst, const float *x, int n);
    /* dst += x * factor */
    void (*add_scaled)(float *dst, const float *x, float factor, int n);
    /* x *= factor */
    void (*scale)(float *x, float factor, int n);
    /* x *= y */
    void (*multiply)(float *x, const float *y, int n);
    /* gate = activation(gate) * up */
    void (*activate)(int activation, float *gate, const float *up, int n);
    /* x = cap * tanh(x / cap) */
    void (*softcap)(float *x, float cap, int n);
    /* x = exp(x - max) / sum */
    void (*softmax)(float *x, int n);
    /* Index of the first value that is no number, else of the first largest. */
    int (*argmax)(const float *x, int n);
    /* Rotate the first 2 * pairs dims of one head by the row's cosines and sines. */
    void (*rotate)(float *x, const float *cosine, const float *sine, int pairs, int interleaved);
    /* Store one head's key into its tile ([dim][16] at lane) and value into its row. */
    void (*store_key)(const float *x, void *tile, int lane, int dim, int is_f32);
    void (*store_value)(const float *x, void *row, int dim, int is_f32);
    /* The pieces of one block. */
    void (*attend)(const ft_attend *a);
    /* Fold a block's pieces into those of the positions before it. */
    void (*merge)(const ft_pieces *to, const ft_pieces *from, int queries, int dim_padded);
} ft_rows;

/* The table that goes with a kernel set of that name (a prefix decides). */
const ft_rows *ft_rows_select(const char *kernels_name);

extern const ft_rows ft_rows_portable;
#if defined(FT_X86)
extern const ft_rows ft_rows_avx2;
extern const ft_rows ft_rows_avx512;
#elif defined(FT_ARM64)
extern const ft_rows ft_rows_neon;
#endif

#endif
