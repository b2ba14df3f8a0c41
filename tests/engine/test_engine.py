"""Turns from command to last event, on a fake model."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.base import BackendError, OutOfDeviceMemory, UnsupportedWeight
from engine.commands import (
    CancelTurn,
    ForgetChat,
    LoadModel,
    MeasureRows,
    Message,
    Stop,
    SubmitTurn,
    UpdateSpeculation,
)
from engine.contracts import LoadedModel
from engine.engine import InferenceEngine
from engine.events import (
    EngineEvent,
    ModelFailed,
    ModelLoaded,
    ModelLoading,
    Notice,
    RowsMeasured,
    SpeculationChanged,
    TextDelta,
    TurnFailed,
)
from engine.options import EngineOptions
from engine.sampling_params import SamplingParams
from engine.speculative.options import SpeculationOptions
from engine.speculative.target import TargetTraits
from tests.engine.fakes_engine import (
    EOS,
    GREEDY,
    PLAIN,
    ByteTokenizer,
    EngineRig,
    FakeExecutable,
    FakeLoader,
    FakeTemplate,
    LinearCache,
    RecurrentCache,
    RingCache,
    fake_model,
    of_type,
)

CACHES = [LinearCache, RingCache, RecurrentCache]
DRAFTING = SpeculationOptions(algorithm="ngram", use_governor=False)
GOVERNED = SpeculationOptions(algorithm="ngram")
SAMPLED = SamplingParams(temperature=0.9, seed=11, repeat_penalty=1.1, frequency_penalty=0.2)
PROMPT = tuple(b"the cat sat on the mat and the cat sat on the hat, " * 2)


def _rig(
    cache: type[LinearCache] = LinearCache,
    options: SpeculationOptions = PLAIN,
    *,
    period: int = 4,
    **fields: object,
) -> EngineRig:
    executable = FakeExecutable(make_cache=cache, period=period)
    return EngineRig(executable, speculation=options, **fields)  # type: ignore[arg-type]


# -- speculation changes nothing


@pytest.mark.parametrize("options", [DRAFTING, GOVERNED])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("period", [0, 4])
def test_s70_the_stream_with_speculation_on_is_the_stream_with_it_off(
    cache: type[LinearCache], sampling: SamplingParams, options: SpeculationOptions, period: int
) -> None:
    plain = _rig(cache, period=period).ask(PROMPT, sampling=sampling, max_tokens=80)
    rig = _rig(cache, options, period=period)
    end = rig.ask(PROMPT, sampling=sampling, max_tokens=80)
    assert end.token_ids == plain.token_ids
    assert end.text == plain.text
    rig.check_holder(PROMPT, end)
    if period and sampling is GREEDY and options is DRAFTING:
        assert end.stats.draft_n_accepted > 40


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("stop_index", [1, 2, 5, 8, 9, 30])
def test_s19_a_stop_inside_an_accepted_window_ends_the_turn_and_the_cache_there(
    cache: type[LinearCache], stop_index: int
) -> None:
    text = _rig(cache, period=26).ask(PROMPT, max_tokens=60).text
    rig = _rig(cache, DRAFTING, period=26)
    rig.ask(PROMPT, max_tokens=60)
    end = rig.ask(PROMPT, max_tokens=60, stop_ids=(ord(text[stop_index]),))
    assert end.finish_reason == "stop"
    assert len(end.token_ids) == min(stop_index, stop_index % 26) + 1
    assert end.text == text[: len(end.token_ids) - 1]
    rig.check_holder(PROMPT, end)
    following = (*PROMPT, *end.token_ids, 1, 2)
    plain = _rig(cache, period=26)
    assert rig.ask(following).token_ids == plain.ask(following).token_ids


@pytest.mark.parametrize("options", [PLAIN, DRAFTING])
def test_a_stop_string_gives_the_same_text_ids_and_cache_with_and_without_drafts(
    options: SpeculationOptions,
) -> None:
    rig = _rig(options=options, period=4)
    end = rig.ask(tuple(b"abcd" * 6), max_tokens=60, stop=("da", "cdab"))
    plain = _rig(period=4).ask(tuple(b"abcd" * 6), max_tokens=60, stop=("da", "cdab"))
    assert (end.text, end.token_ids, end.finish_reason) == (
        plain.text,
        plain.token_ids,
        "stop",
    )
    assert "cdab" not in end.text
    rig.check_holder(tuple(b"abcd" * 6), end)


@pytest.mark.parametrize("num", [0, 1, 2, 7, 8, 9])
@pytest.mark.parametrize("options", [PLAIN, DRAFTING])
def test_exactly_as_many_tokens_as_asked_for(options: SpeculationOptions, num: int) -> None:
    end = _rig(options=options).ask(PROMPT, max_tokens=num)
    assert len(end.token_ids) == num == end.stats.completion_tokens
    assert end.finish_reason == "length"


@pytest.mark.parametrize("options", [PLAIN, DRAFTING])
@pytest.mark.parametrize("room", [1, 2, 4, 9])
def test_a_full_context_ends_the_answer_at_its_last_token(
    options: SpeculationOptions, room: int
) -> None:
    rig = _rig(options=options, context_len=len(PROMPT) + room)
    end = rig.ask(PROMPT, max_tokens=None)
    assert (end.finish_reason, len(end.token_ids)) == ("context", room)
    assert end.token_ids == _rig().ask(PROMPT, max_tokens=room).token_ids


@pytest.mark.parametrize("extra", [0, 1])
def test_a_prompt_that_fills_the_context_fails_with_both_numbers(extra: int) -> None:
    rig = _rig(context_len=64)
    request_id = rig.submit(tuple(range(64 + extra)))
    error = rig.failed(request_id).error
    assert error.kind == "does_not_fit"
    assert str(64 + extra) in error.message
    assert "64" in error.message
    assert error.hint


def test_s42_switching_speculation_in_the_middle_changes_no_token() -> None:
    plain = _rig().ask(PROMPT, max_tokens=200)
    rig = _rig(options=DRAFTING)
    request_id = rig.submit(PROMPT, max_tokens=200)
    for options in (PLAIN, DRAFTING, SpeculationOptions(window=2, use_governor=False), PLAIN):
        rig.run(4)
        rig.engine.apply(UpdateSpeculation(options))
    rig.engine.apply(UpdateSpeculation(DRAFTING))
    rig.run()
    end = rig.finished(request_id)
    assert end.token_ids == plain.token_ids
    assert end.stats.verify_steps > 0
    assert end.stats.plain_steps > 0
    assert [e.options for e in of_type(rig.events, SpeculationChanged)][-1] == DRAFTING
    rig.check_holder(PROMPT, end)


def test_s42_switching_off_reports_why_nothing_drafts() -> None:
    rig = _rig(options=DRAFTING)
    rig.engine.apply(UpdateSpeculation(PLAIN))
    changed = of_type(rig.events, SpeculationChanged)[-1]
    assert changed.algorithm is None
    assert changed.declined


def test_s09_a_refusing_trunk_decodes_plainly_and_says_so_once() -> None:
    traits = TargetTraits(refusal="its verify is not exact")
    model = fake_model(FakeExecutable(period=4), traits=traits)
    rig = EngineRig(model=model, speculation=DRAFTING)
    for _ in range(2):
        end = rig.ask(PROMPT, max_tokens=30)
        assert end.stats.verify_steps == end.stats.draft_n == 0
    assert sum("its verify is not exact" in e.text for e in of_type(rig.events, Notice)) == 1
    assert of_type(rig.events, ModelLoaded)[0].info.refusal == "its verify is not exact"


def test_s20_a_turn_of_one_token_is_never_armed() -> None:
    end = _rig(options=DRAFTING).ask(PROMPT, max_tokens=1)
    assert end.stats.algorithm is None


def test_s25_turn_two_drafts_like_turn_one() -> None:
    rig = _rig(options=DRAFTING, period=26)
    first = rig.ask(PROMPT, max_tokens=60)
    second = rig.ask((*PROMPT, *first.token_ids, *b"more"), max_tokens=60)
    assert second.stats.reused_tokens > len(PROMPT)
    assert second.stats.draft_n_accepted > 30


def test_s29_with_speculation_on_the_prompt_is_forwarded_as_with_it_off() -> None:
    shapes = []
    for options in (PLAIN, DRAFTING):
        rig = _rig(options=options)
        rig.ask(PROMPT, max_tokens=1)
        shapes.append(rig.executable.shapes)
    assert shapes[0] == shapes[1]


def test_statistics_count_only_what_was_emitted() -> None:
    rig = _rig(options=DRAFTING)
    end = rig.ask(PROMPT, max_tokens=60)
    stats = end.stats
    assert 0 <= stats.draft_n_accepted <= stats.draft_n
    assert stats.completion_tokens == 60
    assert 1 + stats.verify_steps + stats.plain_steps + stats.draft_n_accepted == 60
    assert sum(stats.accepted_per_position) == stats.draft_n_accepted
    assert stats.algorithm == "ngram"


def test_times_run_from_the_submit_and_from_the_first_token() -> None:
    rig = _rig()
    rig.submit((1, 2, 3), "other", max_tokens=4)
    rig.run(2)
    request_id = rig.submit(PROMPT, max_tokens=5)
    rig.run()
    stats = rig.finished(request_id).stats
    assert stats.prefill_ms == pytest.approx(20.0)
    assert stats.ttft_ms == pytest.approx(30.0)
    assert stats.decode_ms == pytest.approx(40.0 + 10.0)
    assert stats.phase_ms["plain"] == pytest.approx(40.0)
    assert stats.decode_tok_s == pytest.approx(4 / 0.05)


def test_an_end_token_ends_the_answer_and_is_not_shown() -> None:
    rig = EngineRig(FakeExecutable(period=26, eos_bias=31.0))
    end = rig.ask("hello", max_tokens=100)
    assert end.finish_reason == "stop"
    assert end.token_ids[-1] >= EOS
    assert end.text.encode() == b"".join(map(ByteTokenizer().piece, end.token_ids))


def test_a_hopeless_loop_ends_when_the_guard_is_asked_for() -> None:
    results = []
    for options in (PLAIN, DRAFTING):
        rig = _rig(options=options, period=4)
        results.append(rig.ask(PROMPT, max_tokens=2000, stop_on_repetition=True))
        rig.check_holder(PROMPT, results[-1])
    assert results[0].finish_reason == "repetition"
    assert results[0].token_ids == results[1].token_ids
    assert len(results[0].token_ids) == 4 * 65


# -- models


def test_loading_reports_progress_and_the_model() -> None:
    rig = _rig()
    assert isinstance(rig.events[0], ModelLoading)
    info = of_type(rig.events, ModelLoaded)[0].info
    assert (info.context_len, info.vocab_size, info.algorithms) == (4096, 264, ("ngram",))
    assert (info.algorithm, info.declined) == (None, "speculation is off")


def test_a_loaded_model_says_what_drafts_under_the_options_it_was_loaded_with() -> None:
    info = of_type(_rig(options=SpeculationOptions()).events, ModelLoaded)[0].info
    assert (info.algorithm, info.declined) == ("ngram", None)
    asked = SpeculationOptions(algorithm="draft-head")
    info = of_type(_rig(options=asked).events, ModelLoaded)[0].info
    assert info.algorithm is None
    assert info.declined == "draft-head needs a draft head and this model has none"


def test_the_context_is_bounded_by_the_model_and_by_memory() -> None:
    rig = _rig(context_len=10_000)
    assert of_type(rig.events, ModelLoaded)[0].info.context_len == 4096
    assert "10000" in of_type(rig.events, Notice)[0].text
    small = EngineRig(options=EngineOptions(holder_budget_bytes=8 * 100))
    assert of_type(small.events, ModelLoaded)[0].info.context_len == 100


def test_caches_get_a_share_of_what_is_free_beside_the_weights_unless_it_is_set() -> None:
    executable = FakeExecutable(free_bytes=4 * 8 * 3000)
    rig = EngineRig(executable)
    assert of_type(rig.events, ModelLoaded)[0].info.context_len == 3000
    rig = EngineRig(executable, options=EngineOptions(holder_budget_bytes=8 * 50))
    assert of_type(rig.events, ModelLoaded)[0].info.context_len == 50


@pytest.mark.parametrize(("free_tokens", "num"), [(3000, 2048), (1000, 1000), (0, 1)])
def test_where_little_is_free_one_useful_chat_gets_it(free_tokens: int, num: int) -> None:
    rig = EngineRig(FakeExecutable(free_bytes=8 * free_tokens))
    assert of_type(rig.events, ModelLoaded)[0].info.context_len == num


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(2, "no such file", "x.gguf"), "missing"),
        (OSError("the disk is gone"), "failure"),
        (MemoryError(), "does_not_fit"),
        (OutOfDeviceMemory("weights of 5 bytes into 3"), "does_not_fit"),
        (UnsupportedWeight("a is IQ9"), "bad_model"),
        (BackendError("no device"), "failure"),
    ],
)
def test_a_load_that_fails_is_an_event_and_leaves_no_model(error: Exception, kind: str) -> None:
    events: list[EngineEvent] = []
    engine = InferenceEngine(FakeLoader(error=error), events.append)
    engine.apply(LoadModel(Path("x.gguf"), "x"))
    (failed,) = of_type(events, ModelFailed)
    assert failed.error.kind == kind
    assert failed.error.message
    assert engine.model is None
    engine.apply(SubmitTurn("r", "c", "hello", GREEDY))
    assert "no model" in of_type(events, TurnFailed)[0].error.message


def test_a_bad_file_leaves_the_model_in_use_and_its_turns_alone() -> None:
    rig = _rig()
    request_id = rig.submit(PROMPT)
    rig.run(5)
    holder = rig.engine.holder("chat")
    assert holder is not None
    held_bytes = holder.num_bytes
    rig.loader.error = UnsupportedWeight("a is IQ9")
    rig.engine.apply(LoadModel(Path("bad"), "bad"))
    (failed,) = of_type(rig.events, ModelFailed)
    assert failed.name == "bad"
    assert failed.kept == of_type(rig.events, ModelLoaded)[0].info
    rig.run()
    assert rig.finished(request_id).finish_reason == "length"
    assert rig.loader.freed_bytes == rig.executable.weight_bytes + held_bytes


def test_a_model_that_cannot_be_placed_leaves_none() -> None:
    rig = _rig()
    rig.loader.place_error = OutOfDeviceMemory("weights of 5 bytes into 3")
    rig.engine.apply(LoadModel(Path("y"), "y"))
    (failed,) = of_type(rig.events, ModelFailed)
    assert failed.kept is None
    assert rig.executable.is_closed
    assert rig.engine.model is None


def test_another_model_replaces_the_first_and_ends_its_turns() -> None:
    rig = _rig()
    request_id = rig.submit(PROMPT, max_tokens=50)
    rig.run(5)
    rig.engine.apply(LoadModel(Path("y"), "y"))
    assert rig.finished(request_id).finish_reason == "cancelled"
    assert rig.executable.is_closed
    assert rig.engine.holder("chat") is None


def test_closing_releases_the_weights() -> None:
    rig = _rig()
    rig.engine.close()
    assert rig.executable.is_closed
    assert rig.engine.model is None
    assert not rig.engine.step()


def test_a_forgotten_chat_ends_its_turn() -> None:
    rig = _rig()
    request_id = rig.submit(PROMPT, max_tokens=50)
    rig.run(3)
    rig.engine.apply(ForgetChat("chat"))
    assert rig.finished(request_id).finish_reason == "cancelled"
    assert rig.engine.holder("chat") is None


def test_deltas_carry_counters_and_the_context_in_use() -> None:
    rig = _rig()
    rig.ask(PROMPT, max_tokens=30)
    deltas = of_type(rig.events, TextDelta)
    assert 1 < len(deltas) < 12
    assert deltas[-1].stats.completion_tokens == 30
    assert deltas[0].context_used == len(PROMPT)


def test_a_template_that_refuses_fails_the_turn_alone() -> None:
    class Refusing(FakeTemplate):
        def encode(self, messages: object, **_: object) -> list[int]:  # type: ignore[override]
            from engine.errors import EngineError

            raise EngineError("roles must alternate", hint="delete the empty message")

    model: LoadedModel = fake_model(template=Refusing())
    rig = EngineRig(model=model)
    request_id = rig.submit([("user", "hi")])
    error = rig.failed(request_id).error
    assert (error.message, error.hint) == ("roles must alternate", "delete the empty message")
    assert rig.ask("raw text").finish_reason == "length"


def test_commands_without_a_model_do_no_harm() -> None:
    events: list[EngineEvent] = []
    engine = InferenceEngine(FakeLoader(), events.append)
    for command in (CancelTurn("r"), ForgetChat("c"), Stop(), UpdateSpeculation(PLAIN)):
        engine.apply(command)
    assert [type(e) for e in events] == [SpeculationChanged]
    assert Message("user", "x").role == "user"


def test_a_turn_that_cannot_start_fails_alone() -> None:
    rig = _rig()
    request_id = rig.submit(PROMPT, "a", max_tokens=20)
    rig.run(3)

    def refuse() -> LinearCache:
        raise OutOfDeviceMemory("no memory for a cache: 5 of 3 bytes")

    make_cache, rig.executable.make_cache = rig.executable.make_cache, refuse
    failed = rig.submit((1, 2, 3), "b")
    rig.run(1)
    assert "5 of 3 bytes" in rig.failed(failed).error.message
    rig.executable.make_cache = make_cache
    assert rig.ask((1, 2, 3), "b").finish_reason == "length"
    assert rig.finished(request_id).token_ids == _rig().ask(PROMPT, max_tokens=20).token_ids


def test_the_same_seed_gives_the_same_answer_after_other_chats() -> None:
    rig = _rig(period=0)
    first = rig.ask(PROMPT, sampling=SAMPLED)
    rig.ask(PROMPT[:50], "other", sampling=SAMPLED)
    assert rig.ask(PROMPT, sampling=SAMPLED).token_ids == first.token_ids
    assert rig.ask(PROMPT, sampling=SAMPLED, attempt=1).token_ids != first.token_ids


def test_a_model_without_end_ids_ends_by_length() -> None:
    class NoEnd(ByteTokenizer):
        eog_ids = frozenset()

    rig = EngineRig(model=fake_model(tokenizer=NoEnd()), speculation=DRAFTING)
    assert rig.ask(PROMPT, max_tokens=40).finish_reason == "length"


def test_what_placing_the_weights_cost_is_said_with_the_model() -> None:
    rig = EngineRig(FakeExecutable(notices=["the weights take 16.0 GB, 2.4 GB in the file"]))
    assert [event.text for event in of_type(rig.events, Notice)] == [
        "the weights take 16.0 GB, 2.4 GB in the file"
    ]


def test_rows_that_cannot_be_measured_are_answered_too() -> None:
    rig = EngineRig(FakeExecutable(fail_at=2))
    rig.engine.apply(MeasureRows((1, 2), rounds=1, context_len=8))
    rig.engine.close()
    rig.engine.apply(MeasureRows((1, 2), rounds=1, context_len=8))
    assert of_type(rig.events, RowsMeasured) == [RowsMeasured(()), RowsMeasured(())]
    reasons = [event.text for event in of_type(rig.events, Notice)]
    assert reasons == [
        "rows were not measured: the device is gone",
        "rows were not measured: no model is loaded",
    ]
