"""Files for command lines: a small target, drafts of every kind, and every other input, each by its
name in the folder of a case."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from g4spec.convert import convert
from g4spec.gguf import GGUF
from tests.cpu import gguf_fixtures as fixtures
from tests.fuzz.readers import _every_type
from tests.support import bench_result, kinds, tiny
from tests.support.tiny_dialects import ASSISTANT, DFLASH, Parts
from tests.support.tiny_tokenizer import TEMPLATE

LOG = """INFO 11-20 vllm serve starts
(EngineCore pid=7) ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
llama_model_load: error loading model: done_getting_tensors: wrong number of tensors; expected 58
ValueError: No available memory for the cache blocks.
\x1b[31mFAILED\x1b[0m RuntimeError: CUDA error: no kernel image is available for execution
"""
QUESTIONS = "".join(
    json.dumps({"question_id": i, "category": "writing", "turns": ["Say a.", "Again."]}) + "\n"
    for i in range(3)
)
ANSWER: list[tuple[str, Any]] = [
    ("", {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
    ("", {"choices": [{"index": 0, "delta": {"reasoning_content": "so"}}]}),
    ("", {"choices": [{"index": 0, "delta": {"content": "in the\n"}, "finish_reason": None}]}),
    (
        "",
        {
            "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
            "timings": {
                "predicted_n": 3,
                "predicted_per_second": 9.5,
                "draft_n": 4,
                "draft_n_accepted": 2,
                "notes": ["a note"],
            },
        },
    ),
    ("", {"error": {"message": "too long"}}),
]
LIVE: list[tuple[str, Any]] = [
    ("hello", {"model": "tiny"}),
    (
        "cycle",
        {
            "yours": True,
            "rejected": ["x"],
            "pieces": [
                {"text": "in", "part": "text", "kind": "accepted"},
                {"text": " the", "part": "thought", "kind": "corrected"},
            ],
        },
    ),
    ("end", {"yours": True}),
]
IDS = struct.pack("<3i", 2, 7, 8)


def events(those: Sequence[tuple[str, Any]]) -> bytes:
    """Return server-sent events."""
    return "".join(
        (f"event: {name}\n" if name else "") + f"data: {json.dumps(tree)}\n\n"
        for name, tree in those
    ).encode()


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "in the a"},
    {"role": "assistant", "content": "b", "reasoning_content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "c"}]},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find a word",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["word"],
            },
        },
    }
]
TEXT = "in the a\n\n b def f(x):\n    return x\n"


class Family:
    """Files by name, as bytes; `gguf` has those available as keys and tensors."""

    def __init__(self, folder: Path) -> None:
        target = tiny.target(folder / "T", layers=3, period=3, hidden=32, inter=32, heads=2, kv=1)
        self._drafts(folder, target)
        self.data: dict[str, bytes] = {}
        self.gguf: dict[str, fixtures.File] = {}
        convert(target, folder / "t.gguf", type="bf16")
        self._keep(folder / "t.gguf")
        for name in self.drafts:
            path = folder / f"{name.lower()}.gguf"
            convert(folder / name, path, target=folder / "t.gguf")
            self._keep(path)
        self._dialects(folder)
        self._take("every.gguf", fixtures.File.bytes, _every_type())
        for place in (target, *(folder / name for name in self.drafts)):
            for path in place.iterdir():
                self.data[f"{place.name}/{path.name}"] = path.read_bytes()
        result = bench_result.result()
        result["rows"] = result["rows"][:6]
        self.data |= {
            "r.json": json.dumps(result).encode(),
            "s.json": json.dumps(result).encode(),
            "p.txt": TEXT.encode(),
            "ids.txt": b"2, 7 8 9\n",
            "log.txt": LOG.encode(),
            "q.jsonl": QUESTIONS.encode(),
            "m.json": json.dumps(MESSAGES).encode(),
            "tools.json": json.dumps(TOOLS).encode(),
            "models.json": b'{"data": [{"id": "tiny"}]}',
            "answer.sse": events(ANSWER),
            "live.sse": events(LIVE),
            "ids.bin": IDS,
            "template.jinja": TEMPLATE.encode(),
        }
        self.seed = {name: hashlib.sha256(data).digest() for name, data in self.data.items()}

    def _drafts(self, folder: Path, target: Path) -> None:
        for name, make in kinds.COMMANDS.items():
            make(folder / name, target)
        self.drafts = list(kinds.COMMANDS)

    def _dialects(self, folder: Path) -> None:
        self.dialects = []
        for name, change in DFLASH.items():
            parts = Parts.of(folder / "z.gguf")
            change(parts)
            self._take(f"dialect-{len(self.dialects)}.gguf", None, parts)
            self.dialects.append(name)
        for name, rewrite in ASSISTANT.items():
            parts = Parts.of(folder / "a.gguf")
            rewrite(parts, folder / "a.gguf")
            self._take(f"dialect-{len(self.dialects)}.gguf", None, parts)
            self.dialects.append(name)

    def _keep(self, path: Path) -> None:
        with GGUF(path) as g:
            parts = Parts({k: g.value(k) for k in g}, Parts.of(path).tensors)
        self._take(path.name, None, parts)

    def _take(self, name: str, _: object, what: Parts | bytes) -> None:
        if isinstance(what, bytes):
            from tests.fuzz.mutation import FILES

            file = FILES[what]
        else:
            tensors = {n: fixtures.Entry(*entry) for n, entry in what.tensors.items()}
            file = fixtures.File(dict(what.kv), tensors)
        self.gguf[name], self.data[name] = file, file.bytes()

    def copy(self, name: str) -> fixtures.File:
        """Return a copy of a GGUF that may be changed."""
        file = self.gguf[name]
        tensors = {n: replace(entry) for n, entry in file.tensors.items()}
        return replace(file, kv=dict(file.kv), tensors=tensors)
