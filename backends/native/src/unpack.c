/* From packed groups back to codes and float scales, in portable C; embedding rows.
 *
 * Every product here is exact in float32 (11-bit f16 mantissa x 6 to 8 bits of scale x code), so the
 * dequantized values equal gguf-py's to the bit, with or without fused multiply-add.
 */
#include "layout.h"

/* Four codes of one vector: byte k of the result is the code of input 4 * v + k. */
static uint32_t codes_of_word(const ft_layout *l, const uint8_t *block, int v, int lane) {
    const uint8_t *p = block + 4 * lane;
    uint32_t w, c = 0;
    if (l->planes & FT_BYTE) {
        memcpy(&c, p + 64 * v, 4);
        return c;
    }
    if (l->planes & FT_NIBBLE) {
        memcpy(&w, p + 64 * (v % 4), 4);
        c = w >> 4 * (v / 4) & 0x0f0f0f0fu;
        p += 256;
    }
    if (l->planes & FT_TWO_BIT) {
        memcpy(&w, p + 64 * (v / 4), 4);
        c |= (w >> 2 * (v % 4) & 0x03030303u) << (l->planes & FT_NIBBLE ? 4 : 0);
        p += 128;
    }
    if (l->planes & FT_ONE_BIT) {
        memcpy(&w, p, 4);
        c |= (w >> v & 0x01010101u) << l->high_shift;
    }
    return c;
}

static void word_to_codes(const ft_layout *l, uint32_t word, uint8_t *out) {
    memcpy(out, &word, 4);
    if (l->codes != NULL) {
        for (int k = 0; k < 4; k++) {
            out[k] = l->codes[out[k]];
        }
    }
}

void ft_unpack_codes(const ft_layout *l, const uint8_t *chunk, int blocks, uint8_t *out) {
    for (int b = 0; b < blocks; b++, chunk += l->code_bytes) {
        for (int v = 0; v < 8; v++) {
            for (int lane = 0; lane < FT_GROUP; lane++, out += 4) {
                word_to_codes(l, codes_of_word(l, chunk, v, lane), out);
            }
        }
    }
}

static float f16_at(const uint8_t *halves, int element, int lane) {
    return ft_f32_of_f16(ft_load_u16(halves + 2 * (element * FT_GROUP + lane)));
}

/* Scale j and minimum j (j < 8) of Q4_K and Q5_K; byte b of a row lies at s[16 * b].
 * Source: get_scale_min_k4 in ggml-quants.c. */
static void scale_and_min_k4(const uint8_t *s, int j, int *scale, int *min) {
    if (j < 4) {
        *scale = s[16 * j] & 63;
        *min = s[16 * (j + 4)] & 63;
    } else {
        *scale = (s[16 * (j + 4)] & 15) | (s[16 * (j - 4)] >> 6) << 4;
        *min = (s[16 * (j + 4)] >> 4) | (s[16 * j] >> 6) << 4;
    }
}

/* Signed scale of sub-block j. Source: gguf-py quants.py, classes Q3_K and IQ4_XS. */
static int scale_q3k(const uint8_t *s, int j) {
    int low = s[16 * (j % 8)] >> 4 * (j / 8) & 15, high = s[16 * (8 + j % 4)] >> 2 * (j / 4) & 3;
    return (low | high << 4) - 32;
}

static int scale_iq4xs(const uint8_t *s, uint16_t high, int j) {
    return ((s[16 * (j / 2)] >> 4 * (j % 2) & 15) | (high >> 2 * j & 3) << 4) - 32;
}

/* Scales of one K-quant super-block for one row; scale[16 * j] is sub-block j. */
static void super_block_scales(int32_t type, const uint8_t *s, int lane, float *scale, float *min) {
    const uint8_t *bytes = s + lane;
    int integer, integer_min;
    for (int j = 0; j < 16; j++) {
        switch (type) {
        case FT_Q2_K:
            scale[16 * j] = f16_at(s + 256, 0, lane) * (float)(bytes[16 * j] & 15);
            min[16 * j] = -(f16_at(s + 256, 1, lane) * (float)(bytes[16 * j] >> 4));
            break;
        case FT_Q3_K: scale[16 * j] = f16_at(s + 192, 0, lane) * (float)scale_q3k(bytes, j); break;
        case FT_Q6_K: scale[16 * j] = f16_at(s + 256, 0, lane) * (float)(int8_t)bytes[16 * j]; break;
        case FT_IQ4_XS:
            if (j < 8) {
                integer = scale_iq4xs(bytes, ft_load_u16(s + 64 + 2 * (FT_GROUP + lane)), j);
                scale[16 * j] = f16_at(s + 64, 0, lane) * (float)integer;
            }
            break;
        default: /* Q4_K, Q5_K */
            if (j < 8) {
                scale_and_min_k4(bytes, j, &integer, &integer_min);
                scale[16 * j] = f16_at(s + 192, 0, lane) * (float)integer;
                min[16 * j] = -(f16_at(s + 192, 1, lane) * (float)integer_min);
            }
        }
    }
}

void ft_unpack_scales(const ft_layout *l, const uint8_t *chunk, int blocks, int lane0, int lane1, float *scale,
                      float *min) {
    const uint8_t *s = chunk + (int64_t)blocks * l->code_bytes;
    if (l->file_inputs == 256) {
        for (int lane = lane0; lane < lane1; lane++) {
            super_block_scales(l->type, s, lane, scale + lane, min + lane);
        }
        return;
    }
    for (int b = 0; b < blocks; b++, s += l->scale_bytes) {
        for (int lane = lane0; lane < lane1; lane++) {
            scale[16 * b + lane] = l->type == FT_MXFP4 ? ft_f32_of_e8m0_half(s[lane]) : f16_at(s, 0, lane);
            if (l->has_min) {
                min[16 * b + lane] = f16_at(s, 1, lane);
            }
        }
    }
}

static void unpack_float_row(const ft_matrix *w, const uint8_t *group, int lane, float *out) {
    for (int k = 0; k < w->cols; k++) {
        int64_t i = (int64_t)k * FT_GROUP + lane;
        if (w->type == FT_F32) {
            memcpy(out + k, group + 4 * i, 4);
        } else {
            uint16_t h = ft_load_u16(group + 2 * i);
            out[k] = w->type == FT_F16 ? ft_f32_of_f16(h) : ft_f32_of_bf16(h);
        }
    }
}

/* One block of one row. The minimum is added after the (exact) product, as the file's definition does. */
static void unpack_block(const ft_layout *l, const uint8_t *codes, int lane, const float *scale, const float *min,
                         float *out) {
    uint8_t c[4];
    for (int v = 0; v < 8; v++) {
        int s = l->scales_per_block == 2 ? 16 * (v / 4) : 0;
        word_to_codes(l, codes_of_word(l, codes, v, lane), c);
        for (int k = 0; k < 4; k++) {
            float product = scale[s] * (float)(c[k] - l->offset);
            out[4 * v + k] = l->has_min ? product + min[s] : product;
        }
    }
}

void ft_unpack_row(const ft_matrix *w, int64_t row, float *out) {
    const ft_layout *l = ft_layout_of(w->type);
    const uint8_t *chunk = w->data + row / FT_GROUP * w->group_bytes;
    int lane = (int)(row % FT_GROUP), blocks = w->cols / FT_BLOCK;
    if (l->code_bytes == 0) {
        unpack_float_row(w, chunk, lane, out);
        return;
    }
    float scale[2 * FT_CHUNK_BLOCKS * FT_GROUP], min[2 * FT_CHUNK_BLOCKS * FT_GROUP];
    for (int first = 0; first < blocks; first += FT_CHUNK_BLOCKS) {
        int count = ft_min_int(FT_CHUNK_BLOCKS, blocks - first);
        ft_unpack_scales(l, chunk, count, lane, lane + 1, scale, min);
        for (int b = 0; b < count; b++, out += FT_BLOCK) {
            int s = 16 * l->scales_per_block * b + lane;
            unpack_block(l, chunk + (int64_t)b * l->code_bytes, lane, scale + s, min + s, out);
        }
        chunk += ft_chunk_bytes(l, count);
    }
}
