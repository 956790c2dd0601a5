"""Read bandwidth of this machine's GPUs, as the self-test measured it: one small file per GPU in
the user's cache folder."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from g4spec import __version__
from g4spec.advisor.machine import Measurement
from g4spec.errors import G4Error
from g4spec.gguf import user_cache
from g4spec.gguf.atomic import atomic_write
from g4spec.gguf.regular_files import read_regular

ID = "measured-bandwidth"
"""Id of the statement in reports, beside those of the facts."""
MAX_BYTES = 4096
AGAIN = "`g4spec doctor --self-test` measures it again"


@dataclass(frozen=True, slots=True)
class _Record:
    """Contents of a file: the measurement, and what it holds for.

    Attributes:
        gpu: name of the GPU. `uuid`: identifies it. `driver`: NVIDIA driver, "" if unknown.
        version: g4spec that measured it. `date`: as 2026-11-29. `read`: GB/s.
    """

    gpu: str
    uuid: str
    driver: str
    version: str
    date: str
    read: float


def store(gpu: str, uuid: str, driver: str | None, read: float) -> str | None:
    """Store what a GPU with this name and UUID reads, in GB/s, replacing an older measurement.
    Return why it cannot be stored, or None."""
    record = _Record(gpu, uuid, driver or "", __version__, date.today().isoformat(), read)
    data = json.dumps(asdict(record)).encode()
    try:
        path = _path(uuid)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, len(data)) as file:
            file.write(data)
    except (OSError, RuntimeError, G4Error) as error:  # RuntimeError: there is no home folder
        return str(error)
    return None


def load(uuid: str, driver: str | None, notes: list[str]) -> Measurement | None:
    """Return what is stored for a GPU, or None. If it is not to be used, add the reason to
    `notes`."""
    try:
        path = _path(uuid)
        data = read_regular(path, MAX_BYTES)
    except (FileNotFoundError, RuntimeError):
        return None
    except (OSError, G4Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        notes.append(f"the measured bandwidth in {path} cannot be read: {why}")
        return None
    record = _parse(data)
    if record is None:
        why = "it is damaged"
    elif record.uuid != uuid:
        why = f"it is of another GPU ({record.gpu})"
    elif record.version != __version__:
        why = f"g4spec {record.version} measured it, and this is {__version__}"
    elif record.driver != (driver or ""):
        why = f"it was measured with driver {record.driver}, and this is {driver}"
    else:
        return Measurement(record.read, record.date)
    notes.append(f"the measured bandwidth in {path} is not used: {why}; {AGAIN}")
    return None


def folder() -> Path:
    """Return the folder of measurements."""
    return user_cache.folder("bandwidth")


def _path(uuid: str) -> Path:
    return folder() / f"{uuid}.json"


def _parse(data: bytes) -> _Record | None:
    """Return the contents of a file, or None if they are not what `store` writes."""
    try:
        record = _Record(**json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return None
    texts = (record.gpu, record.uuid, record.driver, record.version, record.date)
    if not all(isinstance(text, str) and text.isprintable() for text in texts):
        return None
    dated = re.fullmatch(r"\d{4}-\d\d-\d\d", record.date)
    number = isinstance(record.read, float) and math.isfinite(record.read) and record.read > 0
    return record if dated and number else None
