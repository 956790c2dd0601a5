"""Faults while commands write: failing and short writes, full disks, limits and signals.

Each case is a fork of this process, which has imported everything, and runs one command line as
`g4spec` does. Afterwards every output must be the old file or the complete new one. No other files
may be left, except temporary files after SIGKILL, which the next run must remove.

    python -m tests.fuzz.faults [--cases 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import functools
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.shim import restart_with_shim

WRITE, FSYNC, RENAME, OPEN, CHMOD = range(5)
CALLS = {"write": WRITE, "fsync": FSYNC, "rename": RENAME, "open": OPEN, "chmod": CHMOD}
ERRORS = [
    errno.ENOSPC,
    errno.EIO,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EFBIG,
    errno.EPERM,
]
CODES = {0, 3, 4}
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


@functools.lru_cache
def old(name: str) -> bytes:
    """Return the previous content of an output; commands only replace files of their own kind."""
    if name == "i.gguf":
        from g4spec.gguf import imatrix

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            imatrix.save(path, imatrix.Imatrix({}, 1, 16, ("older",)))
            return path.read_bytes()
    return {
        ".gguf": b"GGUF, an older file\n",
        ".json": b'{"schema": "g4spec.older"}\n',
        ".html": b"<title>Draft lengths: older\n",
        ".sh": b"# written by g4spec recipe\n# older\n",
        ".yaml": b"# written by g4spec recipe\n# older\n",
    }.get(Path(name).suffix, b"an older file\n")


@dataclass(frozen=True)
class Writer:
    """A command that writes files.

    Attributes:
        argv: arguments, with {out} for the output folder.
        whole: returns True if an output is complete. None: it must equal the output of a run
            without faults. Only `bench` varies, because it writes measurements.
    """

    name: str
    argv: tuple[str, ...]
    whole: Callable[[bytes], bool] | None = None


def writers(base: Path) -> list[Writer]:
    """Return all commands that write files; their inputs are made in `base`."""
    from g4spec.convert import convert
    from tests.support import tiny

    target = tiny.target(base / "T", layers=3, period=3, hidden=64, inter=64, heads=2, kv=1)
    draft = tiny.zlab_dflash(base / "Z", target, inter=64)
    t, z = base / "t.gguf", base / "z.gguf"
    convert(target, t, type="bf16")
    convert(draft, z, target=t, type="bf16")
    text, questions = base / "p.txt", base / "q.jsonl"
    text.write_text("in the a b c d e f g h\n" * 8)
    questions.write_text(json.dumps({"question_id": 1, "turns": ["Say a."]}) + "\n")
    bench = (
        "bench",
        "-m",
        str(t),
        "--preset",
        "mt-bench",
        "--dataset",
        str(questions),
        "--draft-max",
        "0",
        "-n",
        "2",
        "--repeats",
        "1",
        "-c",
        "96",
    )
    return [
        Writer("convert", ("convert", str(draft), "--target", str(t), "-o", "{out}/o.gguf")),
        Writer("convert a target", ("convert", str(target), "-o", "{out}/o.gguf")),
        Writer("quantize", ("quantize", str(t), "{out}/o.gguf", "--type", "q8_0")),
        Writer("recipe", ("recipe", "llama.cpp", "-m", "31b", "--assume", "h200", "-o", "{out}/r")),
        Writer("bench", (*bench, "-o", "{out}/r.json", "--report", "{out}/r.html"), _result),
        Writer(
            "conversion cache",
            ("generate", "-m", str(t), "-md", str(draft), "-p", "a", "-n", "1", "-c", "64"),
        ),
        Writer("kernel cache", ("store-a-kernel",)),
        Writer(
            "imatrix",
            ("imatrix", str(text), "-m", str(t), "-o", "{out}/i.gguf", "-c", "16", "--chunks", "1"),
        ),
    ]


def _result(data: bytes) -> bool:
    if data.startswith(b"<!"):
        return data.rstrip().endswith(b"</html>")
    try:
        return json.loads(data)["schema"].startswith("g4spec.bench/")
    except ValueError:
        return False


# ---- one case


@dataclass
class Fault:
    """The fault of a case.

    Attributes:
        call, at, error, always: see faults.c.
        limit: largest file size in bytes.
        signals: (seconds, number), sent to each of the `together` concurrent runs.
    """

    kind: str
    call: int = -1
    at: int = 0
    error: int = 0
    always: bool = False
    limit: int | None = None
    signals: list[tuple[float, int]] = field(default_factory=list)
    together: int = 1


class FaultRunner:
    """Runs cases in a folder and compares with the outputs of runs without faults."""

    def __init__(self, base: Path, shim: Path | None, only: str | None = None) -> None:
        self.base, self.out = base, base / "out"
        for number in (signal.SIGINT, signal.SIGTERM):  # default handlers, as in a new process
            signal.signal(number, signal.SIG_DFL)
        self._shim = ctypes.CDLL(str(shim)) if shim else None
        self.can_fail = shim is not None
        (base / "made").mkdir()
        self.writers = [w for w in writers(base / "made") if only in (None, w.name)]
        self._sources = {p: p.read_bytes() for p in (base / "made").rglob("*") if p.is_file()}
        self.expected: dict[str, dict[str, bytes]] = {}
        self.calls: dict[str, Counter[str]] = {}
        self.seconds: dict[str, float] = {}
        for writer in self.writers:
            self._learn(writer)

    def _warm(self, writer: Writer) -> None:
        """Run a command in this process, so that forked cases need no imports."""
        from g4spec import cli

        if writer.argv[0] == "store-a-kernel":
            from g4spec.runtime.cuda.build import disk_cache

            assert disk_cache.MAGIC
            return
        self.fresh()
        os.environ["XDG_CACHE_HOME"] = str(self.out / "cache")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert cli.run([a.replace("{out}", str(self.out)) for a in writer.argv]) == 0

    def _learn(self, writer: Writer) -> None:
        """Record the outputs of a command, its time, and its number of calls that can fail."""
        self._warm(writer)
        self.fresh()
        began = time.perf_counter()
        codes, output = self.start(writer, Fault("none", call=CALLS["chmod"], at=1 << 40))
        self.seconds[writer.name] = time.perf_counter() - began
        assert codes == [0], (writer, codes, output)
        self.expected[writer.name] = self.files()
        assert self.expected[writer.name], writer
        counts = self.base / "counts"
        self.calls[writer.name] = Counter(json.loads(counts.read_text()) if self._shim else {})

    def fresh(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()

    def older(self, writer: Writer) -> None:
        """Write outputs of an earlier run, with unusual file modes."""
        for name in self.expected[writer.name]:
            path = self.out / name
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_bytes(old(name))
            path.chmod(0o600 if "cache" in name else 0o640)

    def files(self) -> dict[str, bytes]:
        return {
            str(p.relative_to(self.out)): p.read_bytes()
            for p in sorted(self.out.rglob("*"))
            if p.is_file()
        }

    def start(self, writer: Writer, fault: Fault) -> tuple[list[int], str]:
        """Return the exit codes of a case's runs (negative: the signal that ended it), and their
        stderr."""
        for i in range(fault.together):
            (self.base / f"stderr.{i}").write_text("")  # for runs killed before they create it
        pids = [self._fork(writer, fault, i) for i in range(fault.together)]
        began = time.perf_counter()
        for seconds, number in fault.signals:
            time.sleep(max(0.0, began + seconds - time.perf_counter()))
            for pid in pids:
                os.kill(pid, number)  # a process that has ended is a zombie until waitpid
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        output = "".join((self.base / f"stderr.{i}").read_text() for i in range(fault.together))
        return codes, output

    def _fork(self, writer: Writer, fault: Fault, number: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            self._redirect(number)
            os.environ["XDG_CACHE_HOME"] = str(self.out / "cache")
            if fault.limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (fault.limit, fault.limit))
            if self._shim:
                below, at = os.fsencode(f"{self.out}/"), ctypes.c_long(fault.at)
                self._shim.faults_arm(below, fault.call, at, fault.error, int(fault.always))
            _main([a.replace("{out}", str(self.out)) for a in writer.argv])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001  as the interpreter does at its end
            import traceback

            traceback.print_exc()
            code = 1
        finally:
            if fault.kind == "none" and self._shim:
                counts = {n: self._shim.faults_count(c) for n, c in CALLS.items()}
                (self.base / "counts").write_text(json.dumps(counts))
            with contextlib.suppress(OSError, ValueError):  # the size limit applies to stderr, too
                sys.stderr.flush()
            os._exit(code)

    def _redirect(self, number: int) -> None:
        handle = os.open(self.base / f"stderr.{number}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for target, source in ((2, handle), (1, os.open(os.devnull, os.O_WRONLY))):
            os.dup2(source, target)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115

    # ---- verdict

    def case(self, writer: Writer, fault: Fault, older: bool) -> Iterator[str]:
        """Run a case and return what is wrong with the files it left."""
        self.fresh()
        if older:
            self.older(writer)
        codes, output = self.start(writer, fault)
        ended = {-number for _, number in fault.signals} | {130, 143}
        for code in codes:
            if code not in CODES | (ended if fault.signals else set()):
                yield f"exit code {code}"
        if "Traceback" in output or "ignored in" in output:
            yield f"output {output[-900:]}"
        killed = any(code in (-signal.SIGKILL, -signal.SIGINT, -signal.SIGTERM) for code in codes)
        yield from self.left(writer, older, all(code == 0 for code in codes), killed)
        before = sum(TEMPORARY.fullmatch(Path(n).name) is not None for n in self.files())
        codes, output = self.start(writer, Fault("after"))
        if codes != [0]:
            yield f"the next run ended with {codes}: {output[-300:]}"
        yield from self.left(writer, False, True, False)
        if before and any(TEMPORARY.fullmatch(Path(n).name) for n in self.files()):
            yield "a temporary file outlived the next run"
        if any(path.read_bytes() != data for path, data in self._sources.items()):
            yield "a source was changed"

    def left(self, writer: Writer, older: bool, done: bool, killed: bool) -> Iterator[str]:
        """Return what is wrong with the files in the output folder."""
        expected = self.expected[writer.name]
        for name, data in self.files().items():
            path = self.out / name
            if TEMPORARY.fullmatch(path.name):
                if not killed:
                    yield f"{name} was left over"
            elif name not in expected:
                yield f"{name} should not be there"
            elif data == old(name) and older:
                if done and writer.name != "kernel cache":  # which ignores failed writes
                    yield f"{name} is the older file after a run that ended well"
            elif not (writer.whole(data) if writer.whole else data == expected[name]):
                yield f"{name} is half there: {len(data)} bytes of {len(expected[name])}"
            if older and name in expected and "cache" not in name:
                mode = path.stat().st_mode & 0o777
                if mode != 0o640:
                    yield f"{name} has mode {mode:o}"


def _main(argv: list[str]) -> None:
    """Run one command line as its own process would."""
    from g4spec import cli
    from g4spec.runtime.cuda.build import disk_cache
    from g4spec.runtime.cuda.build.nvrtc import Cubin, Resources

    if argv == ["store-a-kernel"]:
        import warnings

        warnings.simplefilter("ignore")
        code = b"\x7fELF" + bytes(200_000)
        cli.run = lambda argv: (
            disk_cache.store(  # type: ignore[assignment,return-value,func-returns-value]
                "key", Cubin("sm_80", "f", Resources(1, 0, 0, 0), "", code)
            )
            or 0
        )
    sys.argv = ["g4spec", *argv]
    cli.main()


# ---- which faults


def plan(
    bench: FaultRunner, cases: int, rng: random.Random
) -> Iterator[tuple[Writer, Fault, bool]]:
    """Return faults of all kinds in turn, equally many for each command."""
    makers = [_limited, _signalled, _signalled, _together]
    if bench.can_fail:
        makers += [_failing, _short]
    for i in range(cases):
        writer = bench.writers[i % len(bench.writers)]
        yield writer, rng.choice(makers)(bench, writer, rng), rng.random() < 0.6


def _failing(bench: FaultRunner, writer: Writer, rng: random.Random) -> Fault:
    call = rng.choice([c for c, n in bench.calls[writer.name].items() if n] or ["write"])
    at = rng.randrange(1, bench.calls[writer.name][call] + 2)
    return Fault(f"failing {call}", CALLS[call], at, rng.choice(ERRORS), rng.random() < 0.3)


def _short(bench: FaultRunner, writer: Writer, rng: random.Random) -> Fault:
    at = rng.randrange(1, max(1, bench.calls[writer.name]["write"]) + 1)
    return Fault("short write", WRITE, at, 0, rng.random() < 0.5)


def _limited(bench: FaultRunner, writer: Writer, rng: random.Random) -> Fault:
    largest = max(map(len, bench.expected[writer.name].values()))
    return Fault("file size limit", limit=rng.randrange(largest + 100))


def _signalled(bench: FaultRunner, writer: Writer, rng: random.Random) -> Fault:
    numbers = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    at = rng.uniform(0, 1.1 * bench.seconds[writer.name])
    sent = [(at, int(rng.choice(numbers)))]
    if rng.random() < 0.25:  # a second signal, at once or during cleanup
        sent.append((at + rng.choice([0, 0.002, 0.02]), int(rng.choice(numbers[1:]))))
    return Fault("+".join(signal.Signals(n).name for _, n in sent), signals=sent)


def _together(bench: FaultRunner, writer: Writer, rng: random.Random) -> Fault:
    fault = _signalled(bench, writer, rng) if rng.random() < 0.5 else Fault("alone")
    fault.together = rng.randrange(2, 5)
    fault.kind = f"{fault.kind}, several at once"
    return fault


def disks(bench: FaultRunner) -> Iterator[tuple[str, list[str]]]:
    """Test full, filling and read-only disks, if this user may mount one."""
    place = bench.base / "disk"
    place.mkdir()
    for options in ("size=16k", "size=100k", "size=64m,ro", "size=64m"):
        for writer in bench.writers:
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)],
                capture_output=True,
                check=False,
            )
            if done.returncode:
                return
            bench.out = place
            try:
                codes, output = bench.start(writer, Fault("disk"))
                wrong = [f"exit code {c}" for c in codes if c not in CODES]
                wrong += ["a traceback"] if "Traceback" in output else []
                wrong += list(bench.left(writer, False, False, False))
            finally:
                bench.out = bench.base / "out"
                subprocess.run(["umount", str(place)], check=True)
            yield f"{writer.name} on a disk of {options}", wrong


def run(
    cases: int,
    seconds: float,
    seed: int,
    base: Path,
    shim: Path | None,
    with_disks: bool,
    only: str | None,
) -> dict[str, Any]:
    """Run cases until the time is over, then the disk tests; return counts by kind, and errors."""
    bench, kinds, names = FaultRunner(base, shim, only), Counter[str](), Counter[str]()
    broken: dict[str, list[str]] = {}
    end = time.monotonic() + seconds
    for writer, fault, older in plan(bench, cases, random.Random(seed)):
        if time.monotonic() > end:
            break
        kinds[fault.kind] += 1
        names[writer.name] += 1
        if kinds.total() % 50 == 0:
            print(f"{kinds.total()} cases, {list(broken)}", file=sys.stderr, flush=True)
        for what in bench.case(writer, fault, older):
            broken.setdefault(re.sub(r"\d{2,}", "N", what)[:150], []).append(
                f"{what} <- {writer.name}: {fault}, {older=}"
            )
    tried = list(disks(bench)) if with_disks else []
    for name, wrong in tried:
        for what in wrong:
            broken.setdefault(what[:150], []).append(name)
    return {
        "cases": kinds.total() + len(tried),
        "signals": sum(n for k, n in kinds.items() if "SIG" in k),
        "by_fault": dict(sorted(kinds.items())),
        "by_command": dict(sorted(names.items())),
        "disks": len(tried),
        "calls_can_fail": bench.can_fail,
        "broken": {k: v[:3] for k, v in broken.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="faults to this command alone")
    parser.add_argument("--disks", action="store_true", help="mount full and read-only ones")
    asked, shim = parser.parse_args(), restart_with_shim()
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        found = run(
            asked.cases, asked.seconds, asked.seed, Path(folder), shim, asked.disks, asked.only
        )
    print(json.dumps(found, indent=1))
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
