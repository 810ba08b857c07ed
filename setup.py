"""Builds softcap_ops, its C++ kernels where Torch and a compiler are at hand, its Hopper kernels where nvcc is.

The extension is bound by Torch's stable ABI and holds no Python, so one wheel serves every torch >= 2.11 and
every Python; the Hopper kernels are a C library without any Torch. What cannot be built is left out with a line that
says why: the package works without it.

    SOFTCAP_OPS_REQUIRE_EXTENSION=1   fail instead of leaving the C++ kernels out
    SOFTCAP_OPS_REQUIRE_HOPPER=1      fail instead of leaving the Hopper kernels out; 0: leave them out
    SOFTCAP_OPS_SANITIZE=1            AddressSanitizer and UBSan, for tests; no Hopper kernels
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

REQUIRED = os.environ.get("SOFTCAP_OPS_REQUIRE_EXTENSION", "0") == "1"
SANITIZE = os.environ.get("SOFTCAP_OPS_SANITIZE", "0") == "1"
HOPPER = os.environ.get("SOFTCAP_OPS_REQUIRE_HOPPER")  # "1", "0" or unset
# The oldest Torch that a wheel built here loads in, as TORCH_TARGET_VERSION wants it.
TORCH_TARGET_VERSION = "0x020b000000000000"


def explain(kernels: str, error: object) -> None:
    reason = str(error).splitlines()[0][:200]
    print(f"softcap_ops: built without its {kernels} kernels: {reason}", file=sys.stderr)


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


class Hopper(Extension):
    """The Hopper kernels: a shared library that nvcc builds, one object a source, side by side."""

    def __init__(self, nvcc: str) -> None:
        self.nvcc = nvcc
        headers = sorted(glob("csrc/cuda/*.h") + glob("csrc/cuda/*.cuh"))
        super().__init__("softcap_ops.libsoftcap_hopper", sorted(glob("csrc/cuda/*.cu")), depends=headers)

    def build(self, folder: str, library: str) -> None:
        os.makedirs(folder, exist_ok=True)
        os.makedirs(os.path.dirname(library) or ".", exist_ok=True)
        flags = ["-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a"]
        flags += ["-Xcompiler", "-fPIC,-fvisibility=hidden"]

        def compile_one(source: str) -> str:
            target = os.path.join(folder, os.path.basename(source) + ".o")
            if newer_group([source, *self.depends], target):
                self.run(*flags, "-c", source, "-o", target)
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, self.sources))
        self.run("-shared", "-Xlinker", "-s", "-o", library, *objects)

    def run(self, *arguments: str) -> None:
        done = subprocess.run([self.nvcc, *arguments], capture_output=True, text=True)
        if done.returncode != 0:
            sys.stderr.write(done.stdout + done.stderr)
            raise RuntimeError(f"nvcc failed: nvcc {' '.join(arguments)[:150]}")


def nvcc() -> str | None:
    """Where nvcc is, by CUDA_HOME, the path, or the usual place."""
    home = os.environ.get("CUDA_HOME")
    places = [home and os.path.join(home, "bin"), None, "/usr/local/cuda/bin"]  # None: the path
    found = (shutil.which("nvcc", path=place) for place in places if place != "")
    return next(filter(None, found), None)


class BuildExtension(build_ext):
    """Compiles in parallel, names the libraries plainly whatever the Python, and may do without them."""

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
        for ext in list(self.extensions):
            try:
                self.build_extension(ext)
            except Exception as error:
                hopper = isinstance(ext, Hopper)
                if HOPPER == "1" if hopper else REQUIRED:
                    raise
                explain("Hopper" if hopper else "C++", error)
                self.extensions.remove(ext)
        self.distribution.ext_modules = self.extensions

    def build_extension(self, ext: Extension) -> None:
        if isinstance(ext, Hopper):
            ext.build(os.path.join(self.build_temp, "hopper"), self.get_ext_fullpath(ext.name))
        else:
            super().build_extension(ext)


class Wheel(bdist_wheel):
    """Tags a wheel that holds the extension for its platform, and for any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        if not self.distribution.ext_modules:
            return "py3", "none", "any"
        _, _, platform = super().get_tag()
        return "py3", "none", platform


def extensions() -> list[Extension]:
    found: list[Extension] = []
    try:
        found.append(cpu_extension())
    except ImportError as error:
        if REQUIRED:
            raise
        explain("C++", error)
    if HOPPER == "0" or SANITIZE:
        return found
    compiler = nvcc()
    if compiler is not None:
        found.append(Hopper(compiler))
    elif HOPPER == "1":
        raise RuntimeError("softcap_ops: SOFTCAP_OPS_REQUIRE_HOPPER=1, and there is no nvcc")
    else:
        explain("Hopper", "there is no nvcc")
    return found


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtension, "bdist_wheel": Wheel})
