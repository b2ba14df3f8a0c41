/* AVX-VNNI: processors with vpdpbusd but without AVX-512 (Alder Lake and later). */
#include "isa.h"

#if FT_NEW_X86
#include <immintrin.h>

#include "matmul_x86.h"

FT_TARGET_BEGIN("avx2,fma,f16c,avxvnni")
#define FT_HAS_DPBUSD 1
#define IS_SIGNED(l) 0
#include "matmul_avx2.h"
FT_TARGET_END

const ft_kernels ft_avxvnni_kernels = {"avx-vnni", quantize, matmul};
#endif
