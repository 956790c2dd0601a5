"""The section of a diagnosis about the machine itself."""

from __future__ import annotations

from g4spec.advisor import engines, measured
from g4spec.advisor.diagnosis import Diagnosis, Section
from g4spec.advisor.facts import Facts
from g4spec.advisor.machine import GIB, Gpu, Machine
from g4spec.advisor.schema import CapabilityFact, Mark, OtherGpuFact, SupportFact
from g4spec.advisor.software_facts import WheelFact
from g4spec.advisor.versions import holds, parse
from g4spec.runtime.cuda.build.nvrtc import INSTALL

PER_PROCESS = 3
"""Maximum number of processes listed by name."""


def machine_section(facts: Facts, d: Diagnosis) -> None:
    """Add the section on hardware and software, independent of any model."""
    m = d.machine
    s = d.section(
        "Machine" + (" (assumed: drivers and software are not known)" if m.assumed else "")
    )
    if not m.gpus:
        _no_gpu(facts, s, m)
    for gpu in dict.fromkeys(m.gpus):
        _gpu(facts, s, m, gpu)
    if len(m.gpus) > 1:
        link = {True: "NVLink", False: "no NVLink", None: "links unknown"}[m.nvlink]
        s.add("note", f"{len(m.gpus)} GPUs on one node, {link}", facts=("pcie",))
    if m.measured is not None:
        which = ", the slowest GPU" if len(m.gpus) > 1 else ""
        text = (
            f"read bandwidth measured here ({m.measured.date}): {m.measured.read:.0f} GB/s{which}"
        )
        s.add("note", text, facts=(measured.ID,))
    if m.driver:
        s.add(
            "note",
            f"driver {m.driver}, CUDA up to {m.cuda or 'unknown'}",
            facts=("cuda-13-driver",),
        )
    _software(facts, s, m)
    _system(s, m)
    for note in m.notes if m.gpus else ():
        s.add("note", note, detail="CUDA_VISIBLE" not in note)


def _no_gpu(facts: Facts, s: Section, m: Machine) -> None:
    """Add what runs without an NVIDIA GPU, and how to make one visible."""
    if m.other is not None:
        row = facts.get(OtherGpuFact, m.other)
        s.add(
            "warn",
            f"this is {row.name}" if row.id == "other-mac" else f"it has {row.name}",
            row.says,
            row.fix,
            (row.id,),
        )
    elif m.assumed:
        s.add("note", "no NVIDIA GPU: llama.cpp and g4spec run on the CPU")
    else:
        s.add(
            "warn",
            "no NVIDIA GPU that this process can use",
            "; ".join(m.notes),
            "with one in the machine, install its driver, or run the container with --gpus all; "
            'to ask about another machine: --assume "RTX 3090"',
        )


def _gpu(facts: Facts, s: Section, m: Machine, gpu: Gpu) -> None:
    cc = f"{gpu.cc[0]}.{gpu.cc[1]}" if gpu.cc is not None else "unknown"
    row = next((c for c in facts.all(CapabilityFact) if cc in c.cc), None)
    size = f"{gpu.memory / GIB:.1f} GiB" if gpu.memory is not None else "memory unknown"
    if gpu.unified:
        size += " shared with the CPU"
    elif gpu.free is not None:
        size += f", {gpu.free / GIB:.1f} free"
    band = f"{gpu.bandwidth:.0f} GB/s" if gpu.bandwidth else "bandwidth unknown"
    n = sum(g == gpu for g in m.gpus) * m.nodes
    name = f"{n}x {gpu.name}" if n > 1 else gpu.name
    where = f" on {m.nodes} nodes" if m.nodes > 1 else ""
    ids = tuple(i for i in (gpu.card, row.id if row else None) if i)
    generation = f" ({row.generation})" if row else ""
    s.add(
        "good" if row else "warn",
        f"{name}{where}: capability {cc}{generation}, {size}, {band}",
        "" if row else "this compute capability is not in the data",
        facts=ids,
    )
    support = next((r for r in facts.all(SupportFact) if cc in r.cc), None)
    if support is not None:
        s.add("note", f"in short: {support.verdict}", facts=(support.id,))
    if gpu.processes:
        shown = ", ".join(gpu.processes[:PER_PROCESS])
        more = len(gpu.processes) - PER_PROCESS
        s.add(
            "warn",
            f"others use this GPU: {shown}" + (f" and {more} more" if more > 0 else ""),
            "what they hold is not free for the model",
            "end them, or take a shorter context",
        )


def _software(facts: Facts, s: Section, m: Machine) -> None:
    if m.assumed and not m.tools:
        return
    found = []
    for name in ("vllm", "sglang", "llama.cpp"):
        title = engines.engine_fact(facts, name).title
        found.append(f"{title} {m.tools[name]}" if name in m.tools else f"{title} not installed")
    s.add("note", ", ".join(found))
    torch = m.tools.get("torch")
    if torch and m.gpus:
        _torch(facts, s, m, torch)
    others = ", ".join(
        f"{k} {v}" for k, v in m.tools.items() if k not in ("vllm", "sglang", "llama.cpp", "torch")
    )
    if others:
        s.add("note", others, detail=True)
    if m.gpus and not m.assumed:
        _kernels(s, m)


def _kernels(s: Section, m: Machine) -> None:
    """Add which packages are missing to compile and launch g4spec's CUDA kernels."""
    missing = [name for name in ("torch", "cuda-core") if name not in m.tools]
    if missing:
        s.add("warn", f"g4spec's CUDA kernels need {' and '.join(missing)}", fix=INSTALL)
    elif not any(name.startswith("nvidia-cuda-nvrtc") for name in m.tools):
        s.add(
            "note",
            "no package holds NVRTC: g4spec's CUDA kernels need it from the system",
            detail=True,
        )


def _torch(facts: Facts, s: Section, m: Machine, version: str) -> None:
    arches = m.torch_arches
    basis = "read from the library"
    if not arches:
        row = next(
            (
                w
                for w in facts.all(WheelFact)
                if w.package == "torch" and holds(w.versions, parse(version))
            ),
            None,
        )
        arches, basis = (row.sass if row else ()), "as its PyPI wheel"
    mark: Mark = "note"
    why = fix = ""
    if "+cpu" in version:
        mark, why = "warn", "this torch is built without CUDA"
        fix = "install a CUDA build of torch if engines share this environment"
    elif m.cc is not None and arches and not covered(m.cc, arches):
        mark = "bad"
        why = f"it holds code for {', '.join(arches)} only"
        fix = "a build that holds it: the cu126 index keeps 5.0 to 9.0"
    s.add(
        mark,
        f"torch {version}: code for {', '.join(arches) or 'no GPU'} ({basis})",
        why,
        fix,
        ("wheel-torch", "wheel-torch-old"),
    )


def covered(cc: tuple[int, int], arches: tuple[str, ...]) -> bool:
    """Return True if machine code for one of `arches` runs on `cc`: same major, minor <= cc's."""
    return any(a[0] == cc[0] and a[1] <= cc[1] for a in map(parse, arches) if len(a) > 1)


def _system(s: Section, m: Machine) -> None:
    parts = []
    if m.ram is not None:
        free = f", {m.ram_free / GIB:.0f} free" if m.ram_free is not None else ""
        parts.append(f"{m.ram / GIB:.0f} GiB RAM{free}")
    if m.disk_free is not None:
        parts.append(f"{m.disk_free / GIB:.0f} GiB free on disk here")
    if m.container:
        parts.append(f"in a container ({m.container})")
    if m.wsl:
        parts.append("WSL")
    if parts:
        s.add("note", ", ".join(parts))
