"""Train the family: `python train.py tokenizer|target|drafts|evaluate [options]`.

Each stage writes its checkpoints to `--out` and reads those of earlier stages from there. It takes
less than ten minutes on one H200; `--steps` shortens it for a trial on a CPU.
"""

import argparse
import random
import time
from pathlib import Path

import data
import export
import synthetic
import tokenizer as tk
import torch
import torch.nn.functional as F
from optim import Optimizers
from target import Target, TargetConfig, Whole

HERE = Path(__file__).resolve().parent


def autocast(device: str):
    """Return a context for bf16 arithmetic on a GPU and float32 on a CPU."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def train_tokenizer(args: argparse.Namespace) -> None:
    """Learn merges from the training files and 6,000 conversations."""
    texts = data.train_texts()
    functions = synthetic.functions_of(texts)
    chats = [synthetic.chat_text(s, functions) for s in range(6000)]
    plain = [c.replace("<|turn>", "\n").replace("<turn|>", "\n") for c in chats]
    tk.save(tk.train(list(texts.values()) + plain), args.out / "target")


def lm_loss(model: Target, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the weighted next-token cross-entropy of ids [B, T+1]."""
    positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
    hidden, _ = model(ids[:, :-1], positions, Whole(model.c.window))
    loss = F.cross_entropy(model.head(hidden).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    w = weights[:, 1:].flatten()
    return (loss * w).sum() / w.sum()


def held_out_rows(streams: data.Streams, count: int, length: int) -> dict[str, torch.Tensor]:
    """Return rows of held-out files."""
    rows: dict[str, torch.Tensor] = {}
    for kind, end in (("code", ".py"), ("docs", ".txt")):
        texts = [t for k, t in data.held_out_texts().items() if k.endswith(end)]
        ids = [i for t in texts for i in streams.tok.encode(t, add_special_tokens=False).ids]
        rng = random.Random(99)
        starts = [rng.randrange(len(ids) - length) for _ in range(count)]
        rows[kind] = torch.tensor([[tk.BOS, *ids[s : s + length]] for s in starts])
    return rows


def train_target(args: argparse.Namespace) -> None:
    """Train on rows of 1,024 tokens, then of 4,096; `--name`, `--seed`: for the other target."""
    torch.manual_seed(args.seed)
    streams = data.Streams(tk.load(args.out / "target"), args.conversations, args.workers)
    print(
        f"{sum(map(len, streams.code)):,} code tokens, {sum(map(len, streams.chat)):,} chat tokens",
        flush=True,
    )
    model = Target(TargetConfig(dropout=args.dropout)).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    loss_of = torch.compile(lm_loss, dynamic=False) if args.device == "cuda" else lm_loss
    held = {
        k: v.to(args.device)
        for k, v in held_out_rows(streams, 64 if args.device == "cuda" else 2, 1024).items()
    }
    plan = [
        (args.steps, args.batch, 1024, 1.0),
        (args.long_steps, max(1, args.batch // 4), 4096, 0.35),
    ]
    plan = [p for p in plan if p[0]]
    for stage, (steps, batch, length, rate) in enumerate(plan):
        rows = data.batches(
            streams,
            batch,
            length,
            args.seed * 10 + stage,
            args.workers,
            (0.5, 0.3, 0.2) if stage == 0 else (0.45, 0.25, 0.3),
        )
        optimizers = Optimizers(
            model, [model.embed.weight], steps, muon=0.02 * rate, adam=3e-3 * rate, decay=args.decay
        )
        start = time.time()
        for step in range(steps):
            ids, weights = (x.to(args.device, non_blocking=True) for x in next(rows))
            with autocast(args.device):
                loss = loss_of(model, ids, weights)
            loss.backward()
            optimizers.step()
            if step % args.log == 0 or step == steps - 1:
                model.eval()
                with torch.no_grad(), autocast(args.device):
                    seen = {
                        k: round(lm_loss(model, v, torch.ones_like(v)).item(), 3)
                        for k, v in held.items()
                    }
                model.train()
                print(
                    f"stage {stage} step {step} loss {loss.item():.3f} held out {seen} "
                    f"{time.time() - start:.0f} s",
                    flush=True,
                )
        del rows
        export.write_target(model, args.out / args.name)
        model.eval()
        probe(model, streams, args)
        model.train()


@torch.no_grad()
def probe(model: Target, streams: data.Streams, args: argparse.Namespace) -> None:
    """Print recall accuracy by length, as an early check."""
    rng = random.Random(7)
    for length in (256, 1024, 4096):
        right = total = 0
        for _ in range(4 if args.device == "cpu" else 40):
            doc, weights = streams.recall_doc(rng, length)
            ids = torch.from_numpy(doc.astype("int64"))[None].to(args.device)
            n = ids.shape[1]
            padded = F.pad(ids, (0, -n % model.c.window))
            with autocast(args.device):
                hidden, _ = model(
                    padded,
                    torch.arange(padded.shape[1], device=ids.device)[None],
                    Whole(model.c.window),
                )
                best = model.head(hidden).argmax(-1)
            asked = torch.from_numpy(weights).to(args.device)[1:] > 1
            digits = asked & (ids[0, 1:] != tk.END_TURN) & (ids[0, 1:] != tk.NEWLINE)
            right += ((best[0, : n - 1] == ids[0, 1:]) & digits).sum().item()
            total += digits.sum().item()
        print(f"recall up to {length}: {right / total:.3f} of answer tokens", flush=True)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("stage", choices=["tokenizer", "target", "drafts", "evaluate"])
    p.add_argument("--out", type=Path, default=HERE)
    p.add_argument("--name", default="target")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--long-steps", type=int, default=600)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--conversations", type=int, default=data.CONVERSATIONS)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--decay", type=float, default=0.1)
    p.add_argument("--pool", type=int, default=4096)
    p.add_argument("--anchors", type=int, default=32)
    p.add_argument("--count", type=int, default=24, help="prompts per category")
    p.add_argument("--new", type=int, default=200, help="tokens generated per prompt")
    p.add_argument("--forced", type=int, default=1024, help="held-out tokens per file")
    p.add_argument(
        "--rows", type=int, default=8192, help="drafts: training rows of corpus and conversations"
    )
    p.add_argument("--drafts", nargs="+", default=["dflash", "dflash-speculators", "assistant"])
    p.add_argument(
        "--resume", action="store_true", help="drafts: continue from the checkpoints in --out"
    )
    p.add_argument("--rate", type=float, default=1.0, help="drafts: factor on the learning rates")
    p.add_argument("--log", type=int, default=100)
    return p.parse_args()


def main() -> None:
    """Run one stage."""
    args = parse()
    if args.stage == "tokenizer":
        train_tokenizer(args)
    elif args.stage == "target":
        train_target(args)
    elif args.stage == "drafts":
        import train_drafts

        train_drafts.train(args)
    else:
        import evaluate

        evaluate.run(args)


if __name__ == "__main__":
    main()
