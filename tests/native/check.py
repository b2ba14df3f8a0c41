"""The native library under AddressSanitizer and UBSan, and on an emulated Arm processor where one is at hand.

`python -m tests.native.check` builds each tests/native/check_*.c with the library's sources and runs it. All
runs of a harness must print the same checksum: outputs are the same bits on every processor.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "backends" / "native" / "src"
# Clang 14 needs minutes for the AMX file with sanitizers, GCC seconds: hence cc alone.
SANITIZED = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
EMULATED = ("-O2", "-static")
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def checksum(harness: Path, compiler: str, flags: tuple[str, ...], runner: tuple[str, ...]) -> str:
    """Build with `flags`, run, and return the last line, which is the checksum."""
    files = [str(harness), *(str(path) for path in sorted(SOURCES.glob("*.c")))]
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / harness.stem)
        options = [*flags, "-std=gnu11", "-ffp-contract=off", f"-I{SOURCES}"]
        build = [compiler, *options, *files, "-lm", "-lpthread", "-o", program]
        subprocess.run(build, check=True)
        run = subprocess.run([*runner, program], check=True, capture_output=True, text=True)
    return run.stdout.splitlines()[-1]


def main() -> int:
    """Exit status 0 when every run passed and the runs of each harness agree."""
    if not shutil.which("cc"):
        sys.stderr.write("no C compiler: install one to check the native library\n")
        return 1
    has_arm = bool(shutil.which(CROSS) and shutil.which(EMULATOR))
    if not has_arm:
        sys.stdout.write(f"Arm: not checked, it needs {CROSS} and {EMULATOR}\n")
    differ = 0
    for harness in sorted(HERE.glob("check_*.c")):
        here = checksum(harness, "cc", SANITIZED, ())
        sys.stdout.write(f"{harness.stem}, sanitized: {here}\n")
        if has_arm:
            arm = checksum(harness, CROSS, EMULATED, (EMULATOR, "-cpu", "max"))
            sys.stdout.write(f"{harness.stem}, Arm: {arm}\n")
            differ |= arm != here
    if differ:
        sys.stderr.write("the processors disagree about the outputs\n")
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
