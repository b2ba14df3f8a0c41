/* The packed layout of a matrix, and the unpacked panel the kernels multiply.
 *
 * A group holds 16 output rows. Its inputs are cut into chunks of 256 (8 blocks of 32; the last chunk
 * may be shorter), and a chunk is stored as the codes of its blocks followed by their scales:
 *
 *   codes   per block: a nibble plane (256 bytes), a 2-bit plane (128) and a 1-bit plane (64), whichever the
 *           type needs, or one byte per code (512). Input j of row `lane` belongs to vector j / 4, byte
 *           lane * 4 + j % 4 of that vector; 8 vectors of 64 bytes make a block.
 *           nibble plane: vector v low half, vector v + 4 high half of 64 bytes at 64 * v
 *           2-bit plane:  vector v at bit 2 * (v % 4) of 64 bytes at 64 * (v / 4)
 *           1-bit plane:  vector v at bit v
 *   scales  the file's own scale bytes, each element (8 or 16 bit) 16 rows wide: nothing is expanded.
 *
 * So the packed size is the file's size, rounded up to 64 bytes per group.
 */
#ifndef FORETELL_LAYOUT_H
#define FORETELL_LAYOUT_H

#include <string.h>

#include "foretell.h"

#define FT_CHUNK_BLOCKS 8 /* blocks per chunk: 256 inputs, one K-quant super-block */
#define FT_CODE_BYTES 512 /* unpacked codes of one block: 16 rows x 32 inputs */
#define FT_MAX_COLS (1 << 17)

enum ft_planes {
    FT_NIBBLE = 1,  /* 4-bit plane */
    FT_TWO_BIT = 2, /* 2-bit plane */
    FT_ONE_BIT = 4, /* 1-bit plane */
    FT_BYTE = 8     /* codes as they are */
};

/* One field of the file's block that belongs to its scales. */
typedef struct ft_field {
    int16_t offset; /* bytes from the start of the file's block */
    int8_t count;   /* elements */
    int8_t width;   /* bytes per element */
} ft_field;

typedef struct ft_layout {
    int32_t type;
    int16_t file_inputs; /* inputs per block of the file: 32 or 256; 1 for float types */
    int16_t file_bytes;  /* bytes per block of the file */
    int16_t code_bytes;  /* packed codes of one block, 16 rows */
    int16_t scale_bytes; /* packed scales of one file block, 16 rows */
    int16_t offset;      /* weight = scale * (code - offset) + min */
    uint8_t planes;
    uint8_t scales_per_block; /* 1, or 2 where a scale covers 16 inputs */
    uint8_t has_min;
    uint8_t high_shift;   /* where the 1-bit plane goes in a code; the 2-bit plane's shift is 4 under a nibble */
    const uint8_t *codes; /* nibble -> code (offset included), or NULL where a nibble is its own code */
    ft_field fields[3];
} ft_layout;

/* NULL for a type without kernels. Float types have code_bytes 0. */
const ft_layout *ft_layout_of(int32_t type);

/* Bytes of a chunk of `blocks` blocks. */
static inline int64_t ft_chunk_bytes(const ft_layout *l, int blocks) {
    int scale_blocks = l->file_inputs == 256 ? 1 : blocks;
    return (int64_t)blocks * l->code_bytes + (int64_t)scale_blocks * l->scale_bytes;
}

static inline int ft_min_int(int a, int b) { return a < b ? a : b; }

/* Codes of `blocks` blocks of one chunk, 512 bytes each, vector order as above. */
void ft_unpack_codes(const ft_layout *l, const uint8_t *chunk, int blocks, uint8_t *out);
/* Scales and minimums of one chunk: float[blocks][scales_per_block][16]; `min` is added. */
void ft_unpack_scales(const ft_layout *l, const uint8_t *chunk, int blocks, float *scale, float *min);

/* Exact, subnormals included. */
static inline float ft_f32_of_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu, bits;
    float f;
    if (exponent == 0) {
        f = (float)mantissa * 5.9604644775390625e-8f; /* 2^-24 */
        memcpy(&bits, &f, 4);
        bits |= sign;
    } else if (exponent == 31) {
        bits = sign | 0x7f800000u | mantissa << 13;
    } else {
        bits = sign | (exponent + 112u) << 23 | mantissa << 13;
    }
    memcpy(&f, &bits, 4);
    return f;
}

static inline float ft_f32_of_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* 2^(e - 128): half of the e8m0 scale, because the MXFP4 table holds doubled values. */
static inline float ft_f32_of_e8m0_half(uint8_t e) {
    uint32_t bits = e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint16_t ft_load_u16(const uint8_t *p) {
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

#endif
