/* Instruction sets per function: the library is compiled without -m flags and picks at run time.
 *
 * Each matmul_<isa>.c is bracketed by FT_TARGET_BEGIN("...") and FT_TARGET_END. MSVC accepts every
 * intrinsic anywhere, so there the brackets are empty.
 */
#ifndef FORETELL_ISA_H
#define FORETELL_ISA_H

#if defined(__x86_64__) || defined(_M_X64)
#define FT_X86 1
#elif defined(__aarch64__) || defined(_M_ARM64)
#define FT_ARM64 1
#endif

/* Instruction sets a compiler may be too old for: GCC 10 and Clang 10 (Debian 11, Ubuntu 20.04) know neither. Apple's
 * Clang counts its own versions, and no Apple processor has them. */
#if defined(FT_X86) && !defined(__APPLE__)
#if defined(__clang__)
#define FT_NEW_X86 (__clang_major__ >= 12)
#elif defined(__GNUC__)
#define FT_NEW_X86 (__GNUC__ >= 11)
#else
#define FT_NEW_X86 (_MSC_VER >= 1930)
#endif
#endif

#define FT_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define FT_TARGET_BEGIN(isa) FT_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define FT_TARGET_END FT_PRAGMA(clang attribute pop)
#define FT_UNROLL FT_PRAGMA(unroll)
#elif defined(__GNUC__)
#define FT_TARGET_BEGIN(isa) FT_PRAGMA(GCC push_options) FT_PRAGMA(GCC target(isa))
#define FT_TARGET_END FT_PRAGMA(GCC pop_options)
#define FT_UNROLL FT_PRAGMA(GCC unroll 16)
#else
#define FT_TARGET_BEGIN(isa)
#define FT_TARGET_END
#define FT_UNROLL
#endif

/* Fetch a line into the second level; any address will do. */
#if defined(_MSC_VER) && !defined(__clang__)
#define FT_INLINE static __forceinline
#if defined(FT_X86)
#include <intrin.h>
#define FT_PREFETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T1)
#else
#define FT_PREFETCH(p) ((void)(p))
#endif
#else
#define FT_PREFETCH(p) __builtin_prefetch((p), 0, 2)
#define FT_INLINE static inline __attribute__((always_inline))
#endif

#endif
