/* A model's forward pass as an array of operations, run for many rows by one call.
 *
 * Mirrors backends/program.py; backends/native/library.py builds these structs by ctypes and checks
 * their sizes against ft_struct_bytes(). Rows of several chats may share a forward.
 */
#ifndef FT_PROGRAM_H
#define FT_PROGRAM_H

#include "foretell.h"
#include "pool.h"
#include "rows.h"

enum ft_op_kind {
    FT_OP_EMBED, FT_OP_PROJECT, FT_OP_ATTENTION, FT_OP_PROJECT_ADD, FT_OP_GATED_FFN, FT_OP_MOE_FFN,
    FT_OP_SCALE, FT_OP_HEAD, FT_OP_PER_LAYER_INPUTS, FT_OP_PER_LAYER_ADD, FT_OP_EMBED_WITH_HIDDEN,
    FT_NUM_OP_KINDS
};

typedef struct ft_norm {
    const float *weight; /* NULL multiplies by one */
    float eps;
    int32_t present;
} ft_norm;

typedef struct ft_rope {
    const double *inv_freq; /* [pairs] */
    int32_t pairs, interleaved;
    double mscale;
} ft_rope;

typedef struct ft_op {
    int32_t kind, src, dst, num_matrices;
    const ft_matrix *matrices; /* in the order of the Python fields; experts one matrix each */
    const float *const *biases; /* one pointer per matrix (NULL: none), or NULL */
    ft_norm norm, post_norm;
    double factor; /* scale of Embed, Attention, Scale; softcap of Head */
    int32_t activation;
    /* attention */
    int32_t heads, slot, rope; /* rope: index of the table, -1 none */
    int32_t writes_kv, v_from_k;
    ft_norm q_norm, k_norm, v_norm;
    /* mixture of experts: matrices = router, then per stack one per expert */
    int32_t num_experts, num_used, is_fused, experts_padding;
    ft_norm router_norm, experts_post_norm;
    const float *router_scale, *expert_scale;
    const struct ft_op *dense;
    /* head */
    const int32_t *suppressed; /* ascending */
    int64_t num_suppressed;
    /* per-layer embeddings: matrices = projection, table; or gate, proj */
    double table_factor, proj_factor;
    int32_t part, offset; /* numbers per layer; first of this layer's */
    /* head: what int8 lost of a row is multiplied too, as a row of its own */
    int32_t takes_errors, head_padding;
} ft_op;

typedef struct ft_slot {
    int32_t kv_heads, head_dim;
    int32_t window; /* 0: every position is kept */
    int32_t ring;   /* positions of the full ring; 0: linear */
} ft_slot;

typedef struct ft_program_spec {
    const ft_op *ops;
    const int32_t *widths; /* of the registers */
    const ft_slot *slots;
    const ft_rope *ropes;
    int32_t num_ops, num_registers, num_slots, num_ropes;
    int32_t vocab_size, hidden_size;
    int32_t is_f32_cache;
    int32_t grows_cache; /* 0: a drafter; its rows all stand at `start`, see what lies before, write nothing */
} ft_program_spec;

/* Where one chat keeps a slot, in blocks of 128 positions: keys [blocks, G, 8, D, 16], values
 * [blocks, G, 128, D padded]; what one kv head reads of a block is one run of memory. */
typedef struct ft_slot_memory {
    void *keys, *values;
    int64_t capacity; /* positions, a multiple of FT_KEY_BLOCK; the ring's size once it has grown */
} ft_slot_memory;

/* Rows of one chat: appended at position `start`. */
typedef struct ft_segment {
    const ft_slot_memory *slots;
    int64_t start;
    int32_t rows, padding;
} ft_segment;

typedef struct ft_forward_args {
    const int32_t *token_ids; /* all rows, segments in order */
    const ft_segment *segments;
    const int32_t *wanted; /* rows whose logits are computed, ascending */
    float *logits;         /* [2 * num_wanted, V]: the logits, and room for the head's second part */
    int32_t *argmax;       /* [num_wanted] */
    float *hidden;         /* [R, E] of every row, or NULL */
    const float *given;    /* [R, width - table width] for FT_OP_EMBED_WITH_HIDDEN, or NULL */
    int64_t *kind_ns; /* [FT_NUM_OP_KINDS]: nanoseconds by op kind are added here, or NULL */
    int32_t num_segments, num_wanted;
} ft_forward_args;

typedef struct ft_program ft_program;

ft_program *ft_program_new(const ft_program_spec *spec, const ft_kernels *kernels);
void ft_program_free(ft_program *program);
/* 0, or -1 when the activation buffers do not fit in memory (nothing has changed then). */
int ft_forward(ft_program *program, ft_pool *pool, const ft_forward_args *args);

/* ---- inside the native backend only ---- */

typedef struct ft_buffer {
    void *data;
    size_t bytes;
} ft_buffer;

/* Activations of one matmul input: float rows and their quantized form. */
typedef struct ft_input {
    ft_buffer x, q, scale, sum16;
} ft_input;

typedef struct ft_row { /* where a row of the forward belongs */
    int32_t segment;
    int32_t offset; /* within its segment */
    int64_t position;
} ft_row;

struct ft_program {
    ft_program_spec spec;
    const ft_kernels *kernels;
    const ft_rows *vec;
    ft_pool *pool; /* of the forward in progress */
    const ft_forward_args *args;
    int32_t rows;

    ft_buffer *registers; /* [num_registers] of [rows, stride] floats */
    ft_buffer row_info;   /* ft_row [rows] */
    ft_buffer cosines, sines; /* [num_ropes][rows][max_pairs] */
    int32_t max_pairs;
    int32_t unit_queries, unit_dims; /* most of one unit of attention */
    ft_input normed, inner; /* a norm's output; an FFN's hidden rows */
    ft_buffer wide, out, branch; /* matmul outputs: up rows, projections, a dense branch */
    ft_buffer partial;   /* attention blocks computed apart */
    ft_buffer best;      /* head: per piece and row the best id */
    ft_buffer routing, expert_rows; /* mixture of experts */
    ft_buffer scratch;   /* per thread */
    size_t thread_scratch;
};

/* Grow a buffer to `bytes` (64-byte aligned, contents lost); 0, or -1 without memory. */
int ft_buffer_reserve(ft_buffer *buffer, size_t bytes);
void ft_buffer_free(ft_buffer *buffer);

static inline int ft_pad16(int n) { return (n + 15) & ~15; }
static inline int ft_least(int a, int b) { return a < b ? a : b; }
static inline int64_t ft_stride(const ft_program *p, int reg) { return ft_pad16(p->spec.widths[reg]); }
static inline float *ft_register(const ft_program *p, int reg) { return p->registers[reg].data; }
static inline void *ft_thread_scratch(const ft_program *p, int thread) {
    return (uint8_t *)p->scratch.data + (size_t)thread * p->thread_scratch;
}

/* Rows of an input view as the matmul wants them. `x` NULL: the input's own float rows. */
ft_acts ft_acts_of(ft_input *input, const float *x, int64_t stride, int cols);
int ft_input_reserve(ft_input *input, int rows, int cols);
void ft_input_free(ft_input *input);

/* out[0 .. cols) = row of a table: packed, or (groups 0) in the file's layout, rows group_bytes apart. */
void ft_look_up(const ft_program *p, const ft_matrix *table, int64_t row, float *out, int thread);

/* Row pieces of about 4096 numbers, so that a few short rows stay on the calling thread. */
int ft_row_grain(int width);
/* Groups of one piece of a matmul of `groups` groups by `rows` rows. */
int ft_group_grain(const ft_program *p, int groups, int64_t group_bytes, int rows);

/* Norm (if present) and quantize rows of src for `matrices`; the view to multiply by. */
ft_acts ft_prepare(ft_program *p, const ft_norm *norm, const float *src, int64_t stride,
                   const ft_matrix *matrices, int num_matrices, int rows);
void ft_quantize_input(ft_program *p, const ft_acts *acts, const ft_matrix *w, int rows);
/* dst += post_norm(w @ acts + bias) */
void ft_multiply_add(ft_program *p, const ft_acts *acts, const ft_matrix *w, const float *bias,
                     const ft_norm *post_norm, float *dst, int64_t stride, int rows);
/* FFN rows of norm(src) through gate, up, down: dst += post_norm(...). */
void ft_ffn(ft_program *p, const ft_op *op, const float *src, float *dst, int64_t stride);

void ft_run_project(ft_program *p, const ft_op *op);
void ft_run_project_add(ft_program *p, const ft_op *op);
void ft_run_attention(ft_program *p, const ft_op *op);
void ft_run_moe(ft_program *p, const ft_op *op);
void ft_run_head(ft_program *p, const ft_op *op);
void ft_run_per_layer_inputs(ft_program *p, const ft_op *op);
void ft_run_per_layer_add(ft_program *p, const ft_op *op);

/* Memory the operation needs for `rows` rows; 0, or -1 without memory. */
int ft_reserve_matmul(ft_program *p, const ft_op *op, int rows);
int ft_reserve_attention(ft_program *p, const ft_op *op, int rows);
int ft_reserve_moe(ft_program *p, const ft_op *op, int rows);
int ft_reserve_per_layer(ft_program *p, const ft_op *op, int rows);
/* Set unit_queries and unit_dims; the scratch bytes a thread then needs. */
size_t ft_plan_attention(ft_program *p);

#endif
