/* Kernels under a sanitizer or an emulator: exact-size buffers, every format, every kernel this processor has.
 *
 * Each kernel's outputs must equal the portable ones bit for bit, whatever the rows in the call, and a row of
 * unpacked weights must be what packing put in. The last line is a checksum of all outputs: it is the same on
 * every processor. From the repository root:
 *   S=backends/native/src; FILES="$S/pack.c $S/unpack.c $S/quantize.c $S/select.c $S/matmul*.c"
 *   cc -g -O1 -std=gnu11 -fsanitize=address,undefined -fno-sanitize-recover=all -I$S tests/native/check_matmul.c \
 *      $FILES -lm -o /tmp/check_matmul && /tmp/check_matmul
 *   aarch64-linux-gnu-gcc -O2 -std=gnu11 -static -I$S tests/native/check_matmul.c $FILES -lm -o /tmp/check_arm \
 *      && qemu-aarch64 -cpu max /tmp/check_arm
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "isa.h"
#include "layout.h"

#ifdef FT_X86
#include <immintrin.h>
#endif

enum { MAX_ROWS = 37 };

static const char *const kernel_names[] = {"avx512-vnni+amx", "avx512-vnni", "avx-vnni", "avx2", "neon-dotprod"};
static const int types[] = {FT_F32,  FT_F16,  FT_BF16, FT_Q4_0, FT_Q4_1, FT_Q5_0,   FT_Q5_1,   FT_Q8_0,
                            FT_Q2_K, FT_Q3_K, FT_Q4_K, FT_Q5_K, FT_Q6_K, FT_IQ4_NL, FT_IQ4_XS, FT_MXFP4};
static const int shapes[][2] = {{5, 256}, {33, 32}, {21, 96}, {16, 544}, {40, 768}, {17, 2304}, {3, 31}, {18, 77}};
static const int row_counts[] = {1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 25, 37};

static uint64_t state = 88172645463325252u;
static uint64_t checksum = 14695981039346656037u;

static uint32_t random_bits(void) { /* xorshift64 */
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 16);
}

static float random_float(void) { return (float)(int)(random_bits() % 2001) / 500.0f - 2.0f; }

static void *exact(size_t bytes) {
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes) != 0) {
        abort();
    }
    return p;
}

static void fill_block(const ft_layout *l, uint8_t *block) {
    for (int i = 0; i < l->file_bytes; i++) {
        block[i] = (uint8_t)random_bits();
    }
    if (l->type == FT_MXFP4) {
        block[0] = (uint8_t)(110 + random_bits() % 20);
    }
    for (int f = 0; f < 3; f++) {
        for (int e = 0; l->fields[f].width == 2 && e < l->fields[f].count; e++) {
            uint16_t half = (uint16_t)(0x2000 | (random_bits() & 0x8fff)); /* finite f16 below 1 */
            memcpy(block + l->fields[f].offset + 2 * e, &half, 2);
        }
    }
}

static uint8_t *random_file_rows(const ft_layout *l, int rows, int cols) {
    size_t row_bytes = (size_t)(cols / l->file_inputs) * (size_t)l->file_bytes;
    uint8_t *src = exact(row_bytes * (size_t)rows);
    for (size_t i = 0; i < row_bytes * (size_t)rows; i += (size_t)l->file_bytes) {
        if (l->code_bytes > 0) {
            fill_block(l, src + i);
        } else if (l->type == FT_F32) {
            float f = random_float();
            memcpy(src + i, &f, 4);
        } else {
            uint16_t bits = (uint16_t)(0x3800 | (random_bits() & 0x87ff));
            memcpy(src + i, &bits, 2);
        }
    }
    return src;
}

static ft_acts random_acts(int rows, int cols) {
    int blocks = (cols + 31) / 32;
    float *x = exact(sizeof(float) * (size_t)(rows * cols));
    for (int i = 0; i < rows * cols; i++) {
        x[i] = random_float();
    }
    return (ft_acts){cols, blocks, cols, x, exact((size_t)(rows * blocks * 32)), exact((size_t)(rows * blocks * 4)),
                     exact((size_t)(rows * blocks * 4))};
}

static void fail(const char *what, const char *kernels, int type, int rows, int cols) {
    fprintf(stderr, "%s: kernels %s, type %d, %d outputs, %d inputs\n", what, kernels, type, rows, cols);
    exit(1);
}

static void add_to_checksum(const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        checksum = (checksum ^ ((const uint8_t *)bytes)[i]) * 1099511628211u;
    }
}

/* Whether an operation since the last call had a denormal operand: those take a hundred cycles, so kernels must not
 * compute with what others left in the scratch. */
static int met_denormal(void) {
#ifdef FT_X86
    const unsigned flag = 2, state = _mm_getcsr();
    _mm_setcsr(state & ~flag);
    return (state & flag) != 0;
#else
    return 0;
#endif
}

/* Every row count of one kernel against `expected` [MAX_ROWS, outputs]. */
static void check_kernels(const ft_kernels *k, const ft_matrix *m, ft_acts *a, const float *expected) {
    uint32_t *scratch = exact(ft_matmul_scratch_bytes());
    for (size_t i = 0; i < ft_matmul_scratch_bytes() / 4; i++) scratch[i] = 1000; /* a denormal float */
    k->quantize(a, 0, MAX_ROWS);
    for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++) {
        int rows = row_counts[i], first = MAX_ROWS - rows, split = m->groups / 2;
        float *y = exact(sizeof(float) * (size_t)(MAX_ROWS * m->rows));
        met_denormal();
        k->matmul(m, a, first, MAX_ROWS, y, m->rows, 0, split, scratch);
        k->matmul(m, a, first, MAX_ROWS, y, m->rows, split, m->groups, scratch);
        if (met_denormal() && m->type != FT_MXFP4) { /* its random scales may be denormal */
            fail("denormal operands", k->name, m->type, m->rows, m->cols);
        }
        if (memcmp(y + first * m->rows, expected + first * m->rows, sizeof(float) * (size_t)(rows * m->rows)) != 0) {
            fail("outputs differ", k->name, m->type, m->rows, m->cols);
        }
        free(y);
    }
    free(scratch);
}

static void check_matrix(const ft_layout *l, int rows, int cols) {
    uint8_t *src = random_file_rows(l, rows, cols);
    int64_t group_bytes = ft_group_bytes(l->type, cols);
    ft_matrix m = {l->type, rows, cols, (rows + 15) / 16, group_bytes, NULL};
    uint8_t *packed = exact((size_t)(m.groups * group_bytes));
    ft_pack(l->type, src, rows, cols, packed, 0, m.groups);
    m.data = packed;
    float *row = exact(sizeof(float) * (size_t)cols);
    for (int i = 0; i < rows; i++) {
        ft_unpack_row(&m, i, row);
        add_to_checksum(row, sizeof(float) * (size_t)cols);
    }
    ft_acts a = random_acts(MAX_ROWS, cols);
    const ft_kernels *portable = ft_kernels_select("portable");
    void *scratch = exact(ft_matmul_scratch_bytes());
    float *expected = exact(sizeof(float) * (size_t)(MAX_ROWS * rows));
    portable->quantize(&a, 0, MAX_ROWS);
    portable->matmul(&m, &a, 0, MAX_ROWS, expected, rows, 0, m.groups, scratch);
    add_to_checksum(expected, sizeof(float) * (size_t)(MAX_ROWS * rows));
    check_kernels(portable, &m, &a, expected);
    for (size_t i = 0; i < sizeof kernel_names / sizeof *kernel_names; i++) {
        const ft_kernels *k = ft_kernels_select(kernel_names[i]);
        if (k != NULL) {
            check_kernels(k, &m, &a, expected);
        }
    }
    free(src), free(packed), free(row), free(scratch), free(expected);
    free((void *)a.x), free(a.q), free(a.scale), free(a.sum16);
}

int main(void) {
    for (size_t i = 0; i < sizeof kernel_names / sizeof *kernel_names; i++) {
        printf("%s: %s\n", kernel_names[i], ft_kernels_select(kernel_names[i]) != NULL ? "checked" : "not here");
    }
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            if (ft_group_bytes(types[t], shapes[i][1]) > 0) {
                check_matrix(ft_layout_of(types[t]), shapes[i][0], shapes[i][1]);
            }
        }
    }
    printf("checksum %016llx\n", (unsigned long long)checksum);
    return 0;
}
