"""Looks up GPUs by name, and builds the machine that `--assume` describes."""

from __future__ import annotations

import difflib
import functools
import re

from g4spec.advisor.facts import Facts
from g4spec.advisor.machine import GIB, Gpu, Machine
from g4spec.advisor.schema import CapabilityFact, CardFact, OtherGpuFact
from g4spec.advisor.versions import parse
from g4spec.errors import UsageError

MOST = 64
"""Maximum number of cards of an assumed machine."""
VARIANTS = frozenset({"ti", "super", "laptop", "mobile", "max", "d", "s", "m", "x"})
"""Suffixes that distinguish products, as the Ti in RTX 3090 Ti."""

_NUMBERS = {"dual": 2, "two": 2, "three": 3, "quad": 4, "four": 4}
_FIRST = re.compile(
    # Four digits may be a product: 3090 x2, 7900 XTX.
    r"^(-?\d{1,3}\s*|-?\d{4,9}(?=[x×*]\s+[a-z]))[x×*]\s*(.+)$",
    re.IGNORECASE,
)
_LAST = re.compile(r"^(.+[\d\s)])\s*[x×*]\s*(\d{1,3})$", re.IGNORECASE)
_WORD = re.compile(rf"^({'|'.join(_NUMBERS)})\s+(.+?)s?$", re.IGNORECASE)
_MANY = (
    re.compile(r"^(?P<n>-?\d{1,18})\s*[x×*]\s*(?P<name>.+)$", re.IGNORECASE),
    re.compile(r"^(?P<name>.+[\d\s)])\s*[x×*]\s*(?P<n>-?\d{1,18})$", re.IGNORECASE),
)
"""Counts of any length, which may also be products: only beside the name of a known GPU."""
_SIZE = re.compile(r"\b(\d+(?:\.\d+)?)\s*(?:gb|gib|g)\b", re.IGNORECASE)
_BETWEEN = re.compile(rf"^(.+[\d\s)])\s*([x×*]\s*\d{{1,18}})\s+({_SIZE.pattern})$", re.IGNORECASE)
_MIG = re.compile(r"\b\d+g\.(\d+)gb\b", re.IGNORECASE)
_OTHER_UNIT = re.compile(r"\b\d+(?:\.\d+)?\s*(?:[kmt]b|[kmt]ib)\b", re.IGNORECASE)
_SM = re.compile(r"\bsm_?(\d{2,3})[af]?\b", re.IGNORECASE)
_CPU = re.compile(r"^(cpu( only)?|no (nvidia )?gpu|ram)$", re.IGNORECASE)


@functools.lru_cache(1024)
def words(text: str) -> tuple[str, ...]:
    """Split a product name into lower-case words and numbers, without vendor words:
    `NVIDIA GeForce RTX3090` -> rtx, 3090."""
    found = re.findall(r"[a-z]+|\d+", text.lower())
    return tuple(w for w in found if w not in ("nvidia", "geforce", "tesla", "gpu", "graphics"))


def find_card(facts: Facts, name: str) -> CardFact | None:
    """Find a product's row by name. The longest known name that `name` contains as whole words
    wins, so that `RTX 3090 Ti` is not an `RTX 3090`."""
    name_words, best, length = words(name), None, 0
    for card in facts.all(CardFact):
        for alias in (card.name, *card.aliases):
            w = words(alias)
            spots = range(len(name_words) - len(w) + 1)
            if w and len(w) > length and any(name_words[i : i + len(w)] == w for i in spots):
                best, length = card, len(w)
    if best is not None:
        named = set(words(best.name)) | {w for a in best.aliases for w in words(a)}
        if any(_is_variant(w) for w in set(name_words) - named):
            return None  # another product whose figures are not in the data
    return best


def _is_variant(word: str) -> bool:
    """Return True for a suffix of `VARIANTS`, or a misspelled one such as `tii`."""
    longer = [v for v in VARIANTS if len(v) > 1]
    return word in VARIANTS or bool(difflib.get_close_matches(word, longer, 1, 0.75))


def other(facts: Facts, name: str) -> OtherGpuFact | None:
    """Find the row of a GPU of another vendor (or a Jetson) by its name."""
    return next((o for o in facts.all(OtherGpuFact) if re.search(o.pattern, name.lower())), None)


def card_gpu(facts: Facts, card: CardFact, size: float | None) -> Gpu:
    """Build a GPU from its row. `size` in GB selects the memory version; default: the largest."""
    sizes = card.memory
    gb = max(sizes) if size is None else min(sizes, key=lambda s: abs(s - size))
    if size is not None and not _is_memory(gb, size):
        series = words(card.name)[:2]
        like = [c for c in facts.all(CardFact) if words(c.name)[:2] == series and c is not card]
        named = [f'"{card.name} {sizes[0]}GB"']
        named += [f'"{c.name} {s}GB"' for c in like for s in c.memory if _is_memory(s, size)]
        raise UsageError(
            f"{card.name} with {size:g} GB",
            expected=" or ".join(f"{s} GB" for s in sizes),
            found=f"{size:g} GB",
            fix=f'write {", ".join(named)}, or "sm_{card.cc.replace(".", "")} {size:g}GB" '
            "for a GPU that is not in the list",
        )
    index = sizes.index(gb) if len(card.bandwidth) == len(sizes) else -1
    memory = int((card.visible or gb) * GIB)
    major, minor = parse(card.cc)
    return Gpu(
        card.name,
        (major, minor),
        memory,
        None,
        card.bandwidth[index],
        card.id,
        card.unified,
    )


def _is_memory(listed: float, given: float) -> bool:
    """Return True if a given size in GB may mean a listed one."""
    return abs(listed - given) <= max(1.5, 0.05 * listed)


def assume(facts: Facts, text: str) -> Machine:
    """Parse a machine: `2x RTX 3090`, `3090 x2`, `V100 16GB`, `4x GB10`, `sm_86 24GB`,
    `RTX 4090 + RTX 3090`, `CPU 64GB`. Raise UsageError with suggestions for anything else.

    A node has one card that shares memory with the CPU (GB10), so `4x GB10` is four nodes. NVLink
    bridges are assumed to be absent unless the text says nvlink.
    """
    gpus: list[Gpu] = []
    linked = bool(re.search(r"\bnvlink\b", text, re.IGNORECASE))
    bare = re.sub(r"\b(with )?nvlink\b", "", text, flags=re.IGNORECASE).strip()
    bare = re.sub(r"^(cpu|ram)(?=\d)", r"\1 ", bare, flags=re.IGNORECASE)
    if _CPU.match(_SIZE.sub("", bare).strip()):
        return _without_gpu(bare, text)
    for part in re.split(r"[+,&]|\band\b", bare, flags=re.IGNORECASE):
        n, name = _counted(facts, part.strip())
        if _counted(facts, name)[1] != name:
            raise UsageError(f"--assume {text!r}: two counts", expected="one, as 4x H100")
        total = n if n < 1 else len(gpus) + n
        if not 1 <= total <= MOST:
            raise UsageError(f"--assume {text!r}", expected=f"1 to {MOST} GPUs", found=total)
        gpus += [_card(facts, name, text)] * n
    nodes = 1
    if gpus[0].unified and len(gpus) > 1:
        if len(set(gpus)) > 1:
            raise UsageError(f"--assume {text!r}: different nodes in one machine")
        nodes, gpus = len(gpus), gpus[:1]
    nvlink: bool | None = None
    if len(gpus) > 1 and all(g.card for g in gpus):
        kinds = {facts.get(CardFact, g.card or "").nvlink for g in gpus}
        # Boards are linked in the machines that they are sold in; a bridge is bought apart.
        nvlink = None if any("boards" in k for k in kinds) else False
    if linked:
        nvlink = True
    return Machine(tuple(gpus), nodes, nvlink=nvlink, assumed=True)


def _counted(facts: Facts, part: str) -> tuple[int, str]:
    """Split `2x RTX 3090`, `3090 x2` or `dual 3090` into a number and a name. The number may be one
    that no machine has, such as that of `3090 x1000`."""
    if found := _BETWEEN.match(part):  # 3090 x2 24GB
        part = f"{found[1]} {found[3]} {found[2]}"
    if found := _FIRST.match(part):
        return int(found[1]), found[2].strip()
    if found := _LAST.match(part):
        return int(found[2]), found[1].strip()
    if found := _WORD.match(part):
        return _NUMBERS[found[1].lower()], found[2].strip()
    for form in _MANY:
        if (found := form.match(part)) and _is_known(facts, found["name"]):
            return int(found["n"]), found["name"].strip()
    return 1, part


def _is_known(facts: Facts, name: str) -> bool:
    """Return True if a name is that of a known card or contains a compute capability."""
    return find_card(facts, name) is not None or _SM.search(name) is not None


def _size(name: str) -> float | None:
    """Return the memory size in GB that a name contains, or None."""
    found = _SIZE.search(name)
    return float(found[1]) if found else None


def _without_gpu(bare: str, text: str) -> Machine:
    """Build a machine without an NVIDIA card, with the RAM that the text gives."""
    size = _size(bare)
    if not size:
        raise UsageError(f"--assume {text!r}: how much memory?", expected='a size, as "CPU 64GB"')
    ram = int(size * GIB)
    return Machine((), ram=ram, ram_free=ram, assumed=True)


def _card(facts: Facts, name: str, text: str) -> Gpu:
    """Find one card by name, or by capability and size; raise UsageError if there is none."""
    if instance := _MIG.search(name):
        whole = find_card(facts, _SIZE.sub("", name[: instance.start()]))
        arch = f"sm_{whole.cc.replace('.', '')}" if whole else "sm_80"
        raise UsageError(
            f"--assume {text!r}: a MIG instance, which is a part of a GPU",
            expected="the compute capability of the GPU and the memory of the instance",
            fix=f'write {"" if whole else "them as "}"{arch} {instance[1]}GB"',
        )
    size, bare = _size(name), _SIZE.sub("", name).strip()
    if unit := _OTHER_UNIT.search(bare):
        raise UsageError(f"--assume {text!r}", expected="memory in GB, as 24GB", found=unit[0])
    if size == 0:
        raise UsageError(f"--assume {text!r}", expected="more than 0 GB", found="0 GB")
    card = find_card(facts, name) or find_card(facts, bare)
    if card is not None:
        if size in map(_size, card.aliases):
            size = None  # in NVIDIA's name, where it may be the memory of the CPU
        return card_gpu(facts, card, size)
    named = _SM.search(bare)
    if named is not None and size is not None:
        cc = (int(named[1][:-1]), int(named[1][-1]))
        if f"sm_{cc[0]}{cc[1]}" in _architectures(facts):
            return Gpu(f"a GPU of capability {cc[0]}.{cc[1]}", cc, int(size * GIB))
    raise _unknown(facts, bare, size, text)


def _architectures(facts: Facts) -> list[str]:
    """Return the known compute capabilities in order, written as sm_86."""
    known = {c for row in facts.all(CapabilityFact) for c in row.cc}
    return [f"sm_{cc.replace('.', '')}" for cc in sorted(known, key=parse)]


def _unknown(facts: Facts, bare: str, size: float | None, text: str) -> UsageError:
    """Return the error for an unknown card, with suggestions."""
    elsewhere = other(facts, bare)
    if elsewhere is not None:
        memory = f"{size:g}" if size else "64"
        return UsageError(
            f"--assume {text!r}: {elsewhere.name}. {elsewhere.says}",
            fix=f'{elsewhere.fix}; what fits into its memory: --assume "CPU {memory}GB"',
        )
    cards = facts.all(CardFact)
    if _SM.search(bare):
        return UsageError(
            f"--assume {text!r}: unknown compute capability, or no memory size",
            expected=f"one of {', '.join(_architectures(facts))}, with a size",
            fix='write it as "sm_86 24GB"; `g4spec doctor --cards` lists the known GPUs',
        )
    if size is not None and not words(bare):
        same = [c.name for c in cards if any(abs(m - size) <= 0.5 for m in c.memory)]
        return UsageError(
            f"--assume {text!r}: a size without a GPU",
            expected=f"{', '.join(same) or 'a GPU'} (known with {size:g} GB); or the compute "
            f'capability with it, as "sm_86 {size:g}GB"; or "CPU {size:g}GB" for none',
        )
    return UsageError(
        f"--assume {text!r}: unknown GPU",
        fix=f"{_near(bare, cards)}Name any other GPU by compute capability and memory, as "
        '"sm_86 24GB"; `g4spec doctor --cards` lists the known ones',
    )


def _near(name: str, cards: list[CardFact]) -> str:
    """Return a sentence that suggests cards with similar names; "" if there are none."""
    plain = {" ".join(words(alias)): c.name for c in cards for alias in (c.name, *c.aliases)}
    name_words = words(name)
    numbers = {w for w in name_words if w.isdigit() and len(w) > 1}
    same = [c for key, c in plain.items() if numbers & set(key.split())]
    near = [plain[k] for k in difflib.get_close_matches(" ".join(name_words), plain, 5, 0.6)]
    found = list(dict.fromkeys([*same, *near]))[:6]
    return f"did you mean {' or '.join(found)}? " if found else ""
