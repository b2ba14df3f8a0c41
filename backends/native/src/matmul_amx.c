/* AMX int8 for many rows: a tile instruction makes the exact block sums of 16 rows x 16 outputs at once.
 *
 * The float part is the one of matmul_avx512.c, in the same order, so a row keeps its bits when a prompt
 * was read by this path and the next token is decoded by the other.
 * Source: Intel SDM vol. 2, TDPBSSD, LDTILECFG; tile data needs the kernel's permission (select.c).
 */
#include "isa.h"

#if FT_NEW_X86
#include <immintrin.h>

#include "matmul_x86.h"

FT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,amx-tile,amx-int8")

#define ROWS 16            /* rows of a full tile */
#define BATCH_ROWS 64      /* rows that share an unpacked panel: with it they just fit the first level */
#define PRODUCTS (16 * 16) /* words of one result tile */

/* Tile registers: results (even and odd products), activations, weights; the PART ones are as high as
 * the last rows need. */
#define SUMS_EVEN 0
#define SUMS_ODD 1
#define SUMS_PART_EVEN 2
#define SUMS_PART_ODD 3
#define ROW 4
#define ROW_PART 5
#define WEIGHTS 6

typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* One row of a tile whose sums start at FT_BIAS. */
static const int32_t bias_words[16] = {
    FT_BIAS_BITS, FT_BIAS_BITS, FT_BIAS_BITS, FT_BIAS_BITS, FT_BIAS_BITS, FT_BIAS_BITS, FT_BIAS_BITS, FT_BIAS_BITS,
    FT_BIAS_BITS, FT_BIAS_BITS, FT_BIAS_BITS, FT_BIAS_BITS, FT_BIAS_BITS, FT_BIAS_BITS, FT_BIAS_BITS, FT_BIAS_BITS,
};

static void configure(int inputs, int part_rows) {
    tile_config c = {.palette = 1};
    const uint8_t part = (uint8_t)(part_rows > 0 ? part_rows : ROWS);
    for (int sums = SUMS_EVEN; sums <= SUMS_PART_ODD; sums++) {
        c.row_bytes[sums] = 64;
        c.rows[sums] = sums < SUMS_PART_EVEN ? ROWS : part;
    }
    c.row_bytes[ROW] = c.row_bytes[ROW_PART] = (uint16_t)inputs;
    c.rows[ROW] = ROWS;
    c.rows[ROW_PART] = part;
    c.row_bytes[WEIGHTS] = 64;
    c.rows[WEIGHTS] = (uint8_t)(inputs / 4);
    _tile_loadconfig(&c);
}

/* Signed codes, so that no offset term is left for the float part. */
static void centre(uint8_t *codes, int blocks, int offset) {
    __m512i o = _mm512_set1_epi8((char)offset);
    for (int i = 0; i < blocks * FT_CODE_BYTES; i += 64) {
        _mm512_store_si512(codes + i, _mm512_sub_epi8(_mm512_load_si512(codes + i), o));
    }
}

typedef struct row_tile {
    const ft_panel *panel;
    const int8_t *q; /* first row, first block of the panel */
    int64_t stride;  /* bytes from row to row of q */
    const ft_side *side[2]; /* of rows 0..7 and 8..15 */
    int blocks;
    int32_t *products; /* [2][16][16]: of the last even and odd product */
    float *acc; /* 16 rows of 16, acc_stride floats apart: added to, or written if is_first */
    int64_t acc_stride;
    int is_first;
    const char *ahead; /* weights to prefetch: per block ahead_lines cache lines, then ahead_step bytes on */
    int ahead_lines, ahead_step;
} row_tile;

FT_INLINE void prefetch_ahead(const row_tile *t, int b) {
    for (int i = 0; i < t->ahead_lines; i++) {
        _mm_prefetch(t->ahead + (int64_t)b * t->ahead_step + 64 * i, _MM_HINT_T1);
    }
}

/* Products are counted over blocks and their halves. Store product p - 2 and begin product p in the same
 * register: a result is stored one product late, when the tile unit is done with it. The sums of a block,
 * or of its first half, start at FT_BIAS. */
#define EXCHANGE(t, p, total, scales, sums, row)                                        \
    if ((p) >= 2) {                                                                     \
        _tile_stored(sums, (t)->products + sums % 2 * PRODUCTS, 64);                    \
    }                                                                                   \
    if ((p) < (total)) {                                                                \
        if (scales == 2 && sums % 2 == 1) {                                             \
            _tile_zero(sums);                                                           \
        } else {                                                                        \
            prefetch_ahead(t, (p) / scales);                                            \
            _tile_loadd(sums, bias_words, 0);                                        \
        }                                                                               \
        _tile_loadd(WEIGHTS, (t)->panel->codes + (p) * (FT_CODE_BYTES / scales), 64);   \
        _tile_loadd(row, (t)->q + (p) * (FT_BLOCK / scales), (t)->stride);              \
        _tile_dpbssd(sums, row, WEIGHTS);                                               \
    }
FT_INLINE void exchange_even(const row_tile *t, int p, int total, int scales, int is_part) {
    if (is_part) {
        EXCHANGE(t, p, total, scales, SUMS_PART_EVEN, ROW_PART)
    } else {
        EXCHANGE(t, p, total, scales, SUMS_EVEN, ROW)
    }
}
FT_INLINE void exchange_odd(const row_tile *t, int p, int total, int scales, int is_part) {
    if (is_part) {
        EXCHANGE(t, p, total, scales, SUMS_PART_ODD, ROW_PART)
    } else {
        EXCHANGE(t, p, total, scales, SUMS_ODD, ROW)
    }
}

FT_INLINE void accumulate_block(const row_tile *t, int b, int scales, int has_min, __m512 *acc) {
    const float *sums = (const float *)t->products + (scales == 1 ? b % 2 * PRODUCTS : 0);
    const float *scale = t->panel->scale + b * scales * FT_GROUP, *min = t->panel->min + b * scales * FT_GROUP;
    const __m512 unbias = _mm512_mul_ps(_mm512_load_ps(scale), _mm512_set1_ps(-FT_BIAS));
    int64_t at = (int64_t)b * (1 + scales) * FT_TILE;
    FT_UNROLL
    for (int i = 0; i < ROWS; i++) {
        const ft_side *side = t->side[i / FT_TILE] + at + i % FT_TILE;
        __m512 x = _mm512_fmadd_ps(_mm512_load_ps(sums + 16 * i), _mm512_load_ps(scale), unbias);
        if (scales == 2) {
            __m512 second = _mm512_cvtepi32_ps(_mm512_load_si512(sums + PRODUCTS + 16 * i));
            x = _mm512_fmadd_ps(second, _mm512_load_ps(scale + 16), x);
        }
        FT_UNROLL
        for (int s = 0; s < has_min * scales; s++) {
            x = _mm512_fmadd_ps(_mm512_load_ps(min + 16 * s), _mm512_set1_ps(side[(1 + s) * FT_TILE].f), x);
        }
        acc[i] = _mm512_fmadd_ps(x, _mm512_set1_ps(side->f), acc[i]);
    }
}

FT_INLINE void run_tile(const row_tile *t, int scales, int has_min, int is_part) {
    const int total = t->blocks * scales;
    __m512 acc[ROWS];
    FT_UNROLL
    for (int i = 0; i < ROWS; i++) {
        acc[i] = t->is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(t->acc + i * t->acc_stride);
    }
    for (int p = 0; p < total + 2; p += 2) {
        exchange_even(t, p, total, scales, is_part);
        if (scales == 1 && p >= 2) {
            accumulate_block(t, p - 2, scales, has_min, acc);
        }
        exchange_odd(t, p + 1, total, scales, is_part);
        if (p >= 2 && p / scales <= t->blocks) {
            accumulate_block(t, scales == 1 ? p - 1 : p / 2 - 1, scales, has_min, acc);
        }
    }
    FT_UNROLL
    for (int i = 0; i < ROWS; i++) {
        _mm512_storeu_ps(t->acc + i * t->acc_stride, acc[i]);
    }
}

FT_INLINE void run_tile_part(const row_tile *t, int scales, int has_min, int rows) {
    if (rows == ROWS) {
        run_tile(t, scales, has_min, 0);
    } else {
        run_tile(t, scales, has_min, 1);
    }
}

static void run_tile_any(const ft_layout *l, const row_tile *t, int rows) {
    if (l->scales_per_block == 1) {
        if (l->has_min) {
            run_tile_part(t, 1, 1, rows);
        } else {
            run_tile_part(t, 1, 0, rows);
        }
    } else if (l->has_min) {
        run_tile_part(t, 2, 1, rows);
    } else {
        run_tile_part(t, 2, 0, rows);
    }
}

/* One group against rows [r0, r1), whose side terms are ready. */
static void run_group(const ft_layout *l, const ft_matrix *w, const ft_acts *a, int r0, int r1, float *y,
                      int64_t ldy, int g, ft_scratch *s) {
    int64_t side_words = (1 + l->scales_per_block) * FT_TILE;
    row_tile t = {.panel = &s->panel, .stride = (int64_t)a->blocks * FT_BLOCK, .products = s->products};
    int lanes = ft_lanes_of(w, g);
    for (int first = 0; first < a->blocks; first += FT_PANEL_BLOCKS) {
        t.blocks = ft_min_int(FT_PANEL_BLOCKS, a->blocks - first);
        t.ahead = (const char *)ft_unpack_panel(&ft_avx512_ops, l, w->data + g * w->group_bytes, first, t.blocks, &s->panel);
        t.ahead_step = (int)ft_chunk_bytes(l, FT_CHUNK_BLOCKS) / FT_CHUNK_BLOCKS;
        t.ahead_lines = (t.ahead_step + 63) / 64;
        if (l->offset != 0) {
            centre(s->panel.codes, t.blocks, l->offset);
        }
        for (int r = r0; r < r1; r += ROWS) {
            int rows = ft_min_int(ROWS, r1 - r), second = rows > FT_TILE;
            float *out = y + r * ldy + g * FT_GROUP;
            t.q = a->q + r * t.stride + first * FT_BLOCK;
            t.side[0] = s->side + ((int64_t)(r - r0) / FT_TILE * a->blocks + first) * side_words;
            t.side[1] = t.side[0] + second * a->blocks * side_words;
            int is_whole = rows == ROWS && lanes == FT_GROUP; /* then y itself holds the sums */
            t.is_first = first == 0;
            t.acc = is_whole ? out : s->acc;
            t.acc_stride = is_whole ? ldy : FT_GROUP;
            if (!is_whole && first > 0) {
                ft_load_acc(s->acc, out, ldy, rows, lanes);
            }
            run_tile_any(l, &t, rows);
            if (!is_whole) {
                ft_store_acc(s->acc, out, ldy, rows, lanes);
            }
            t.ahead_lines = 0;
        }
    }
}

static void run_many_rows(const ft_layout *l, const ft_matrix *w, const ft_acts *a, int r0, int r1, float *y,
                          int64_t ldy, int g0, int g1, ft_scratch *s) {
    int tile_words = a->blocks * (1 + l->scales_per_block) * FT_TILE;
    int batch = ft_min_int(BATCH_ROWS, FT_SIDE_WORDS / tile_words / 2 * ROWS);
    configure(FT_BLOCK / l->scales_per_block, (r1 - r0) % ROWS);
    for (int r = r0; r < r1; r += batch) {
        int end = ft_min_int(r1, r + batch);
        for (int t = r; t < end; t += FT_TILE) {
            ft_fill_side(l, a, t, ft_min_int(FT_TILE, end - t), 0, s->side + (int64_t)(t - r) / FT_TILE * tile_words);
        }
        for (int g = g0; g < g1; g++) {
            run_group(l, w, a, r, end, y, ldy, g, s);
        }
    }
    _tile_release();
}

static void matmul(const ft_matrix *w, const ft_acts *a, int r0, int r1, float *y, int64_t ldy, int g0, int g1,
                   void *scratch) {
    const ft_layout *l = ft_layout_of(w->type);
    int tile_words = a->blocks * (1 + l->scales_per_block) * FT_TILE;
    if (l->code_bytes == 0 || r1 - r0 < FT_AMX_ROWS * l->scales_per_block || FT_SIDE_WORDS / tile_words < 2) {
        ft_matmul_run(&ft_avx512_ops, w, a, r0, r1, y, ldy, g0, g1, scratch);
    } else {
        run_many_rows(l, w, a, r0, r1, y, ldy, g0, g1, scratch);
    }
}

FT_TARGET_END

const ft_kernels ft_amx_kernels = {"avx512-vnni+amx", ft_quantize_avx512, matmul};
#endif
