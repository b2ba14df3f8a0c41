/* What the instruction sets share: the panel loop (matmul.c) and what each one supplies to it.
 *
 * The arithmetic, the same on every processor: per block of 32 inputs and output lane
 *     i_s = sum of (code - offset) * q over the inputs of scale s     exact int32
 *     t   = float(i_0) * scale_0;  t = fma(float(i_1), scale_1, t)    second term only with two scales
 *     t   = fma(min_s, float(sum of q over s), t)                     only with minimums, s ascending
 *     acc = fma(t, activation scale, acc)                             blocks ascending
 * and for float weights acc_0 (even k) and acc_1 (odd k) by fma, k ascending, then acc_0 + acc_1.
 */
#ifndef FORETELL_MATMUL_H
#define FORETELL_MATMUL_H

#include "layout.h"

#define FT_TILE 8           /* rows that share one read of a panel */
#define FT_PANELS 16 /* groups whose panels are kept unpacked while rows pass; few rows use one */
#define FT_PANEL_BLOCKS 64  /* blocks unpacked at once when many rows use them: 32 KB of codes, fits L1 */
#define FT_SIDE_WORDS (FT_MAX_COLS / FT_BLOCK * 3 * FT_TILE)

/* How far ahead weights are fetched, into the second-level cache: first-level fill buffers are what one core runs out of. One row of Q4_1 on a
 * Sapphire Rapids core: 7.3 GB/s without, 10.3 with first-level, 12.0 with second-level hints (3 KB: 11.1). */
#define FT_PREFETCH_BYTES 6144

/* Unpacked weights of some blocks of one group. */
typedef struct ft_panel {
    uint8_t codes[FT_PANEL_BLOCKS * FT_CODE_BYTES];
    float scale[FT_PANEL_BLOCKS * 2 * FT_GROUP]; /* [blocks][scales_per_block][16] */
    float min[FT_PANEL_BLOCKS * 2 * FT_GROUP];
} ft_panel;

/* Per block of a row tile: activation scales, then per weight scale the sum term of each row. The sum
 * term is float(sum of q) where the type has minimums, else int32 bias - offset * sum of q. */
typedef union ft_side {
    float f;
    int32_t i;
} ft_side;

/* Up to FT_TILE activation rows against one panel. */
typedef struct ft_tile {
    const ft_panel *panel;
    const int8_t *q[FT_TILE]; /* at the panel's first block */
    const ft_side *side;      /* [blocks][1 + scales_per_block][FT_TILE] */
    int blocks;
    int rows;
    float *acc; /* [FT_TILE][16], 64-byte aligned, added to */
    /* Weights to prefetch while computing: per block ahead_lines cache lines, then ahead_step bytes on. */
    const uint8_t *ahead;
    int ahead_lines, ahead_step;
} ft_tile;

typedef struct ft_scratch {
    ft_panel panels[FT_PANELS];
    float acc[2 * FT_TILE * FT_GROUP];
    int32_t products[2 * FT_GROUP * FT_GROUP]; /* AMX result tiles */
    ft_side side[FT_SIDE_WORDS];
} ft_scratch;

typedef struct ft_ops {
    /* Fill codes, scale, min of the panel from block `at` on with one chunk. */
    void (*unpack)(const ft_layout *l, const uint8_t *chunk, int blocks, ft_panel *panel, int at);
    void (*tile)(const ft_layout *l, const ft_tile *t);
    /* y[rows, 16] of one group of float weights; `lanes` outputs are written. */
    void (*float_tile)(const ft_matrix *w, const uint8_t *group, const float *const *x, int rows, float *acc);
    int32_t bias; /* what the first sum of a block starts at, beside its own term */
} ft_ops;

void ft_matmul_run(const ft_ops *ops, const ft_matrix *w, const ft_acts *a, int r0, int r1, float *y, int64_t ldy,
                   int g0, int g1, void *scratch);
/* Unpack blocks [first, first + blocks) of a group; `first` is a multiple of 8. Returns where they end. */
const uint8_t *ft_unpack_panel(const ft_ops *ops, const ft_layout *l, const uint8_t *group, int first, int blocks,
                     ft_panel *panel);

/* Side terms of rows [r, r + rows), repeating the last up to `filled` <= FT_TILE rows: what a kernel computes
 * beside the wanted rows must be ordinary numbers, since denormal ones cost a hundred cycles each. `bias` is
 * added to the first integer term of a block. */
void ft_fill_side(const ft_layout *l, const ft_acts *a, int r, int rows, int filled, int32_t bias, ft_side *side);
/* acc of a tile to and from y: a float survives the trip unchanged, so panels continue each other. */
void ft_load_acc(float *acc, const float *y, int64_t ldy, int rows, int lanes);
void ft_store_acc(const float *acc, float *y, int64_t ldy, int rows, int lanes);

static inline int ft_lanes_of(const ft_matrix *w, int g) { return ft_min_int(FT_GROUP, w->rows - g * FT_GROUP); }

extern const ft_kernels ft_portable_kernels;

#endif
