/* The loop every instruction set runs: rows in tiles of 8, weights unpacked once per tile or batch. */
#include "matmul.h"

#define BATCH_TILES 8 /* row tiles that share one unpacked panel */

size_t ft_matmul_scratch_bytes(void) { return sizeof(ft_scratch); }

const uint8_t *ft_unpack_panel(const ft_ops *ops, const ft_layout *l, const uint8_t *group, int first, int blocks,
                               ft_panel *panel) {
    const uint8_t *chunk = group + first / FT_CHUNK_BLOCKS * ft_chunk_bytes(l, FT_CHUNK_BLOCKS);
    for (int at = 0; at < blocks; at += FT_CHUNK_BLOCKS) {
        int count = ft_min_int(FT_CHUNK_BLOCKS, blocks - at);
        ops->unpack(l, chunk, count, panel, at);
        chunk += ft_chunk_bytes(l, count);
    }
    return chunk;
}

/* Let a tile prefetch from `at` on, as many bytes per block as a block takes. */
static void prefetch_from(ft_tile *t, const ft_layout *l, const uint8_t *at) {
    t->ahead = at;
    t->ahead_step = (int)ft_chunk_bytes(l, FT_CHUNK_BLOCKS) / FT_CHUNK_BLOCKS;
    t->ahead_lines = (t->ahead_step + 63) / 64;
}

/* One row's sum terms; `side` is its column of the first term. */
static void fill_sums(const ft_layout *l, const int16_t *sums, int blocks, int32_t bias, ft_side *side) {
    int words = (1 + l->scales_per_block) * FT_TILE;
    if (l->has_min && l->scales_per_block == 1) {
        for (int b = 0; b < blocks; b++) {
            side[b * words].f = (float)(sums[2 * b] + sums[2 * b + 1]);
        }
    } else if (l->has_min) {
        for (int b = 0; b < blocks; b++) {
            side[b * words].f = (float)sums[2 * b];
            side[b * words + FT_TILE].f = (float)sums[2 * b + 1];
        }
    } else if (l->scales_per_block == 1) {
        for (int b = 0; b < blocks; b++) {
            side[b * words].i = bias - l->offset * (sums[2 * b] + sums[2 * b + 1]);
        }
    } else {
        for (int b = 0; b < blocks; b++) {
            side[b * words].i = bias - l->offset * sums[2 * b];
            side[b * words + FT_TILE].i = -l->offset * sums[2 * b + 1];
        }
    }
}

void ft_fill_side(const ft_layout *l, const ft_acts *a, int r, int rows, int filled, int32_t bias, ft_side *side) {
    int words = (1 + l->scales_per_block) * FT_TILE;
    for (int i = 0; i < filled; i++) {
        int64_t first = (int64_t)(r + ft_min_int(i, rows - 1)) * a->blocks;
        const float *scale = a->scale + first;
        for (int b = 0; b < a->blocks; b++) {
            side[b * words + i].f = scale[b];
        }
        fill_sums(l, a->sum16 + 2 * first, a->blocks, bias, side + FT_TILE + i);
    }
}

void ft_load_acc(float *acc, const float *y, int64_t ldy, int rows, int lanes) {
    for (int i = 0; i < rows; i++) {
        memcpy(acc + i * FT_GROUP, y + i * ldy, (size_t)lanes * sizeof(float));
    }
}

void ft_store_acc(const float *acc, float *y, int64_t ldy, int rows, int lanes) {
    for (int i = 0; i < rows; i++) {
        if (lanes == FT_GROUP) {
            memcpy(y + i * ldy, acc + i * FT_GROUP, FT_GROUP * sizeof(float));
        } else {
            memcpy(y + i * ldy, acc + i * FT_GROUP, (size_t)lanes * sizeof(float));
        }
    }
}

/* Point a tile at rows [r, r + rows); the rows it lacks repeat the last one. */
static void aim_tile(ft_tile *t, const ft_acts *a, int r, int rows, int first) {
    t->rows = rows;
    for (int i = 0; i < FT_TILE; i++) {
        int row = r + ft_min_int(i, rows - 1);
        t->q[i] = a->q + ((int64_t)row * a->blocks + first) * FT_BLOCK;
    }
}

/* Up to 8 rows: chunk by chunk, so that unpacking, products and the next chunks' loads overlap. */
static void run_few_rows(const ft_ops *ops, const ft_layout *l, const ft_matrix *w, const ft_acts *a, int r0,
                         int r1, float *y, int64_t ldy, int g0, int g1, ft_scratch *s) {
    int chunk_bytes = (int)ft_chunk_bytes(l, FT_CHUNK_BLOCKS), side_words = (1 + l->scales_per_block) * FT_TILE;
    ft_tile t = {.panel = &s->panels[0], .acc = s->acc};
    for (int g = g0; g < g1; g++) {
        const uint8_t *chunk = w->data + g * w->group_bytes;
        aim_tile(&t, a, r0, r1 - r0, 0);
        memset(s->acc, 0, FT_TILE * FT_GROUP * sizeof(float));
        t.side = s->side;
        for (int first = 0; first < a->blocks; first += FT_CHUNK_BLOCKS) {
            t.blocks = ft_min_int(FT_CHUNK_BLOCKS, a->blocks - first);
            prefetch_from(&t, l, chunk + FT_PREFETCH_BYTES);
            ops->unpack(l, chunk, t.blocks, &s->panels[0], 0);
            ops->tile(l, &t);
            for (int i = 0; i < FT_TILE; i++) {
                t.q[i] += FT_CHUNK_BLOCKS * FT_BLOCK;
            }
            t.side += FT_CHUNK_BLOCKS * side_words;
            chunk += chunk_bytes;
        }
        ft_store_acc(s->acc, y + r0 * ldy + g * FT_GROUP, ldy, r1 - r0, ft_lanes_of(w, g));
    }
}

/* Many rows whose side terms are ready: each panel is unpacked once and meets all of them. */
static void run_many_rows(const ft_ops *ops, const ft_layout *l, const ft_matrix *w, const ft_acts *a, int r0,
                          int r1, float *y, int64_t ldy, int g, ft_scratch *s) {
    int side_words = (1 + l->scales_per_block) * FT_TILE;
    ft_tile t = {.panel = &s->panels[0], .acc = s->acc};
    for (int first = 0; first < a->blocks; first += FT_PANEL_BLOCKS) {
        t.blocks = ft_min_int(FT_PANEL_BLOCKS, a->blocks - first);
        prefetch_from(&t, l, ft_unpack_panel(ops, l, w->data + g * w->group_bytes, first, t.blocks, &s->panels[0]));
        for (int r = r0; r < r1; r += FT_TILE) {
            float *out = y + r * ldy + g * FT_GROUP;
            aim_tile(&t, a, r, ft_min_int(FT_TILE, r1 - r), first);
            t.side = s->side + ((int64_t)(r - r0) / FT_TILE * a->blocks + first) * side_words;
            memset(s->acc, 0, sizeof s->acc);
            if (first > 0) {
                ft_load_acc(s->acc, out, ldy, t.rows, ft_lanes_of(w, g));
            }
            ops->tile(l, &t);
            ft_store_acc(s->acc, out, ldy, t.rows, ft_lanes_of(w, g));
            t.ahead_lines = 0; /* once per panel */
        }
    }
}

static void run_float(const ft_ops *ops, const ft_matrix *w, const ft_acts *a, int r0, int r1, float *y,
                      int64_t ldy, int g0, int g1, ft_scratch *s) {
    for (int g = g0; g < g1; g++) {
        for (int r = r0; r < r1; r += FT_TILE) {
            const float *x[FT_TILE];
            int rows = ft_min_int(FT_TILE, r1 - r);
            for (int i = 0; i < FT_TILE; i++) {
                x[i] = a->x + (r + ft_min_int(i, rows - 1)) * a->ldx;
            }
            ops->float_tile(w, w->data + g * w->group_bytes, x, rows, s->acc);
            ft_store_acc(s->acc, y + r * ldy + g * FT_GROUP, ldy, rows, ft_lanes_of(w, g));
        }
    }
}

void ft_matmul_run(const ft_ops *ops, const ft_matrix *w, const ft_acts *a, int r0, int r1, float *y, int64_t ldy,
                   int g0, int g1, void *scratch) {
    const ft_layout *l = ft_layout_of(w->type);
    ft_scratch *s = scratch;
    if (l->code_bytes == 0) {
        run_float(ops, w, a, r0, r1, y, ldy, g0, g1, s);
        return;
    }
    int tile_words = a->blocks * (1 + l->scales_per_block) * FT_TILE;
    int tiles = ft_min_int(BATCH_TILES, FT_SIDE_WORDS / tile_words);
    for (int r = r0; r < r1; r += tiles * FT_TILE) {
        int end = ft_min_int(r1, r + tiles * FT_TILE);
        for (int t = r; t < end; t += FT_TILE) {
            int rows = ft_min_int(FT_TILE, end - t), even = rows > 1 ? rows + rows % 2 : rows;
            ft_fill_side(l, a, t, rows, even, ops->bias, s->side + (int64_t)(t - r) / FT_TILE * tile_words);
        }
        if (end - r <= FT_TILE) {
            run_few_rows(ops, l, w, a, r, end, y, ldy, g0, g1, s);
            continue;
        }
        for (int g = g0; g < g1; g++) {
            run_many_rows(ops, l, w, a, r, end, y, ldy, g, s);
        }
    }
}
