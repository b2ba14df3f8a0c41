/* Operations around matrices: projections, the gated FFN and the head. */
#include <math.h>
#include <string.h>

#include "program.h"

/* A piece is a third of a thread's share, at most this many bytes of weights: 20 us of one core's
 * bandwidth, so that a preempted thread holds up little. Setting up a call costs about a group's
 * work (18 % of a prefill in pieces of 4 groups), hence the least size with many rows. */
#define PIECES_PER_THREAD 3
#define PIECE_BYTES (256 << 10)
#define LEAST_GROUPS 16

int ft_row_grain(int width) {
    const int grain = 4096 / (width > 0 ? width : 1);
    return grain > 1 ? grain : 1;
}

int ft_group_grain(const ft_program *p, int groups, int64_t group_bytes, int rows) {
    const int pieces = PIECES_PER_THREAD * ft_pool_threads(p->pool);
    int most = (int)(PIECE_BYTES / (group_bytes > 0 ? group_bytes : 1));
    if (rows > 4 && most < LEAST_GROUPS) most = LEAST_GROUPS;
    const int grain = ft_least((groups + pieces - 1) / pieces, most);
    return grain > 1 ? grain : 1;
}

/* ---- inputs ---- */

typedef struct prepare_job {
    ft_program *p;
    const ft_norm *norm;
    const float *src;
    int64_t stride;
    ft_acts acts;
    int quantize;
} prepare_job;

static void prepare_rows(void *arg, int begin, int end, int thread) {
    prepare_job *job = arg;
    (void)thread;
    if (job->norm->present) {
        for (int r = begin; r < end; r++)
            job->p->vec->rms_norm(job->src + r * job->stride, (float *)job->acts.x + r * job->acts.ldx,
                                  job->norm->weight, job->acts.cols, job->norm->eps);
    }
    if (job->quantize) job->p->kernels->quantize(&job->acts, begin, end);
}

static int any_int8(const ft_matrix *matrices, int num_matrices) {
    for (int i = 0; i < num_matrices; i++)
        if (ft_type_uses_int8(matrices[i].type)) return 1;
    return 0;
}

ft_acts ft_prepare(ft_program *p, const ft_norm *norm, const float *src, int64_t stride,
                   const ft_matrix *matrices, int num_matrices, int rows) {
    prepare_job job = {
        .p = p, .norm = norm, .src = src, .stride = stride,
        .acts = ft_acts_of(&p->normed, norm->present ? NULL : src, stride, matrices->cols),
        .quantize = any_int8(matrices, num_matrices),
    };
    ft_pool_ranges(p->pool, rows, ft_row_grain(matrices->cols), prepare_rows, &job);
    return job.acts;
}

void ft_quantize_input(ft_program *p, const ft_acts *acts, const ft_matrix *w, int rows) {
    const ft_norm none = {0};
    prepare_job job = {.p = p, .norm = &none, .acts = *acts, .quantize = any_int8(w, 1)};
    ft_pool_ranges(p->pool, rows, ft_row_grain(acts->cols), prepare_rows, &job);
}

/* ---- several matrices side by side ---- */

typedef struct project_job {
    ft_program *p;
    const ft_op *op;
    ft_acts acts;
    float *y;
    int64_t stride;
} project_job;

static void add_bias(const ft_program *p, const float *bias, float *y, int64_t stride, int rows, int n) {
    for (int r = 0; r < rows; r++) p->vec->add(y + r * stride, bias, n);
}

static void project_groups(void *arg, int begin, int end, int thread) {
    const project_job *job = arg;
    const ft_program *p = job->p;
    int first = 0, column = 0;
    for (int i = 0; i < job->op->num_matrices; i++) {
        const ft_matrix *w = &job->op->matrices[i];
        const int g0 = begin > first ? begin - first : 0, g1 = ft_least(end - first, w->groups);
        if (g0 < g1) {
            float *y = job->y + column;
            p->kernels->matmul(w, &job->acts, 0, p->rows, y, job->stride, g0, g1,
                               ft_thread_scratch(p, thread));
            const float *bias = job->op->biases ? job->op->biases[i] : NULL;
            const int from = g0 * FT_GROUP, to = ft_least(g1 * FT_GROUP, w->rows);
            if (bias) add_bias(p, bias + from, y + from, job->stride, p->rows, to - from);
        }
        first += w->groups;
        column += w->rows;
    }
}

static int total_groups(const ft_matrix *matrices, int num_matrices) {
    int groups = 0;
    for (int i = 0; i < num_matrices; i++) groups += matrices[i].groups;
    return groups;
}

void ft_run_project(ft_program *p, const ft_op *op) {
    const ft_matrix *w = op->matrices;
    project_job job = {.p = p, .op = op, .y = ft_register(p, op->dst), .stride = ft_stride(p, op->dst)};
    job.acts = ft_prepare(p, &op->norm, ft_register(p, op->src), ft_stride(p, op->src), w,
                          op->num_matrices, p->rows);
    const int groups = total_groups(w, op->num_matrices);
    ft_pool_ranges(p->pool, groups, ft_group_grain(p, groups, w->group_bytes, p->rows), project_groups,
                   &job);
}

/* ---- into the residual stream ---- */

typedef struct add_job {
    ft_program *p;
    const ft_acts *acts;
    const ft_matrix *w;
    const float *bias;
    const ft_norm *post_norm;
    float *out, *dst;
    int64_t out_stride, stride;
    int rows;
} add_job;

static void add_groups(void *arg, int begin, int end, int thread) {
    const add_job *job = arg;
    const ft_program *p = job->p;
    const int from = begin * FT_GROUP, n = ft_least(end * FT_GROUP, job->w->rows) - from;
    p->kernels->matmul(job->w, job->acts, 0, job->rows, job->out, job->out_stride, begin, end,
                       ft_thread_scratch(p, thread));
    for (int r = 0; r < job->rows; r++) {
        float *y = job->out + r * job->out_stride + from;
        if (job->bias) p->vec->add(y, job->bias + from, n);
        if (!job->post_norm->present) p->vec->add(job->dst + r * job->stride + from, y, n);
    }
}

static void add_normed_rows(void *arg, int begin, int end, int thread) {
    const add_job *job = arg;
    const ft_norm *norm = job->post_norm;
    (void)thread;
    for (int r = begin; r < end; r++) {
        float *y = job->out + r * job->out_stride;
        job->p->vec->rms_norm(y, y, norm->weight, job->w->rows, norm->eps);
        job->p->vec->add(job->dst + r * job->stride, y, job->w->rows);
    }
}

void ft_multiply_add(ft_program *p, const ft_acts *acts, const ft_matrix *w, const float *bias,
                     const ft_norm *post_norm, float *dst, int64_t stride, int rows) {
    add_job job = {.p = p, .acts = acts, .w = w, .bias = bias, .post_norm = post_norm,
                   .out = p->out.data, .out_stride = ft_pad16(w->rows), .dst = dst,
                   .stride = stride, .rows = rows};
    ft_pool_ranges(p->pool, w->groups, ft_group_grain(p, w->groups, w->group_bytes, rows), add_groups,
                   &job);
    if (post_norm->present)
        ft_pool_ranges(p->pool, rows, ft_row_grain(w->rows), add_normed_rows, &job);
}

void ft_run_project_add(ft_program *p, const ft_op *op) {
    const ft_norm none = {0};
    const ft_acts acts = ft_prepare(p, &none, ft_register(p, op->src), ft_stride(p, op->src),
                                    op->matrices, 1, p->rows);
    ft_multiply_add(p, &acts, op->matrices, op->biases ? op->biases[0] : NULL, &op->post_norm,
                    ft_register(p, op->dst), ft_stride(p, op->dst), p->rows);
}

/* ---- gated FFN ---- */

typedef struct gate_job {
    ft_program *p;
    const ft_op *op;
    ft_acts acts;
    float *gate, *up;
    int64_t stride;
} gate_job;

static void gate_groups(void *arg, int begin, int end, int thread) {
    const gate_job *job = arg;
    const ft_program *p = job->p;
    const ft_matrix *gate = &job->op->matrices[0], *up = &job->op->matrices[1];
    void *scratch = ft_thread_scratch(p, thread);
    const int from = begin * FT_GROUP, n = ft_least(end * FT_GROUP, gate->rows) - from;
    p->kernels->matmul(gate, &job->acts, 0, p->rows, job->gate, job->stride, begin, end, scratch);
    p->kernels->matmul(up, &job->acts, 0, p->rows, job->up, job->stride, begin, end, scratch);
    for (int64_t r = 0; r < p->rows; r++)
        p->vec->activate(job->op->activation, job->gate + r * job->stride + from,
                         job->up + r * job->stride + from, n);
}

void ft_ffn(ft_program *p, const ft_op *op, const float *src, float *dst, int64_t stride) {
    const ft_matrix *gate = &op->matrices[0], *down = &op->matrices[2];
    gate_job job = {.p = p, .op = op, .gate = p->inner.x.data, .up = p->wide.data,
                    .stride = ft_pad16(gate->rows)};
    job.acts = ft_prepare(p, &op->norm, src, stride, op->matrices, 2, p->rows);
    const int grain = ft_group_grain(p, gate->groups, 2 * gate->group_bytes, p->rows);
    ft_pool_ranges(p->pool, gate->groups, grain, gate_groups, &job);
    const ft_acts inner = ft_acts_of(&p->inner, NULL, 0, gate->rows);
    ft_quantize_input(p, &inner, down, p->rows);
    ft_multiply_add(p, &inner, down, NULL, &op->post_norm, dst, stride, p->rows);
}

/* ---- head ---- */

typedef struct head_job {
    ft_program *p;
    const ft_op *op;
    ft_acts acts;
    int rows; /* rows of acts: the wanted ones, and behind them their rounding errors */
    int grain;
} head_job;

static void normed_row(const ft_program *p, const ft_op *op, int row, float *out) {
    const float *src = ft_register(p, op->src) + row * ft_stride(p, op->src);
    p->vec->rms_norm(src, out, op->norm.weight, op->matrices->cols, op->norm.eps);
}

static void hidden_rows(void *arg, int begin, int end, int thread) {
    const head_job *job = arg;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        normed_row(job->p, job->op, (int)r, job->p->args->hidden + r * job->p->spec.hidden_size);
}

static void projected_groups(void *arg, int begin, int end, int thread) {
    const head_job *job = arg;
    const ft_program *p = job->p;
    p->kernels->matmul(&job->op->matrices[1], &job->acts, 0, p->rows, p->args->hidden,
                       p->spec.hidden_size, begin, end, ft_thread_scratch(p, thread));
}

static void project_hidden(head_job *job) {
    ft_program *p = job->p;
    const ft_op *op = job->op;
    const ft_matrix *w = &op->matrices[1];
    job->acts = ft_prepare(p, &op->norm, ft_register(p, op->src), ft_stride(p, op->src), w, 1, p->rows);
    ft_pool_ranges(p->pool, w->groups, ft_group_grain(p, w->groups, w->group_bytes, p->rows),
                   projected_groups, job);
}

/* What int8 lost of a row becomes a row of its own, so that the head sees about 15 bits. */
static void error_row(const ft_acts *acts, int row, float *out) {
    const float *x = acts->x + row * acts->ldx;
    const int8_t *q = acts->q + (int64_t)row * acts->blocks * FT_BLOCK;
    const float *scale = acts->scale + (int64_t)row * acts->blocks;
    for (int k = 0; k < acts->cols; k++) out[k] = fmaf(-(float)q[k], scale[k / FT_BLOCK], x[k]);
}

static void wanted_rows(void *arg, int begin, int end, int thread) {
    const head_job *job = arg;
    const ft_acts *acts = &job->acts;
    const int wanted = job->p->args->num_wanted;
    float *x = (float *)acts->x;
    (void)thread;
    for (int i = begin; i < end; i++)
        normed_row(job->p, job->op, job->p->args->wanted[i], x + i * acts->ldx);
    if (any_int8(job->op->matrices, 1)) job->p->kernels->quantize(acts, begin, end);
    if (job->rows == wanted) return;
    for (int i = begin; i < end; i++) error_row(acts, i, x + (wanted + i) * acts->ldx);
    job->p->kernels->quantize(acts, wanted + begin, wanted + end);
}

static void suppress(const ft_op *op, float *logits, int from, int to) {
    int64_t low = 0, high = op->num_suppressed;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (op->suppressed[middle] < from) low = middle + 1;
        else high = middle;
    }
    for (; low < op->num_suppressed && op->suppressed[low] < to; low++)
        logits[op->suppressed[low]] = -INFINITY;
}

static void head_groups(void *arg, int begin, int end, int thread) {
    const head_job *job = arg;
    const ft_program *p = job->p;
    const ft_matrix *w = job->op->matrices;
    const int wanted = p->args->num_wanted, from = begin * FT_GROUP;
    const int to = ft_least(end * FT_GROUP, w->rows), vocab = p->spec.vocab_size;
    int32_t *best = (int32_t *)p->best.data + (int64_t)(begin / job->grain) * wanted;
    p->kernels->matmul(w, &job->acts, 0, job->rows, p->args->logits, vocab, begin, end,
                       ft_thread_scratch(p, thread));
    for (int64_t i = 0; i < wanted; i++) {
        float *logits = p->args->logits + i * vocab;
        if (job->rows > wanted)
            p->vec->add(logits + from, logits + (int64_t)wanted * vocab + from, to - from);
        if (job->op->factor > 0) p->vec->softcap(logits + from, (float)job->op->factor, to - from);
        suppress(job->op, logits, from, to);
        best[i] = from + p->vec->argmax(logits + from, to - from);
    }
}

static int head_rows(const ft_program *p, const ft_op *op) {
    return op->takes_errors ? 2 * p->args->num_wanted : p->args->num_wanted;
}
static int head_grain(const ft_program *p, const ft_op *op) {
    return ft_group_grain(p, op->matrices->groups, op->matrices->group_bytes, head_rows(p, op));
}
static int head_pieces(const ft_program *p, const ft_op *op) {
    return ft_pool_threads(p->pool) == 1 ? 1 : (op->matrices->groups - 1) / head_grain(p, op) + 1;
}

static void fold_best(const ft_program *p, int pieces) {
    const int wanted = p->args->num_wanted;
    const int32_t *best = p->best.data;
    for (int64_t i = 0; i < wanted; i++) {
        const float *logits = p->args->logits + i * p->spec.vocab_size;
        int32_t top = best[i];
        for (int64_t c = 1; c < pieces && !isnan(logits[top]); c++) {
            const int32_t id = best[c * wanted + i];
            if (logits[id] > logits[top] || isnan(logits[id])) top = id;
        }
        p->args->argmax[i] = top;
    }
}

void ft_run_head(ft_program *p, const ft_op *op) {
    const int wanted = p->args->num_wanted;
    head_job job = {.p = p, .op = op, .acts = ft_acts_of(&p->normed, NULL, 0, op->matrices->cols),
                    .rows = head_rows(p, op)};
    const int rows_grain = ft_row_grain(op->matrices->cols);
    if (p->args->hidden && op->num_matrices > 1) project_hidden(&job);
    else if (p->args->hidden) ft_pool_ranges(p->pool, p->rows, rows_grain, hidden_rows, &job);
    if (wanted == 0) return;
    ft_pool_ranges(p->pool, wanted, rows_grain, wanted_rows, &job);
    job.grain = head_grain(p, op);
    const int pieces = head_pieces(p, op);
    ft_pool_ranges(p->pool, op->matrices->groups, job.grain, head_groups, &job);
    fold_best(p, pieces);
}

/* ---- memory ---- */

int ft_reserve_matmul(ft_program *p, const ft_op *op, int rows) {
    const ft_matrix *w = op->matrices;
    const size_t r = (size_t)rows;
    const int inputs = op->kind == FT_OP_HEAD && head_rows(p, op) > rows ? head_rows(p, op) : rows;
    int failed = ft_input_reserve(&p->normed, inputs, w->cols);
    if (op->kind == FT_OP_HEAD)
        return failed | ft_buffer_reserve(&p->best, (size_t)p->args->num_wanted *
                                                        (size_t)head_pieces(p, op) * sizeof(int32_t));
    if (op->kind == FT_OP_GATED_FFN) {
        const size_t inner = (size_t)ft_pad16(w->rows);
        failed |= ft_input_reserve(&p->inner, rows, w->rows);
        failed |= ft_buffer_reserve(&p->wide, r * inner * sizeof(float));
        w = &op->matrices[2];
    }
    if (op->kind != FT_OP_PROJECT)
        failed |= ft_buffer_reserve(&p->out, r * (size_t)ft_pad16(w->rows) * sizeof(float));
    return failed;
}
