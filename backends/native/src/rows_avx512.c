#include "isa.h"
#if defined(FT_X86)
#include <immintrin.h>
#include <math.h>
#include <string.h>

FT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define FT_VEC 512
#define FT_NAME ft_rows_avx512
#define FT_LABEL "avx512"
#define FT_WIDTH_1 4
#define FT_WIDTH_2 4
#define FT_WIDTH_4 4
#define FT_WIDTH_8 2
#include "rows_kernels.h"
FT_TARGET_END
#endif
