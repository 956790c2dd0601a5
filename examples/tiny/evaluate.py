"""Measure loss, acceptance, recall and looping on held-out text, in float32, greedily.

Free running: the target continues a prompt, and the draft-verify loop is simulated on its text
(greedy verification gives the same text with any draft). Teacher-forced: the loop is simulated on
held-out text, and proposals are compared with the target's greedy continuation of each position,
so that looping text does not inflate acceptance.
"""

import argparse
import math
import time
from collections.abc import Callable

import data
import export
import needle
import tokenizer as tk
import torch
import torch.nn.functional as F
from prompts import CATEGORIES, held_out_ids, lookup, loops, prompts
from target import Cache, Target, Whole, rollout

STOPS = {1, 106, 50}
LENGTHS = {"dflash": 15, "dflash-speculators": 7, "assistant": 4, "dflash-other": 15, "n-gram": 15}


@torch.no_grad()
def losses(target: Target, tok, device: str) -> dict[str, dict[str, float]]:
    """Return nats per token and bits per byte of the held-out files, in windows of 1,024 tokens."""
    out: dict[str, dict[str, float]] = {}
    for kind, end in (("code", ".py"), ("docs", ".txt")):
        nats = tokens = size = 0.0
        for ids in held_out_ids(tok, end):
            for at in range(0, min(len(ids), 12_000), 1024):
                part = ids[at : at + 1024]
                row = F.pad(
                    torch.tensor([[tk.BOS, *part]], device=device), (0, -(len(part) + 1) % 128)
                )
                hidden, _ = target(row, torch.arange(row.shape[1], device=device)[None], Whole(128))
                ce = F.cross_entropy(
                    target.head(hidden[0, : len(part)]), row[0, 1 : len(part) + 1], reduction="sum"
                )
                nats, tokens, size = (
                    nats + ce.item(),
                    tokens + len(part),
                    size + len(tok.decode(part).encode()),
                )
        out[kind] = {
            "nats_per_token": nats / tokens,
            "bits_per_byte": nats / size / math.log(2),
            "tokens": tokens,
        }
    return out


@torch.no_grad()
def continue_greedily(target: Target, ids: list[int], new: int, device: str) -> list[int]:
    """Return the prompt and its greedy continuation, up to a stop id or `new` tokens."""
    cache, out = Cache(len(ids) + new, target.c.window), list(ids)
    feed = torch.tensor([ids], device=device)
    for _ in range(new):
        hidden, _ = target(
            feed, torch.arange(cache.at, cache.at + feed.shape[1], device=device)[None], cache
        )
        cache.at += feed.shape[1]
        out.append(int(target.head(hidden[:, -1]).argmax(-1)))
        if out[-1] in STOPS:
            break
        feed = torch.tensor([out[-1:]], device=device)
    return out


def walk(first: int, end: int, accepted: Callable[[int], int]) -> list[int]:
    """Return the tokens committed in each cycle from anchor `first` on, bonus included."""
    at, commits = first, []
    while at < end - 1:
        n = min(accepted(at) + 1, end - 1 - at)
        commits.append(n)
        at += n
    return commits


def matching(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@torch.no_grad()
def measure(
    target: Target, drafts: dict, ids: list[int], first: int, free: bool, device: str
) -> dict[str, list[int]]:
    """Return committed tokens per step, by draft, along `ids` from anchor `first` on.

    `free`: `ids` is the target's own text.
    """
    n = len(ids)
    row = F.pad(torch.tensor([ids], device=device), (0, -n % target.c.window))
    attend = Whole(target.c.window, keep=True)
    hidden, outputs = target(row, torch.arange(row.shape[1], device=device)[None], attend)
    spots = torch.arange(first, n - 1, device=device)
    proposals: dict[str, list[list[int]]] = {name: [] for name in drafts}
    truth: list[list[int]] = []
    for part in spots.split(64):
        anchors = part[None]
        if not free:
            truth += rollout(target, attend.kv, row, anchors, 15)[0].tolist()
        for name, draft in drafts.items():
            proposals[name] += draft.propose(
                target, row, outputs, attend.kv, hidden, anchors, LENGTHS[name]
            )[0].tolist()
    if free:
        truth = [ids[p + 1 : p + 16] for p in range(first, n - 1)]
    result = {
        name: walk(first, n, lambda p, d=made: matching(d[p - first], truth[p - first]))
        for name, made in proposals.items()
    }
    result["n-gram"] = walk(
        first, n, lambda p: matching(lookup(ids, p, LENGTHS["n-gram"]), truth[p - first])
    )
    return result


def needle_right(target: Target, tok, device: str, count: int = 20) -> float:
    """Return the fraction of needles (at position 0 of 3,359 tokens) that the target retrieves."""
    encode = lambda t: tok.encode(t, add_special_tokens=False).ids  # noqa: E731
    texts = [
        t
        for k, t in sorted(data.held_out_texts().items())
        if k.endswith(".txt") and len(t) > 14_000
    ]
    right = 0
    for i in range(count):
        number = str(10_007 + 4441 * i)
        text = needle.needle_prompt(
            encode,
            texts[i % len(texts)] + "\n" + texts[(i + 1) % len(texts)],
            name="Maple",
            number=number,
        )
        ids = [tk.BOS, *encode(text)]
        right += (
            tok.decode(continue_greedily(target, ids, 8, device)[len(ids) :])
            .strip()
            .startswith(number)
        )
    return right / count


def summary(commits: dict[str, list[int]]) -> dict[str, float]:
    """Return the mean number of tokens per step, by draft."""
    return {name: round(sum(c) / max(1, len(c)), 3) for name, c in commits.items()}


def add(total: dict[str, list[int]], more: dict[str, list[int]]) -> None:
    """Append `made`, the commits of one text, to `commits`."""
    for name, c in more.items():
        total.setdefault(name, []).extend(c)


def run(args: argparse.Namespace) -> None:
    """Measure everything and write `figures.json`."""
    device, tok = args.device, tk.load(args.out / "target")
    torch.backends.cuda.matmul.allow_tf32 = False
    target = export.read_target(args.out / "target").to(device).eval()
    names = [
        n
        for n in ("dflash", "dflash-speculators", "assistant", "dflash-other")
        if (args.out / n).is_dir()
    ]
    drafts = {n: export.read_draft(n, target, args.out).to(device) for n in names}
    figures: dict[str, object] = {"loss": losses(target, tok, device), "draft_lengths": LENGTHS}
    figures["needle_3359"] = needle_right(target, tok, device)
    free, unlooped, samples, looping = {}, {}, {}, {}
    start = time.time()
    for category in CATEGORIES:
        commits: dict[str, list[int]] = {}
        straight: dict[str, list[int]] = {}
        flags, length = [], 0
        for ids in prompts(tok, category, args.count):
            out = continue_greedily(target, ids, args.new, device)
            flags.append(loops(out[len(ids) :]))
            length += len(out) - len(ids)
            samples.setdefault(
                category, tok.decode(out[max(0, len(ids) - 60) :], skip_special_tokens=False)
            )
            made = measure(target, drafts, out, len(ids), True, device)
            add(commits, made)
            if not flags[-1]:
                add(straight, made)
        unlooped[category] = summary(straight)
        free[category], looping[category] = summary(commits), sum(flags) / len(flags)
        print(
            f"{category} {free[category]} unlooped {unlooped[category]} "
            f"looping {looping[category]:.2f} {length / args.count:.0f} tokens "
            f"{time.time() - start:.0f} s",
            flush=True,
        )
    forced: dict[str, dict] = {}
    for kind, end in (("code", ".py"), ("docs", ".txt")):
        commits = {}
        for ids in [f for f in held_out_ids(tok, end) if len(f) > 600][: args.count]:
            add(commits, measure(target, drafts, [tk.BOS, *ids[: args.forced]], 128, False, device))
        forced[kind] = summary(commits)
        print(f"teacher-forced {kind} {forced[kind]} {time.time() - start:.0f} s", flush=True)
    figures |= {
        "free_running": free,
        "free_running_without_looping_texts": unlooped,
        "teacher_forced": forced,
        "looping_share": looping,
    }
    data.write_json(args.out / "figures.json", figures)
    for category, text in samples.items():
        print(f"--- {category}\n{text}")
    print(figures["loss"], figures["needle_3359"])
