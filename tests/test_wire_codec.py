"""What a core says is what the other core hears: every message survives the wire unchanged."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import messages as m
from engine.types import Candidate, FinishReason, SamplingParams, Token, TokenLogprob
from protos import worker_pb2 as wpb
from wire import codec, pulling

settings.register_profile("codec", deadline=None, max_examples=60)
settings.load_profile("codec")

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
f32 = st.floats(-100, 0, width=32)
seconds = st.integers(0, 10**6).map(lambda millis: millis / 1000)
texts = st.text(max_size=20)
digests = st.binary(min_size=32, max_size=32)
keys = st.builds(m.RequestKey, u64, u32, u32)
nodes = st.builds(m.Node, texts, u64, texts)
times = st.builds(m.StageTimes, seconds, seconds, seconds)
facts = st.dictionaries(texts, texts, max_size=3)
reasons = st.sampled_from(m.Reason)
finish_reasons = st.sampled_from(FinishReason)
candidates = st.builds(Candidate, u32, f32)
logprobs = st.builds(TokenLogprob, u32, st.none() | f32, st.none() | u32, st.lists(candidates, max_size=2).map(tuple))
tokens = st.builds(Token, u32, u32, st.none() | logprobs)
token_ids = st.lists(u32, min_size=1, max_size=20).map(tuple)
tickets = st.builds(
    m.Ticket, u64, nodes, u32, u32, seconds, st.lists(digests, max_size=3).map(tuple), st.integers(1, 5)
)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2, width=32),
    top_p=st.floats(0.125, 1, width=32),
    top_k=st.integers(0, 1000),
    min_p=st.floats(0, 1, width=32),
    repetition_penalty=st.floats(0.5, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    seed=u64,
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100, width=32), max_size=3),
    max_tokens=st.integers(20, 10**6),
    min_tokens=st.integers(0, 20),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
hellos = st.builds(
    m.WorkerHello,
    nodes,
    st.builds(m.KvLayout, st.binary(max_size=8), texts, st.integers(1, 128), u32, u32, u32, u64, texts),
    st.integers(1, 2**31),
    u32,
    st.integers(1, 2**31),
    st.lists(st.builds(m.TransportOffer, texts, st.binary(max_size=4)), max_size=2).map(tuple),
)
first_tokens = st.builds(
    m.FirstToken,
    keys,
    tokens,
    st.none() | finish_reasons,
    st.none() | u32,
    st.lists(logprobs, max_size=3).map(tuple),
    times,
)
common_commands = st.one_of(
    st.builds(m.Cancel, keys),
    st.builds(m.Heartbeat, u64),
    st.builds(m.Drain, seconds),
    st.builds(m.RouterHello, texts, u64, u64),
)
starts = {
    **{"key": keys, "params": params, "deadline": seconds, "age": seconds, "cache_namespace": st.binary(max_size=8)},
    **{"request_id": texts, "traceparent": texts},
}
prefill_starts = st.builds(m.PrefillStart, token_ids=token_ids, emitted=st.just(0), **starts)
decode_starts = st.builds(
    m.DecodeStart, token_ids=token_ids, emitted=st.just(0), ticket=tickets, until_index=u32, **starts
)
refusals = st.one_of(
    st.builds(m.Refused, keys, reasons, seconds, facts), st.builds(m.Failed, keys, reasons, st.booleans(), facts)
)
loads = st.builds(m.WorkerLoad, u32, u32, u64, u32, u32, f32.map(abs), st.booleans(), u64)
changes = st.builds(
    m.CacheChange, st.lists(digests, max_size=2).map(tuple), st.lists(digests, max_size=2).map(tuple), u64
)
steps = st.builds(
    m.StepBatch,
    u64,
    st.lists(st.builds(m.Row, keys, tokens), max_size=5).map(tuple),
    st.lists(st.builds(m.Finish, keys, finish_reasons, st.none() | u32, times), max_size=2).map(tuple),
)
handles = st.lists(st.builds(m.BlockHandle, u32, u32, u32, u64), max_size=4).map(tuple)
positions = st.lists(u32, max_size=5).map(tuple)
pull_requests = st.one_of(
    st.builds(m.PullOpen, u64, keys, u64, texts, st.binary(max_size=8), u32, texts),
    st.builds(m.PullWant, positions),
    st.builds(m.PullCopied, handles),
    st.builds(m.PullDone),
    st.builds(m.Heartbeat, u64),
)
pull_events = st.one_of(
    st.builds(m.PullOpened, st.binary(max_size=8)),
    st.builds(m.BlocksSealed, handles),
    st.builds(m.BlocksValid, positions, positions),
    first_tokens,
    st.builds(m.Failed, keys, reasons, st.booleans(), facts),
    st.builds(m.Heartbeat, u64),
)


def over_the_wire(value: Any, to_pb: Any, from_pb: Any) -> Any:
    pb = to_pb(value)
    return from_pb(type(pb).FromString(pb.SerializeToString()))


@given(st.one_of(common_commands, prefill_starts))
def test_prefill_commands_survive(command: Any) -> None:
    assert over_the_wire(command, codec.prefill_command_to_pb, codec.prefill_command_from_pb) == command


@given(st.one_of(common_commands, decode_starts, st.builds(m.Credit, keys, u32)))
def test_decode_commands_survive(command: Any) -> None:
    assert over_the_wire(command, codec.decode_command_to_pb, codec.decode_command_from_pb) == command


@given(st.one_of(hellos, loads, first_tokens, refusals, changes, st.builds(m.PrefillAccepted, keys, tickets, u32)))
def test_prefill_events_survive(event: Any) -> None:
    assert over_the_wire(event, codec.prefill_event_to_pb, codec.prefill_event_from_pb) == event


@given(st.one_of(hellos, loads, first_tokens, refusals, steps))
def test_decode_events_survive(event: Any) -> None:
    assert over_the_wire(event, codec.decode_event_to_pb, codec.decode_event_from_pb) == event


@given(pull_requests)
def test_pull_requests_survive(request: Any) -> None:
    assert over_the_wire(request, pulling.pull_request_to_pb, pulling.pull_request_from_pb) == request


@given(pull_events)
def test_pull_events_survive(event: Any) -> None:
    assert over_the_wire(event, pulling.pull_event_to_pb, pulling.pull_event_from_pb) == event


@given(st.binary(max_size=200))
def test_garbled_messages_are_refused_by_name(data: bytes) -> None:
    """Whatever bytes parse as protobuf, reading them gives a value or InvalidMessage, nothing else."""
    readers = [
        (wpb.PrefillCommand, codec.prefill_command_from_pb),
        (wpb.DecodeCommand, codec.decode_command_from_pb),
        (wpb.PrefillEvent, codec.prefill_event_from_pb),
        (wpb.DecodeEvent, codec.decode_event_from_pb),
        (wpb.PullRequest, pulling.pull_request_from_pb),
        (wpb.PullEvent, pulling.pull_event_from_pb),
    ]
    for kind, read in readers:
        try:
            pb = kind.FromString(data)
        except Exception:  # protobuf's own refusal, before our code sees anything
            continue
        with contextlib.suppress(codec.InvalidMessage):
            read(pb)


def test_a_resume_that_leaves_no_prompt_is_refused() -> None:
    start = wpb.PrefillStart(token_ids=[1, 2], emitted=2)
    with pytest.raises(codec.InvalidMessage, match="leaves no prompt"):
        codec.prefill_command_from_pb(wpb.PrefillCommand(start=start))


def test_sampling_floats_reach_every_worker_as_the_same_float32() -> None:
    """A request that moves must see the same temperature: float32 rounding happens once, then is stable."""
    once = over_the_wire(
        m.PrefillStart(m.RequestKey(1, 0), (1,), 0, SamplingParams(temperature=0.1, seed=1, max_tokens=1), 1.0, 0.0),
        codec.prefill_command_to_pb,
        codec.prefill_command_from_pb,
    )
    twice = over_the_wire(once, codec.prefill_command_to_pb, codec.prefill_command_from_pb)
    assert once.params.temperature == struct.unpack("f", struct.pack("f", 0.1))[0]
    assert twice.params == once.params
