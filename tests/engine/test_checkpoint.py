"""System prompts forwarded once: warmed, kept on disk, restored, and never trusted blindly."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from backends.base import BackendError, OutOfDeviceMemory
from engine.cache import checkpoint
from engine.cache.checkpoint import CheckpointFolder
from engine.cache.holder import Holder
from engine.errors import CheckpointUnsound
from engine.events import Notice, TurnStarted
from engine.options import EngineOptions
from tests.engine.fakes_engine import (
    EngineRig,
    FakeExecutable,
    LinearCache,
    RecurrentCache,
    RingCache,
    fake_model,
    of_type,
)

SYSTEM = "You are a careful assistant who answers in one line. " * 3
CHAT = [("system", SYSTEM), ("user", "hello")]
CACHES = [LinearCache, RingCache, RecurrentCache]


def _rig(
    folder: Path | None, cache: type[LinearCache] = LinearCache, **changes: object
) -> EngineRig:
    model = fake_model(**{"executable": FakeExecutable(make_cache=cache), **changes})
    options = EngineOptions(checkpoint_dir=folder)
    return EngineRig(model=model, system_prompt=SYSTEM, options=options)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def _save(folder: CheckpointFolder, holder: Holder) -> None:
    for _ in folder.save(holder):
        pass


def _holder(*token_ids: int) -> Holder:
    holder = Holder(FakeExecutable())
    holder.forward(token_ids)
    return holder


def test_s49_the_system_prompt_is_warmed_while_nothing_is_asked() -> None:
    rig = _rig(None)
    rig.run()
    assert rig.executable.shapes == [(64,), (64,), (len(SYSTEM) + 4 - 128,)]
    end = rig.ask(CHAT)
    assert end.stats.reused_tokens == len(SYSTEM) + 4
    assert end.token_ids == EngineRig().ask(CHAT).token_ids


def test_a_turn_does_not_wait_for_the_warming() -> None:
    rig = _rig(None)
    rig.run(1)
    end = rig.ask(CHAT)
    assert end.token_ids == EngineRig().ask(CHAT).token_ids
    rig.run()
    assert len(rig.engine._session.store.checkpoints) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("cache", CACHES)
def test_s49_a_warmed_prompt_is_restored_from_disk(
    tmp_path: Path, cache: type[LinearCache]
) -> None:
    first = _rig(tmp_path, cache)
    first.run()
    assert len(_files(tmp_path)) == 1
    second = _rig(tmp_path, cache)
    second.run()
    assert second.executable.num_forwards == 0
    end = second.ask(CHAT)
    assert end.stats.reused_tokens == len(SYSTEM) + 4
    assert end.token_ids == EngineRig(FakeExecutable(make_cache=cache)).ask(CHAT).token_ids


def test_s49_a_checkpoint_that_was_evicted_comes_back_from_disk(tmp_path: Path) -> None:
    rig = _rig(tmp_path)
    rig.run()
    store = rig.engine._session.store  # type: ignore[union-attr]
    while store.evict_one():
        pass
    before = rig.executable.num_rows
    end = rig.ask(CHAT)
    assert end.stats.reused_tokens == len(SYSTEM) + 4
    assert rig.executable.num_rows - before < len(SYSTEM)


def test_a_prefix_whose_file_another_process_removed_is_stored_again(tmp_path: Path) -> None:
    rig = _rig(tmp_path)
    rig.run()
    (path,) = _files(tmp_path)
    path.unlink()
    store = rig.engine._session.store  # type: ignore[union-attr]
    while store.evict_one():
        pass
    rig.ask(CHAT)
    assert _files(tmp_path) == [path]


def test_s49_a_prefix_the_budget_has_no_room_for_is_not_made_again_and_again() -> None:
    prefix_len = len(SYSTEM) + 4
    options = EngineOptions(holder_budget_bytes=8 * (2 * prefix_len - 20))
    rig = EngineRig(options=options, context_len=2 * prefix_len - 20)
    for turn in range(3):
        request_id = rig.submit(CHAT, max_tokens=60)
        while rig.engine.step():
            pass
        assert rig.finished(request_id).stats.reused_tokens > 0 or turn == 0
        before = rig.executable.num_forwards
        rig.run()
        assert rig.executable.num_forwards == before
        assert rig.engine.holder("chat") is not None


def test_s49_a_checkpoint_in_the_making_counts_and_makes_room_first() -> None:
    rig = _rig(None)
    rig.run(1)
    store = rig.engine._session.store  # type: ignore[union-attr]
    assert store.num_bytes == 8 * 64
    assert store.evict_one()
    assert store.num_bytes == 0
    rig.run()
    assert [len(held.token_ids) for held in store.checkpoints] == [len(SYSTEM) + 4]


def test_a_prompt_nobody_named_is_kept_after_its_first_turn(tmp_path: Path) -> None:
    options = EngineOptions(checkpoint_dir=tmp_path)
    EngineRig(options=options).ask(CHAT)
    rig = EngineRig(options=options)
    rig.ask(CHAT)
    assert of_type(rig.events, TurnStarted)[0].reused_tokens == len(SYSTEM) + 4


@pytest.mark.parametrize("arithmetic", ["fake", "other"])
def test_a_file_is_kept_by_arithmetic_not_by_what_a_device_is_called(
    tmp_path: Path, arithmetic: str
) -> None:
    """Another number of threads, shown with the device, made every stored prefix useless."""
    _rig(tmp_path).run()
    executable = FakeExecutable(device="the same, 2 threads", arithmetic=arithmetic)
    rig = _rig(tmp_path, executable=executable)
    rig.run()
    assert (executable.num_forwards == 0) == (arithmetic == "fake")


@pytest.mark.parametrize("changes", [{"content_hash": "other"}, {"name": "same"}])
def test_a_file_of_another_model_is_never_used(tmp_path: Path, changes: dict[str, object]) -> None:
    _rig(tmp_path).run()
    rig = _rig(tmp_path, **changes)
    rig.run()
    assert (rig.executable.num_forwards > 0) == ("content_hash" in changes)


@pytest.mark.parametrize("damage", ["empty", "half", "bit", "text", "renamed"])
def test_a_damaged_or_foreign_file_is_ignored_with_one_notice(tmp_path: Path, damage: str) -> None:
    _rig(tmp_path).run()
    (path,) = _files(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "renamed":
        folder = CheckpointFolder(tmp_path, "other", "other")
        _save(folder, _holder(1, 2, 3))
        folder.path_for([1, 2, 3]).replace(path)
    else:
        flipped = bytearray(data)
        flipped[-400] ^= 1
        damaged = {"empty": b"", "half": data[: len(data) // 2], "bit": flipped, "text": b"hi"}
        path.write_bytes(damaged[damage])
    rig = _rig(tmp_path)
    rig.run()
    assert len(of_type(rig.events, Notice)) == 1
    end = rig.ask(CHAT)
    assert end.token_ids == EngineRig().ask(CHAT).token_ids
    repaired = _rig(tmp_path)
    repaired.run()
    assert repaired.executable.num_forwards == 0


def test_an_export_the_cache_refuses_is_unsound(tmp_path: Path) -> None:
    class Refusing(LinearCache):
        def import_state(self, state: object, length: int) -> None:
            raise BackendError("other layout")

    folder = CheckpointFolder(tmp_path, "hash", "fake")
    _save(folder, _holder(1, 2, 3))
    with pytest.raises(CheckpointUnsound, match="other layout"):
        folder.load(FakeExecutable(make_cache=Refusing), [1, 2, 3])
    assert folder.load(FakeExecutable(), [1, 2, 3]) is None


def test_a_sound_file_outlives_a_device_without_room_for_it(tmp_path: Path) -> None:
    class Full(LinearCache):
        def import_state(self, state: object, length: int) -> None:
            raise OutOfDeviceMemory("no room")

    _rig(tmp_path).run()
    rig = _rig(tmp_path, Full)
    assert rig.ask(CHAT).token_ids == EngineRig().ask(CHAT).token_ids
    assert len(_files(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_costs_one_notice(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    rig = _rig(blocked)
    rig.run()
    assert len(of_type(rig.events, Notice)) == 1
    assert rig.ask(CHAT).stats.reused_tokens == len(SYSTEM) + 4


@pytest.mark.parametrize("error", [MemoryError(), OutOfDeviceMemory("the device is full")])
def test_a_prefix_that_cannot_be_exported_costs_one_notice(
    tmp_path: Path, error: Exception
) -> None:
    class Full(LinearCache):
        def export_state(self) -> Mapping[str, np.ndarray]:
            raise error

    rig = _rig(tmp_path, Full)
    rig.run()
    assert len(of_type(rig.events, Notice)) == 1
    assert rig.ask(CHAT).stats.reused_tokens == len(SYSTEM) + 4
    assert not _files(tmp_path)


def test_the_folder_keeps_the_newest_files_that_fit_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path, "hash", "fake")
    _save(folder, _holder(1, 1))
    size = _files(tmp_path)[0].stat().st_size
    monkeypatch.setattr(checkpoint, "MAX_BYTES", 3 * size)
    for n in range(2, 6):
        os.utime(folder.path_for([n - 1] * 2), (n, n))
        _save(folder, _holder(n, n))
    kept = {folder.path_for([n, n]) for n in (3, 4, 5)}
    assert set(_files(tmp_path)) == kept
    _save(folder, _holder(*range(60)))
    monkeypatch.setattr(checkpoint, "MAX_BYTES", 100)
    before = _files(tmp_path)
    _save(folder, _holder(*range(60, 120)))
    assert _files(tmp_path) == before


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "hash", "fake")
    old, young = (tmp_path / f"x.checkpoint.npz.{n}.part" for n in (1, 2))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    _save(folder, _holder(1, 2))
    assert set(_files(tmp_path)) == {young, folder.path_for([1, 2])}


def test_a_file_another_process_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path, "hash", "fake")
    gone = tmp_path / "gone.checkpoint.npz"
    listed = [gone, *tmp_path.glob("*")]
    monkeypatch.setattr(Path, "glob", lambda *_: listed)
    _save(folder, _holder(1, 2))
    assert folder.path_for([1, 2]).is_file()


def test_a_prefix_is_written_in_pieces_and_half_of_it_is_nothing(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "hash", "fake")
    saving = folder.save(_holder(1, 2, 3))
    next(saving)
    assert [path.suffix for path in _files(tmp_path)] == [".part"]
    del saving
    assert not _files(tmp_path)


def test_a_failing_warm_up_costs_nothing_but_itself() -> None:
    model = fake_model(FakeExecutable(fail_at=2))
    rig = EngineRig(model=model, system_prompt=SYSTEM)
    rig.run()
    assert rig.ask(CHAT).token_ids == EngineRig().ask(CHAT).token_ids


@pytest.mark.skipif(sys.platform == "win32", reason="permissions are POSIX's")
def test_nobody_else_can_read_a_kept_system_prompt(tmp_path: Path) -> None:
    """Settings with it are 0600, and its tokens lay in a folder that all could read."""
    folder = tmp_path / "cache" / "checkpoints"
    _rig(folder).run()
    assert _files(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
