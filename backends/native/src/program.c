/* Buffers of a program, and the loop over its operations. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "program.h"

#include <math.h>
#include <string.h>

#include "aligned.h"
#include "threads.h"

int ft_buffer_reserve(ft_buffer *buffer, size_t bytes) {
    if (bytes <= buffer->bytes) return 0;
    void *data = ft_aligned_alloc(bytes);
    if (data == NULL) return -1;
    /* Padding lanes are read by vector loads, so they must hold numbers, not noise. */
    memset(data, 0, bytes);
    ft_aligned_free(buffer->data);
    buffer->data = data;
    buffer->bytes = bytes;
    return 0;
}

void ft_buffer_free(ft_buffer *buffer) {
    ft_aligned_free(buffer->data);
    buffer->data = NULL;
    buffer->bytes = 0;
}

int ft_input_reserve(ft_input *input, int rows, int cols) {
    const size_t blocks = ((size_t)cols + FT_BLOCK - 1) / FT_BLOCK, r = (size_t)rows;
    int failed = ft_buffer_reserve(&input->x, r * (size_t)ft_pad16(cols) * sizeof(float));
    failed |= ft_buffer_reserve(&input->q, r * blocks * FT_BLOCK);
    failed |= ft_buffer_reserve(&input->scale, r * blocks * sizeof(float));
    failed |= ft_buffer_reserve(&input->sum16, r * blocks * 2 * sizeof(int16_t));
    return failed ? -1 : 0;
}

void ft_input_free(ft_input *input) {
    ft_buffer_free(&input->x);
    ft_buffer_free(&input->q);
    ft_buffer_free(&input->scale);
    ft_buffer_free(&input->sum16);
}

ft_acts ft_acts_of(ft_input *input, const float *x, int64_t stride, int cols) {
    return (ft_acts){
        .cols = cols,
        .blocks = (cols + FT_BLOCK - 1) / FT_BLOCK,
        .ldx = x == NULL ? ft_pad16(cols) : stride,
        .x = x == NULL ? input->x.data : x,
        .q = input->q.data,
        .scale = input->scale.data,
        .sum16 = input->sum16.data,
    };
}

static int most_pairs(const ft_program_spec *spec) {
    int most = 0;
    for (int i = 0; i < spec->num_ropes; i++)
        if (spec->ropes[i].pairs > most) most = spec->ropes[i].pairs;
    return most;
}

/* A looked-up row is packed alone, as a group of one, in the thread's scratch. */
static size_t look_up_bytes(const ft_program_spec *spec) {
    size_t most = 0;
    for (int i = 0; i < spec->num_ops; i++) {
        const ft_op *op = &spec->ops[i];
        if (op->kind != FT_OP_EMBED && op->kind != FT_OP_EMBED_WITH_HIDDEN &&
            op->kind != FT_OP_PER_LAYER_INPUTS)
            continue;
        const ft_matrix *table = &op->matrices[op->num_matrices - 1];
        const size_t bytes = (size_t)ft_group_bytes(table->type, table->cols);
        if (bytes > most) most = bytes;
    }
    return (most + 63) & ~(size_t)63;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

ft_program *ft_program_new(const ft_program_spec *spec, const ft_kernels *kernels) {
    ft_program *p = calloc(1, sizeof *p);
    if (p == NULL) return NULL;
    p->spec = *spec;
    p->kernels = kernels;
    p->vec = ft_rows_select(kernels->name);
    p->max_pairs = ft_pad16(most_pairs(spec));
    p->registers = calloc((size_t)spec->num_registers + 1, sizeof *p->registers);
    p->thread_scratch = larger((ft_matmul_scratch_bytes() + 63) & ~(size_t)63,
                               larger(ft_plan_attention(p), look_up_bytes(spec)));
    if (p->registers == NULL) {
        ft_program_free(p);
        return NULL;
    }
    return p;
}

void ft_program_free(ft_program *p) {
    if (p == NULL) return;
    ft_buffer *const buffers[] = {&p->row_info, &p->cosines, &p->sines, &p->wide, &p->out, &p->branch,
                                  &p->partial, &p->best, &p->routing, &p->expert_rows, &p->scratch};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) ft_buffer_free(buffers[i]);
    for (int i = 0; p->registers != NULL && i < p->spec.num_registers; i++)
        ft_buffer_free(&p->registers[i]);
    ft_input_free(&p->normed);
    ft_input_free(&p->inner);
    free(p->registers);
    free(p);
}

static int reserve_op(ft_program *p, const ft_op *op, int rows) {
    switch (op->kind) {
    case FT_OP_ATTENTION: return ft_reserve_attention(p, op, rows);
    case FT_OP_MOE_FFN: return ft_reserve_moe(p, op, rows);
    case FT_OP_PER_LAYER_INPUTS:
    case FT_OP_PER_LAYER_ADD: return ft_reserve_per_layer(p, op, rows);
    case FT_OP_EMBED:
    case FT_OP_EMBED_WITH_HIDDEN:
    case FT_OP_SCALE: return 0;
    default: return ft_reserve_matmul(p, op, rows);
    }
}

static int reserve(ft_program *p, ft_pool *pool, int rows) {
    const size_t r = (size_t)rows, threads = (size_t)ft_pool_threads(pool);
    const size_t tables = (size_t)p->spec.num_ropes * r * (size_t)p->max_pairs * sizeof(float);
    int failed = ft_buffer_reserve(&p->row_info, r * sizeof(ft_row));
    failed |= ft_buffer_reserve(&p->scratch, threads * p->thread_scratch);
    failed |= ft_buffer_reserve(&p->cosines, tables) | ft_buffer_reserve(&p->sines, tables);
    for (int i = 0; i < p->spec.num_registers; i++)
        failed |= ft_buffer_reserve(&p->registers[i], r * (size_t)ft_stride(p, i) * sizeof(float));
    for (int i = 0; i < p->spec.num_ops && !failed; i++)
        failed |= reserve_op(p, &p->spec.ops[i], rows);
    return failed ? -1 : 0;
}

static int count_rows(const ft_forward_args *args) {
    int rows = 0;
    for (int s = 0; s < args->num_segments; s++) rows += args->segments[s].rows;
    return rows;
}

static void place_rows(ft_program *p) {
    ft_row *row = p->row_info.data;
    for (int s = 0; s < p->args->num_segments; s++) {
        const ft_segment *segment = &p->args->segments[s];
        for (int i = 0; i < segment->rows; i++)
            *row++ = (ft_row){.segment = s, .offset = i,
                              .position = segment->start + (p->spec.grows_cache ? i : 0)};
    }
}

/* Cosines and sines of every row, once per forward: angles in double, so far positions stay exact. */
static void fill_angles(void *arg, int begin, int end, int thread) {
    ft_program *p = arg;
    (void)thread;
    for (int r = begin; r < end; r++) {
        const double position = (double)((const ft_row *)p->row_info.data)[r].position;
        for (int t = 0; t < p->spec.num_ropes; t++) {
            const ft_rope *rope = &p->spec.ropes[t];
            const size_t at = ((size_t)t * (size_t)p->rows + (size_t)r) * (size_t)p->max_pairs;
            float *cosine = (float *)p->cosines.data + at, *sine = (float *)p->sines.data + at;
            for (int i = 0; i < rope->pairs; i++) {
                const double angle = position * rope->inv_freq[i];
                cosine[i] = (float)(cos(angle) * rope->mscale);
                sine[i] = (float)(sin(angle) * rope->mscale);
            }
        }
    }
}

void ft_look_up(const ft_program *p, const ft_matrix *table, int64_t row, float *out, int thread) {
    if (table->groups > 0) {
        ft_unpack_row(table, row, out);
        return;
    }
    uint8_t *packed = ft_thread_scratch(p, thread);
    const ft_matrix one = {table->type, 1, table->cols, 1, ft_group_bytes(table->type, table->cols), packed};
    ft_pack(table->type, table->data + row * table->group_bytes, 1, table->cols, packed, 0, 1);
    ft_unpack_row(&one, 0, out);
}

typedef struct row_job {
    ft_program *p;
    const ft_op *op;
} row_job;

static void embed_rows(void *arg, int begin, int end, int thread) {
    const row_job *job = arg;
    const ft_program *p = job->p;
    const int64_t stride = ft_stride(p, job->op->dst);
    for (int r = begin; r < end; r++) {
        float *out = ft_register(p, job->op->dst) + r * stride;
        ft_look_up(p, job->op->matrices, p->args->token_ids[r], out, thread);
        if (job->op->factor != 1.0)
            p->vec->scale(out, (float)job->op->factor, job->op->matrices->cols);
        if (job->op->kind == FT_OP_EMBED_WITH_HIDDEN) {
            const int cols = job->op->matrices->cols, given = p->spec.widths[job->op->dst] - cols;
            memcpy(out + cols, p->args->given + (int64_t)r * given, sizeof(float) * (size_t)given);
        }
    }
}

static void scale_rows(void *arg, int begin, int end, int thread) {
    const row_job *job = arg;
    const ft_program *p = job->p;
    const int dst = job->op->dst;
    (void)thread;
    for (int r = begin; r < end; r++)
        p->vec->scale(ft_register(p, dst) + r * ft_stride(p, dst), (float)job->op->factor,
                      p->spec.widths[dst]);
}

static void run_op(ft_program *p, const ft_op *op) {
    row_job job = {p, op};
    switch (op->kind) {
    case FT_OP_EMBED:
    case FT_OP_EMBED_WITH_HIDDEN: ft_pool_ranges(p->pool, p->rows, 8, embed_rows, &job); break;
    case FT_OP_SCALE: ft_pool_ranges(p->pool, p->rows, 8, scale_rows, &job); break;
    case FT_OP_PROJECT: ft_run_project(p, op); break;
    case FT_OP_PROJECT_ADD: ft_run_project_add(p, op); break;
    case FT_OP_ATTENTION: ft_run_attention(p, op); break;
    case FT_OP_GATED_FFN:
        ft_ffn(p, op, ft_register(p, op->dst), ft_register(p, op->dst), ft_stride(p, op->dst));
        break;
    case FT_OP_MOE_FFN: ft_run_moe(p, op); break;
    case FT_OP_HEAD: ft_run_head(p, op); break;
    case FT_OP_PER_LAYER_INPUTS: ft_run_per_layer_inputs(p, op); break;
    case FT_OP_PER_LAYER_ADD: ft_run_per_layer_add(p, op); break;
    default: break;
    }
}

int ft_forward(ft_program *p, ft_pool *pool, const ft_forward_args *args) {
    ft_pool_lock(pool);
    p->pool = pool;
    p->args = args;
    p->rows = count_rows(args);
    int result = reserve(p, pool, p->rows);
    if (result == 0) {
        place_rows(p);
        ft_pool_ranges(pool, p->rows, 16, fill_angles, p);
        int64_t before = ft_now_ns();
        for (int i = 0; i < p->spec.num_ops; i++) {
            run_op(p, &p->spec.ops[i]);
            const int64_t after = ft_now_ns();
            if (args->kind_ns) args->kind_ns[p->spec.ops[i].kind] += after - before;
            before = after;
        }
    }
    ft_pool_unlock(pool);
    return result;
}
