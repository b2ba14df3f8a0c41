/* The NEON kernels, for select.c, and whether this compiler can build them. */
#ifndef FORETELL_MATMUL_NEON_H
#define FORETELL_MATMUL_NEON_H

#include "isa.h"
#include "matmul.h"

/* Clang before 16 declares the dot product only where the whole file is compiled for it (Apple's is). */
#if defined(FT_ARM64) && (defined(__ARM_FEATURE_DOTPROD) || (defined(__GNUC__) && !defined(__clang__)) || \
                          (defined(__clang__) && __clang_major__ >= 16))
#define FT_NEON 1
extern const ft_kernels ft_neon_kernels;
#endif

#endif
