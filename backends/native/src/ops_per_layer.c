/* Per-layer embeddings: every layer's own small input, looked up and projected once per forward. */
#include "program.h"

typedef struct layer_job {
    ft_program *p;
    const ft_op *op;
    ft_acts acts;
    float *y;       /* matmul output rows */
    int64_t stride; /* of y */
} layer_job;

static void multiply_groups(void *arg, int begin, int end, int thread) {
    const layer_job *job = arg;
    job->p->kernels->matmul(job->op->matrices, &job->acts, 0, job->p->rows, job->y, job->stride, begin,
                            end, ft_thread_scratch(job->p, thread));
}

static void multiply(layer_job *job, int src) {
    ft_program *p = job->p;
    const ft_matrix *w = job->op->matrices;
    const ft_norm none = {0};
    job->acts = ft_prepare(p, &none, ft_register(p, src), ft_stride(p, src), w, 1, p->rows);
    ft_pool_ranges(p->pool, w->groups, ft_group_grain(p, w->groups, w->group_bytes, p->rows),
                   multiply_groups, job);
}

static void mix_rows(void *arg, int begin, int end, int thread) {
    const layer_job *job = arg;
    const ft_program *p = job->p;
    const ft_op *op = job->op;
    const int width = op->matrices[0].rows;
    for (int64_t r = begin; r < end; r++) {
        float *y = job->y + r * job->stride, *looked_up = (float *)p->wide.data + r * ft_pad16(width);
        p->vec->scale(y, (float)op->proj_factor, width);
        for (int at = 0; at < width; at += op->part)
            p->vec->rms_norm(y + at, y + at, op->norm.weight, op->part, op->norm.eps);
        ft_look_up(p, &op->matrices[1], p->args->token_ids[r], looked_up, thread);
        p->vec->add_scaled(y, looked_up, (float)op->table_factor, width);
        p->vec->scale(y, (float)op->factor, width);
    }
}

void ft_run_per_layer_inputs(ft_program *p, const ft_op *op) {
    layer_job job = {.p = p, .op = op, .y = ft_register(p, op->dst), .stride = ft_stride(p, op->dst)};
    multiply(&job, op->src);
    ft_pool_ranges(p->pool, p->rows, ft_row_grain(op->matrices[0].rows), mix_rows, &job);
}

static void gate_rows(void *arg, int begin, int end, int thread) {
    const layer_job *job = arg;
    const ft_program *p = job->p;
    const ft_op *op = job->op;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        p->vec->activate(op->activation, job->y + r * job->stride,
                         ft_register(p, op->src) + r * ft_stride(p, op->src) + op->offset, op->part);
}

void ft_run_per_layer_add(ft_program *p, const ft_op *op) {
    layer_job job = {.p = p, .op = op, .y = p->inner.x.data, .stride = ft_pad16(op->part)};
    multiply(&job, op->dst);
    ft_pool_ranges(p->pool, p->rows, ft_row_grain(op->part), gate_rows, &job);
    const ft_acts inner = ft_acts_of(&p->inner, NULL, 0, op->part);
    ft_quantize_input(p, &inner, &op->matrices[1], p->rows);
    ft_multiply_add(p, &inner, &op->matrices[1], NULL, &op->post_norm, ft_register(p, op->dst),
                    ft_stride(p, op->dst), p->rows);
}

int ft_reserve_per_layer(ft_program *p, const ft_op *op, int rows) {
    const size_t r = (size_t)rows;
    const int width = op->matrices[0].rows;
    int failed = ft_input_reserve(&p->normed, rows, op->matrices[0].cols);
    if (op->kind == FT_OP_PER_LAYER_INPUTS)
        return failed | ft_buffer_reserve(&p->wide, r * (size_t)ft_pad16(width) * sizeof(float));
    failed |= ft_input_reserve(&p->inner, rows, op->part);
    return failed | ft_buffer_reserve(&p->out, r * (size_t)ft_pad16(op->matrices[1].rows) * sizeof(float));
}
