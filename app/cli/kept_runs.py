"""Every bench run goes into the database, with the bytes, options and machine it ran on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from app.machine import machine_name
from app.settings import Settings
from app.wiring import Wiring


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredModel:
    """What was measured."""

    name: str
    content_hash: str
    device: str


def keep_run(
    wiring: Wiring,
    settings: Settings,
    kind: str,
    model: MeasuredModel,
    report: Mapping[str, Any],
) -> None:
    """Store a run. Raises: StorageError."""
    wiring.open_bench().save(
        kind,
        model=model.name,
        model_sha256=model.content_hash,
        options=dataclasses.asdict(settings.speculation),
        machine={"name": machine_name(), "device": model.device},
        report=report,
    )
