/* Mixture of experts: route rows, gather them expert by expert, multiply, fold back in rank order. */
#include <math.h>
#include <string.h>

#include "program.h"

/* One (row, rank) assignment; sorted by expert they are the rows of the expert matmuls. */
typedef struct moe_job {
    ft_program *p;
    const ft_op *op;
    int32_t rows, experts, used, total; /* total = rows * used */
    int64_t stride;                     /* of dst */
    float *dst;
    float *probs;      /* [rows, experts] */
    int32_t *chosen;   /* [rows, used] expert of each rank */
    float *weights;    /* [rows, used] */
    int32_t *starts;   /* [experts + 1] first sorted assignment of each expert */
    int32_t *slot_of;  /* [rows, used] sorted index of an assignment */
    int32_t *row_of;   /* [total] row of a sorted assignment */
    int32_t *active;   /* experts with rows */
    int32_t num_active;
    ft_acts acts;      /* gathered inputs, then hidden rows */
    float *gate, *up, *out;
    int64_t inner_stride, out_stride;
} moe_job;

static int inner_width(const ft_op *op) {
    const int rows = op->matrices[1].rows;
    return op->is_fused ? rows / 2 : rows;
}
static const ft_matrix *gate_of(const ft_op *op, int expert) { return &op->matrices[1 + expert]; }
static const ft_matrix *up_of(const ft_op *op, int expert) {
    return &op->matrices[1 + op->num_experts + expert];
}
static const ft_matrix *down_of(const ft_op *op, int expert) {
    return &op->matrices[1 + op->num_experts * (op->is_fused ? 1 : 2) + expert];
}

static void router_input(moe_job *job, int begin, int end) {
    const ft_program *p = job->p;
    const ft_op *op = job->op;
    const ft_norm *norm = op->router_norm.present ? &op->router_norm : &op->norm;
    const int cols = op->matrices[0].cols;
    for (int64_t r = begin; r < end; r++) {
        float *x = (float *)job->acts.x + r * job->acts.ldx;
        p->vec->rms_norm(job->dst + r * job->stride, x, norm->weight, cols, norm->eps);
        if (op->router_scale) p->vec->multiply(x, op->router_scale, cols);
    }
    if (ft_type_uses_int8(op->matrices[0].type)) p->kernels->quantize(&job->acts, begin, end);
}

static void choose_experts(const moe_job *job, int64_t row) {
    float *probs = job->probs + row * job->experts;
    float sum = 0.0f;
    job->p->vec->softmax(probs, job->experts);
    for (int j = 0; j < job->used; j++) {
        const int best = job->p->vec->argmax(probs, job->experts);
        job->chosen[row * job->used + j] = best;
        job->weights[row * job->used + j] = probs[best];
        sum += probs[best];
        probs[best] = -1.0f; /* below every probability: not chosen again */
    }
    for (int j = 0; j < job->used; j++) {
        float *weight = &job->weights[row * job->used + j];
        *weight /= sum;
        if (job->op->expert_scale) *weight *= job->op->expert_scale[job->chosen[row * job->used + j]];
    }
}

static void route_rows(void *arg, int begin, int end, int thread) {
    moe_job *job = arg;
    const ft_matrix *router = job->op->matrices;
    router_input(job, begin, end);
    job->p->kernels->matmul(router, &job->acts, begin, end, job->probs, job->experts, 0, router->groups,
                            ft_thread_scratch(job->p, thread));
    for (int r = begin; r < end; r++) choose_experts(job, r);
}

/* Counting sort by expert; rows of an expert stay in ascending order. */
static void sort_assignments(moe_job *job) {
    int32_t *starts = job->starts;
    memset(starts, 0, sizeof(int32_t) * ((size_t)job->experts + 1));
    for (int i = 0; i < job->total; i++) starts[job->chosen[i] + 1]++;
    job->num_active = 0;
    for (int e = 0; e < job->experts; e++) {
        if (starts[e + 1] > 0) job->active[job->num_active++] = e;
        starts[e + 1] += starts[e];
    }
    int32_t *next = job->active + job->experts;
    memcpy(next, starts, sizeof(int32_t) * (size_t)job->experts);
    for (int i = 0; i < job->total; i++) {
        const int at = next[job->chosen[i]]++;
        job->slot_of[i] = at;
        job->row_of[at] = i / job->used;
    }
}

static void gather_rows(void *arg, int begin, int end, int thread) {
    moe_job *job = arg;
    const ft_program *p = job->p;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        const float *src = job->dst + job->row_of[i] * job->stride;
        p->vec->rms_norm(src, (float *)job->acts.x + i * job->acts.ldx, job->op->norm.weight,
                         job->acts.cols, job->op->norm.eps);
    }
    if (ft_type_uses_int8(gate_of(job->op, 0)->type)) p->kernels->quantize(&job->acts, begin, end);
}

/* Items of an expert phase: (active expert, piece of its groups). */
typedef struct expert_piece {
    int32_t expert, first, last, g0, g1; /* rows first .. last of the sorted assignments */
} expert_piece;

#define EXPERT_PIECES 4

static expert_piece piece_of(const moe_job *job, int item, int groups) {
    const int expert = job->active[item / EXPERT_PIECES], part = item % EXPERT_PIECES;
    return (expert_piece){expert, job->starts[expert], job->starts[expert + 1],
                          groups * part / EXPERT_PIECES, groups * (part + 1) / EXPERT_PIECES};
}

static void activate_columns(const moe_job *job, const expert_piece *e, int from, int n) {
    for (int64_t r = e->first; r < e->last; r++) {
        float *gate = job->gate + r * job->inner_stride + from;
        job->p->vec->activate(job->op->activation, gate, job->up + r * job->inner_stride + from, n);
    }
}

static void split_experts(void *arg, int begin, int end, int thread) {
    const moe_job *job = arg;
    const ft_program *p = job->p;
    for (int item = begin; item < end; item++) {
        const ft_matrix *gate = gate_of(job->op, job->active[item / EXPERT_PIECES]);
        const expert_piece e = piece_of(job, item, gate->groups);
        const ft_matrix *up = up_of(job->op, e.expert);
        if (e.g0 == e.g1) continue;
        p->kernels->matmul(gate, &job->acts, e.first, e.last, job->gate, job->inner_stride, e.g0, e.g1,
                           ft_thread_scratch(p, thread));
        p->kernels->matmul(up, &job->acts, e.first, e.last, job->up, job->inner_stride, e.g0, e.g1,
                           ft_thread_scratch(p, thread));
        const int from = e.g0 * FT_GROUP;
        activate_columns(job, &e, from, ft_least(e.g1 * FT_GROUP, gate->rows) - from);
    }
}

static void fused_experts(void *arg, int begin, int end, int thread) {
    const moe_job *job = arg;
    for (int item = begin; item < end; item++) {
        const ft_matrix *w = gate_of(job->op, job->active[item / EXPERT_PIECES]);
        const expert_piece e = piece_of(job, item, w->groups);
        if (e.g0 < e.g1)
            job->p->kernels->matmul(w, &job->acts, e.first, e.last, job->up, 2 * job->inner_stride,
                                    e.g0, e.g1, ft_thread_scratch(job->p, thread));
    }
}

static void activate_fused(void *arg, int begin, int end, int thread) {
    const moe_job *job = arg;
    const int inner = inner_width(job->op);
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        const float *both = job->up + i * 2 * job->inner_stride;
        float *gate = job->gate + i * job->inner_stride;
        memcpy(gate, both, sizeof(float) * (size_t)inner);
        job->p->vec->activate(job->op->activation, gate, both + inner, inner);
    }
}

static void down_experts(void *arg, int begin, int end, int thread) {
    const moe_job *job = arg;
    for (int item = begin; item < end; item++) {
        const ft_matrix *w = down_of(job->op, job->active[item / EXPERT_PIECES]);
        const expert_piece e = piece_of(job, item, w->groups);
        if (e.g0 < e.g1)
            job->p->kernels->matmul(w, &job->acts, e.first, e.last, job->out, job->out_stride, e.g0,
                                    e.g1, ft_thread_scratch(job->p, thread));
    }
}

static void fold_rows(void *arg, int begin, int end, int thread) {
    const moe_job *job = arg;
    const ft_program *p = job->p;
    const ft_op *op = job->op;
    const int width = down_of(op, 0)->rows;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        float *sum = (float *)p->wide.data + r * job->out_stride;
        memset(sum, 0, sizeof(float) * (size_t)width);
        for (int j = 0; j < job->used; j++)
            p->vec->add_scaled(sum, job->out + job->slot_of[r * job->used + j] * job->out_stride,
                               job->weights[r * job->used + j], width);
        if (op->experts_post_norm.present)
            p->vec->rms_norm(sum, sum, op->experts_post_norm.weight, width, op->experts_post_norm.eps);
        if (op->dense) p->vec->add(sum, (float *)p->branch.data + r * job->out_stride, width);
        if (op->post_norm.present)
            p->vec->rms_norm(sum, sum, op->post_norm.weight, width, op->post_norm.eps);
        p->vec->add(job->dst + r * job->stride, sum, width);
    }
}

static moe_job describe(ft_program *p, const ft_op *op) {
    moe_job job = {.p = p, .op = op, .rows = p->rows, .experts = op->num_experts, .used = op->num_used,
                   .stride = ft_stride(p, op->dst), .dst = ft_register(p, op->dst)};
    const size_t total = (size_t)p->rows * (size_t)op->num_used, experts = (size_t)op->num_experts;
    job.total = (int32_t)total;
    job.probs = p->routing.data;
    job.weights = job.probs + (size_t)p->rows * experts;
    job.chosen = (int32_t *)(job.weights + total);
    job.slot_of = job.chosen + total;
    job.row_of = job.slot_of + total;
    job.starts = job.row_of + total;
    job.active = job.starts + experts + 1; /* and as many cursors behind it */
    job.gate = p->inner.x.data;
    job.up = p->expert_rows.data;
    job.out = p->out.data;
    job.inner_stride = ft_pad16(inner_width(op));
    job.out_stride = ft_pad16(down_of(op, 0)->rows);
    return job;
}

static void run_experts(moe_job *job) {
    ft_program *p = job->p;
    const int items = job->num_active * EXPERT_PIECES, inner = inner_width(job->op);
    job->acts = ft_acts_of(&p->normed, NULL, 0, gate_of(job->op, 0)->cols);
    ft_pool_ranges(p->pool, job->total, ft_row_grain(job->acts.cols), gather_rows, job);
    if (job->op->is_fused) {
        ft_pool_ranges(p->pool, items, 1, fused_experts, job);
        ft_pool_ranges(p->pool, job->total, ft_row_grain(inner), activate_fused, job);
    } else {
        ft_pool_ranges(p->pool, items, 1, split_experts, job);
    }
    job->acts = ft_acts_of(&p->inner, NULL, 0, inner);
    ft_quantize_input(p, &job->acts, down_of(job->op, 0), job->total);
    ft_pool_ranges(p->pool, items, 1, down_experts, job);
}

void ft_run_moe(ft_program *p, const ft_op *op) {
    moe_job job = describe(p, op);
    if (op->dense) {
        memset(p->branch.data, 0, (size_t)p->rows * (size_t)job.out_stride * sizeof(float));
        ft_ffn(p, op->dense, job.dst, p->branch.data, job.out_stride);
    }
    job.acts = ft_acts_of(&p->normed, NULL, 0, op->matrices[0].cols);
    ft_pool_ranges(p->pool, p->rows, 8, route_rows, &job);
    sort_assignments(&job);
    run_experts(&job);
    ft_pool_ranges(p->pool, p->rows, ft_row_grain((int)job.out_stride), fold_rows, &job);
}

int ft_reserve_moe(ft_program *p, const ft_op *op, int rows) {
    const int total = rows * op->num_used, inner = inner_width(op), out = down_of(op, 0)->rows;
    const size_t t = (size_t)total, inner_bytes = (size_t)ft_pad16(inner) * sizeof(float);
    const size_t out_bytes = (size_t)ft_pad16(out) * sizeof(float);
    const size_t words = (size_t)rows * (size_t)op->num_experts + 4 * t + 3 * (size_t)op->num_experts + 1;
    int failed = ft_input_reserve(&p->normed, total, op->matrices[0].cols);
    failed |= ft_input_reserve(&p->inner, total, inner);
    failed |= ft_buffer_reserve(&p->routing, words * sizeof(float));
    failed |= ft_buffer_reserve(&p->expert_rows, t * 2 * inner_bytes);
    failed |= ft_buffer_reserve(&p->out, t * out_bytes);
    failed |= ft_buffer_reserve(&p->wide, (size_t)rows * out_bytes);
    failed |= ft_buffer_reserve(&p->branch, (size_t)rows * out_bytes);
    if (op->dense) failed |= ft_reserve_matmul(p, op->dense, rows);
    return failed;
}
