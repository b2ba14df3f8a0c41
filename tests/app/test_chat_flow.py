"""What a person does in a chat, on a scripted engine."""

from __future__ import annotations

from pathlib import Path

from engine.commands import SubmitTurn
from tests.app.app_fixtures import open_stage


async def test_an_answer_streams_into_the_transcript_and_the_store(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        await stage.ask("What is the capital of France?")
        (turn,) = stage.engine.sent(SubmitTurn)
        assert [m.content for m in turn.prompt] == ["What is the capital of France?"]
        stage.engine.begin()
        stage.engine.say("The capital is ")
        stage.engine.say("**Paris**.")
        stage.engine.finish()
        await stage.settle()
        assert "The capital is Paris." in stage.text
        assert [m.content for m in stage.store.messages(stage.chat_id)] == [
            "What is the capital of France?",
            "The capital is **Paris**.",
        ]
