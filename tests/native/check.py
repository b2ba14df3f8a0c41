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
SANITIZED = (
    *("-g1", "-fno-var-tracking", "-O1"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
EMULATED = ("-O2", "-static")
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def checksums(compiler: str, flags: tuple[str, ...], runner: tuple[str, ...]) -> dict[str, str]:
    """Build everything with `flags`, run each harness: its name to its last line, the checksum."""
    options = [*flags, "-std=gnu11", "-ffp-contract=off", f"-I{SOURCES}"]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
        subprocess.run([compiler, *options, "-c", *sources], check=True, cwd=folder)
        objects = [str(path) for path in sorted(Path(folder).glob("*.o"))]
        for harness in sorted(HERE.glob("check_*.c")):
            program = str(Path(folder) / harness.stem)
            link = [compiler, *options, str(harness), *objects, "-lm", "-lpthread", "-o", program]
            subprocess.run(link, check=True)
            run = subprocess.run([*runner, program], check=True, stdout=subprocess.PIPE, text=True)
            found[harness.stem] = run.stdout.splitlines()[-1]
    return found


def main() -> int:
    """Exit status 0 when every run passed and the runs of each harness agree."""
    if not shutil.which("cc"):
        sys.stderr.write("no C compiler: install one to check the native library\n")
        return 1
    here = checksums("cc", SANITIZED, ())
    for name, line in here.items():
        sys.stdout.write(f"{name}, sanitized: {line}\n")
    if not (shutil.which(CROSS) and shutil.which(EMULATOR)):
        sys.stdout.write(f"Arm: not checked, it needs {CROSS} and {EMULATOR}\n")
        return 0
    arm = checksums(CROSS, EMULATED, (EMULATOR, "-cpu", "max"))
    for name, line in arm.items():
        sys.stdout.write(f"{name}, Arm: {line}\n")
    if arm != here:
        sys.stderr.write("the processors disagree about the outputs\n")
    return int(arm != here)


if __name__ == "__main__":
    sys.exit(main())
