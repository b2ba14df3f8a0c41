/* From ggml's block layout to 16-row groups: bits move, no value changes.
 *
 * Source: block layouts of ggml (ggml-common.h) as decoded by gguf-py's quants.py.
 */
#include "layout.h"

/* IQ4_NL and IQ4_XS values plus 128; MXFP4 (E2M1 doubled) values plus 12. Source: ggml-common.h. */
static const uint8_t iq4_codes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t mxfp4_codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

#define NO_FIELD {0, 0, 0}
static const ft_layout layouts[] = {
    /* type, inputs, bytes, codes, scales, offset, planes, scales/block, min, high shift, table, fields */
    {FT_F32, 1, 4, 0, 0, 0, 0, 0, 0, 0, NULL, {NO_FIELD}},
    {FT_F16, 1, 2, 0, 0, 0, 0, 0, 0, 0, NULL, {NO_FIELD}},
    {FT_BF16, 1, 2, 0, 0, 0, 0, 0, 0, 0, NULL, {NO_FIELD}},
    {FT_Q4_0, 32, 18, 256, 32, 8, FT_NIBBLE, 1, 0, 0, NULL, {{0, 1, 2}}},
    {FT_Q4_1, 32, 20, 256, 64, 0, FT_NIBBLE, 1, 1, 0, NULL, {{0, 2, 2}}},
    {FT_Q5_0, 32, 22, 320, 32, 16, FT_NIBBLE | FT_ONE_BIT, 1, 0, 4, NULL, {{0, 1, 2}}},
    {FT_Q5_1, 32, 24, 320, 64, 0, FT_NIBBLE | FT_ONE_BIT, 1, 1, 4, NULL, {{0, 2, 2}}},
    {FT_Q8_0, 32, 34, 512, 32, 128, FT_BYTE, 1, 0, 0, NULL, {{0, 1, 2}}},
    {FT_Q2_K, 256, 84, 128, 320, 0, FT_TWO_BIT, 2, 1, 0, NULL, {{0, 16, 1}, {80, 2, 2}}},
    {FT_Q3_K, 256, 110, 192, 224, 4, FT_TWO_BIT | FT_ONE_BIT, 2, 0, 2, NULL, {{96, 12, 1}, {108, 1, 2}}},
    {FT_Q4_K, 256, 144, 256, 256, 0, FT_NIBBLE, 1, 1, 0, NULL, {{4, 12, 1}, {0, 2, 2}}},
    {FT_Q5_K, 256, 176, 320, 256, 0, FT_NIBBLE | FT_ONE_BIT, 1, 1, 4, NULL, {{4, 12, 1}, {0, 2, 2}}},
    {FT_Q6_K, 256, 210, 384, 288, 32, FT_NIBBLE | FT_TWO_BIT, 2, 0, 0, NULL, {{192, 16, 1}, {208, 1, 2}}},
    {FT_IQ4_NL, 32, 18, 256, 32, 128, FT_NIBBLE, 1, 0, 0, iq4_codes, {{0, 1, 2}}},
    {FT_IQ4_XS, 256, 136, 256, 128, 128, FT_NIBBLE, 1, 0, 0, iq4_codes, {{4, 4, 1}, {0, 2, 2}}},
    {FT_MXFP4, 32, 17, 256, 16, 12, FT_NIBBLE, 1, 0, 0, mxfp4_codes, {{0, 1, 1}}},
};

const ft_layout *ft_layout_of(int32_t type) {
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        if (layouts[i].type == type) {
            return &layouts[i];
        }
    }
    return NULL;
}

int ft_type_uses_int8(int32_t type) {
    const ft_layout *l = ft_layout_of(type);
    return l != NULL && l->code_bytes > 0;
}

int64_t ft_group_bytes(int32_t type, int64_t cols) {
    const ft_layout *l = ft_layout_of(type);
    if (l == NULL || cols <= 0 || cols > FT_MAX_COLS || cols % l->file_inputs != 0) {
        return -1;
    }
    int64_t bytes = cols / l->file_inputs * l->file_bytes * FT_GROUP;
    return (bytes + 63) & ~(int64_t)63;
}

/* The nibbles of 32 inputs stored as 16 bytes: low halves first. */
static void codes_of_halves(const uint8_t *q, uint8_t *out) {
    for (int j = 0; j < 16; j++) {
        out[j] = q[j] & 15;
        out[j + 16] = q[j] >> 4;
    }
}

static void add_high_bits(const uint8_t *high, uint8_t *out) {
    for (int j = 0; j < 32; j++) {
        out[j] |= (high[j / 8] >> (j % 8) & 1) << 4;
    }
}

/* 32 bytes shared by several sub-blocks of a super-block: out = bits [shift, shift + width). */
static void codes_of_bits(const uint8_t *q, int shift, int width, uint8_t *out) {
    for (int j = 0; j < 32; j++) {
        out[j] = (uint8_t)(q[j] >> shift & ((1 << width) - 1));
    }
}

static void add_bits(const uint8_t *q, int shift, int width, int to, uint8_t *out) {
    for (int j = 0; j < 32; j++) {
        out[j] |= (uint8_t)((q[j] >> shift & ((1 << width) - 1)) << to);
    }
}

/* Codes of sub-block `sub` (32 inputs) of one block of the file. Q8_0 becomes unsigned here. */
static void file_codes(int32_t type, const uint8_t *block, int sub, uint8_t *out) {
    switch (type) {
    case FT_Q4_0:
    case FT_IQ4_NL: codes_of_halves(block + 2, out); break;
    case FT_Q4_1: codes_of_halves(block + 4, out); break;
    case FT_MXFP4: codes_of_halves(block + 1, out); break;
    case FT_IQ4_XS: codes_of_halves(block + 8 + 16 * sub, out); break;
    case FT_Q5_0:
        codes_of_halves(block + 6, out);
        add_high_bits(block + 2, out);
        break;
    case FT_Q5_1:
        codes_of_halves(block + 8, out);
        add_high_bits(block + 4, out);
        break;
    case FT_Q8_0:
        for (int j = 0; j < 32; j++) {
            out[j] = block[2 + j] ^ 0x80;
        }
        break;
    case FT_Q2_K: codes_of_bits(block + 16 + 32 * (sub / 4), 2 * (sub % 4), 2, out); break;
    case FT_Q3_K:
        codes_of_bits(block + 32 + 32 * (sub / 4), 2 * (sub % 4), 2, out);
        add_bits(block, sub, 1, 2, out);
        break;
    case FT_Q4_K: codes_of_bits(block + 16 + 32 * (sub / 2), 4 * (sub % 2), 4, out); break;
    case FT_Q5_K:
        codes_of_bits(block + 48 + 32 * (sub / 2), 4 * (sub % 2), 4, out);
        add_bits(block + 16, sub, 1, 4, out);
        break;
    case FT_Q6_K:
        codes_of_bits(block + 64 * (sub / 4) + 32 * (sub % 2), 4 * (sub % 4 / 2), 4, out);
        add_bits(block + 128 + 32 * (sub / 4), 2 * (sub % 4), 2, 4, out);
        break;
    default: break;
    }
}

static void or_u32(uint8_t *p, uint32_t v) {
    uint32_t old;
    memcpy(&old, p, 4);
    old |= v;
    memcpy(p, &old, 4);
}

/* Four codes of one row go into one 32-bit word of each plane, so a plane is filled word by word. */
static void put_codes(const ft_layout *l, const uint8_t *codes, int lane, uint8_t *dst) {
    for (int v = 0; v < 8; v++) {
        uint8_t *p = dst + 4 * lane;
        uint32_t c;
        memcpy(&c, codes + 4 * v, 4);
        if (l->planes & FT_BYTE) {
            memcpy(p + 64 * v, &c, 4);
        }
        if (l->planes & FT_NIBBLE) {
            or_u32(p + 64 * (v % 4), (c & 0x0f0f0f0fu) << 4 * (v / 4));
            p += 256;
        }
        if (l->planes & FT_TWO_BIT) {
            int from = l->planes & FT_NIBBLE ? 4 : 0;
            or_u32(p + 64 * (v / 4), (c >> from & 0x03030303u) << 2 * (v % 4));
            p += 128;
        }
        if (l->planes & FT_ONE_BIT) {
            or_u32(p, (c >> l->high_shift & 0x01010101u) << v);
        }
    }
}

static void put_scales(const ft_layout *l, const uint8_t *block, int lane, uint8_t *dst) {
    for (int f = 0; f < 3; f++) {
        const ft_field field = l->fields[f];
        for (int e = 0; e < field.count; e++) {
            memcpy(dst + lane * field.width, block + field.offset + e * field.width, (size_t)field.width);
            dst += FT_GROUP * field.width;
        }
    }
}

static void pack_lane(const ft_layout *l, const uint8_t *src, int64_t cols, int lane, uint8_t *dst) {
    int blocks = (int)(cols / FT_BLOCK), subs = l->file_inputs / FT_BLOCK;
    uint8_t codes[FT_BLOCK];
    for (int first = 0; first < blocks; first += FT_CHUNK_BLOCKS) {
        int count = ft_min_int(FT_CHUNK_BLOCKS, blocks - first);
        uint8_t *scales = dst + (int64_t)count * l->code_bytes;
        for (int b = 0; b < count; b++) {
            const uint8_t *block = src + (int64_t)((first + b) / subs) * l->file_bytes;
            file_codes(l->type, block, (first + b) % subs, codes);
            put_codes(l, codes, lane, dst + (int64_t)b * l->code_bytes);
            if ((first + b) % subs == 0) {
                put_scales(l, block, lane, scales + b / subs * l->scale_bytes);
            }
        }
        dst += ft_chunk_bytes(l, count);
    }
}

static void pack_float_lane(int width, const uint8_t *src, int64_t cols, int lane, uint8_t *dst) {
    for (int64_t k = 0; k < cols; k++) {
        memcpy(dst + (k * FT_GROUP + lane) * width, src + k * width, (size_t)width);
    }
}

void ft_pack(int32_t type, const uint8_t *src, int64_t rows, int64_t cols, uint8_t *dst, int64_t g0, int64_t g1) {
    const ft_layout *l = ft_layout_of(type);
    int64_t group_bytes = ft_group_bytes(type, cols);
    int64_t row_bytes = cols / l->file_inputs * l->file_bytes;
    for (int64_t g = g0; g < g1; g++) {
        uint8_t *group = dst + g * group_bytes;
        memset(group, 0, (size_t)group_bytes);
        for (int lane = 0; lane < FT_GROUP && g * FT_GROUP + lane < rows; lane++) {
            const uint8_t *row = src + (g * FT_GROUP + lane) * row_bytes;
            if (l->code_bytes > 0) {
                pack_lane(l, row, cols, lane, group);
            } else {
                pack_float_lane(l->file_bytes, row, cols, lane, group);
            }
        }
    }
}
