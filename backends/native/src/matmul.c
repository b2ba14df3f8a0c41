/* The loop every instruction set runs: rows in tiles of 8, weights unpacked once per tile or batch. */
#include "matmul.h"

#define BATCH_TILES 8 /* row tiles that share one unpacked panel */

size_t ft_matmul_scratch_bytes(void) { return sizeof(ft_scratch); }

void ft_unpack_panel(const ft_ops *ops, const ft_layout *l, const uint8_t *group, int first, int blocks,
                     ft_panel *panel) {
    const uint8_t *chunk = group + first / FT_CHUNK_BLOCKS * ft_chunk_bytes(l, FT_CHUNK_BLOCKS);
    for (int at = 0; at < blocks; at += FT_CHUNK_BLOCKS) {
        int count = ft_min_int(FT_CHUNK_BLOCKS, blocks - at);
        ops->unpack(l, chunk, count, panel, at);
        chunk += ft_chunk_bytes(l, count);
    }
}

static void fill_side(const ft_layout *l, const ft_acts *a, int r, int rows, ft_side *side) {
    int scales = l->scales_per_block;
    for (int b = 0; b < a->blocks; b++) {
        for (int i = 0; i < rows; i++) {
            const int16_t *sums = a->sum16 + ((int64_t)(r + i) * a->blocks + b) * 2;
            side[i].f = a->scale[(int64_t)(r + i) * a->blocks + b];
            for (int s = 0; s < scales; s++) {
                int sum = scales == 2 ? sums[s] : sums[0] + sums[1];
                ft_side *term = &side[(1 + s) * FT_TILE + i];
                if (l->has_min) {
                    term->f = (float)sum;
                } else {
                    term->i = -l->offset * sum;
                }
            }
        }
        side += (1 + scales) * FT_TILE;
    }
}

/* acc of a tile to and from y: a float survives the trip unchanged, so panels continue each other. */
static void load_acc(float *acc, const float *y, int64_t ldy, int rows, int lanes) {
    for (int i = 0; i < rows; i++) {
        memcpy(acc + i * FT_GROUP, y + i * ldy, (size_t)lanes * sizeof(float));
    }
}

static void store_acc(const float *acc, float *y, int64_t ldy, int rows, int lanes) {
    for (int i = 0; i < rows; i++) {
        memcpy(y + i * ldy, acc + i * FT_GROUP, (size_t)lanes * sizeof(float));
    }
}

static int lanes_of(const ft_matrix *w, int g) { return ft_min_int(FT_GROUP, w->rows - g * FT_GROUP); }

/* One group against a batch of rows whose side terms are ready. */
static void run_group(const ft_ops *ops, const ft_layout *l, const ft_matrix *w, const ft_acts *a, int r0, int r1,
                      float *y, int64_t ldy, int g, ft_scratch *s) {
    const uint8_t *group = w->data + g * w->group_bytes;
    int step = r1 - r0 <= FT_TILE ? FT_CHUNK_BLOCKS : FT_PANEL_BLOCKS;
    int side_words = (1 + l->scales_per_block) * FT_TILE;
    for (int first = 0; first < a->blocks; first += step) {
        ft_tile t = {.panel = &s->panel, .acc = s->acc, .blocks = ft_min_int(step, a->blocks - first)};
        ft_unpack_panel(ops, l, group, first, t.blocks, &s->panel);
        for (int r = r0; r < r1; r += FT_TILE) {
            float *out = y + r * ldy + g * FT_GROUP;
            t.rows = ft_min_int(FT_TILE, r1 - r);
            t.side = s->side + ((int64_t)(r - r0) / FT_TILE * a->blocks + first) * side_words;
            for (int i = 0; i < FT_TILE; i++) {
                int row = r + ft_min_int(i, t.rows - 1);
                t.q[i] = a->q + ((int64_t)row * a->blocks + first) * FT_BLOCK;
            }
            memset(s->acc, 0, sizeof s->acc);
            if (first > 0) {
                load_acc(s->acc, out, ldy, t.rows, lanes_of(w, g));
            }
            ops->tile(l, &t);
            store_acc(s->acc, out, ldy, t.rows, lanes_of(w, g));
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
            store_acc(s->acc, y + r * ldy + g * FT_GROUP, ldy, rows, lanes_of(w, g));
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
            fill_side(l, a, t, ft_min_int(FT_TILE, end - t), s->side + (int64_t)(t - r) / FT_TILE * tile_words);
        }
        for (int g = g0; g < g1; g++) {
            run_group(ops, l, w, a, r, end, y, ldy, g, s);
        }
    }
}
