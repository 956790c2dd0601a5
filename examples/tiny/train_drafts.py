"""Train drafts for a trained target: labels are the target's greedy continuations.

Every step takes rows of training text and of text that the target generated, runs one target pass,
picks random anchors, computes the target's greedy continuation of each, and updates each draft.
"""

import argparse
import time

import data
import export
import tokenizer as tk
import torch
from drafts import SPECULATORS, ZLAB, Assistant, AssistantConfig, DFlash, clusters
from optim import Optimizers
from target import Target, Whole, generate, rollout
from train import autocast

STEPS = 15


def own_text(
    target: Target, prompts: torch.Tensor, length: int, device: str, seed: int
) -> torch.Tensor:
    """Generate rows of `length` tokens from prompts of 64 to 512 tokens, a third greedily."""
    generator = torch.Generator(device).manual_seed(seed)
    out: list[torch.Tensor] = []
    for i, part in enumerate(prompts.split(1024)):
        ids = part.long().to(device)[:, : (64, 128, 256, 512)[i % 4]]
        temperature = torch.tensor([0.0, 0.6, 1.0], device=device).repeat(len(ids))[: len(ids)]
        with autocast(device), torch.no_grad():
            out.append(generate(target, ids, length, temperature, generator))
    return torch.cat(out)


def frequent(target: Target, pool: torch.Tensor, count: int) -> torch.Tensor:
    """Return the draft vocabulary: the target's most frequent ids and stop ids, sorted."""
    seen = torch.bincount(pool.flatten().cpu(), minlength=target.c.vocab).float()
    seen[[1, 106, 107]] += 1e9
    return seen.topk(count)[1].sort()[0]


def build(
    target: Target, pool: torch.Tensor, names: list[str], device: str
) -> dict[str, torch.nn.Module]:
    """Return new drafts by name."""
    embed = target.embed.weight.detach()
    makers = {
        "dflash": lambda: DFlash(ZLAB),
        "dflash-other": lambda: DFlash(ZLAB),
        "dflash-speculators": lambda: DFlash(
            SPECULATORS, frequent(target, pool, SPECULATORS.own_head).to(device), embed
        ),
        "assistant": lambda: Assistant(
            AssistantConfig(), target.c, clusters(embed.cpu(), AssistantConfig().centroids)
        ),
    }
    return {n: makers[n]().to(device) for n in names}


def losses(
    drafts: dict, target: Target, ids, outputs, kv, hidden, anchors, labels, live
) -> dict[str, torch.Tensor]:
    """Return the loss of each draft."""
    return {
        n: d.loss(target, ids, kv, hidden, anchors, labels, live)
        if isinstance(d, Assistant)
        else d.loss(target, ids, outputs, anchors, labels, live)
        for n, d in drafts.items()
    }


class Prepare:
    """Target pass and greedy labels; on a GPU, one CUDA graph per shape."""

    def __init__(self, target: Target) -> None:
        self.target, self.graphs = target, {}

    def compute(self, ids: torch.Tensor, anchors: torch.Tensor) -> tuple:
        """Return hidden states, layer outputs, K/V and labels."""
        attend = Whole(self.target.c.window, keep=True)
        hidden, outputs = self.target(
            ids, torch.arange(ids.shape[1], device=ids.device)[None], attend
        )
        return hidden, outputs, attend.kv, rollout(self.target, attend.kv, ids, anchors, STEPS)

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor, count: int) -> tuple:
        """Return (hidden, outputs, kv, anchors, labels, live): live is 1.0 up to a stop id."""
        anchors = (
            torch.rand(ids.shape[0], ids.shape[1] - 2, device=ids.device).argsort(-1)[:, :count] + 1
        )
        if ids.is_cuda:
            if ids.shape not in self.graphs:
                self.graphs[ids.shape] = self.capture(ids.clone(), anchors.clone())
            graph, static_ids, static_anchors, result = self.graphs[ids.shape]
            static_ids.copy_(ids)
            static_anchors.copy_(anchors)
            graph.replay()
            hidden, outputs, kv, labels = result
        else:
            hidden, outputs, kv, labels = self.compute(ids, anchors)
        stop = (labels == 1) | (labels == 106) | (labels == 50)
        return hidden, outputs, kv, anchors, labels, (stop.cumsum(-1) - stop.long() == 0).float()

    def capture(self, ids: torch.Tensor, anchors: torch.Tensor) -> tuple:
        """Warm up on a side stream, then capture a CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            self.compute(ids, anchors)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            result = self.compute(ids, anchors)
        return graph, ids, anchors, result


def tables(args: argparse.Namespace, target: Target, streams: data.Streams) -> dict:
    """Return training rows: `short` (corpus, conversations, generated text), `long` and `own`."""
    seed, workers, device = args.seed * 10, args.workers, args.device
    short = data.rows(streams, args.rows, 1024, seed + 5, workers, (0.5, 0.4, 0.1))
    long = data.rows(streams, args.rows // 8, 4096, seed + 6, workers, (0.5, 0.2, 0.3))
    prompts = data.rows(streams, args.pool, 512, seed + 7, workers, (0.5, 0.45, 0.05))
    target.to(device)  # only now: the workers above are forked
    own = own_text(target, prompts, 1024, device, args.seed)
    return {
        "short": torch.cat([short.long().to(device), own]),
        "long": long.long().to(device),
        "own": own,
    }


def optimizer(draft: torch.nn.Module, args: argparse.Namespace) -> Optimizers:
    """Return the optimizers of one draft."""
    embeds = [draft.embed.weight] if isinstance(draft, Assistant) else []
    return Optimizers(draft, embeds, args.steps, 0.02 * args.rate, 3e-3 * args.rate, decay=0.02)


def train(args: argparse.Namespace) -> None:
    """Train all drafts of one target together (`--name other`: only the negative control)."""
    torch.manual_seed(args.seed)
    device, start = args.device, time.time()
    streams = data.Streams(tk.load(args.out / "target"), args.conversations, args.workers)
    target = export.read_target(args.out / args.name).eval().requires_grad_(False)
    rows = tables(args, target, streams)
    names = ["dflash-other"] if args.name == "other" else args.drafts
    if args.resume:
        drafts = {n: export.read_draft(n, target, args.out).to(device).train() for n in names}
    else:
        drafts = build(target, rows["own"], names, device)
    print({n: sum(p.numel() for p in d.parameters()) for n, d in drafts.items()}, flush=True)
    optimizers = [optimizer(d, args) for d in drafts.values()]
    if device == "cuda":
        torch._dynamo.config.cache_size_limit = 64
        for layer in (layer for d in drafts.values() for layer in d.layers):
            layer.compile(dynamic=False)
    prepare = Prepare(target)
    for step in range(args.steps):
        kind, count = ("long", max(1, args.batch // 8)) if step % 6 == 5 else ("short", args.batch)
        ids = rows[kind][torch.randint(len(rows[kind]), (count,), device=device)]
        with autocast(device):
            hidden, outputs, kv, anchors, labels, live = prepare(ids, args.anchors)
            parts = losses(drafts, target, ids, outputs, kv, hidden, anchors, labels, live)
        sum(parts.values()).backward()
        for o in optimizers:
            o.step()
        if step % args.log == 0 or step == args.steps - 1:
            shown = {n: round(v.item(), 3) for n, v in parts.items()}
            print(f"step {step} {shown} {time.time() - start:.0f} s", flush=True)
    export.write_drafts(drafts, target, args.out)
