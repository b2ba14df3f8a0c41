#include "rows.h"

#include <string.h>

#define FT_VEC 0
#define FT_NAME ft_rows_portable
#define FT_LABEL "portable"
#define FT_WIDTH_1 4
#define FT_WIDTH_2 2
#define FT_WIDTH_4 1
#define FT_WIDTH_8 1
#include "rows_kernels.h"

const ft_rows *ft_rows_select(const char *kernels_name) {
#if defined(FT_X86)
    if (strncmp(kernels_name, "avx512", 6) == 0) return &ft_rows_avx512;
    if (strncmp(kernels_name, "avx", 3) == 0) return &ft_rows_avx2;
#elif defined(FT_ARM64)
    if (strncmp(kernels_name, "neon", 4) == 0) return &ft_rows_neon;
#endif
    (void)kernels_name;
    return &ft_rows_portable;
}
