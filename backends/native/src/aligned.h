/* Memory aligned to a cache line (and an AVX-512 load). */
#ifndef FT_ALIGNED_H
#define FT_ALIGNED_H

#include <stdlib.h>

#if defined(_WIN32)
#include <malloc.h>
static inline void *ft_aligned_alloc(size_t bytes) { return _aligned_malloc(bytes ? bytes : 64, 64); }
static inline void ft_aligned_free(void *data) { _aligned_free(data); }
#else
static inline void *ft_aligned_alloc(size_t bytes) {
    return aligned_alloc(64, (bytes + 64) & ~(size_t)63);
}
static inline void ft_aligned_free(void *data) { free(data); }
#endif

#endif
