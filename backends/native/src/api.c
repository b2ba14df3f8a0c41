/* Exported calls that only Python uses: struct sizes, packing over the pool. */
#include <string.h>

#include "program.h"

/* Bytes of a struct by name, so that the ctypes mirrors can be checked at load; -1 unknown. */
int64_t ft_struct_bytes(const char *name) {
    const struct { const char *name; size_t bytes; } sizes[] = {
        {"matrix", sizeof(ft_matrix)}, {"norm", sizeof(ft_norm)}, {"rope", sizeof(ft_rope)},
        {"op", sizeof(ft_op)}, {"slot", sizeof(ft_slot)}, {"program_spec", sizeof(ft_program_spec)},
        {"slot_memory", sizeof(ft_slot_memory)}, {"segment", sizeof(ft_segment)},
        {"forward_args", sizeof(ft_forward_args)},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (strcmp(sizes[i].name, name) == 0) return (int64_t)sizes[i].bytes;
    return -1;
}

const char *ft_kernels_name(const ft_kernels *kernels) { return kernels->name; }

typedef struct pack_job {
    int32_t type;
    const uint8_t *src;
    int64_t rows, cols;
    uint8_t *dst;
} pack_job;

static void pack_groups(void *arg, int begin, int end, int thread) {
    const pack_job *job = arg;
    (void)thread;
    ft_pack(job->type, job->src, job->rows, job->cols, job->dst, begin, end);
}

void ft_pack_matrix(ft_pool *pool, int32_t type, const uint8_t *src, int64_t rows, int64_t cols,
                    uint8_t *dst) {
    pack_job job = {type, src, rows, cols, dst};
    ft_pool_lock(pool);
    ft_pool_ranges(pool, (int)((rows + FT_GROUP - 1) / FT_GROUP), 16, pack_groups, &job);
    ft_pool_unlock(pool);
}

/* Count to `n` in pieces over the pool: out[i] = number of visits of item i (for tests). */
static void visit(void *arg, int begin, int end, int thread) {
    (void)thread;
    for (int i = begin; i < end; i++) ((int32_t *)arg)[i]++;
}
void ft_pool_visit(ft_pool *pool, int32_t n, int32_t grain, int32_t *out) {
    ft_pool_lock(pool);
    ft_pool_ranges(pool, n, grain, visit, out);
    ft_pool_unlock(pool);
}

/* Sum 64-bit words over the pool: reading `bytes` once, for measuring memory bandwidth. */
typedef struct read_job {
    const uint64_t *words;
    int64_t count;
    _Atomic uint64_t sum;
} read_job;

#define READ_WORDS (1 << 17) /* 1 MB per piece */

static void read_words(void *arg, int begin, int end, int thread) {
    read_job *job = arg;
    const int64_t last = (int64_t)end * READ_WORDS;
    uint64_t sum = 0;
    (void)thread;
    for (int64_t i = (int64_t)begin * READ_WORDS; i < last && i < job->count; i++) sum += job->words[i];
    job->sum += sum;
}

uint64_t ft_read_memory(ft_pool *pool, const uint64_t *words, int64_t count) {
    read_job job = {.words = words, .count = count};
    ft_pool_lock(pool);
    ft_pool_ranges(pool, (int)((count + READ_WORDS - 1) / READ_WORDS), 1, read_words, &job);
    ft_pool_unlock(pool);
    return job.sum;
}
