/* The kernels of this processor, best first.
 *
 * A feature counts only if the operating system saves its registers (XCR0), and AMX on Linux only after
 * the process has asked for its tile state.
 * Source: Intel SDM vol. 1, 13.3 and vol. 2, CPUID; Linux Documentation/arch/x86/xstate.rst.
 */
#if defined(__linux__)
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <string.h>

#include "isa.h"
#include "matmul.h"

#ifdef FT_X86
#include "matmul_x86.h"
#if defined(_MSC_VER)
#include <intrin.h>
static void cpuid(unsigned leaf, unsigned sub, unsigned *r) { __cpuidex((int *)r, (int)leaf, (int)sub); }
static unsigned long long xcr0(void) { return _xgetbv(0); }
#else
#include <cpuid.h>
static void cpuid(unsigned leaf, unsigned sub, unsigned *r) {
    __cpuid_count(leaf, sub, r[0], r[1], r[2], r[3]);
}
static unsigned long long xcr0(void) {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (unsigned long long)high << 32 | low;
}
#endif

enum register_name { EAX, EBX, ECX, EDX };
#define YMM_STATE 0x6u
#define ZMM_STATE 0xe6u
#define TILE_STATE 0x60000u

/* Whether sub-leaf `sub` of `leaf` has all of `bits` set in register `name`. */
static int has_bits(unsigned leaf, unsigned sub, enum register_name name, unsigned bits) {
    unsigned r[4] = {0, 0, 0, 0};
    cpuid(0, 0, r);
    if (r[EAX] < leaf) {
        return 0;
    }
    cpuid(leaf, sub, r);
    return (r[name] & bits) == bits;
}

static int saves(unsigned long long state) {
    return has_bits(1, 0, ECX, 1u << 27) && (xcr0() & state) == state;
}

int ft_has_avx2(void) {
    return saves(YMM_STATE) && has_bits(1, 0, ECX, 1u << 12 | 1u << 29) && has_bits(7, 0, EBX, 1u << 5);
}

int ft_has_avx_vnni(void) { return ft_has_avx2() && has_bits(7, 1, EAX, 1u << 4); }

int ft_has_avx512_vnni(void) {
    unsigned foundation = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
    return ft_has_avx2() && saves(ZMM_STATE) && has_bits(7, 0, EBX, foundation) && has_bits(7, 0, ECX, 1u << 11);
}

int ft_has_amx_int8(void) {
    if (!ft_has_avx512_vnni() || !saves(TILE_STATE) || !has_bits(7, 0, EDX, 1u << 24 | 1u << 25)) {
        return 0;
    }
#if defined(__linux__)
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0; /* not tried on other systems */
#endif
}
#endif

#include "matmul_neon.h"
#ifdef FT_NEON
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(_WIN32)
#include <windows.h>
#endif

static int has_dot_product(void) {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & 1ul << 20) != 0; /* HWCAP_ASIMDDP */
#elif defined(_WIN32)
    return IsProcessorFeaturePresent(43); /* PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE */
#else
    return 1; /* every Apple silicon processor */
#endif
}
#endif

static int always(void) { return 1; }

static const struct {
    const ft_kernels *kernels;
    int (*is_here)(void);
} choices[] = {
#ifdef FT_X86
#if FT_NEW_X86
    {&ft_amx_kernels, ft_has_amx_int8},
#endif
    {&ft_avx512_kernels, ft_has_avx512_vnni},
#if FT_NEW_X86
    {&ft_avxvnni_kernels, ft_has_avx_vnni},
#endif
    {&ft_avx2_kernels, ft_has_avx2},
#endif
#ifdef FT_NEON
    {&ft_neon_kernels, has_dot_product},
#endif
    {&ft_portable_kernels, always},
};

const ft_kernels *ft_kernels_select(const char *wanted) {
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        const ft_kernels *kernels = choices[i].kernels;
        if ((wanted == NULL || strcmp(kernels->name, wanted) == 0) && choices[i].is_here()) {
            return kernels;
        }
    }
    return NULL;
}
