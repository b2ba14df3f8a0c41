"""The trunk and its assistant drafter in float64 numpy, from the published formulas alone.

Shares no line with the program: no cache, every position from the start each time. The trunk gives
the keys and values its last windowed and last full owning layers would hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tests.models.tiny_assistant import (
    EPS,
    FAR_BASE,
    FAR_DIM,
    HEADS,
    NEAR_BASE,
    NEAR_DIM,
    NUM_SHARED,
    OWN_PATTERN,
    SOFTCAP,
    TRUNK_PATTERN,
    WIDTH,
    WINDOW,
    rope_factors,
)

Weights = Mapping[str, np.ndarray]


class Donor(NamedTuple):
    """Keys after norm and rotation, values after norm: [positions, D] each (one kv head)."""

    keys: np.ndarray
    values: np.ndarray


class Trunk(NamedTuple):
    """What the drafter needs of it."""

    logits: np.ndarray
    hidden: np.ndarray
    """[T, F], after the final norm."""
    donors: dict[bool, Donor]
    """By windowed or not."""


def rms(x: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    return y if weight is None else y * weight


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotate(x: np.ndarray, positions: np.ndarray, is_near: bool) -> np.ndarray:
    """x [T, heads, D]; pairs (i, i + D/2)."""
    dim = x.shape[-1]
    base, factors = (NEAR_BASE, 1.0) if is_near else (FAR_BASE, rope_factors().astype(float))
    angles = positions[:, None, None] * base ** (-2 * np.arange(dim // 2) / dim) / factors
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attend(query: np.ndarray, donor: Donor, seen: np.ndarray) -> np.ndarray:
    """query [T, H, D], seen [T, positions] -> [T, H * D]; scores are not scaled."""
    scores = np.einsum("thd,nd->thn", query, donor.keys)
    scores = np.where(seen[:, None], scores, -np.inf)
    return np.einsum("thn,nd->thd", softmax(scores), donor.values).reshape(len(query), -1)


def queries(
    w: Weights, block: str, h: np.ndarray, positions: np.ndarray, is_near: bool
) -> np.ndarray:
    dim = NEAR_DIM if is_near else FAR_DIM
    q = (h @ w[f"{block}.attn_q.weight"].T).reshape(len(h), HEADS, dim)
    return rotate(rms(q, w[f"{block}.attn_q_norm.weight"]), positions, is_near)


def rest_of_layer(w: Weights, block: str, x: np.ndarray, attended: np.ndarray) -> np.ndarray:
    y = attended @ w[f"{block}.attn_output.weight"].T
    x = x + rms(y, w[f"{block}.post_attention_norm.weight"])
    n = rms(x, w[f"{block}.ffn_norm.weight"])
    inner = gelu(n @ w[f"{block}.ffn_gate.weight"].T) * (n @ w[f"{block}.ffn_up.weight"].T)
    x = x + rms(inner @ w[f"{block}.ffn_down.weight"].T, w[f"{block}.post_ffw_norm.weight"])
    return x * w[f"{block}.layer_output_scale.weight"]


def doubles(weights: Weights) -> Weights:
    return {name: data.astype(np.float64) for name, data in weights.items()}


def run_trunk(weights: Weights, token_ids: Sequence[int]) -> Trunk:
    w, positions = doubles(weights), np.arange(len(token_ids))
    behind = positions[:, None] - positions[None]
    x = w["token_embd.weight"][list(token_ids)] * np.sqrt(WIDTH)
    donors: dict[bool, Donor] = {}
    for layer, is_near in enumerate(TRUNK_PATTERN):
        block = f"blk.{layer}"
        h = rms(x, w[f"{block}.attn_norm.weight"])
        if layer < len(TRUNK_PATTERN) - NUM_SHARED:
            key = rms(h @ w[f"{block}.attn_k.weight"].T, w[f"{block}.attn_k_norm.weight"])
            value = rms(h @ w[f"{block}.attn_v.weight"].T)
            donors[is_near] = Donor(rotate(key[:, None], positions, is_near)[:, 0], value)
        seen = (behind >= 0) & ((behind < WINDOW) | (not is_near))
        attended = attend(queries(w, block, h, positions, is_near), donors[is_near], seen)
        x = rest_of_layer(w, block, x, attended)
    hidden = rms(x, w["output_norm.weight"])
    logits = SOFTCAP * np.tanh(hidden @ w["token_embd.weight"].T / SOFTCAP)
    return Trunk(logits, hidden, donors)


class Draft(NamedTuple):
    """One pass of the drafter."""

    token_id: int
    logits: np.ndarray
    confidence: float


def run_assistant(
    weights: Weights, trunk_weights: Weights, known: Sequence[int], last_id: int, num: int
) -> list[Draft]:
    """A chain of `num` drafts after `known` and the newest token, which the trunk has not seen."""
    w, table = doubles(weights), trunk_weights["token_embd.weight"].astype(np.float64)
    trunk = run_trunk(trunk_weights, known)
    place = len(known)
    positions = np.arange(place)
    token_id, hidden = last_id, trunk.hidden[-1]
    drafts = []
    for _ in range(num):
        pair = np.concatenate([table[token_id] * np.sqrt(WIDTH), hidden])
        x = (w["nextn.pre_projection.weight"] @ pair)[None]
        for layer, is_near in enumerate(OWN_PATTERN):
            block = f"blk.{layer}"
            h = rms(x, w[f"{block}.attn_norm.weight"])
            q = queries(w, block, h, np.array([place]), is_near)
            seen = (place - positions < WINDOW) | (not is_near)
            x = rest_of_layer(w, block, x, attend(q, trunk.donors[is_near], seen[None]))
        y = rms(x, w["output_norm.weight"])[0]
        logits = w["token_embd.weight"] @ y
        best = np.sort(logits)[-10:]
        drafts.append(Draft(int(logits.argmax()), logits, float(softmax(best)[-1])))
        token_id, hidden = drafts[-1].token_id, w["nextn.post_projection.weight"] @ y
    return drafts
