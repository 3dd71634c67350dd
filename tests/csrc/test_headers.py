"""Each header of csrc/ compiles by itself: it includes all that it uses."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
IS_X86 = platform.machine() in ("x86_64", "AMD64")
GPP = shutil.which("g++")
ARM_GPP = shutil.which("aarch64-linux-gnu-g++") if IS_X86 else GPP
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
FLAGS = {  # as CMakeLists.txt has them
    "generic": (),
    "avx2": AVX2,
    "avx2_vnni": (*AVX2, "-mavxvnni"),
    "avx512": AVX512,
    "avx512_vnni": (*AVX512, "-mavx512vnni"),
    "avx512_bf16": (*AVX512, "-mavx512vnni", "-mavx512bf16"),
    "amx": (*AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
}
ARM_BEST = "-march=armv8.2-a+fp16+dotprod+i8mm+bf16"
HEADERS = {str(header.relative_to(CSRC)): header.read_text() for header in sorted(CSRC.rglob("*.h"))}
OF_UNITS = [name for name, text in HEADERS.items() if '#include "simd/isa_unit.h"' in text or name == "simd/isa_unit.h"]
OF_ARM = [name for name in HEADERS if name.endswith("_neon.h")]
OF_X86 = [name for name in HEADERS if name.endswith("_x86.h")]
OF_ALL = [name for name in HEADERS if name not in OF_ARM + OF_X86]
NAMES_INTRINSICS = re.compile(r"\b_mm|\b__m\d|\b_tile|\b_cvt|\b__tile")
COMPILED_BELOW = OF_UNITS if IS_X86 else []  # by themselves, too, for vectors, which takes more of each

pytestmark = pytest.mark.skipif(GPP is None, reason="there is no g++")


OPTIONS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-unused-function")


def errors_of(header, flags=(), compiler=GPP):
    """Return what the compiler says of a unit that includes nothing but this header."""
    command = [compiler, "-fsyntax-only", *OPTIONS, *flags, f"-I{CSRC}", "-x", "c++", "-"]
    source = f'#include "{header}"\n'
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "header",
    [
        pytest.param(name, marks=pytest.mark.thorough) if name in COMPILED_BELOW else name
        for name in [*OF_ALL, *(OF_X86 if IS_X86 else ())]
    ],
)
def test_a_header_compiles_by_itself(header):
    assert errors_of(header) == ""


@pytest.mark.slow
@pytest.mark.skipif(ARM_GPP is None, reason="there is no g++ for AArch64 (Debian: g++-aarch64-linux-gnu)")
@pytest.mark.parametrize("flags", [(), (ARM_BEST,)], ids=["neon", "neon_i8mm"])
@pytest.mark.parametrize("header", OF_ARM)
def test_a_header_of_arm_compiles_by_itself(header, flags):
    assert errors_of(header, flags, compiler=ARM_GPP) == ""


@pytest.fixture(scope="module")
def with_intrinsics(tmp_path_factory):
    """Return a function for the options that include precompiled intrinsics, which take most of a header's compile
    time.
    """
    folder = tmp_path_factory.mktemp("intrinsics")

    def options(isa):
        header = folder / f"{isa}.h"
        if not header.exists():
            header.write_text("#include <immintrin.h>\n")
            command = [GPP, *OPTIONS, *FLAGS[isa], "-x", "c++-header", header, "-o", f"{header}.gch"]
            subprocess.run(command, check=True)
        return ("-include", str(header))

    return options


@pytest.mark.slow
@pytest.mark.skipif(not IS_X86, reason="these instruction sets are of x86")
@pytest.mark.parametrize("isa", [pytest.param("avx2", marks=pytest.mark.thorough), "avx512_bf16"])  # of each width
@pytest.mark.parametrize("header", [header for header in OF_UNITS if header not in OF_ARM])
def test_a_header_of_units_compiles_for_vectors_of_each_width(header, isa, with_intrinsics):
    brought = () if NAMES_INTRINSICS.search(HEADERS[header]) else with_intrinsics(isa)
    assert errors_of(header, (*FLAGS[isa], *brought)) == ""


@pytest.mark.slow
@pytest.mark.skipif(not IS_X86, reason="AMX is of x86")
@pytest.mark.parametrize("header", [name for name in OF_X86 if "#if HAS_AMX" in HEADERS[name]])
def test_a_header_of_amx_compiles_by_itself(header):
    assert errors_of(header, FLAGS["amx"]) == ""


def test_the_flags_are_those_of_the_build():
    build = (CSRC.parent / "CMakeLists.txt").read_text()
    assert all(flag in build for flags in FLAGS.values() for flag in flags)


def test_every_header_is_included_once():
    assert [name for name, text in HEADERS.items() if "\n#pragma once\n" not in text] == []
