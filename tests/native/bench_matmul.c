/* Microseconds and GB/s per matrix, by format, rows and threads; smallest of several passes.
 *
 * Build and run from the repository root:
 *   cc -O3 -std=gnu11 -ffp-contract=off -Ibackends/native/src tests/native/bench_matmul.c \
 *      backends/native/src/{pack,unpack,quantize,select}.c backends/native/src/matmul*.c -lm -lpthread -o /tmp/bench
 *   /tmp/bench [kernels|- [type or 0 [outputs inputs]]]
 * Times are thread processor time, the slowest thread's.
 * Each pass walks about 100 MB of different matrices, so weights come from memory as they do in a model.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "layout.h"

enum { MAX_ROWS = 512, POOL_BYTES = 100 << 20, PASSES = 5 };

typedef struct bench {
    const ft_kernels *kernels;
    ft_matrix matrix;
    ft_acts acts;
    float *y;
    uint8_t *pool;
    int count, rows, threads;
} bench;

typedef struct worker {
    const bench *b;
    int index;
    void *scratch;
    pthread_barrier_t *start;
    double took_us;
} worker;

/* Processor time of the calling thread: on a shared machine waiting for a core is not the kernel's doing. */
static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void *aligned(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(p, 1, bytes);
    return p;
}

static void *work(void *arg) {
    worker *w = arg;
    const bench *b = w->b;
    int groups = b->matrix.groups;
    ft_matrix m = b->matrix;
    pthread_barrier_wait(w->start);
    double began = now_us();
    for (int i = 0; i < b->count; i++) {
        m.data = b->pool + (int64_t)i * groups * m.group_bytes;
        b->kernels->matmul(&m, &b->acts, 0, b->rows, b->y, m.rows, groups * w->index / b->threads,
                           groups * (w->index + 1) / b->threads, w->scratch);
    }
    w->took_us = now_us() - began;
    return NULL;
}

static double pass_us(const bench *b) {
    pthread_t threads[8];
    worker workers[8];
    pthread_barrier_t start;
    pthread_barrier_init(&start, NULL, (unsigned)b->threads);
    for (int t = 0; t < b->threads; t++) {
        workers[t] = (worker){b, t, aligned(ft_matmul_scratch_bytes()), &start, 0};
        pthread_create(&threads[t], NULL, work, &workers[t]);
    }
    double took = 0;
    for (int t = 0; t < b->threads; t++) {
        pthread_join(threads[t], NULL);
        took = workers[t].took_us > took ? workers[t].took_us : took;
        free(workers[t].scratch);
    }
    pthread_barrier_destroy(&start);
    return took;
}

static void fill_pool(bench *b) {
    int64_t bytes = b->matrix.groups * b->matrix.group_bytes;
    for (int64_t i = 0; i < bytes * b->count; i++) {
        b->pool[i] = (uint8_t)(0x30 | (i * 2654435761u >> 13 & 0x0f)); /* normal numbers in f16, bf16, f32 */
    }
}

static void measure(bench *b, const char *name) {
    static const int row_counts[] = {1, 2, 4, 8, 16, 64, 512};
    double bytes = (double)b->matrix.groups * (double)b->matrix.group_bytes;
    for (b->threads = 1; b->threads <= 2; b->threads++) {
        printf("%-6s %d thread%s", name, b->threads, b->threads > 1 ? "s" : " ");
        for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++) {
            double best = 1e30;
            bench part = *b;
            part.rows = row_counts[i];
            part.count = part.rows >= 64 ? 4 : b->count;
            for (int pass = 0; pass < PASSES; pass++) {
                double took = pass_us(&part) / part.count;
                best = took < best ? took : best;
            }
            double ops = 2.0 * part.rows * b->matrix.rows * b->matrix.cols;
            if (part.rows >= 64) {
                printf(" | %d: %8.1f us %6.0f GOPS", part.rows, best, ops / best / 1e3);
            } else {
                printf(" | %d: %6.1f us %4.1f GB/s", part.rows, best, bytes / best / 1e3);
            }
        }
        printf("\n");
        fflush(stdout);
    }
}

static void read_bandwidth(const uint8_t *pool) {
    double best = 1e30;
    volatile uint64_t sink = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        double began = now_us();
        uint64_t sum = 0;
        for (size_t i = 0; i < POOL_BYTES; i += 64) {
            uint64_t v;
            memcpy(&v, pool + i, 8);
            sum += v;
        }
        sink += sum;
        double took = now_us() - began;
        best = took < best ? took : best;
    }
    printf("read bandwidth, one thread: %.1f GB/s\n", POOL_BYTES / best / 1e3);
}

int main(int argc, char **argv) {
    static const struct {
        int type;
        const char *name;
    } types[] = {{FT_Q4_1, "Q4_1"},     {FT_Q4_0, "Q4_0"},   {FT_Q5_0, "Q5_0"}, {FT_Q5_1, "Q5_1"},
                 {FT_Q8_0, "Q8_0"},     {FT_Q4_K, "Q4_K"},   {FT_Q5_K, "Q5_K"}, {FT_Q6_K, "Q6_K"},
                 {FT_Q2_K, "Q2_K"},     {FT_Q3_K, "Q3_K"},   {FT_IQ4_NL, "IQ4_NL"}, {FT_IQ4_XS, "IQ4_XS"},
                 {FT_MXFP4, "MXFP4"},   {FT_F16, "F16"},     {FT_BF16, "BF16"}, {FT_F32, "F32"}};
    const char *wanted = argc > 1 && strcmp(argv[1], "-") != 0 ? argv[1] : NULL;
    int only = argc > 2 ? atoi(argv[2]) : 0, outputs = argc > 4 ? atoi(argv[3]) : 1536;
    bench b = {.kernels = ft_kernels_select(wanted), .pool = aligned(POOL_BYTES)};
    if (b.kernels == NULL) {
        fprintf(stderr, "no kernels called %s here\n", wanted);
        return 1;
    }
    printf("kernels: %s\n", b.kernels->name);
    read_bandwidth(b.pool);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (only > 0 && types[i].type != only) {
            continue;
        }
        int cols = argc > 4 ? atoi(argv[4]) : ft_layout_of(types[i].type)->file_inputs == 256 ? 768 : 576;
        b.matrix = (ft_matrix){types[i].type, outputs, cols, (outputs + 15) / 16, ft_group_bytes(types[i].type, cols), NULL};
        b.count = (int)(POOL_BYTES / (b.matrix.groups * b.matrix.group_bytes));
        b.acts = (ft_acts){cols, (cols + 31) / 32, cols, aligned(sizeof(float) * MAX_ROWS * (size_t)cols), NULL, NULL, NULL};
        size_t blocks = (size_t)b.acts.blocks * MAX_ROWS;
        b.acts.q = aligned(blocks * 32), b.acts.scale = aligned(blocks * 4), b.acts.sum16 = aligned(blocks * 4);
        b.y = aligned(sizeof(float) * MAX_ROWS * (size_t)outputs);
        fill_pool(&b);
        for (size_t j = 0; j < (size_t)MAX_ROWS * (size_t)cols; j++) {
            ((float *)b.acts.x)[j] = (float)(j * 7919 % 201) - 100.0f;
        }
        b.kernels->quantize(&b.acts, 0, MAX_ROWS);
        measure(&b, types[i].name);
        free((void *)b.acts.x), free(b.acts.q), free(b.acts.scale), free(b.acts.sum16), free(b.y);
    }
    return 0;
}
