"""Takes README's screenshot from the running program on the real default model.

`python -m tests.screenshot` needs the default model installed (foretell models pull smollm2-135m).
It chats in a temporary database; nothing of the person's own is shown.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import tempfile
from pathlib import Path

from app.app import ForetellApp
from app.settings import replace_setting
from app.wiring import Wiring
from storage.paths import Paths

SIZE = (104, 30)
POLL_S = 0.2
QUESTIONS = (
    "What is the capital of France?",
    "Repeat word for word: The ferry leaves the northern pier at seven in the morning and returns "
    "at a quarter past nine in the evening. Tickets are sold on board, and bicycles pay half fare.",
)


async def chat(app: ForetellApp, target: Path) -> None:
    """Ask the questions one after the other, then save the screen."""
    async with app.run_test(size=SIZE) as pilot:
        while app.model.phase != "ready":
            await pilot.pause(POLL_S)
        for question in QUESTIONS:
            await pilot.press(*("space" if c == " " else c for c in question), "enter")
            await pilot.pause(POLL_S)
            while app.conversations.running:
                await pilot.pause(POLL_S)
        await pilot.pause(1.0)
        app.save_screenshot(target.name, path=str(target.parent))


def main() -> None:
    """Write assets/screenshot.svg."""
    wiring = Wiring.from_environment()
    settings = replace_setting(wiring.settings, "sampling.temperature", 0.0)
    with tempfile.TemporaryDirectory() as folder:
        wiring = dataclasses.replace(wiring, paths=Paths(Path(folder)), settings=settings)
        model = Wiring.from_environment().find_model(settings.model)
        models = wiring.paths.models_dir
        models.mkdir(parents=True)
        (models / model.path.name).symlink_to(model.path)
        target = Path(__file__).parent.parent / "assets" / "screenshot.svg"
        asyncio.run(chat(ForetellApp(wiring.services(settings)), target))
        sys.stdout.write(f"wrote {target}\n")


if __name__ == "__main__":
    main()
