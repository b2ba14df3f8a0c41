/* AMX int8 for many rows: a tile instruction makes the exact block sums of 16 rows x 16 outputs at once.
 *
 * The float part is the one of matmul_avx512.c, in the same order, so a row keeps its bits when a prompt
 * was read by this path and the next token is decoded by the other.
 * Source: Intel SDM vol. 2, TDPBSUD, LDTILECFG; tile data needs the kernel's permission (select.c).
 */
#include "isa.h"

#if FT_NEW_X86
#include <immintrin.h>

#include "matmul_x86.h"

FT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,amx-tile,amx-int8")

#define ROWS 16            /* rows of a full tile */
#define BATCH_ROWS 64      /* rows whose part of a panel's inputs stays in the first level */
#define LONG_PANEL 24      /* blocks that are not split, */
#define SPLIT_PANEL 16     /* and how more are: 64 rows of 2048 inputs go from 94 to 80 cycles a product */
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
    /* Volatile: the intrinsic of GCC names 8 of its 64 bytes as read, and the other stores may be dropped. */
    volatile tile_config c = {.palette = 1};
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
    _tile_loadconfig((const void *)&c);
}

/* 16 rows of one panel. */
typedef struct row_tile {
    const ft_panel *panel;
    int blocks;
    const int8_t *q; /* first row, first block of the panel */
    int64_t stride;  /* bytes from row to row of q */
    const ft_side *side[2]; /* of rows 0..7 and 8..15 */
    int32_t *products; /* [2][16][16]: the last even and odd product */
    float *acc; /* 16 rows of 16, acc_stride floats apart: added to, or written if is_first */
    int64_t acc_stride;
    int is_first;
    const char *ahead; /* weights of the next panel: ahead_lines cache lines are fetched beside each two products */
    int ahead_lines;
} row_tile;

/* Products are counted over blocks and their halves. Sums start at FT_BIAS, or at zero where the row's own term
 * brings it: those of types with an offset, and second halves. */
#define BEGIN(sums, row)                               \
    if (at_zero) {                                     \
        _tile_zero(sums);                              \
    } else {                                           \
        _tile_loadd(sums, bias_words, 0);              \
    }                                                  \
    _tile_loadd(WEIGHTS, codes, 64);                   \
    _tile_loadd(row, q, stride);                       \
    _tile_dpbsud(sums, row, WEIGHTS)

FT_INLINE void begin_even(const uint8_t *codes, const int8_t *q, int64_t stride, int is_part, int at_zero) {
    if (is_part) {
        BEGIN(SUMS_PART_EVEN, ROW_PART);
    } else {
        BEGIN(SUMS_EVEN, ROW);
    }
}
FT_INLINE void begin_odd(const uint8_t *codes, const int8_t *q, int64_t stride, int is_part, int at_zero) {
    if (is_part) {
        BEGIN(SUMS_PART_ODD, ROW_PART);
    } else {
        BEGIN(SUMS_ODD, ROW);
    }
}
FT_INLINE void finish_even(int32_t *out, int is_part) {
    if (is_part) {
        _tile_stored(SUMS_PART_EVEN, out, 64);
    } else {
        _tile_stored(SUMS_EVEN, out, 64);
    }
}
FT_INLINE void finish_odd(int32_t *out, int is_part) {
    if (is_part) {
        _tile_stored(SUMS_PART_ODD, out, 64);
    } else {
        _tile_stored(SUMS_ODD, out, 64);
    }
}

/* What the float part of the next block reads. */
typedef struct float_part {
    const float *scale, *min;
    const ft_side *side[2];
} float_part;

FT_INLINE __m512i sum_of(const int32_t *product, const ft_side *term, int has_min) {
    __m512i sum = _mm512_load_si512(product);
    return has_min ? sum : _mm512_add_epi32(sum, _mm512_set1_epi32(term->i));
}

FT_INLINE void accumulate(float_part *f, const int32_t *products, int rows, int scales, int has_min, __m512 *acc) {
    const __m512 scale = _mm512_load_ps(f->scale), unbias = _mm512_mul_ps(scale, _mm512_set1_ps(-FT_BIAS));
    FT_UNROLL
    for (int i = 0; i < rows; i++) {
        const ft_side *side = f->side[i / FT_TILE] + i % FT_TILE;
        __m512i sum = sum_of(products + 16 * i, side + FT_TILE, has_min);
        __m512 x = _mm512_fmadd_ps(_mm512_castsi512_ps(sum), scale, unbias);
        if (scales == 2) {
            sum = sum_of(products + PRODUCTS + 16 * i, side + 2 * FT_TILE, has_min);
            x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_load_ps(f->scale + 16), x);
        }
        FT_UNROLL
        for (int s = 0; s < has_min * scales; s++) {
            x = _mm512_fmadd_ps(_mm512_load_ps(f->min + 16 * s), _mm512_set1_ps(side[(1 + s) * FT_TILE].f), x);
        }
        acc[i] = _mm512_fmadd_ps(x, _mm512_set1_ps(side->f), acc[i]);
    }
    f->scale += scales * FT_GROUP;
    f->min += scales * FT_GROUP;
    f->side[0] += (1 + scales) * FT_TILE;
    f->side[1] += (1 + scales) * FT_TILE;
}

/* Two products a turn. A result is stored one product late, when the tile unit is done with it, and the float
 * part of a product runs beside the next one. */
FT_INLINE void run_tile(const row_tile *t, int rows, int scales, int has_min, int is_part) {
    const int pairs = t->blocks * scales / 2, has_single = scales == 1 && t->blocks % 2;
    const int code_step = FT_CODE_BYTES / scales, q_step = FT_BLOCK / scales;
    const uint8_t *codes = t->panel->codes;
    const int8_t *q = t->q;
    const int64_t stride = t->stride;
    int32_t *even = t->products, *odd = even + PRODUCTS;
    float_part f = {t->panel->scale, t->panel->min, {t->side[0], t->side[1]}};
    __m512 acc[ROWS];
    FT_UNROLL
    for (int i = 0; i < rows; i++) {
        acc[i] = t->is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(t->acc + i * t->acc_stride);
    }
    begin_even(codes, q, stride, is_part, !has_min);
    if (pairs > 0) {
        begin_odd(codes + code_step, q + q_step, stride, is_part, !has_min || scales == 2);
    }
    const char *ahead = t->ahead;
    const int ahead_lines = t->ahead_lines;
    for (int left = pairs - 1; left >= 0; left--) {
        for (int i = 0; i < ahead_lines; i++, ahead += 64) {
            _mm_prefetch(ahead, _MM_HINT_T1);
        }
        codes += 2 * code_step;
        q += 2 * q_step;
        finish_even(even, is_part);
        if (left > 0 || has_single) {
            begin_even(codes, q, stride, is_part, !has_min);
        }
        if (scales == 1) {
            accumulate(&f, even, rows, scales, has_min, acc);
        }
        finish_odd(odd, is_part);
        if (left > 0) {
            begin_odd(codes + code_step, q + q_step, stride, is_part, !has_min || scales == 2);
        }
        accumulate(&f, scales == 1 ? odd : even, rows, scales, has_min, acc);
    }
    if (has_single) {
        finish_even(even, is_part);
        accumulate(&f, even, rows, scales, has_min, acc);
    }
    FT_UNROLL
    for (int i = 0; i < rows; i++) {
        _mm512_storeu_ps(t->acc + i * t->acc_stride, acc[i]);
    }
}

FT_INLINE void run_tile_part(const row_tile *t, int scales, int has_min, int rows) {
    if (rows == ROWS) {
        run_tile(t, ROWS, scales, has_min, 0);
    } else if (rows > FT_TILE) {
        run_tile(t, ROWS, scales, has_min, 1);
    } else {
        run_tile(t, FT_TILE, scales, has_min, 1);
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

/* Share the next panel's weights among the `tiles` row tiles that pass this one: this is number `tile`. */
static void aim_ahead(row_tile *t, const uint8_t *next, int64_t bytes, int tile, int tiles, int pairs) {
    t->ahead = (const char *)next + bytes * tile / tiles;
    t->ahead_lines = (int)((bytes / tiles + 64 * pairs - 1) / (64 * pairs));
}

/* Ordinary numbers where a tile of fewer rows stores no sums. */
static void fill_products(int32_t *products, int rows) {
    for (int row = rows; row < ROWS; row++) {
        _mm512_store_si512(products + row * 16, _mm512_set1_epi32(FT_BIAS_BITS));
        _mm512_store_si512(products + PRODUCTS + row * 16, _mm512_set1_epi32(FT_BIAS_BITS));
    }
}

/* 16 rows or fewer from r on; `part` takes the sums where y has no room for whole tiles. */
static void run_row_tile(const ft_layout *l, row_tile *t, int rows, int lanes, float *out, int64_t ldy, float *part) {
    int is_whole = rows == ROWS && lanes == FT_GROUP; /* then y itself holds the sums */
    t->acc = is_whole ? out : part;
    t->acc_stride = is_whole ? ldy : FT_GROUP;
    if (!is_whole && !t->is_first) {
        ft_load_acc(part, out, ldy, rows, lanes);
    }
    fill_products(t->products, rows);
    run_tile_any(l, t, rows);
    if (!is_whole) {
        ft_store_acc(part, out, ldy, rows, lanes);
    }
}

/* Rows [r0, r1) against blocks [first, first + blocks) of some groups; the side terms of [r0, r1) are ready. The
 * first batch of rows unpacks a panel, which then waits in the second level; a batch stays in the first. */
static void run_panels(const ft_layout *l, const ft_matrix *w, const ft_acts *a, int r0, int r1, float *y, int64_t ldy,
                       int g0, int g1, int first, int blocks, ft_scratch *s) {
    int64_t side_words = (1 + l->scales_per_block) * FT_TILE, stride = (int64_t)a->blocks * FT_BLOCK;
    int keeps = r1 - r0 > BATCH_ROWS;
    int64_t chunk_bytes = ft_chunk_bytes(l, FT_CHUNK_BLOCKS), packed_bytes = chunk_bytes * blocks / FT_CHUNK_BLOCKS;
    const uint8_t *next = w->data + w->group_bytes + chunk_bytes * first / FT_CHUNK_BLOCKS;
    int tiles = (ft_min_int(BATCH_ROWS, r1 - r0) + ROWS - 1) / ROWS;
    int pairs = blocks * l->scales_per_block / 2 > 0 ? blocks * l->scales_per_block / 2 : 1;
    for (int batch = r0; batch < r1; batch += BATCH_ROWS) {
        int end = ft_min_int(r1, batch + BATCH_ROWS);
        for (int g = g0; g < g1; g++) {
            ft_panel *panel = &s->panels[keeps ? g - g0 : 0];
            if (batch == r0) {
                ft_unpack_panel(&ft_avx512_ops, l, w->data + g * w->group_bytes, first, blocks, panel);
            }
            for (int r = batch; r < end; r += ROWS) {
                int rows = ft_min_int(ROWS, r1 - r);
                const ft_side *side = s->side + ((int64_t)(r - r0) / FT_TILE * a->blocks + first) * side_words;
                const ft_side *second = rows > FT_TILE ? side + a->blocks * side_words : side;
                row_tile t = {.panel = panel, .blocks = blocks, .q = a->q + r * stride + first * FT_BLOCK,
                              .stride = stride, .side = {side, second}, .products = s->products,
                              .is_first = first == 0};
                if (batch == r0) {
                    aim_ahead(&t, next + g * w->group_bytes, packed_bytes, (r - batch) / ROWS, tiles, pairs);
                }
                run_row_tile(l, &t, rows, ft_lanes_of(w, g), y + r * ldy + g * FT_GROUP, ldy, s->acc);
            }
        }
    }
}

static void run_many_rows(const ft_layout *l, const ft_matrix *w, const ft_acts *a, int r0, int r1, float *y,
                          int64_t ldy, int g0, int g1, ft_scratch *s) {
    int tile_words = a->blocks * (1 + l->scales_per_block) * FT_TILE;
    int most = FT_SIDE_WORDS / tile_words / 2 * ROWS;
    int span = a->blocks <= LONG_PANEL ? a->blocks : SPLIT_PANEL;
    configure(FT_BLOCK / l->scales_per_block, (r1 - r0) % ROWS);
    for (int r = r0; r < r1; r += most) {
        int end = ft_min_int(r1, r + most);
        for (int t = r; t < end; t += FT_TILE) {
            ft_fill_side(l, a, t, ft_min_int(FT_TILE, end - t), FT_TILE, FT_BIAS_BITS,
                         s->side + (int64_t)(t - r) / FT_TILE * tile_words);
        }
        for (int g = g0; g < g1; g += FT_PANELS) {
            for (int first = 0; first < a->blocks; first += span) {
                run_panels(l, w, a, r, end, y, ldy, g, ft_min_int(g1, g + FT_PANELS), first,
                           ft_min_int(span, a->blocks - first), s);
            }
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
