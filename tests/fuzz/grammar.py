"""The grammar of command lines: each command's lines and options, with possible values."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.fuzz.family import Family
from tests.support import kinds


class Maker(Protocol):
    """The source of random choices: see `cases.Maker`."""

    rng: random.Random
    family: Family

    def named(self, *names: str) -> str: ...


Rng = random.Random
Value = Callable[["Maker"], str]

TEXTS = [
    "",
    "a",
    "in the a",
    "\n\n\n",
    "<bos><|turn>user",
    "\x1b]0;t\x07",
    "é😀" * 40,
    "\u202e",
    "a" * 3000,
    "\ud800",
    "\x00",
    "-1",
    "--json",
    "{{ x }}",
    "<0x1B>",
]
WHOLE = [
    "0",
    "1",
    "2",
    "3",
    "7",
    "16",
    "64",
    "-1",
    "257",
    "2147483648",
    "9223372036854775808",
    "1" * 30,
    "x",
    "",
    "1.5",
    "0x10",
]
REAL = ["0", "1", "0.5", "0.9", "-1", "1e-9", "1e9", "1e400", "nan", "inf", "x", ""]
TYPES = [
    "q8_0",
    "bf16",
    "f16",
    "f32",
    "q4_0",
    "q4_k_m",
    "q5_k_m",
    "iq4_nl",
    "q6_k",
    "mxfp4",
    "x",
    "",
]
OUTPUTS = [
    "o.gguf",
    "o.gguf",
    "o.gguf",
    "o.json",
    "new/o.gguf",
    "t.gguf",
    "Z",
    "",
    "/dev/full",
    "pipe",
    "o" * 300,
    ".",
    "a\x1bb.gguf",
    "loop",
]
CARDS = ["h200", "RTX 3090", "2x RTX 3090", "h100", "x", "", "8x b200", "\x9b31m", "0x h200"]
BIAS = ["5+1", "5-1", "5=0.5", "99999+1", "5+nan", "5", "-1+2", "x+1", "5+1e400", "5=-inf"]


def _one(*values: str) -> Value:
    return lambda make: make.rng.choice(values)


def _file(*names: str) -> Value:
    return lambda make: make.named(*names)


def anything(make: Maker) -> str:
    return make.rng.choice(
        [
            "h:nowhere",
            "org/name",
            "z-lab/gemma-4-31B-it-DFlash",
            "31b",
            "nowhere.gguf",
            "",
            ".",
            "~nobody/x",
            "~no-such-user/x.gguf",
            "T",
            "Z",
            *make.family.data,
        ]
    )


FOLDERS = tuple(kinds.COMMANDS)
DRAFTS = tuple(f"{name.lower()}.gguf" for name in FOLDERS)
GGUFS = ("t.gguf", *DRAFTS, "every.gguf")
DIALECTS = tuple(f"dialect-{i}.gguf" for i in range(9))
TARGET, DRAFT = _file("t.gguf"), _file(*DRAFTS, *FOLDERS, *DIALECTS)
SOURCE = _file(*FOLDERS, *FOLDERS, "T", *GGUFS, *DIALECTS)
INT, FLOAT, STR = _one(*WHOLE), _one(*REAL), _one(*TEXTS)
NONE: Value = lambda make: ""  # noqa: E731  a flag
OUT, RESULT = _one(*OUTPUTS), _one(*(o for o in OUTPUTS if o != "pipe"))
THREADS = _one("1", "1", "1", "0", "-1", "x", "", "1.5")
LAYERS = _one("0", "1", "99", "all", "auto", "-1", "x", "")
SMALL = {
    "-c": _one("64", "64", "96", "17", *WHOLE[1:]),  # 0 is all that the model has
    "-n": _one("1", "2", "3", *WHOLE),
    "--draft-window": INT,
    "--draft-p-min": FLOAT,
    "--device": _one("cpu", "cuda", "auto", "x"),
    "--cache-type": _one("f16", "q8_0", "x"),
    "--seed": INT,
    "-t": THREADS,
    "--json": NONE,
    "-q": NONE,
}
BRIEF = {**SMALL, "-n": _one("1", "2", "3", "7", "0", "x", "", "1.5", "0x10")}
"""Token counts for commands that decode many texts: none takes 10 s of legitimate work."""
CONVERSATION = {
    "--messages": _file("m.json", "tools.json", "p.txt"),
    "--tools": _file("tools.json", "m.json"),
    "--chat": NONE,
    "--no-chat": NONE,
    "--system": STR,
    "--thinking": NONE,
    "--no-thinking": NONE,
    "--parse-special": NONE,
    "--no-parse-special": NONE,
}
CHUNKS = _one("1", "2", "3", "x", "", "1.5")
"""Chunks of a text: its mutations of 20,000 bytes in chunks of 16 are 10 s of legitimate work."""
SAMPLING = {
    "--temp": FLOAT,
    "--top-k": INT,
    "--top-p": FLOAT,
    "--min-p": FLOAT,
    "--top-n-sigma": FLOAT,
    "--ignore-eos": NONE,
}
LENGTH = _one("1", "2", "auto", "0", "15", "1,2", "sweep", *WHOLE)


@dataclass(frozen=True)
class Grammar:
    """A command: complete lines that reach far into it, and its options with possible values.

    Attributes:
        reads: files that the command reads without naming them.
        given: possible standard inputs.
    """

    weight: int
    lines: tuple[tuple[Any, ...], ...]
    options: dict[str, Value] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    given: tuple[str, ...] = ("a line\n",)


STREAM = 200
"""File descriptor for the tokens of `serve --daemon`."""
FD = str(STREAM)
TYPED = ("p.txt", "ids.txt", "log.txt", "template.jinja")
"""Files that contain the user's own text."""
TALK = (
    "a line\n",
    "hi\n/regen\nb\n",
    "/system x\n/clear\n/help\n/nothing\n",
    '"""a\nb"""\n',
    "\x1b]0;x\x07\n" + "a" * 3000,
    "/exit\n",
    "",
    '"""\n',
)
BENCH = ("bench", "-m", TARGET)
RULES = _one("G4-TNS-002", "G4-KEY-001", "x", "")
COMMANDS: dict[str, Grammar] = {
    "inspect": Grammar(
        9,
        (("inspect", SOURCE),),
        {"--tensors": NONE, "--no-tensors": NONE, "--json": NONE, "-q": NONE},
    ),
    "validate": Grammar(
        9,
        (
            ("validate", _file(*GGUFS)),
            ("validate", _file(*DRAFTS), "--target", TARGET),
            ("validate", _file("z.gguf"), "--against", _file("Z")),
            ("validate", _file("t.gguf"), "--against", _file("T")),
        ),
        {
            "--upstream": NONE,
            "--strict": NONE,
            "--list-rules": NONE,
            "--rule": RULES,
            "--target": anything,
            "--against": anything,
            "--json": NONE,
            "-q": NONE,
        },
    ),
    "convert": Grammar(
        9,
        (
            ("convert", _file(*FOLDERS), "--target", _file("t.gguf", "T"), "-o", OUT),
            ("convert", _file(*DIALECTS), "--target", TARGET, "-o", OUT),
            ("convert", _file("T"), "-o", OUT),
            ("convert", SOURCE, "--target", anything, "--dry-run"),
        ),
        {
            "--type": _one(*TYPES),
            "--tensor-type": _one("ffn=q4_0", "(=f16", "x", "a" * 40 + "*=f16"),
            "--split-max-size": _one("1M", "0M", "1G", "x", "-1M"),
            "--dry-run": NONE,
            "--json": NONE,
            "-q": NONE,
        },
    ),
    "quantize": Grammar(
        5,
        (("quantize", _file(*GGUFS), OUT, "--type", _one(*TYPES)),),
        {
            "--allow-requantize": NONE,
            "--dry-run": NONE,
            "--report": NONE,
            "--json": NONE,
            "--tensor-type": _one("ffn=q4_0", "(=f16", "x"),
            "--split-max-size": _one("1M", "x"),
            "--imatrix": _file("t.gguf", "p.txt", "Z", "nowhere"),
            "-q": NONE,
        },
    ),
    "generate": Grammar(
        5,
        (
            ("generate", "-m", TARGET, "-md", DRAFT, "-p", "in the", "-n", "2", "-c", "64"),
            ("generate", "-m", TARGET, "-p", "a", "-n", "1", "-c", "64"),
            ("generate", "-m", TARGET, "-md", "ngram", "-f", _file("p.txt"), "-n", "2", "-c", "64"),
            (
                *("generate", "-m", TARGET, "-md", DRAFT, "-n", "1", "-c", "64"),
                *("--tokens-file", _file("ids.txt")),
            ),
            ("generate", "-m", TARGET, "-p", STR, "-n", "1", "-c", "96", "--chat"),
            (
                *("generate", "-m", TARGET, "-n", "1", "-c", "512"),
                *("--messages", _file("m.json"), "--tools", _file("tools.json")),
            ),
        ),
        {
            **SMALL,
            **SAMPLING,
            **CONVERSATION,
            "--show-draft": NONE,
            "--show-rejected": NONE,
            "--stop": STR,
            "--logit-bias": _one(*BIAS),
            "--repeat-penalty": FLOAT,
            "--presence-penalty": FLOAT,
            "--frequency-penalty": FLOAT,
            "--draft-max": LENGTH,
            "-md": anything,
        },
    ),
    "tokenize": Grammar(
        8,
        (
            ("tokenize", "-m", TARGET, STR),
            ("tokenize", "-m", TARGET, "--file", _file("p.txt")),
            (
                "tokenize",
                "-m",
                TARGET,
                "--ids-to-text",
                _one("2 7 8", "300 301", "[1,2]", "999999", "x"),
            ),
            ("tokenize", "-m", TARGET, "--file", "-"),
        ),
        {
            "--csv": NONE,
            "--bos": NONE,
            "--no-bos": NONE,
            "--json": NONE,
            "-q": NONE,
            "--ids-to-text": NONE,
        },
    ),
    "verify": Grammar(
        1,
        (
            ("verify", "-m", TARGET, "-md", DRAFT, "--cases", "1", "-n", "3", "-c", "512"),
            (
                *("verify", "-m", TARGET, "-md", DRAFT, "--cases", "1", "-n", "3", "-c", "512"),
                *("--messages", _file("m.json"), "--tools", _file("tools.json")),
            ),
        ),
        {
            **BRIEF,
            **CONVERSATION,
            "-np": _one("1", "2", "0", "x"),
            "--long-tokens": INT,
            "-p": STR,
            "-f": _file("p.txt", "ids.txt"),
            "--tokens-file": _file("ids.txt", "p.txt"),
            "--temp": FLOAT,
            "--draft-max": LENGTH,
        },
    ),
    "bench": Grammar(
        2,
        (
            (
                *BENCH,
                "-md",
                DRAFT,
                "--draft-max",
                "1",
                "-n",
                "1",
                "--prompts",
                "1",
                "--repeats",
                "1",
                "--categories",
                "chat",
                "-c",
                "512",
                "-o",
                RESULT,
            ),
            (
                *BENCH,
                "--preset",
                "mt-bench",
                "--dataset",
                _file("q.jsonl"),
                "--prompts",
                "1",
                "--repeats",
                "1",
                "-n",
                "1",
                "-c",
                "96",
                "--draft-max",
                "0",
            ),
            (
                *BENCH,
                "-md",
                DRAFT,
                "--draft-max",
                "1",
                "-n",
                "1",
                "--prompts",
                "1",
                "--categories",
                "chat",
                "-c",
                "512",
                "-np",
                "2",
            ),
        ),
        {
            **BRIEF,
            **SAMPLING,
            **CONVERSATION,
            "-p": STR,
            "-f": _file("p.txt", "ids.txt"),
            "--tokens-file": _file("ids.txt", "p.txt"),
            "--long-tokens": INT,
            "--type": _one(*TYPES),
            "--draft-max": LENGTH,
            "--categories": _one("code", "x", "", "code,x"),
            "--repeats": _one("1", "2", "0", "-1", "x"),
            "--report": RESULT,
            "-o": RESULT,
            "--prompts": INT,
            "-np": _one("1", "0", "x"),
            "--synthetic": _one("31b", "x"),
            "--accept-length": INT,
        },
    ),
    "doctor": Grammar(
        9,
        (
            ("doctor", "-m", SOURCE, "-md", SOURCE, "--assume", "h200"),
            ("doctor", "-m", SOURCE),
            ("doctor", "--log", _file("log.txt")),
            ("doctor", "-m", anything, "-md", anything, "--assume", "h100"),
        ),
        {
            "-c": INT,
            "--kv": _one("f16", "q8_0", "x", ""),
            "--engine": _one("vllm", "llama.cpp", "g4spec", "x"),
            "--gpus": INT,
            "--assume": _one(*CARDS),
            "--with": _one("vllm=0.19.2", "vllm", "=", "cuda=13"),
            "--why": _one("x", "", "vllm"),
            "-v": NONE,
            "--json": NONE,
            "--log": anything,
            "--attention-backend": _one("TRITON_ATTN", "x", ""),
            "-ngl": LAYERS,
            "-ncmoe": LAYERS,
            "--cards": NONE,
            "-q": NONE,
        },
    ),
    "recipe": Grammar(
        7,
        (
            (
                "recipe",
                _one("llama.cpp", "vllm", "sglang", "g4spec"),
                "-m",
                SOURCE,
                "-md",
                SOURCE,
                "--assume",
                "h200",
            ),
            ("recipe", _one("vllm", "x", ""), "-m", anything, "--assume", _one(*CARDS)),
        ),
        {
            "-c": INT,
            "--kv": _one("f16", "q8_0", "x"),
            "--gpus": INT,
            "--nodes": INT,
            "--compose": NONE,
            "-o": _one("rec", "rec", "Z", "t.gguf", "", "pipe"),
            "--json": NONE,
            "--with": _one("vllm=0.19.2", "x=1"),
            "-ngl": LAYERS,
            "-ncmoe": LAYERS,
            "-q": NONE,
        },
    ),
    "compare": Grammar(
        9,
        (("bench", "compare", _file("r.json"), _file("s.json")),),
        {"--tolerance": _one("5%", "0", "x", "1e400", "nan%"), "--force": NONE, "--json": NONE},
    ),
    "words": Grammar(
        1,
        ((_one("help", "", "--version", "inspekt"), STR), ("demo", "--family", STR)),
        {"--help": NONE, "--json": NONE},
    ),
    "imatrix": Grammar(
        3,
        (("imatrix", _file("p.txt"), "-m", TARGET, "-o", OUT, "-c", "16", "--chunks", "1"),),
        {"-c": INT, "--chunks": CHUNKS, "-o": OUT, "-t": THREADS, "--json": NONE, "-q": NONE},
    ),
    "perplexity": Grammar(
        3,
        (
            ("perplexity", _file("p.txt"), "-m", TARGET, "-c", "16", "--chunks", "1"),
            (
                *("perplexity", _file("p.txt"), "-m", TARGET, "--against", TARGET),
                *("-c", "16", "--chunks", "1"),
            ),
        ),
        {
            "-c": INT,
            "--chunks": CHUNKS,
            "--against": anything,
            "--cache-type": STR,
            "--device": SMALL["--device"],
            "-t": THREADS,
            "--json": NONE,
            "-q": NONE,
        },
    ),
    "chat": Grammar(
        3,
        (
            ("chat", "-m", TARGET, "-n", "2", "-c", "256"),
            ("chat", "-m", TARGET, "-md", DRAFT, "-n", "2", "-c", "256", "--show-draft"),
        ),
        {
            **{flag: value for flag, value in SMALL.items() if flag != "--json"},
            **SAMPLING,
            "-md": anything,
            "--system": STR,
            "--think": NONE,
            "--show-draft": NONE,
            "--draft-max": LENGTH,
        },
        given=TALK,
    ),
    "chat --url": Grammar(
        8,
        (
            ("chat", "--url", "http://127.0.0.1:9"),
            ("chat", "--url", "http://127.0.0.1:9/v1", "--show-draft"),
        ),
        {
            "--url": _one(
                "", "x", "ftp://x", "http://", "http://[", "http://127.0.0.1:99999", "//"
            ),
            "--api-key": _one("k", "\n", "é", ""),
            "--show-draft": NONE,
            "--system": STR,
            "--think": NONE,
            "-n": INT,
            "--seed": INT,
            "--draft-max": LENGTH,
        },
        reads=("models.json", "answer.sse", "live.sse"),
        given=TALK,
    ),
    "serve": Grammar(
        4,
        (
            ("serve", "-m", TARGET, "--port", "0", "-c", "64", "-np", "2"),
            ("serve", "-m", TARGET, "-md", DRAFT, "--port", "0", "-c", "64", "-np", "1"),
            ("serve", "--models", ".", "--port", "0", "-c", "64"),
        ),
        {
            **{flag: value for flag, value in SMALL.items() if flag not in ("-n", "--json")},
            **{flag: value for flag, value in SAMPLING.items() if flag != "--ignore-eos"},
            "-np": _one("1", "2", "0", "x", "65536"),
            "--draft-max": LENGTH,
            "-md": anything,
            "--models": _one("T", ".", "x", ""),
            "--models-max": INT,
            "--host": _one(
                "127.0.0.1", "::1", "0.0.0.0", "1.2.3.4", "[::1]", "127.0.0.1:80", "\x1b"
            ),
            "--port": INT,
            "--queue": INT,
            "--api-key": _one("k", "", "\n", "é"),
            "--api-key-file": _file("p.txt", "ids.txt"),
            "-a": STR,
            "--cors-origin": _one("*", "http://x", "x", "", "\n"),
            "--ssl-cert-file": _file("p.txt", "Z", "nowhere"),
            "--ssl-key-file": _file("p.txt", "Z", "nowhere"),
            "--timeout": FLOAT,
            "--prefix-cache": INT,
            "--pool": INT,
            "-n": INT,
            "--chat-template-file": _file("p.txt", "T/chat_template.jinja", "template.jinja"),
            "--daemon": NONE,
            "--models-autoload": NONE,
            "--no-models-autoload": NONE,
            "--tags": STR,
            "--slots": NONE,
            "--no-slots": NONE,
            "--metrics": NONE,
            "--no-metrics": NONE,
            "--ui": NONE,
            "--no-ui": NONE,
            "--hang-timeout": FLOAT,
            "--sleep-idle-seconds": FLOAT,
            "--reasoning": _one("on", "off", "auto", "x", ""),
            "--prefill-assistant": NONE,
            "--no-prefill-assistant": NONE,
        },
        reads=("t.gguf", "z.gguf"),
    ),
    "serve --daemon": Grammar(
        2,
        (
            (
                "serve",
                "-m",
                TARGET,
                "-md",
                DRAFT,
                "-c",
                "64",
                "--daemon",
                "--stream-fd",
                str(STREAM),
            ),
        ),
        {**SAMPLING, "--pool": INT, "--stream-fd": _one(FD, "999", "-1", "x"), "-q": NONE},
        reads=("ids.bin",),
        given=(
            "ids.bin 2\n",
            "ids.bin 2 samp=0.5,0.9,3,1.1,7\nids.bin 1\n",
            "ids.bin 0\nx 3\n",
            "ids.bin 9999999999\n",
            "ids.bin 2 samp=nan,x\n",
            "\x1b\n\n \n",
            "ids.bin 99",
        ),
    ),
}
