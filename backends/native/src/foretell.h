/* The seam inside the native backend: matrices in packed layout, activations, kernels by processor.
 *
 * Plain C11 with compiler builtins; no Python and no PyTorch header. Pointers and sizes are checked
 * by the Python side (backends/native/library.py) before any call.
 *
 * Layout idea: 16 output rows of a matrix form a group, so that one 64-byte load holds four
 * consecutive inputs of each of the 16 rows (one vpdpbusd, or one row of an AMX B tile). Activations
 * are quantized to int8 per block of 32 inputs; products of one block are exact int32, and the float
 * accumulation over blocks runs in one fixed order. So an output row has the same bits whatever the
 * number of rows in the call and whichever integer instruction computed it (ledger S70).
 */
#ifndef FORETELL_H
#define FORETELL_H

#include <stddef.h>
#include <stdint.h>

#define FT_GROUP 16 /* output rows per group */
#define FT_BLOCK 32 /* inputs per activation block */

/* ggml type numbers, as in the file. */
enum ft_type {
    FT_F32 = 0, FT_F16 = 1, FT_Q4_0 = 2, FT_Q4_1 = 3, FT_Q5_0 = 6, FT_Q5_1 = 7, FT_Q8_0 = 8,
    FT_Q2_K = 10, FT_Q3_K = 11, FT_Q4_K = 12, FT_Q5_K = 13, FT_Q6_K = 14,
    FT_IQ4_NL = 20, FT_IQ4_XS = 23, FT_BF16 = 30, FT_MXFP4 = 39
};

/* A matrix of `rows` outputs by `cols` inputs in packed layout; of a stack of experts each is one. */
typedef struct ft_matrix {
    int32_t type;
    int32_t rows, cols;
    int32_t groups;       /* ceil(rows / FT_GROUP) */
    int64_t group_bytes;  /* packed bytes of one group */
    const uint8_t *data;  /* 64-byte aligned, groups * group_bytes */
} ft_matrix;

/* Activations of some rows, float and (for integer kernels) quantized. Not owned. */
typedef struct ft_acts {
    int32_t cols;    /* inputs per row */
    int32_t blocks;  /* ceil(cols / FT_BLOCK) */
    int64_t ldx;     /* floats from one row of x to the next */
    const float *x;  /* [rows, ldx] */
    int8_t *q;       /* [rows, blocks * 32], zero padded */
    float *scale;    /* [rows, blocks]: x ~ q * scale */
    int16_t *sum16;  /* [rows, blocks * 2]: sum of q over each half block of 16 */
} ft_acts;

/* Kernels of one instruction set, chosen once at load by ft_kernels_select(). */
typedef struct ft_kernels {
    const char *name; /* "avx512-vnni+amx", "avx512-vnni", "avx-vnni", "avx2", "neon-dotprod", "portable" */
    /* Fill q, scale, sum16 of rows [r0, r1) from x. */
    void (*quantize)(const ft_acts *a, int r0, int r1);
    /* y[r, n] = sum_k w[n, k] * x[r, k] for rows [r0, r1) and groups [g0, g1); y row stride ldy
     * floats. Float types read a->x, quantized types read a->q. `scratch` is private to the calling
     * thread, ft_matmul_scratch_bytes() long, 64-byte aligned. Outputs past w->rows are not written. */
    void (*matmul)(const ft_matrix *w, const ft_acts *a, int r0, int r1, float *y, int64_t ldy,
                   int g0, int g1, void *scratch);
} ft_kernels;

const ft_kernels *ft_kernels_select(const char *wanted); /* NULL: the best here */
size_t ft_matmul_scratch_bytes(void);
int ft_type_uses_int8(int32_t type); /* whether matmul reads a->q */

/* Packed size of one group; -1 for a type without kernels or cols that do not fit the type. */
int64_t ft_group_bytes(int32_t type, int64_t cols);
/* Pack groups [g0, g1) of a matrix whose rows lie in ggml block layout at src. */
void ft_pack(int32_t type, const uint8_t *src, int64_t rows, int64_t cols, uint8_t *dst,
             int64_t g0, int64_t g1);
/* out[0..cols) = dequantized row, exactly the file's values in float32 (embedding look-up). */
void ft_unpack_row(const ft_matrix *w, int64_t row, float *out);

#endif
