#include "isa.h"
#if defined(FT_ARM64)
#include <math.h>
#include <string.h>

#define FT_VEC 128
#define FT_NAME ft_rows_neon
#define FT_LABEL "neon"
#define FT_WIDTH_1 4
#define FT_WIDTH_2 2
#define FT_WIDTH_4 1
#define FT_WIDTH_8 1
#include "rows_kernels.h"
#endif
