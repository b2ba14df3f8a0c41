/* Whole forwards without Python: for sanitizers, emulators and other processors.
 *
 * Runs one random model (attention over a ring and a linear cache, a gated FFN, experts) with every
 * kernel set and several thread counts, in one piece and row by row; all logits must be the same
 * bits, and the printed checksum is the same on every processor.
 *
 * Build and run from the repository root (add -fsanitize=address,undefined or -fsanitize=thread):
 *   cc -O3 -std=gnu11 -ffp-contract=off -Ibackends/native/src tests/native/check_program.c \
 *      backends/native/src/[a-z]*.c -lm -lpthread -o /tmp/check_program && /tmp/check_program
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "program.h"

enum { WIDTH = 96, HEADS = 6, KV = 2, DIM = 24, FFN = 160, VOCAB = 200, WINDOW = 20, RING = 128 };
enum { EXPERTS = 5, USED = 2, LAYERS = 2, ROWS = 160, CAPACITY = 256 };
enum { Q = HEADS * DIM, K = KV * DIM };

static uint32_t state = 7;
static uint32_t draw(void) { return state = state * 1664525u + 1013904223u; }
static float uniform(void) { return (float)(draw() >> 8) / 8388608.0f - 1.0f; }

/* What a model is made of lives to the end; the leak check asks only that something points at it. */
static void *made[65536];
static int num_made;

static void *zeroed(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 127) / 64 * 64);
    memset(p, 0, bytes);
    made[num_made++ % 65536] = p;
    return p;
}

static ft_matrix random_matrix(int type, int rows, int cols) {
    const size_t row_bytes = type == FT_F32 ? (size_t)cols * 4 : (size_t)cols / 32 * 34;
    uint8_t *src = zeroed(row_bytes * (size_t)rows);
    if (type == FT_F32) {
        for (int i = 0; i < rows * cols; i++) ((float *)(void *)src)[i] = uniform() * 0.2f;
    } else {
        for (size_t i = 0; i < row_bytes * (size_t)rows; i++) src[i] = (uint8_t)(draw() >> 24);
        for (size_t i = 0; i < row_bytes * (size_t)rows; i += 34) src[i] = 0x40, src[i + 1] = 0x16;
    }
    ft_matrix w = {type, rows, cols, (rows + FT_GROUP - 1) / FT_GROUP, ft_group_bytes(type, cols), NULL};
    uint8_t *packed = zeroed((size_t)w.groups * (size_t)w.group_bytes);
    ft_pack(type, src, rows, cols, packed, 0, w.groups);
    free(src);
    w.data = packed;
    return w;
}

static ft_norm random_norm(int width) {
    float *weight = zeroed((size_t)width * 4);
    for (int i = 0; i < width; i++) weight[i] = 1.0f + 0.3f * uniform();
    return (ft_norm){weight, 1e-6f, 1};
}

static ft_matrix *matrices(int count) { return zeroed(sizeof(ft_matrix) * (size_t)count); }

/* ops: embed, then per layer project, attention, project_add, ffn or experts; head. Registers: x, qkv, attended. */
static ft_program_spec random_program(int type) {
    static int32_t widths[3] = {WIDTH, Q + 2 * K, Q};
    static double inv_freq[DIM / 2];
    static ft_rope ropes[2] = {{inv_freq, DIM / 2, 0, 1.0}, {inv_freq, DIM / 4, 1, 1.1}};
    static const ft_slot slots[2] = {{KV, DIM, WINDOW, RING}, {KV, DIM, 0, 0}};
    ft_op *ops = zeroed(sizeof(ft_op) * (2 + 4 * LAYERS)), *op = ops;
    double frequency = 1.0;
    for (int i = 0; i < DIM / 2; i++, frequency *= 0.5) inv_freq[i] = frequency; /* exact everywhere */
    ft_matrix *table = matrices(1);
    *table = random_matrix(type, VOCAB, WIDTH);
    *op++ = (ft_op){.kind = FT_OP_EMBED, .matrices = table, .num_matrices = 1, .factor = 2.0};
    for (int layer = 0; layer < LAYERS; layer++) {
        ft_matrix *qkv = matrices(3), *out = matrices(1), *ffn = matrices(1 + 3 * EXPERTS);
        qkv[0] = random_matrix(type, Q, WIDTH);
        qkv[1] = random_matrix(type, K, WIDTH);
        qkv[2] = random_matrix(type, K, WIDTH);
        out[0] = random_matrix(FT_F32, WIDTH, Q);
        *op++ = (ft_op){.kind = FT_OP_PROJECT, .dst = 1, .matrices = qkv, .num_matrices = 3,
                        .norm = random_norm(WIDTH)};
        *op++ = (ft_op){.kind = FT_OP_ATTENTION, .src = 1, .dst = 2, .heads = HEADS, .slot = layer,
                        .rope = layer, .writes_kv = 1, .factor = 0.2, .q_norm = random_norm(DIM),
                        .k_norm = random_norm(DIM)};
        *op++ = (ft_op){.kind = FT_OP_PROJECT_ADD, .src = 2, .matrices = out, .num_matrices = 1,
                        .post_norm = random_norm(WIDTH)};
        if (layer == 0) {
            ffn[0] = random_matrix(type, FFN, WIDTH);
            ffn[1] = random_matrix(type, FFN, WIDTH);
            ffn[2] = random_matrix(type, WIDTH, FFN);
            *op++ = (ft_op){.kind = FT_OP_GATED_FFN, .matrices = ffn, .num_matrices = 3,
                            .norm = random_norm(WIDTH), .activation = FT_GELU_TANH};
            continue;
        }
        ffn[0] = random_matrix(FT_F32, EXPERTS, WIDTH);
        for (int e = 0; e < 2 * EXPERTS; e++) ffn[1 + e] = random_matrix(type, FFN, WIDTH);
        for (int e = 0; e < EXPERTS; e++) ffn[1 + 2 * EXPERTS + e] = random_matrix(type, WIDTH, FFN);
        *op++ = (ft_op){.kind = FT_OP_MOE_FFN, .matrices = ffn, .num_matrices = 1 + 3 * EXPERTS,
                        .norm = random_norm(WIDTH), .num_experts = EXPERTS, .num_used = USED};
    }
    *op++ = (ft_op){.kind = FT_OP_HEAD, .takes_errors = 1, .matrices = table, .num_matrices = 1, .factor = 15.0,
                    .norm = random_norm(WIDTH)};
    return (ft_program_spec){.ops = ops, .widths = widths, .slots = slots, .ropes = ropes,
                             .num_ops = (int32_t)(op - ops), .num_registers = 3, .num_slots = 2,
                             .num_ropes = 2, .vocab_size = VOCAB, .hidden_size = WIDTH,
                             .is_f32_cache = type == FT_F32, .grows_cache = 1};
}

static void new_cache(ft_slot_memory *slots) {
    const int64_t capacities[2] = {RING, CAPACITY};
    for (int i = 0; i < 2; i++) {
        slots[i].capacity = capacities[i];
        slots[i].keys = zeroed((size_t)capacities[i] * KV * DIM * 4);
        slots[i].values = zeroed((size_t)capacities[i] * KV * (DIM + 8) * 4);
    }
}

/* Forward ROWS tokens of two chats, the second a third as long, in steps of `step` rows. */
static void run(const ft_program_spec *spec, const char *kernels, int threads, int step, float *logits) {
    ft_pool *pool = ft_pool_new(threads);
    ft_program *p = ft_program_new(spec, ft_kernels_select(kernels));
    ft_slot_memory first[2], second[2];
    int32_t ids[2 * ROWS], wanted[2 * ROWS], best[2 * ROWS];
    float *part = zeroed(sizeof(float) * 2 * 2 * ROWS * VOCAB); /* half of it the head's second parts */
    new_cache(first);
    new_cache(second);
    for (int at = 0; at < ROWS; at += step) {
        const int n = ROWS - at < step ? ROWS - at : step, m = at < ROWS / 3 ? ft_least(n, ROWS / 3 - at) : 0;
        for (int i = 0; i < n; i++) ids[i] = (at + i) * 37 % VOCAB;
        for (int i = 0; i < m; i++) ids[n + i] = (at + i) * 11 % VOCAB;
        for (int i = 0; i < n + m; i++) wanted[i] = i;
        const ft_segment segments[2] = {{first, at, n, 0}, {second, at, m, 0}};
        const ft_forward_args args = {.token_ids = ids, .segments = segments, .wanted = wanted,
                                      .logits = part, .argmax = best, .num_segments = m ? 2 : 1,
                                      .num_wanted = n + m};
        if (ft_forward(p, pool, &args) != 0) exit(2);
        memcpy(logits + (size_t)at * VOCAB, part, sizeof(float) * (size_t)n * VOCAB);
        memcpy(logits + (size_t)(ROWS + at) * VOCAB, part + n * VOCAB, sizeof(float) * (size_t)m * VOCAB);
    }
    for (int i = 0; i < 2; i++) {
        free(first[i].keys), free(first[i].values);
        free(second[i].keys), free(second[i].values);
    }
    free(part);
    ft_program_free(p);
    ft_pool_free(pool);
}

static uint64_t checksum(const float *x, size_t n) {
    uint64_t hash = 1469598103934665603u; /* FNV-1a, 64 bit */
    for (size_t i = 0; i < n * sizeof(float); i++) hash = (hash ^ ((const uint8_t *)x)[i]) * 1099511628211u;
    return hash;
}

int main(void) {
    const char *names[] = {"portable", "avx2", "avx-vnni", "avx512-vnni", "avx512-vnni+amx", "neon-dotprod"};
    const size_t count = (size_t)(ROWS + ROWS / 3) * VOCAB;
    float *expected = zeroed(2 * ROWS * VOCAB * sizeof(float)), *logits = zeroed(2 * ROWS * VOCAB * sizeof(float));
    int failed = 0;
    uint64_t sum = 0;
    for (int type = FT_F32; type <= FT_Q8_0; type += FT_Q8_0) {
        const ft_program_spec spec = random_program(type);
        run(&spec, "portable", 1, 100, expected);
        sum = sum * 31 + checksum(expected, count);
        for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
            if (ft_kernels_select(names[k]) == NULL) continue;
            for (int threads = 1; threads <= 4; threads += 3) {
                for (int step = 1; step <= ROWS; step = step * 9 + 8) {
                    run(&spec, names[k], threads, step, logits);
                    const int same = memcmp(logits, expected, count * sizeof(float)) == 0;
                    if (!same) printf("%s, %d threads, steps of %d: other bits\n", names[k], threads, step);
                    failed |= !same;
                }
            }
        }
    }
    free(expected);
    free(logits);
    printf("%s %016llx\n", failed ? "FAILED" : "all the same", (unsigned long long)sum);
    return failed;
}
