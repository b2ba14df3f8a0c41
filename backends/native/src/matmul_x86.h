/* The x86 kernels, for the one that builds on another (AMX) and for select.c. */
#ifndef FORETELL_MATMUL_X86_H
#define FORETELL_MATMUL_X86_H

#include "matmul.h"

/* Rows from which the tile unit wins over vpdpbusd; twice as many where a scale covers 16 inputs. */
#define FT_AMX_ROWS 9

/* An exact sum that started at these bits is, read as a float, FT_BIAS + sum while |sum| < 2^22. Then
 * fma(bits, scale, -FT_BIAS * scale) is sum * scale rounded once: a scale has at most 19 significant bits
 * (a half times a byte; of MXFP4 a power of two, below 2^104 in any sane file), so the last term is exact.
 * It saves the conversion, which counts: beside tile instructions 512-bit multiplications and conversions
 * run on one port instead of two (58 cycles for 64 instead of 29; additions keep 29). */
#define FT_BIAS 12582912.0f
#define FT_BIAS_BITS 0x4B400000

extern const ft_ops ft_avx512_ops;
extern const ft_kernels ft_avx512_kernels, ft_amx_kernels, ft_avxvnni_kernels, ft_avx2_kernels;

void ft_quantize_avx512(const ft_acts *a, int r0, int r1);

/* Whether processor and operating system have it. The AMX one also asks the kernel for permission. */
int ft_has_avx2(void);
int ft_has_avx_vnni(void);
int ft_has_avx512_vnni(void);
int ft_has_amx_int8(void);

#endif
