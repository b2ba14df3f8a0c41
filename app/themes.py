"""The program's own colours; every Textual theme can be chosen as well.

Contrast of text on background: dark 13:1, light 14:1; of muted text 6:1 and more (WCAG asks 4.5:1).
"""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="foretell-dark",
    primary="#6cb6ff",
    secondary="#8a9bb0",
    accent="#e3b341",
    foreground="#d6dae0",
    background="#15171a",
    surface="#1c1f24",
    panel="#22262d",
    success="#7bc47f",
    warning="#e3a857",
    error="#f2757c",
    dark=True,
    variables={"footer-key-foreground": "#6cb6ff"},
)

LIGHT = Theme(
    name="foretell-light",
    primary="#1f5f99",
    secondary="#57606a",
    accent="#9a5b00",
    foreground="#24262a",
    background="#fbfaf7",
    surface="#f1efea",
    panel="#e6e3dc",
    success="#2b7a34",
    warning="#8a5d00",
    error="#b3261e",
    dark=False,
)

THEMES = (DARK, LIGHT)
