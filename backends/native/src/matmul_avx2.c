/* AVX2 with FMA: processors from Haswell and Zen on. */
#include "isa.h"

#ifdef FT_X86
#include <immintrin.h>

#include "matmul_x86.h"

FT_TARGET_BEGIN("avx2,fma,f16c")
#define FT_HAS_DPBUSD 0
/* 8-bit codes would overflow vpmaddubsw as unsigned bytes; they are kept signed. */
#define IS_SIGNED(l) ((l)->offset == 128)
#include "matmul_avx2.h"
FT_TARGET_END

const ft_kernels ft_avx2_kernels = {"avx2", quantize, matmul};
#endif
