"""``python -m tests.native.sanitize``: the kernels under the compiler's sanitizers, by the tests of this folder.

The extension is built into a temporary folder with AddressSanitizer and UndefinedBehaviorSanitizer, and once more with
ThreadSanitizer. Python and torch are as they are: only what the extension does is watched, and leaks are not. Needs g++ and
cmake, and a few minutes.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SANITIZERS = {
    "address": ("address,undefined", ["libasan.so", "libubsan.so", "libstdc++.so.6"]),
    "thread": ("thread", ["libtsan.so", "libstdc++.so.6"]),
}
"""What the compiler is told, and what must be in the process before Python is."""
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:strict_init_order=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:abort_on_error=1",
}
OTHERS = "tests/native/test_files.py::test_living_runs_leave_each_other_alone"
"""Has a process group, in whose barrier ThreadSanitizer sees a race of torch's own (torch 2.13)."""
RUN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("lightning_zero.ops._kernels", sys.argv[1])
sys.modules[spec.name] = kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
import pytest
from lightning_zero.ops import _native
assert _native.kernels is kernels, "the tests would run other kernels"
raise SystemExit(pytest.main(sys.argv[2:]))
"""


def build(folder: Path, flags: str) -> Path:
    """The extension with ``-fsanitize=flags``."""
    options = f"-fsanitize={flags} -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), f"-DCMAKE_CXX_FLAGS={options}", "-DCMAKE_CXX_COMPILER=g++"]
    subprocess.run([*configure, f"-DPython_EXECUTABLE={sys.executable}"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder), "-j2"], check=True, stdout=subprocess.DEVNULL)
    return folder / f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"


def watch(kernels: Path, libraries: list[str], tests: list[str]) -> int:
    """Run pytest with these kernels; the exit status."""
    find = lambda name: subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()  # noqa: E731
    environment = {**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(map(find, libraries)), "OMP_NUM_THREADS": "1"}
    # gcc's ThreadSanitizer wants addresses where they are without randomisation.
    command = ["setarch", "-R", sys.executable, "-c", RUN, str(kernels), "-q", "-p", "no:cacheprovider"]
    command += ["--deselect", OTHERS, *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sanitizer", nargs="*", choices=[*SANITIZERS, []], help="default: both, in turn")
    parser.add_argument("--tests", nargs="*", default=["tests/native"])
    arguments = parser.parse_args()
    failed = 0
    for name in arguments.sanitizer or SANITIZERS:
        flags, libraries = SANITIZERS[name]
        with tempfile.TemporaryDirectory() as folder:
            kernels = build(Path(folder), flags)
            print(f"--- -fsanitize={flags}", flush=True)
            failed |= watch(kernels, libraries, arguments.tests)
    return int(failed != 0)


if __name__ == "__main__":
    raise SystemExit(main())
