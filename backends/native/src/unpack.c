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

static void halves(const uint8_t *p, int lane0, int lane1, float *out) {
    for (int lane = lane0; lane < lane1; lane++) {
        out[lane] = ft_f32_of_f16(ft_load_u16(p + 2 * lane));
    }
}

#include "scales.h"

void ft_unpack_scales(const ft_layout *l, const uint8_t *chunk, int blocks, float *scale, float *min) {
    unpack_scales(l, chunk, blocks, 0, FT_GROUP, scale, min);
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
        unpack_scales(l, chunk, count, lane, lane + 1, scale, min);
        for (int b = 0; b < count; b++, out += FT_BLOCK) {
            int s = 16 * l->scales_per_block * b + lane;
            unpack_block(l, chunk + (int64_t)b * l->code_bytes, lane, scale + s, min + s, out);
        }
        chunk += ft_chunk_bytes(l, count);
    }
}
