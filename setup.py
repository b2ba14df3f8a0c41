"""Build of the native library; everything else about the package is in pyproject.toml.

The library is plain C, loaded with ctypes: it exports no Python module. `optional` keeps an
installation without a compiler alive; the torch backend then takes its place.
"""

import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# No contraction: the bits of every kernel must be the same on each instruction set.
UNIX_FLAGS = [
    "-std=c11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-g0",
]
MSVC_FLAGS = ["/O2", "/std:c11", "/fp:precise", "/experimental:c11atomics"]


class BuildLibrary(build_ext):
    """A plain shared library: no PyInit symbol to export."""

    def build_extensions(self) -> None:
        """Compile with the flags of the compiler at hand."""
        is_msvc = self.compiler.compiler_type == "msvc"
        for extension in self.extensions:
            extension.extra_compile_args = MSVC_FLAGS if is_msvc else UNIX_FLAGS
        super().build_extensions()

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Only what Python calls (this matters on Windows; elsewhere everything is visible)."""
        return list(ext.export_symbols)


EXPORTS = [
    "ft_struct_bytes",
    "ft_kernels_select",
    "ft_kernels_name",
    "ft_group_bytes",
    "ft_pack",
    "ft_pack_matrix",
    "ft_matmul_scratch_bytes",
    "ft_type_uses_int8",
    "ft_unpack_row",
    "ft_pool_new",
    "ft_pool_free",
    "ft_pool_threads",
    "ft_pool_visit",
    "ft_read_memory",
    "ft_program_new",
    "ft_program_free",
    "ft_forward",
]

setup(
    cmdclass={"build_ext": BuildLibrary},
    ext_modules=[
        Extension(
            "backends.native._foretell",
            sources=sorted(glob("backends/native/src/*.c")),
            depends=sorted(glob("backends/native/src/*.h")),
            libraries=[] if sys.platform == "win32" else ["m", "pthread"],
            export_symbols=EXPORTS,
            optional=True,
        )
    ],
)
