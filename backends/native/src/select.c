/* The kernels of this processor. */
#include <string.h>

#include "matmul.h"

static const ft_kernels *const all_kernels[] = {&ft_portable_kernels};

const ft_kernels *ft_kernels_select(const char *wanted) {
    for (size_t i = 0; i < sizeof all_kernels / sizeof *all_kernels; i++) {
        if (wanted == NULL || strcmp(all_kernels[i]->name, wanted) == 0) {
            return all_kernels[i];
        }
    }
    return NULL;
}
