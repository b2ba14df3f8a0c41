"""Flags laid over settings: what a command was told beats what is configured."""

from __future__ import annotations

import argparse
import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from app.cli.output import USAGE, CommandFailed
from app.settings import Settings, SettingsError, replace_setting
from app.wiring import Wiring
from engine.commands import LoadModel
from engine.sampling_params import SamplingParams

_SETTING_OF_FLAG = {
    "model": "model",
    "ctx_size": "context_len",
    "temp": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "repeat_penalty": "sampling.repeat_penalty",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "seed": "sampling.seed",
    "spec": "speculation.is_enabled",
    "spec_type": "speculation.algorithm",
    "spec_draft": "speculation.window",
    "spec_pmin": "speculation.min_draft_prob",
    "draft_model": "speculation.drafter_path",
}


def settings_from(args: argparse.Namespace, settings: Settings) -> Settings:
    """Settings with every flag that was given. Raises: CommandFailed (usage) on a bad value."""
    changes: list[tuple[str, Any]] = [
        (key, getattr(args, flag))
        for flag, key in _SETTING_OF_FLAG.items()
        if getattr(args, flag, None) is not None
    ]
    if getattr(args, "think", None) is not None:
        changes.append(("think", "on" if args.think else "off"))
    if getattr(args, "no_governor", False):
        changes.append(("speculation.use_governor", False))
    try:
        for key, value in changes:
            settings = replace_setting(settings, key, value)
    except SettingsError as error:
        raise CommandFailed(str(error), hint=error.hint, exit_code=USAGE) from error
    max_tokens = getattr(args, "max_tokens", None)
    if max_tokens is not None and max_tokens < 0:
        raise CommandFailed(
            f"max-tokens {max_tokens} is out of range", hint="use 0 or more", exit_code=USAGE
        )
    return settings


def sampling_from(
    args: argparse.Namespace, settings: Settings, recommended: Mapping[str, float]
) -> SamplingParams:
    """The sampler of one answer; without `--seed` and without a configured seed, a fresh one."""
    sampling = settings.sampling.over(recommended)
    if args.seed is None and sampling.seed == 0:
        return dataclasses.replace(sampling, seed=secrets.randbits(31))
    return sampling


def load_command(settings: Settings, wiring: Wiring) -> LoadModel:
    """The order that loads the configured model. Raises: ModelNotFound."""
    return wiring.find_model(settings.model).load_command(settings)
