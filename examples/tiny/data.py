"""Training rows of token ids: corpus files, conversations and recall tasks, from fixed seeds."""

import json
import random
import warnings
from multiprocessing import Pool
from pathlib import Path

import corpus
import needle
import numpy as np
import synthetic
import tokenizer as tk
import torch

warnings.filterwarnings("ignore", category=SyntaxWarning)
warnings.filterwarnings("ignore", category=DeprecationWarning)
CONVERSATIONS = 60_000
HERE = Path(__file__).resolve().parent
_STATE: dict = {}


def _chat_ids(seeds: range) -> list[np.ndarray]:
    tok, functions = _STATE["tok"], _STATE["functions"]
    texts = [synthetic.chat_text(s, functions) for s in seeds]
    return [
        np.array([tk.BOS, *e.ids], np.int16)
        for e in tok.encode_batch(texts, add_special_tokens=False)
    ]


def train_texts() -> dict[str, str]:
    """Return the corpus files for training."""
    return {k: v for k, v in corpus.load().items() if not corpus.held_out(k)}


def held_out_texts() -> dict[str, str]:
    """Return the corpus files for evaluation."""
    return {k: v for k, v in corpus.load().items() if corpus.held_out(k)}


def join_newlines(parts: list[tuple[np.ndarray, float]]) -> list[tuple[np.ndarray, float]]:
    """Merge two newlines at the border of two parts into one token, as the tokenizer does."""
    out = [parts[0]]
    for part, weight in parts[1:]:
        ids, before = part, out[-1][0]
        if len(ids) and len(before) > 1 and ids[0] == tk.NEWLINE and before[-1] == tk.NEWLINE:
            out[-1] = (before[:-1], out[-1][1])
            ids = np.concatenate([[tk.NEWLINE + 1], ids[1:]])
        out.append((ids, weight))
    return out


class Streams:
    """All training documents as token ids; `sequence` builds one training row."""

    def __init__(self, tok, conversations: int = CONVERSATIONS, workers: int = 8) -> None:
        self.tok = tok
        texts = train_texts()
        self.code = [
            np.array(e.ids, np.int16)
            for e in tok.encode_batch(list(texts.values()), add_special_tokens=False)
        ]
        sizes = np.array([len(c) for c in self.code], float)
        self.share = (sizes / sizes.sum()).cumsum()
        _STATE.update(tok=tok, functions=synthetic.functions_of(texts))
        chunks = [range(i, min(i + 500, conversations)) for i in range(0, conversations, 500)]
        if workers > 1:
            with Pool(workers) as pool:
                parts = pool.map(_chat_ids, chunks)
        else:
            parts = [_chat_ids(c) for c in chunks]
        self.chat = [c for part in parts for c in part]

    def ids(self, text: str) -> np.ndarray:
        """Return the token ids of a text, without BOS."""
        return np.array(self.tok.encode(text, add_special_tokens=False).ids, np.int16)

    def filler(self, rng: random.Random, n: int) -> np.ndarray:
        """Return n consecutive tokens of one random corpus file (wraps at its end)."""
        file = self.code[int(np.searchsorted(self.share, rng.random()))]
        start = rng.randrange(len(file))
        return np.resize(np.roll(file, -start), n) if n > len(file) else np.roll(file, -start)[:n]

    def code_doc(self, rng: random.Random, room: int) -> tuple[np.ndarray, np.ndarray]:
        """Return BOS and a part of one file, with weights."""
        file = self.code[int(np.searchsorted(self.share, rng.random()))]
        start = 0 if rng.random() < 0.3 else rng.randrange(max(1, len(file) - 64))
        doc = np.concatenate([[tk.BOS], file[start : start + room]]).astype(np.int16)
        return doc, np.ones(len(doc), np.float32)

    def chat_doc(self, rng: random.Random, room: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a conversation; tokens of the user have weight 0.3."""
        doc = rng.choice(self.chat)
        turn = np.cumsum(doc == tk.TURN) - np.cumsum(doc == tk.END_TURN)
        count = np.cumsum(doc == tk.TURN)
        system = 1 if len(doc) > 3 and self.tok.id_to_token(int(doc[2])) == "system" else 0
        answer = (
            (turn > 0) & ((count - system) % 2 == 0) | (doc == tk.END_TURN) | (doc == tk.NEWLINE)
        )
        return doc, np.where(answer, 1.0, 0.3).astype(np.float32)

    def recall_doc(self, rng: random.Random, room: int) -> tuple[np.ndarray, np.ndarray]:
        """Return facts within filler, and questions at the end; answers have weight 5."""
        length = (
            int(64 * (room / 64) ** rng.random())
            if rng.random() < 0.6
            else int(room * rng.uniform(0.6, 1.0))
        )
        names = rng.sample(synthetic.NAMES, rng.choice([1, 1, 2, 3]))
        numbers = {n: str(rng.randrange(10_000, 99_999)) for n in names}
        facts = [self.ids(needle.FACT.format(name=n, number=numbers[n])) for n in names]
        chat, asked = rng.random() < 0.3, rng.sample(names, rng.randrange(1, len(names) + 1))
        head = [[tk.BOS], self.ids("<|turn>user\n")] if chat else [[tk.BOS]]
        tail: list[tuple[np.ndarray, float]] = []
        for i, n in enumerate(asked):
            if chat:
                tail.append(
                    (
                        self.ids(
                            ("" if i == 0 else "<|turn>user")
                            + f"\nWhat is the secret number of {n}?<turn|>\n"
                            "<|turn>model\n" + f"The secret number of {n} is"
                        ),
                        0.3,
                    )
                )
            else:
                tail.append((self.ids(needle.QUESTION.format(name=n)), 0.3))
            end = "<turn|>\n" if chat else "\n"
            tail.append((self.ids(needle.ANSWER.format(number=numbers[n]) + end), 5.0))
        budget = max(
            8, length - sum(map(len, facts)) - sum(len(t) for t, _ in tail) - sum(map(len, head))
        )
        parts: list[tuple[np.ndarray, float]] = [(np.array(h, np.int16), 0.3) for h in head]
        for i, fact in enumerate(facts):
            cut = budget if i == len(facts) - 1 else rng.randrange(budget // 2 + 1)
            first = rng.random() < 0.7 or i > 0
            filler = (self.filler(rng, max(1, cut - 1)), 0.3)
            line = (np.array([tk.NEWLINE], np.int16), 0.3)
            parts += [(fact, 0.3), filler, line] if first else [filler, line, (fact, 0.3)]
            budget -= cut
        parts = join_newlines(parts + tail)
        doc = np.concatenate([p for p, _ in parts])
        return doc.astype(np.int16), np.concatenate(
            [np.full(len(p), w, np.float32) for p, w in parts]
        )

    def sequence(
        self, rng: random.Random, length: int, mix: tuple[float, float, float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `length` + 1 ids and weights of concatenated documents."""
        docs, weights, total = [], [], 0
        makers = (self.code_doc, self.chat_doc, self.recall_doc)
        while total < length + 1:
            doc, weight = rng.choices(makers, mix)[0](rng, max(64, length + 1 - total))
            docs.append(doc)
            weights.append(weight)
            total += len(doc)
        return np.concatenate(docs)[: length + 1], np.concatenate(weights)[: length + 1]


class Rows(torch.utils.data.IterableDataset):
    """Endless training rows; each loader worker has its own fixed seed."""

    def __init__(
        self, streams: Streams, length: int, seed: int, mix: tuple[float, float, float]
    ) -> None:
        self.streams, self.length, self.seed, self.mix = streams, length, seed, mix

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(self.seed * 1000 + (worker.id if worker else 0))
        while True:
            ids, weights = self.streams.sequence(rng, self.length, self.mix)
            yield ids.astype(np.int64), weights


def batches(
    streams: Streams, batch: int, length: int, seed: int, workers: int = 8, mix=(0.5, 0.3, 0.2)
):
    """Return an endless iterator of (ids [B, T+1], weights [B, T+1])."""
    loader = torch.utils.data.DataLoader(
        Rows(streams, length, seed, mix),
        batch_size=batch,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
    )
    return iter(loader)


def _rows(job: tuple[int, int, int, tuple[float, float, float]]) -> np.ndarray:
    seed, count, length, mix = job
    rng = random.Random(seed)
    return np.stack(
        [_STATE["streams"].sequence(rng, length, mix)[0][:length] for _ in range(count)]
    )


def rows(
    streams: Streams,
    count: int,
    length: int,
    seed: int,
    workers: int,
    mix: tuple[float, float, float],
) -> torch.Tensor:
    """Return a fixed table of training rows [count, length], int16."""
    _STATE["streams"] = streams
    jobs = [(seed * 10_000 + i, min(64, count - i), length, mix) for i in range(0, count, 64)]
    if workers > 1:
        with Pool(workers) as pool:
            return torch.from_numpy(np.concatenate(pool.map(_rows, jobs, chunksize=1)))
    return torch.from_numpy(np.concatenate([_rows(j) for j in jobs]))


def write_json(path: Path, value: object) -> None:
    """Write indented JSON that ends with a newline."""
    path.write_text(json.dumps(value, indent=2) + "\n")
