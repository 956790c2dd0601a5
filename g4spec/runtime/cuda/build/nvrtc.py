"""Compiles kernel files with NVRTC: each template instance becomes a cubin for one architecture.

This runs on the user's machine, but needs no GPU, no nvcc and no CUDA headers. A kernel file is in
the folder of the `.py` that launches it. It includes only files of `cuda/include/` and
`quant/formats/`, by name without folder, and the header that `constants` generates. NVRTC gets all
of them in memory, so that the complete source of a cubin is known (`closure`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4spec.errors import EnvironmentProblem, KernelCompileError, Unsupported, UsageError
from g4spec.runtime.cuda.build import constants

# Tests compile every kernel for all of these. A cubin runs on its own architecture and on later
# minor versions of the same major one. sm_90a adds instructions that only Hopper has.
ARCHS = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120", "sm_121")
TENSOR_ARCHS = tuple(a for a in ARCHS if a not in ("sm_70", "sm_75"))
"""Architectures with the MMA and asynchronous copy instructions of the matmul, attention and expert
kernels. Older GPUs run those of `cuda/portable/` instead."""
# Maximum shared memory of a block in bytes (CUDA programming guide, "Compute Capabilities").
SHARED_LIMIT = {
    "sm_70": 98304,
    "sm_75": 65536,
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_89": 101376,
    "sm_90a": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
    "sm_121": 101376,
}
PRETEND = "G4SPEC_CUDA_ARCH"
"""Environment variable with an older architecture, whose kernels the GPU runs instead of its own.
For tests."""
# Compute capabilities that run only cubins made for exactly them (CUDA programming guide).
TEGRA = ((7, 2), (8, 7), (10, 1))
STATIC_SHARED = 49152  # maximum bytes of shared memory that a kernel may declare statically

CUDA = Path(__file__).parents[1]
INCLUDES = (CUDA / "include", Path(__file__).parents[3] / "quant" / "formats")
INSTALL = "install it: pip install 'g4spec[cuda]'"

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b(.*)", re.MULTILINE)
_ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)'(?P<text>.*?)(?=Compiling entry function|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """The resources that a kernel uses, as ptxas reports them.

    Args:
        registers: 32-bit registers per thread.
        spill: bytes of spill stores plus spill loads per thread.
        stack: bytes of the stack frame per thread.
        shared: bytes of statically declared shared memory per CTA.
    """

    registers: int
    spill: int
    stack: int
    shared: int


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    Args:
        arch: sm_XX, or compute_XX for PTX, which the driver compiles to machine code.
        symbol: mangled name of the kernel in the code.
        resources: all 0 for PTX.
        log: log of the compiler.
        code: ELF image, or PTX.
    """

    arch: str
    symbol: str
    resources: Resources
    log: str
    code: bytes


@functools.cache
def arch_of(major: int, minor: int) -> str:
    """Return the architecture to compile for on a device of this compute capability: the newest of
    `ARCHS` that runs there, or the device's own if none does. Raises Unsupported below 7.0."""
    if major < 7:
        raise Unsupported(
            "CUDA kernels",
            expected="compute capability 7.0 (Volta) or newer",
            found=f"{major}.{minor}",
            fix="use `device` cpu",
        )
    compatible = [a for a in ARCHS if major * 10 <= number(a) <= major * 10 + minor]
    return compatible[-1] if compatible and (major, minor) not in TEGRA else f"sm_{major}{minor}"


def pretended(arch: str) -> str:
    """Return the architecture whose kernels a GPU of `arch` runs: its own, or the value of
    G4SPEC_CUDA_ARCH.

    Raises:
        UsageError: the value is neither `arch` nor an older one of `ARCHS`, or it is sm_90a and the
            GPU is newer: code for sm_90a runs on no other architecture.
    """
    requested = os.environ.get(PRETEND) or arch
    if requested != arch:
        older = [a for a in ARCHS if number(a) <= number(arch) and not a.endswith("a")]
        if requested not in older:
            raise UsageError(PRETEND, expected=f"one of {', '.join(older)}", found=requested)
    return requested


def virtual(arch: str) -> str:
    """Return the name of an architecture's PTX: compute_86 for sm_86."""
    return f"compute_{number(arch)}"


def number(arch: str) -> int:
    """Return the number of an architecture: 90 for sm_90a."""
    return int(re.sub(r"\D", "", arch))


def options(arch: str) -> tuple[str, ...]:
    """Return NVRTC's options, the same for every kernel. G4SPEC_LINEINFO=1 adds source lines for
    profilers."""
    lines = ("-lineinfo",) if os.environ.get("G4SPEC_LINEINFO") == "1" else ()
    # Since 12.9 NVRTC has a cache of its own; with a cached result ptxas logs no resources.
    no_cache = ("--no-cache",) if version() >= (12, 9) else ()
    return (
        f"-arch={arch}",
        "-std=c++17",
        "-default-device",
        "--ptxas-options=-v",
        *no_cache,
        *lines,
    )


def source_path(file: str) -> Path:
    """Return the path of a kernel file, given its name or, in tests, its absolute path."""
    return kernel_files().get(file, CUDA / file)


@functools.cache
def kernel_files() -> dict[str, Path]:
    """Map the name of every kernel file of the package to its path."""
    return {path.name: path for path in sorted(CUDA.glob("*/*.cu"))}


@functools.cache
def closure(file: str) -> Mapping[str, str]:
    """Return all sources of a kernel file, name -> text: the file first, then every header. They
    are read once in a process.

    Raises:
        KernelCompileError: an include, even in a disabled `#if`, is not in exactly one folder.
        EnvironmentProblem: a file cannot be read.
    """
    path = source_path(file)
    sources = {file: _read(path, file)}
    queue = [file]
    while queue:
        user = queue.pop()
        for text in _INCLUDE.findall(sources[user]):
            quoted = re.match(r'\s*"([\w.]+)"', text)
            name = quoted[1] if quoted else ""
            if name in sources:
                continue
            if name == constants.HEADER:
                sources[name] = constants.header()
                continue
            places = [folder / name for folder in INCLUDES if (folder / name).is_file()]
            if not name or len(places) != 1:
                raise KernelCompileError(
                    str(path),
                    (),
                    f"{user}: #include {text.strip()}",
                    fix='include "name.cuh", a file that is in just one of '
                    + " and ".join(str(folder) for folder in INCLUDES),
                )
            sources[name] = _read(places[0], user)
            queue.append(name)
    return sources


def _read(path: Path, user: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(
            f"{user}: kernel source {path} cannot be read",
            found=error.strerror,
            fix="install g4spec again",
        ) from None


@functools.cache
def _library() -> Any:
    """Return the NVRTC bindings; raise EnvironmentProblem unless they and the library can be
    loaded."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise EnvironmentProblem(
            "CUDA kernels need the package cuda-bindings", fix=INSTALL
        ) from None
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise EnvironmentProblem(
            "CUDA kernels need the NVRTC library", found=str(error).splitlines()[0], fix=INSTALL
        ) from None
    return nvrtc


@functools.cache
def version() -> tuple[int, int]:
    """Return the version of the NVRTC library, for instance (12, 9)."""
    _, major, minor = _library().nvrtcVersion()
    return major, minor


@functools.cache
def build() -> str:
    """Return the version of the NVRTC library and the size of its file, which tells patch releases
    apart: they have the same version."""
    _library()
    from cuda.pathfinder import load_nvidia_dynamic_lib

    path = load_nvidia_dynamic_lib("nvrtc").abs_path
    size = Path(path).stat().st_size if path and Path(path).is_file() else 0
    return "{}.{}-{}".format(*version(), size)


@functools.cache
def supported() -> tuple[int, ...]:
    """Return the architectures that the NVRTC library compiles for, as numbers: 70 is sm_70."""
    return tuple(_library().nvrtcGetSupportedArchs()[1])


def check_arch(arch: str) -> None:
    """Raise EnvironmentProblem unless the installed NVRTC compiles for this architecture."""
    if number(arch) not in supported():
        raise EnvironmentProblem(
            f"NVRTC {'{}.{}'.format(*version())} cannot compile for {arch}",
            expected="one of " + ", ".join(f"sm_{n}" for n in supported()),
            fix="install a torch whose CUDA version supports this GPU: NVRTC comes with it",
        )


def key(file: str, name: str, arch: str) -> str:
    """Return the cache key of a compilation: a hash of sources, options, name expression and NVRTC
    build."""
    return _digest([sources_digest(file), build(), *options(arch), name])


@functools.cache
def sources_digest(file: str) -> str:
    """Return a hash of all sources of a kernel file (see `closure`)."""
    return _digest(text for pair in closure(file).items() for text in pair)


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def compile(sources: Mapping[str, str], name: str, arch: str) -> Cubin:
    """Compile one instance of a kernel file. NVRTC does not run calls of one process in parallel.

    Args:
        sources: result of `closure`.
        name: name expression, for instance "norm<2>".
        arch: sm_XX, or compute_XX for PTX.

    Raises:
        KernelCompileError: the compiler failed, or the file has no such kernel.
        EnvironmentProblem: NVRTC is missing, or cannot compile for the architecture.
    """
    return compile_together(sources, [name], arch)[0]


def compile_together(sources: Mapping[str, str], names: Sequence[str], arch: str) -> list[Cubin]:
    """Compile several instances of a kernel file as one program: the headers are parsed once, and
    the machine code is that of `compile`. The cubins, in the order of the names, have the log and
    the code in common. Otherwise like `compile`."""
    check_arch(arch)
    nvrtc, (file, text), *headers = _library(), *sources.items()
    status, program = nvrtc.nvrtcCreateProgram(
        text.encode(),
        str(source_path(file)).encode(),
        len(headers),
        [source.encode() for _, source in headers],
        [header.encode() for header, _ in headers],
    )
    _check(status, "nvrtcCreateProgram")
    try:
        return _compile(nvrtc, program, file, names, arch)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _compile(nvrtc: Any, program: Any, file: str, names: Sequence[str], arch: str) -> list[Cubin]:
    for name in names:
        _check(nvrtc.nvrtcAddNameExpression(program, name.encode())[0], f"{file}: {name}")
    flags = options(arch)
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])  # nvrtcGetProgramLog writes into it
    nvrtc.nvrtcGetProgramLog(program, log)
    message = log.rstrip(b"\0").decode("utf-8", "replace")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelCompileError(
            f"{source_path(file)}: {'; '.join(names)}",
            flags,
            message or status.name,
            fix="correct the kernel, or report this with the lines above",
        )
    symbols = []
    for name in names:
        status, symbol = nvrtc.nvrtcGetLoweredName(program, name.encode())
        _check(status, f"{file}: {name}")
        symbols.append(symbol.decode())
    form = "PTX" if arch.startswith("compute") else "CUBIN"
    status, size = getattr(nvrtc, f"nvrtcGet{form}Size")(program)
    _check(status, f"nvrtcGet{form}Size")
    code = bytes(size)
    _check(getattr(nvrtc, f"nvrtcGet{form}")(program, code)[0], f"nvrtcGet{form}")
    nothing = dict.fromkeys(symbols, Resources(0, 0, 0, 0))
    used = nothing if form == "PTX" else resources(message)
    return [Cubin(arch, symbol, used[symbol], message, code) for symbol in symbols]


def _check(status: Any, what: str) -> None:
    if status.value:
        raise EnvironmentProblem(f"NVRTC: {what}", found=status.name)


def resources(log: str) -> dict[str, Resources]:
    """Parse the resources of each kernel, by symbol, from the log of `--ptxas-options=-v`."""
    kernels = {}
    for match in _ENTRY.finditer(log):
        text = match["text"]
        numbers = {
            what: sum(int(n) for n in re.findall(rf"(\d+) bytes {what}", text))
            for what in ("stack frame", "spill stores", "spill loads", "smem")
        }
        registers = re.search(r"Used (\d+) registers", text)
        assert registers, log
        kernels[match["symbol"]] = Resources(
            int(registers[1]),
            numbers["spill stores"] + numbers["spill loads"],
            numbers["stack frame"],
            numbers["smem"],
        )
    return kernels
