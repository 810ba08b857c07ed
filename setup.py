"""Builds softcap_ops, and its C++ kernels where Torch and a compiler are at hand.

The extension is bound by Torch's stable ABI and holds no Python, so one wheel serves every torch >= 2.11 and
every Python. What cannot be built is left out with a line that says why: the package works without it.

    SOFTCAP_OPS_REQUIRE_EXTENSION=1   fail instead of leaving it out
    SOFTCAP_OPS_SANITIZE=1            AddressSanitizer and UBSan, for tests
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

REQUIRED = os.environ.get("SOFTCAP_OPS_REQUIRE_EXTENSION", "0") == "1"
SANITIZE = os.environ.get("SOFTCAP_OPS_SANITIZE", "0") == "1"
# The oldest Torch that a wheel built here loads in, as TORCH_TARGET_VERSION wants it.
TORCH_TARGET_VERSION = "0x020b000000000000"


def explain(error: Exception) -> None:
    reason = str(error).splitlines()[0][:200]
    print(f"softcap_ops: built without its C++ kernels: {reason}", file=sys.stderr)


def cpu_extension() -> Extension:
    """The CPU kernels as an extension; raises if Torch is missing."""
    from torch.utils import cpp_extension

    flags = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fvisibility=hidden"]
    flags += ["-Wall", "-Wextra", "-Wno-psabi"]
    link = ["-Wl,-S"] if sys.platform == "linux" else []
    if SANITIZE:
        flags += ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
        link = ["-fsanitize=address,undefined"]
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    return Extension(
        "softcap_ops._C",
        sources=sorted(glob("csrc/cpu/*.cpp")),
        depends=sorted(glob("csrc/cpu/*.h") + glob("csrc/cpu/*.inc")),
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)],
        library_dirs=cpp_extension.library_paths(),
        libraries=["torch_cpu", "torch"],
        extra_compile_args=includes + flags,
        extra_link_args=link,
        language="c++",
    )


class BuildExtension(build_ext):
    """Compiles in parallel, names the library `_C.so` whatever the Python, and may do without it."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # no Python module: Torch loads it, and it registers itself

    def build_extensions(self) -> None:
        compile_all = self.compiler.compile

        def compile_parallel(sources: list[str], **options: object) -> list[str]:
            def one(source: str) -> list[str]:
                return compile_all([source], **options)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [obj for objects in pool.map(one, sources) for obj in objects]

        self.compiler.compile = compile_parallel
        super().build_extensions()

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            if REQUIRED:
                raise
            explain(error)
            self.extensions = self.distribution.ext_modules = []


class Wheel(bdist_wheel):
    """Tags a wheel that holds the extension for its platform, and for any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        if not self.distribution.ext_modules:
            return "py3", "none", "any"
        _, _, platform = super().get_tag()
        return "py3", "none", platform


def extensions() -> list[Extension]:
    try:
        return [cpu_extension()]
    except ImportError as error:
        if REQUIRED:
            raise
        explain(error)
        return []


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtension, "bdist_wheel": Wheel})
