from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class TextState:
    asked: int
    def cut(self, tokens: int) -> None: ...

class Lengths:
    def __init__(self, padded: bool) -> None: ...
    def text(self, asked: int | Literal["auto"]) -> TextState:
        return TextState(4 if asked == "auto" else asked)
    def plan(self, texts, most): return [min(t.asked, m) for t, m in zip(texts, most)]
    def again(self, texts, counts, most): return all(c == min(t.asked, m) for t, c, m in zip(texts, counts, most))
    def observe(self, texts, counts, accepted, seconds): ...
Length = Lengths
