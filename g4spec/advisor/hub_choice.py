"""Chooses one of several GGUF files of a hub repository: the best type that fits a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from g4spec.advisor import lookup, runtime_support
from g4spec.advisor.engines import judge
from g4spec.advisor.facts import Facts
from g4spec.advisor.format_choice import Question, by_preference
from g4spec.advisor.machine import Machine
from g4spec.advisor.named_models import TargetModel, WeightFormat, find_size, named_target
from g4spec.advisor.schema import SizeFact
from g4spec.errors import EnvironmentProblem

LEAST_SHARE = 0.5
"""A file with less than this share of the bytes that a target of its type has is something else,
for example a draft."""


def best_file(
    facts: Facts,
    machine: Machine,
    repository: str,
    sizes: Mapping[str, int],
    context: int | None = None,
    kv: str | None = None,
    draft: Path | None = None,
) -> str | None:
    """Return the file of a repository that `doctor` would recommend for g4spec on this machine.

    Args:
        machine: without GPUs for a run on the CPU, whose weights are float32 whatever the type.
        repository: `org/name`, which contains the size of the model, as gemma-4-31B-it-GGUF.
        sizes: file name -> bytes; for a split model, the first part and the bytes of all parts.
        context: tokens; None: the default, 0: what the model was trained on.
        kv: cache type, or None for the default.
        draft: local path of the draft of the run.

    Returns None if the repository's name contains no size, or no file name a known type.

    Raises EnvironmentProblem if no type fits.
    """
    size = find_size(facts, repository.rpartition("/")[2])
    if size is None:
        return None
    whole = named_target(facts, size, repository)
    formats = [_format(size, whole, repository, name, n) for name, n in sizes.items()]
    found = by_preference([f for f in formats if f is not None], machine)
    if not found:
        return None
    context = whole.context if context == 0 else context
    target = replace(whole, formats=tuple(found), gguf_hub=repository)
    pair = lookup.find_draft(facts, str(draft), target) if draft is not None else None
    verdict = judge(facts, machine, Question(target, pair, context, kv), "g4spec")
    if verdict.refusal:
        smallest = min(found, key=lambda f: f.nbytes)
        raise EnvironmentProblem(
            f"{repository}: none of its {len(found)} types can run here",
            found=verdict.refusal,
            fix=f"name one to try it nevertheless, as {smallest.gguf}",
        )
    return (verdict.option or found[0]).gguf.partition(":")[2]


def _format(
    size: SizeFact, whole: TargetModel, repository: str, name: str, nbytes: int
) -> WeightFormat | None:
    """Return a file as a weight format of `size`; None if it cannot be one."""
    type = lookup.type_of(name)
    if not type:
        return None
    usual = lookup.estimated(size, type, whole)
    if nbytes < LEAST_SHARE * usual.nbytes:
        return None
    own = runtime_support.gpu_bytes(type, nbytes)
    return replace(usual, nbytes=nbytes, own=own, gguf=f"{repository}:{name}")
