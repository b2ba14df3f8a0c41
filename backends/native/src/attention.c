/* Attention of many rows, of several chats, over linear and ring caches.
 *
 * Keys are taken in blocks of FT_KEY_BLOCK at fixed absolute positions; each block gives a softmax
 * piece (max, sum, weighted values) and the pieces of a row are folded in ascending order. So a row
 * has the same bits whatever rows share the call and however the blocks are spread over threads.
 * A ring holds a multiple of FT_KEY_BLOCK positions, so a block is contiguous there too; a forward
 * longer than a ring's slack is appended and attended in parts that fit (window rules: a row at p
 * needs p - window + 1 .. p, so capacity - window + 1 rows may be written ahead).
 */
#include <math.h>
#include <string.h>

#include "program.h"

/* Queries of one unit: rows times heads per kv head. More share a block from L2, fewer spread better. */
#define UNIT_QUERIES 48

typedef struct attention_job {
    ft_program *p;
    const ft_op *op;
    const ft_slot *slot;
    float *src, *dst;
    int64_t src_stride, dst_stride;
    int32_t dim, dim_padded, group; /* group: query heads per kv head */
    int32_t first, last;            /* offsets within each segment done in this part */
    int32_t tile_rows, tiles;       /* rows per unit; units along the rows */
    int32_t blocks;                 /* key blocks per unit, 0: a unit takes all of them */
} attention_job;

typedef struct unit_scratch {
    float *q, *weights, *wide;
    ft_pieces running, block; /* of all blocks so far, and of one */
    int32_t *begin, *end;
} unit_scratch;

static int most_queries(const ft_program *p) {
    int most = UNIT_QUERIES;
    for (int i = 0; i < p->spec.num_ops; i++) {
        const ft_op *op = &p->spec.ops[i];
        if (op->kind != FT_OP_ATTENTION) continue;
        const int group = op->heads / p->spec.slots[op->slot].kv_heads;
        if (group > most) most = group;
    }
    return most;
}

static int most_dims(const ft_program *p) {
    int most = 16;
    for (int i = 0; i < p->spec.num_slots; i++)
        if (p->spec.slots[i].head_dim > most) most = p->spec.slots[i].head_dim;
    return ft_pad16(most);
}

size_t ft_plan_attention(ft_program *p) {
    p->unit_queries = most_queries(p);
    p->unit_dims = most_dims(p);
    const size_t queries = (size_t)p->unit_queries, dims = (size_t)p->unit_dims;
    const size_t floats = queries * (3 * dims + FT_KEY_BLOCK + 6) + 2 * FT_KEY_BLOCK * dims;
    return (floats * sizeof(float) + 1023) & ~(size_t)63;
}

static unit_scratch carve(const ft_program *p, int thread) {
    const size_t queries = (size_t)p->unit_queries, dims = (size_t)p->unit_dims;
    unit_scratch s;
    s.q = ft_thread_scratch(p, thread);
    s.wide = s.q + queries * dims;
    s.weights = s.wide + 2 * FT_KEY_BLOCK * dims;
    s.running.acc = s.weights + queries * FT_KEY_BLOCK;
    s.block.acc = s.running.acc + queries * dims;
    s.running.max = s.block.acc + queries * dims;
    s.running.sum = s.running.max + queries;
    s.block.max = s.running.sum + queries;
    s.block.sum = s.block.max + queries;
    s.begin = (int32_t *)(s.block.sum + queries);
    s.end = s.begin + queries;
    return s;
}

/* ---- rotate and append ---- */

static void shape_heads(const attention_job *job, float *x, int heads, const ft_norm *norm, int row,
                        int rotates) {
    const ft_program *p = job->p;
    const ft_rope *rope = job->op->rope < 0 || !rotates ? NULL : &p->spec.ropes[job->op->rope];
    const size_t at = rope == NULL ? 0
        : ((size_t)job->op->rope * (size_t)p->rows + (size_t)row) * (size_t)p->max_pairs;
    for (int h = 0; h < heads; h++, x += job->dim) {
        if (norm->present) p->vec->rms_norm(x, x, norm->weight, job->dim, norm->eps);
        if (rope)
            p->vec->rotate(x, (float *)p->cosines.data + at, (float *)p->sines.data + at, rope->pairs,
                           rope->interleaved);
    }
}

static size_t element_bytes(const ft_program *p) { return p->spec.is_f32_cache ? 4 : 2; }

static void append_head(const attention_job *job, int kv_head, const float *key, const float *value,
                        const ft_row *row) {
    const ft_program *p = job->p;
    const ft_slot_memory *memory = &p->args->segments[row->segment].slots[job->op->slot];
    const int64_t at = row->position % memory->capacity, block = at / FT_KEY_BLOCK;
    const int64_t inside = at % FT_KEY_BLOCK, lane = inside % FT_KEY_TILE;
    const int64_t start = (block * job->slot->kv_heads + kv_head) * FT_KEY_BLOCK; /* of the block, in positions */
    const int64_t k_at = (start + inside - lane) * job->dim, v_at = (start + inside) * job->dim_padded;
    p->vec->store_key(key, (uint8_t *)memory->keys + (size_t)k_at * element_bytes(p), (int)lane, job->dim,
                      p->spec.is_f32_cache);
    p->vec->store_value(value, (uint8_t *)memory->values + (size_t)v_at * element_bytes(p), job->dim,
                        p->spec.is_f32_cache);
}

static void append_rows(void *arg, int begin, int end, int thread) {
    const attention_job *job = arg;
    const ft_program *p = job->p;
    const ft_op *op = job->op;
    const int64_t kv = job->slot->kv_heads, dim = job->dim;
    const unit_scratch s = carve(p, thread);
    for (int r = begin; r < end; r++) {
        const ft_row *row = (const ft_row *)p->row_info.data + r;
        if (row->offset < job->first || row->offset >= job->last) continue;
        float *q = job->src + r * job->src_stride, *keys = q + op->heads * dim, *values = keys + kv * dim;
        shape_heads(job, q, op->heads, &op->q_norm, r, 1);
        if (!op->writes_kv) continue;
        for (int g = 0; g < kv; g++) {
            float *key = keys + g * dim, *value = values + g * dim;
            if (op->v_from_k) { /* the raw key, before norm and rotation */
                value = s.q;
                memcpy(value, key, sizeof(float) * (size_t)dim);
            }
            shape_heads(job, value, 1, &op->v_norm, r, 0);
            shape_heads(job, key, 1, &op->k_norm, r, 1);
            append_head(job, g, key, value, row);
        }
    }
}

/* ---- attend ---- */

/* Rows of one unit: consecutive rows of one segment within this part. */
typedef struct row_tile {
    int32_t row, rows;
    const ft_slot_memory *memory;
} row_tile;

static int part_rows(const attention_job *job, const ft_segment *segment) {
    const int end = ft_least(segment->rows, job->last);
    return end > job->first ? end - job->first : 0;
}

static int count_tiles(const attention_job *job) {
    int tiles = 0;
    for (int s = 0; s < job->p->args->num_segments; s++)
        tiles += (part_rows(job, &job->p->args->segments[s]) + job->tile_rows - 1) / job->tile_rows;
    return tiles;
}

static row_tile find_tile(const attention_job *job, int tile) {
    int row = 0;
    for (int s = 0; s < job->p->args->num_segments; s++) {
        const ft_segment *segment = &job->p->args->segments[s];
        const int rows = part_rows(job, segment), tiles = (rows + job->tile_rows - 1) / job->tile_rows;
        if (tile < tiles) {
            const int from = tile * job->tile_rows;
            return (row_tile){row + job->first + from, ft_least(job->tile_rows, rows - from),
                              &segment->slots[job->op->slot]};
        }
        tile -= tiles;
        row += segment->rows;
    }
    return (row_tile){0, 0, NULL};
}

static int64_t first_visible(const attention_job *job, int64_t position) {
    const int64_t from = job->slot->window ? position - job->slot->window + 1 : 0;
    return from > 0 ? from : 0;
}

static int64_t last_visible(const attention_job *job, int64_t position) {
    return job->p->spec.grows_cache ? position : position - 1;
}

/* Multiply the unit's queries by the scale and lay them out row by row, head by head. */
static void gather_queries(const attention_job *job, const row_tile *tile, int kv_head, float *q) {
    for (int r = 0; r < tile->rows; r++) {
        const float *src = job->src + (tile->row + r) * job->src_stride +
                           (int64_t)kv_head * job->group * job->dim;
        for (int h = 0; h < job->group; h++, src += job->dim, q += job->dim_padded) {
            memcpy(q, src, sizeof(float) * (size_t)job->dim);
            job->p->vec->scale(q, (float)job->op->factor, job->dim);
        }
    }
}

static void visible_range(const attention_job *job, const row_tile *tile, int64_t block,
                          const unit_scratch *s) {
    const ft_row *rows = (const ft_row *)job->p->row_info.data + tile->row;
    for (int r = 0, i = 0; r < tile->rows; r++) {
        const int64_t start = block * FT_KEY_BLOCK, last = last_visible(job, rows[r].position) + 1 - start;
        const int64_t first = first_visible(job, rows[r].position) - start;
        const int32_t end = last > FT_KEY_BLOCK ? FT_KEY_BLOCK : last > 0 ? (int32_t)last : 0;
        const int32_t begin = first <= 0 ? 0 : first < end ? (int32_t)first : end;
        for (int h = 0; h < job->group; h++, i++) {
            s->begin[i] = begin;
            s->end[i] = end;
        }
    }
}

/* One key block for the unit's queries. */
static void attend_block(const attention_job *job, const row_tile *tile, int kv_head, int64_t block,
                         const unit_scratch *s, ft_pieces out) {
    const ft_program *p = job->p;
    const int64_t kv = job->slot->kv_heads, bytes = (int64_t)element_bytes(p);
    const int64_t at = block * FT_KEY_BLOCK % tile->memory->capacity * kv + kv_head * FT_KEY_BLOCK;
    visible_range(job, tile, block, s);
    const ft_attend call = {
        .q = s->q, .queries = tile->rows * job->group, .dim = job->dim, .dim_padded = job->dim_padded,
        .is_f32 = p->spec.is_f32_cache,
        .k = (const uint8_t *)tile->memory->keys + at * job->dim * bytes,
        .v = (const uint8_t *)tile->memory->values + at * job->dim_padded * bytes,
        .begin = s->begin, .end = s->end,
        .weights = s->weights, .wide = s->wide, .out = out,
    };
    p->vec->attend(&call);
}

static void write_rows(const attention_job *job, const row_tile *tile, int kv_head,
                       const ft_pieces *running) {
    for (int r = 0, i = 0; r < tile->rows; r++) {
        float *out = job->dst + (tile->row + r) * job->dst_stride + (int64_t)kv_head * job->group * job->dim;
        for (int h = 0; h < job->group; h++, i++, out += job->dim) {
            memcpy(out, running->acc + (int64_t)i * job->dim_padded, sizeof(float) * (size_t)job->dim);
            job->p->vec->scale(out, 1.0f / running->sum[i], job->dim);
        }
    }
}

static void clear_pieces(const attention_job *job, const ft_pieces *pieces, int queries) {
    for (int i = 0; i < queries; i++) {
        pieces->max[i] = -INFINITY;
        pieces->sum[i] = 0.0f;
    }
    memset(pieces->acc, 0, sizeof(float) * (size_t)queries * (size_t)job->dim_padded);
}

static void block_span(const attention_job *job, const row_tile *tile, int64_t *first, int64_t *last) {
    const ft_row *rows = (const ft_row *)job->p->row_info.data + tile->row;
    *first = first_visible(job, rows[0].position) / FT_KEY_BLOCK;
    *last = last_visible(job, rows[tile->rows - 1].position) / FT_KEY_BLOCK + 1;
}

static void attend_units(void *arg, int begin, int end, int thread) {
    const attention_job *job = arg;
    const unit_scratch s = carve(job->p, thread);
    for (int unit = begin; unit < end; unit++) {
        const int kv_head = unit % job->slot->kv_heads;
        const row_tile tile = find_tile(job, unit / job->slot->kv_heads);
        const int queries = tile.rows * job->group;
        int64_t block, last;
        gather_queries(job, &tile, kv_head, s.q);
        clear_pieces(job, &s.running, queries);
        block_span(job, &tile, &block, &last);
        for (; block < last; block++) {
            attend_block(job, &tile, kv_head, block, &s, s.block);
            job->p->vec->merge(&s.running, &s.block, queries, job->dim_padded);
        }
        write_rows(job, &tile, kv_head, &s.running);
    }
}

/* ---- few rows over many keys: blocks computed apart, then folded ---- */

static size_t partial_floats(const attention_job *job) {
    return (size_t)job->tile_rows * (size_t)job->group * ((size_t)job->dim_padded + 2);
}

/* Of one (tile, kv head, block). */
static ft_pieces partial_of(const attention_job *job, int unit, int64_t block) {
    const int queries = job->tile_rows * job->group;
    float *max = (float *)job->p->partial.data +
                 ((size_t)unit * (size_t)job->blocks + (size_t)block) * partial_floats(job);
    return (ft_pieces){.max = max, .sum = max + queries, .acc = max + 2 * queries};
}

static void attend_pieces(void *arg, int begin, int end, int thread) {
    const attention_job *job = arg;
    const unit_scratch s = carve(job->p, thread);
    for (int piece = begin; piece < end; piece++) {
        const int unit = piece / job->blocks, kv_head = unit % job->slot->kv_heads;
        const row_tile tile = find_tile(job, unit / job->slot->kv_heads);
        int64_t first, last;
        block_span(job, &tile, &first, &last);
        const int64_t block = first + piece % job->blocks;
        if (block >= last) continue;
        gather_queries(job, &tile, kv_head, s.q);
        attend_block(job, &tile, kv_head, block, &s, partial_of(job, unit, block - first));
    }
}

static void fold_units(void *arg, int begin, int end, int thread) {
    const attention_job *job = arg;
    const unit_scratch s = carve(job->p, thread);
    for (int unit = begin; unit < end; unit++) {
        const row_tile tile = find_tile(job, unit / job->slot->kv_heads);
        const int queries = tile.rows * job->group;
        int64_t first, last;
        block_span(job, &tile, &first, &last);
        clear_pieces(job, &s.running, queries);
        for (int64_t block = first; block < last; block++) {
            const ft_pieces piece = partial_of(job, unit, block - first);
            job->p->vec->merge(&s.running, &piece, queries, job->dim_padded);
        }
        write_rows(job, &tile, unit % job->slot->kv_heads, &s.running);
    }
}

/* ---- scheduling ---- */

static int most_blocks(const attention_job *job) {
    int64_t most = 1;
    for (int t = 0; t < job->tiles; t++) {
        const row_tile tile = find_tile(job, t);
        int64_t first, last;
        block_span(job, &tile, &first, &last);
        if (last - first > most) most = last - first;
    }
    return (int)most;
}

/* Few units leave threads idle on a long cache: then every block is a unit of its own. */
static int splits_blocks(const ft_program *p, int units) {
    return ft_pool_threads(p->pool) > 1 && units < 8 * ft_pool_threads(p->pool);
}

static int longest_segment(const ft_program *p) {
    int rows = 0;
    for (int s = 0; s < p->args->num_segments; s++)
        if (p->args->segments[s].rows > rows) rows = p->args->segments[s].rows;
    return rows;
}

static attention_job describe(ft_program *p, const ft_op *op) {
    const ft_slot *slot = &p->spec.slots[op->slot];
    attention_job job = {
        .p = p, .op = op, .slot = slot, .src = ft_register(p, op->src), .dst = ft_register(p, op->dst),
        .src_stride = ft_stride(p, op->src), .dst_stride = ft_stride(p, op->dst),
        .dim = slot->head_dim, .dim_padded = ft_pad16(slot->head_dim),
        .group = op->heads / slot->kv_heads,
    };
    /* No more than there are: pieces of one row's blocks would be laid out for a full unit, 200 MB for one
     * row at 131k positions of a Llama 8B. */
    job.tile_rows = ft_least(UNIT_QUERIES / job.group, longest_segment(p));
    if (job.tile_rows < 1) job.tile_rows = 1;
    return job;
}

static void run_part(attention_job *job) {
    ft_program *p = job->p;
    const int kv = job->slot->kv_heads;
    ft_pool_ranges(p->pool, p->rows, ft_row_grain(p->spec.widths[job->op->src]), append_rows, job);
    job->tiles = count_tiles(job);
    const int units = job->tiles * kv;
    job->blocks = splits_blocks(p, units) ? most_blocks(job) : 0;
    if (job->blocks < 2) {
        ft_pool_ranges(p->pool, units, 1, attend_units, job);
        return;
    }
    ft_pool_ranges(p->pool, units * job->blocks, 1, attend_pieces, job);
    ft_pool_ranges(p->pool, units, 8, fold_units, job);
}

static int part_limit(const attention_job *job) {
    return job->slot->ring ? job->slot->ring - job->slot->window + 1 : INT32_MAX;
}

void ft_run_attention(ft_program *p, const ft_op *op) {
    attention_job job = describe(p, op);
    const int rows = longest_segment(p), limit = part_limit(&job);
    for (int first = 0; first < rows; first += ft_least(limit, rows)) {
        job.first = first;
        job.last = ft_least(rows - first, limit) + first;
        run_part(&job);
    }
}

int ft_reserve_attention(ft_program *p, const ft_op *op, int rows) {
    attention_job job = describe(p, op);
    job.last = INT32_MAX;
    job.tiles = count_tiles(&job);
    int units = job.tiles * job.slot->kv_heads;
    if (!splits_blocks(p, units)) {
        if (rows <= part_limit(&job)) return 0;
        units = 8 * ft_pool_threads(p->pool); /* parts are shorter and may still split */
    }
    int64_t longest = 0;
    for (int s = 0; s < p->args->num_segments; s++) {
        const int64_t end = p->args->segments[s].start + p->args->segments[s].rows;
        if (end > longest) longest = end;
    }
    if (job.slot->window && longest > job.slot->window + rows) longest = job.slot->window + rows;
    /* In steps: a cache that grows by a block a time would move the buffer every time. */
    const size_t blocks = ((size_t)(longest / FT_KEY_BLOCK) + 2 + 15) & ~(size_t)15;
    return ft_buffer_reserve(&p->partial, (size_t)units * blocks * partial_floats(&job) * sizeof(float));
}
