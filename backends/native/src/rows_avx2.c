#include "isa.h"
#if defined(FT_X86)
#include <immintrin.h>
#include <math.h>
#include <string.h>

FT_TARGET_BEGIN("avx2,fma,f16c")
#define FT_VEC 256
#define FT_NAME ft_rows_avx2
#define FT_LABEL "avx2"
#define FT_WIDTH_1 4
#define FT_WIDTH_2 2
#define FT_WIDTH_4 1
#define FT_WIDTH_8 1
#include "rows_kernels.h"
FT_TARGET_END
#endif
