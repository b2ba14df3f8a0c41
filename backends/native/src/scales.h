/* Scales of one chunk as float, lane by lane; included once per instruction set.
 *
 * The including file defines `halves(p, lane0, lane1, out)`: f16 to float32 of 16 values. The inner loops
 * over lanes are plain so that a compiler turns them into the vectors of the surrounding target.
 * Source: gguf-py quants.py (Q2_K .. IQ4_XS) and get_scale_min_k4 in ggml-quants.c.
 */
#define FT_LANES for (int lane = lane0; lane < lane1; lane++)

static void scales_q2k(const uint8_t *s, int lane0, int lane1, float *scale, float *min) {
    float d[FT_GROUP], dmin[FT_GROUP];
    halves(s + 256, lane0, lane1, d);
    halves(s + 288, lane0, lane1, dmin);
    for (int j = 0; j < 16; j++) {
        FT_LANES { scale[16 * j + lane] = d[lane] * (float)(s[16 * j + lane] & 15); }
        FT_LANES { min[16 * j + lane] = -(dmin[lane] * (float)(s[16 * j + lane] >> 4)); }
    }
}

static void scales_q3k(const uint8_t *s, int lane0, int lane1, float *scale) {
    float d[FT_GROUP];
    halves(s + 192, lane0, lane1, d);
    for (int j = 0; j < 16; j++) {
        const uint8_t *low = s + 16 * (j % 8), *high = s + 16 * (8 + j % 4);
        int low_shift = 4 * (j / 8), high_shift = 2 * (j / 4);
        FT_LANES {
            int integer = (low[lane] >> low_shift & 15) | (high[lane] >> high_shift & 3) << 4;
            scale[16 * j + lane] = d[lane] * (float)(integer - 32);
        }
    }
}

static void scales_k4(const uint8_t *s, int lane0, int lane1, float *scale, float *min) {
    float d[FT_GROUP], dmin[FT_GROUP];
    halves(s + 192, lane0, lane1, d);
    halves(s + 224, lane0, lane1, dmin);
    for (int j = 0; j < 4; j++) {
        const uint8_t *a = s + 16 * j, *b = s + 16 * (j + 4), *c = s + 16 * (j + 8);
        float *late_scale = scale + 64, *late_min = min + 64;
        FT_LANES { scale[16 * j + lane] = d[lane] * (float)(a[lane] & 63); }
        FT_LANES { min[16 * j + lane] = -(dmin[lane] * (float)(b[lane] & 63)); }
        FT_LANES { late_scale[16 * j + lane] = d[lane] * (float)((c[lane] & 15) | (a[lane] >> 6) << 4); }
        FT_LANES { late_min[16 * j + lane] = -(dmin[lane] * (float)((c[lane] >> 4) | (b[lane] >> 6) << 4)); }
    }
}

static void scales_q6k(const uint8_t *s, int lane0, int lane1, float *scale) {
    float d[FT_GROUP];
    halves(s + 256, lane0, lane1, d);
    for (int j = 0; j < 16; j++) {
        FT_LANES { scale[16 * j + lane] = d[lane] * (float)(int8_t)s[16 * j + lane]; }
    }
}

static void scales_iq4xs(const uint8_t *s, int lane0, int lane1, float *scale) {
    float d[FT_GROUP];
    halves(s + 64, lane0, lane1, d);
    for (int j = 0; j < 8; j++) {
        FT_LANES {
            int low = s[16 * (j / 2) + lane] >> 4 * (j % 2) & 15;
            int high = s[96 + 2 * lane + j / 4] >> 2 * (j % 4) & 3;
            scale[16 * j + lane] = d[lane] * (float)((low | high << 4) - 32);
        }
    }
}

static void unpack_scales(const ft_layout *l, const uint8_t *chunk, int blocks, int lane0, int lane1, float *scale,
                          float *min) {
    const uint8_t *s = chunk + (int64_t)blocks * l->code_bytes;
    switch (l->type) {
    case FT_Q2_K: scales_q2k(s, lane0, lane1, scale, min); break;
    case FT_Q3_K: scales_q3k(s, lane0, lane1, scale); break;
    case FT_Q4_K:
    case FT_Q5_K: scales_k4(s, lane0, lane1, scale, min); break;
    case FT_Q6_K: scales_q6k(s, lane0, lane1, scale); break;
    case FT_IQ4_XS: scales_iq4xs(s, lane0, lane1, scale); break;
    case FT_MXFP4:
        for (int b = 0; b < blocks; b++) {
            FT_LANES { scale[16 * b + lane] = ft_f32_of_e8m0_half(s[16 * b + lane]); }
        }
        break;
    default:
        for (int b = 0; b < blocks; b++, s += l->scale_bytes) {
            halves(s, lane0, lane1, scale + 16 * b);
            if (l->has_min) {
                halves(s + 32, lane0, lane1, min + 16 * b);
            }
        }
    }
}

#undef FT_LANES
