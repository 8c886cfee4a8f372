"""Protobuf on one side, engine.messages on the other: only here, in wire.pairing and in wire.pulling do the two meet.

`..._to_pb` builds a wire message, `..._from_pb` reads one. Reading raises InvalidMessage for a peer's nonsense
(an unset oneof, a value out of range); callers count it and end that stream or job, never the process.
"""

from __future__ import annotations

import enum
from collections.abc import Sized
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

from engine import messages as m
from engine.types import Candidate, FinishReason, InvalidField, SamplingParams, Token, TokenLogprob
from protos import generation_pb2 as gpb
from protos import worker_pb2 as wpb
from wire.pairing import node_from_pb, node_to_pb, paths_from_pb, paths_to_pb, peers_from_pb, peers_to_pb

MAX_DURATION_S = 10 * 366 * 86400.0
MAX_LABEL = 256  # characters of what is only ever shown


class InvalidMessage(ValueError):
    """A peer sent a message that no version of this program sends."""


UNREADABLE = (InvalidMessage, DecodeError)  # what reading from a peer raises: grpc parses the bytes as they are read


def readable(message: Any) -> Any:
    """A client's grpc gives None for a message that does not parse, where a server's raises DecodeError."""
    if message is None:
        raise InvalidMessage("its bytes are no message of this protocol")
    return message


def to_duration(seconds: float) -> Duration:
    nanos = round(max(0.0, min(seconds, MAX_DURATION_S)) * 1e9)
    return Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def from_duration(duration: Duration) -> float:
    seconds = (duration.seconds * 10**9 + duration.nanos) / 1e9
    if not 0 <= seconds <= MAX_DURATION_S:
        raise InvalidMessage(f"a duration of {seconds:g} s is out of range")
    return seconds


# ---- sampling -------------------------------------------------------------------------------------------------

_SAMPLING_SCALARS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
)  # fmt: skip


def params_fields(
    sampling: gpb.SamplingParams, stopping: gpb.StoppingParams, output: gpb.OutputOptions
) -> dict[str, Any]:
    """Keyword arguments for SamplingParams: only what the message sets, so that defaults stay the caller's."""
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in _SAMPLING_SCALARS if sampling.HasField(name)}
    if sampling.HasField("n"):
        fields["n"] = sampling.n
    if sampling.logit_bias:
        fields["logit_bias"] = dict(sampling.logit_bias)
    for name in ("max_tokens", "min_tokens"):
        if stopping.HasField(name):
            fields[name] = getattr(stopping, name)
    fields["stop"] = tuple(stopping.stop)
    fields["stop_token_ids"] = tuple(stopping.stop_token_ids)
    fields["ignore_eos"] = stopping.ignore_eos
    fields["include_stop_in_output"] = stopping.include_stop_in_output
    if output.HasField("logprobs"):
        fields["logprobs"] = output.logprobs
    if output.HasField("prompt_logprobs"):
        fields["prompt_logprobs"] = output.prompt_logprobs
    return fields


def params_from_pb(
    sampling: gpb.SamplingParams, stopping: gpb.StoppingParams, output: gpb.OutputOptions
) -> SamplingParams:
    try:
        return SamplingParams(**params_fields(sampling, stopping, output))
    except InvalidField as error:
        raise InvalidMessage(str(error)) from error


def params_to_pb(params: SamplingParams) -> tuple[gpb.SamplingParams, gpb.StoppingParams, gpb.OutputOptions]:
    """Stop strings stay behind: they are matched on text, which only the router has."""
    sampling = gpb.SamplingParams(logit_bias=params.logit_bias)
    for name in _SAMPLING_SCALARS:
        if (value := getattr(params, name)) is not None:
            setattr(sampling, name, value)
    stopping = gpb.StoppingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )
    return sampling, stopping, gpb.OutputOptions(logprobs=params.logprobs, prompt_logprobs=params.prompt_logprobs)


def logprob_to_pb(logprob: TokenLogprob) -> gpb.TokenLogprob:
    top = [gpb.TokenLogprob.Candidate(token_id=c.token_id, logprob=c.logprob) for c in logprob.top]
    return gpb.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, rank=logprob.rank, top=top)


def logprob_from_pb(pb: gpb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        pb.token_id,
        pb.logprob if pb.HasField("logprob") else None,
        pb.rank if pb.HasField("rank") else None,
        tuple(Candidate(c.token_id, c.logprob) for c in pb.top),
    )


# ---- identity and small parts ---------------------------------------------------------------------------------


def key_to_pb(key: m.RequestKey) -> wpb.RequestKey:
    return wpb.RequestKey(request=key.request, attempt=key.attempt, placement=key.placement)


def key_from_pb(pb: wpb.RequestKey) -> m.RequestKey:
    return m.RequestKey(pb.request, pb.attempt, pb.placement)


def _times_to_pb(times: m.StageTimes) -> wpb.StageTimes:
    return wpb.StageTimes(
        queued=to_duration(times.queued),
        computed=to_duration(times.computed),
        transferred=to_duration(times.transferred),
    )


def _times_from_pb(pb: wpb.StageTimes) -> m.StageTimes:
    return m.StageTimes(from_duration(pb.queued), from_duration(pb.computed), from_duration(pb.transferred))


def _stop_to_pb(stop_token_id: int | None) -> gpb.StopMatch | None:
    return None if stop_token_id is None else gpb.StopMatch(token_id=stop_token_id)


def _stop_from_pb(pb: gpb.StopMatch) -> int | None:
    return pb.token_id if pb.WhichOneof("matched") == "token_id" else None


def _number(value: enum.Enum) -> Any:
    """Protobuf takes an enum's number; its stubs do not say so."""
    return value.value


def _finish_from_number(number: int) -> FinishReason | None:
    try:
        return FinishReason(number) if number else None
    except ValueError:
        raise InvalidMessage(f"{number} is no finish reason") from None


def _reason_from_number(number: int) -> m.Reason:
    """A reason that a newer peer knows and we do not is still a failure: it becomes INTERNAL."""
    try:
        return m.Reason(number)
    except ValueError:
        return m.Reason.INTERNAL


def ticket_to_pb(ticket: m.Ticket) -> wpb.Ticket:
    return wpb.Ticket(
        id=ticket.id,
        owner=node_to_pb(ticket.owner),
        num_tokens=ticket.num_tokens,
        num_blocks=ticket.num_blocks,
        time_to_live=to_duration(ticket.time_to_live),
        block_hashes=ticket.block_hashes,
        consumers=ticket.consumers,
    )


def ticket_from_pb(pb: wpb.Ticket) -> m.Ticket:
    return m.Ticket(
        id=pb.id,
        owner=node_from_pb(pb.owner),
        num_tokens=pb.num_tokens,
        num_blocks=pb.num_blocks,
        time_to_live=from_duration(pb.time_to_live),
        block_hashes=tuple(pb.block_hashes),
        consumers=pb.consumers or 1,
    )


def hello_to_pb(hello: m.WorkerHello) -> wpb.WorkerHello:
    return wpb.WorkerHello(
        node=node_to_pb(hello.node),
        layout=wpb.KvLayout(**hello.layout._asdict()),
        total_blocks=hello.total_blocks,
        max_num_seqs=hello.max_num_seqs,
        max_model_len=hello.max_model_len,
        transports=[wpb.TransportOffer(kind=offer.kind, metadata=offer.metadata) for offer in hello.transports],
    )


def hello_from_pb(pb: wpb.WorkerHello) -> m.WorkerHello:
    layout = m.KvLayout(**{name: getattr(pb.layout, name) for name in m.KvLayout._fields})
    if layout.block_size < 1 or pb.total_blocks < 1 or pb.max_model_len < 1:
        raise InvalidMessage("a worker's hello lacks its block size, pool or model length")
    return m.WorkerHello(
        node=node_from_pb(pb.node),
        layout=layout,
        total_blocks=pb.total_blocks,
        max_num_seqs=pb.max_num_seqs,
        max_model_len=pb.max_model_len,
        transports=tuple(m.TransportOffer(offer.kind, offer.metadata) for offer in pb.transports),
    )


def router_hello_to_pb(hello: m.RouterHello) -> wpb.RouterHello:
    return wpb.RouterHello(router=hello.router, incarnation=hello.incarnation, session=hello.session)


def router_hello_from_pb(pb: wpb.RouterHello) -> m.RouterHello:
    return m.RouterHello(pb.router, pb.incarnation, pb.session)


def load_to_pb(load: m.WorkerLoad) -> wpb.WorkerLoad:
    return wpb.WorkerLoad(
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        free_blocks=load.free_blocks,
        leased_blocks=load.leased_blocks,
        step_seconds=load.step_seconds,
        draining=load.draining,
        pulled_blocks=load.pulled_blocks,
        kv_path=load.kv_path,
        kv_paths=paths_to_pb(load.kv_paths),
        refuses=load.refuses,
        cached_blocks=load.cached_blocks,
    )


def load_from_pb(pb: wpb.WorkerLoad) -> m.WorkerLoad:
    return m.WorkerLoad(
        pb.running,
        pb.waiting,
        pb.waiting_tokens,
        pb.free_blocks,
        pb.leased_blocks,
        pb.step_seconds,
        pb.draining,
        pb.pulled_blocks,
        pb.kv_path,
        paths_from_pb(pb.kv_paths),
        pb.refuses,
        pb.cached_blocks,
    )


# ---- commands -------------------------------------------------------------------------------------------------


def prefill_command_to_pb(command: m.PrefillCommand | m.RouterHello) -> wpb.PrefillCommand:
    match command:
        case m.PrefillStart():
            sampling, stopping, output = params_to_pb(command.params)
            return wpb.PrefillCommand(
                start=wpb.PrefillStart(
                    key=key_to_pb(command.key),
                    token_ids=command.token_ids,
                    emitted=command.emitted,
                    sampling=sampling,
                    stopping=stopping,
                    output=output,
                    cache_namespace=command.cache_namespace,
                    deadline=to_duration(command.deadline),
                    age=to_duration(command.age),
                    request_id=command.request_id,
                    traceparent=command.traceparent,
                )
            )
        case m.RouterHello():
            return wpb.PrefillCommand(hello=router_hello_to_pb(command))
        case m.Cancel():
            return wpb.PrefillCommand(cancel=wpb.Cancel(key=key_to_pb(command.key)))
        case m.Heartbeat():
            return wpb.PrefillCommand(heartbeat=wpb.Heartbeat(sequence=command.sequence))
        case m.Drain():
            return wpb.PrefillCommand(drain=wpb.Drain(grace=to_duration(command.grace)))


def prefill_command_from_pb(pb: wpb.PrefillCommand) -> m.PrefillCommand | m.RouterHello:
    match pb.WhichOneof("command"):
        case "start":
            start = pb.start
            return m.PrefillStart(
                key=key_from_pb(start.key),
                token_ids=tuple(start.token_ids[:]),  # a slice comes at half the price of an iteration
                emitted=_emitted(start.emitted, start.token_ids),
                params=params_from_pb(start.sampling, start.stopping, start.output),
                deadline=from_duration(start.deadline),
                age=from_duration(start.age),
                cache_namespace=start.cache_namespace,
                request_id=start.request_id[:MAX_LABEL],
                traceparent=start.traceparent[:MAX_LABEL],
            )
        case kind:
            return _common_command_from_pb(pb, kind)


def decode_command_to_pb(command: m.DecodeCommand | m.RouterHello) -> wpb.DecodeCommand:
    match command:
        case m.DecodeStart():
            sampling, stopping, output = params_to_pb(command.params)
            return wpb.DecodeCommand(
                start=wpb.DecodeStart(
                    key=key_to_pb(command.key),
                    ticket=ticket_to_pb(command.ticket),
                    token_ids=command.token_ids,
                    sampling=sampling,
                    stopping=stopping,
                    output=output,
                    emitted=command.emitted,
                    deadline=to_duration(command.deadline),
                    age=to_duration(command.age),
                    until_index=command.until_index,
                    cache_namespace=command.cache_namespace,
                    request_id=command.request_id,
                    traceparent=command.traceparent,
                )
            )
        case m.RouterHello():
            return wpb.DecodeCommand(hello=router_hello_to_pb(command))
        case m.Cancel():
            return wpb.DecodeCommand(cancel=wpb.Cancel(key=key_to_pb(command.key)))
        case m.Credit():
            return wpb.DecodeCommand(credit=wpb.Credit(key=key_to_pb(command.key), until_index=command.until_index))
        case m.Heartbeat():
            return wpb.DecodeCommand(heartbeat=wpb.Heartbeat(sequence=command.sequence))
        case m.Drain():
            return wpb.DecodeCommand(drain=wpb.Drain(grace=to_duration(command.grace)))
        case m.Peers():
            return wpb.DecodeCommand(peers=peers_to_pb(command))


def decode_command_from_pb(pb: wpb.DecodeCommand) -> m.DecodeCommand | m.RouterHello:
    match pb.WhichOneof("command"):
        case "start":
            start = pb.start
            return m.DecodeStart(
                key=key_from_pb(start.key),
                ticket=ticket_from_pb(start.ticket),
                token_ids=tuple(start.token_ids[:]),  # a slice comes at half the price of an iteration
                emitted=_emitted(start.emitted, start.token_ids),
                params=params_from_pb(start.sampling, start.stopping, start.output),
                deadline=from_duration(start.deadline),
                age=from_duration(start.age),
                until_index=start.until_index,
                cache_namespace=start.cache_namespace,
                request_id=start.request_id[:MAX_LABEL],
                traceparent=start.traceparent[:MAX_LABEL],
            )
        case "credit":
            return m.Credit(key_from_pb(pb.credit.key), pb.credit.until_index)
        case "peers":
            return peers_from_pb(pb.peers)
        case kind:
            return _common_command_from_pb(pb, kind)


def _common_command_from_pb(
    pb: wpb.PrefillCommand | wpb.DecodeCommand, kind: str | None
) -> m.RouterHello | m.Cancel | m.Heartbeat | m.Drain:
    match kind:
        case "hello":
            return router_hello_from_pb(pb.hello)
        case "cancel":
            return m.Cancel(key_from_pb(pb.cancel.key))
        case "heartbeat":
            return m.Heartbeat(pb.heartbeat.sequence)
        case "drain":
            return m.Drain(from_duration(pb.drain.grace))
        case _:
            raise InvalidMessage("a command without content")


def _emitted(emitted: int, token_ids: Sized) -> int:
    """The prompt has at least one token, so fewer tokens were emitted than there are."""
    if emitted >= (total := len(token_ids)):
        raise InvalidMessage(f"{emitted} of {total} tokens are said to be emitted, which leaves no prompt")
    return emitted


# ---- events ---------------------------------------------------------------------------------------------------


def first_token_to_pb(first: m.FirstToken) -> wpb.FirstToken:
    logprob = first.token.logprob
    return wpb.FirstToken(
        key=key_to_pb(first.key),
        token_id=first.token.token_id,
        index=first.token.index,
        logprob=None if logprob is None else logprob_to_pb(logprob),
        prompt_logprobs=[logprob_to_pb(each) for each in first.prompt_logprobs],
        finish_reason=_number(first.finish_reason) if first.finish_reason else None,
        times=_times_to_pb(first.times),
        stop_match=_stop_to_pb(first.stop_token_id),
    )


def first_token_from_pb(pb: wpb.FirstToken) -> m.FirstToken:
    logprob = logprob_from_pb(pb.logprob) if pb.HasField("logprob") else None
    return m.FirstToken(
        key=key_from_pb(pb.key),
        token=Token(pb.index, pb.token_id, logprob),
        finish_reason=_finish_from_number(pb.finish_reason),
        stop_token_id=_stop_from_pb(pb.stop_match),
        prompt_logprobs=tuple(logprob_from_pb(each) for each in pb.prompt_logprobs),
        times=_times_from_pb(pb.times),
    )


def step_to_pb(step: m.StepBatch) -> wpb.StepBatch:
    """Columns, not rows: one message however many sequences advanced."""
    rows = step.rows
    return wpb.StepBatch(
        step=step.step,
        requests=[row.key.request for row in rows],
        attempts=[row.key.attempt for row in rows],
        placements=[row.key.placement for row in rows],
        indices=[row.token.index for row in rows],
        token_ids=[row.token.token_id for row in rows],
        logprobs=[
            wpb.RowLogprob(row=number, logprob=logprob_to_pb(row.token.logprob))
            for number, row in enumerate(rows)
            if row.token.logprob is not None
        ],
        finishes=[
            wpb.Finish(
                key=key_to_pb(finish.key),
                reason=_number(finish.reason),
                stop_match=_stop_to_pb(finish.stop_token_id),
                times=_times_to_pb(finish.times),
            )
            for finish in step.finishes
        ],
    )


def step_from_pb(pb: wpb.StepBatch) -> m.StepBatch:
    count = len(pb.requests)
    if not len(pb.attempts) == len(pb.placements) == len(pb.indices) == len(pb.token_ids) == count:
        raise InvalidMessage("a step's columns differ in length")
    logprobs: list[TokenLogprob | None] = [None] * count
    for each in pb.logprobs:
        if each.row >= count:
            raise InvalidMessage(f"a logprob for row {each.row} of {count}")
        logprobs[each.row] = logprob_from_pb(each.logprob)
    keys = map(m.RequestKey, pb.requests, pb.attempts, pb.placements)
    tokens = map(Token, pb.indices, pb.token_ids, logprobs)
    return m.StepBatch(pb.step, tuple(map(m.Row, keys, tokens)), tuple(_finish_from_pb(f) for f in pb.finishes))


def _finish_from_pb(pb: wpb.Finish) -> m.Finish:
    if (reason := _finish_from_number(pb.reason)) is None:
        raise InvalidMessage("a finish without a reason")
    return m.Finish(key_from_pb(pb.key), reason, _stop_from_pb(pb.stop_match), _times_from_pb(pb.times))


def _refused_to_pb(refused: m.Refused) -> wpb.Refused:
    return wpb.Refused(
        key=key_to_pb(refused.key),
        reason=_number(refused.reason),
        retry_after=to_duration(refused.retry_after),
        facts=refused.facts,
    )


def failed_to_pb(failed: m.Failed) -> wpb.Failed:
    return wpb.Failed(
        key=key_to_pb(failed.key), reason=_number(failed.reason), resumable=failed.resumable, facts=failed.facts
    )


def _refused_from_pb(pb: wpb.Refused) -> m.Refused:
    reason = _reason_from_number(pb.reason)
    return m.Refused(key_from_pb(pb.key), reason, from_duration(pb.retry_after), dict(pb.facts))


def failed_from_pb(pb: wpb.Failed) -> m.Failed:
    return m.Failed(key_from_pb(pb.key), _reason_from_number(pb.reason), pb.resumable, dict(pb.facts))


def prefill_event_to_pb(event: m.PrefillEvent | m.WorkerHello) -> wpb.PrefillEvent:
    match event:
        case m.WorkerHello():
            return wpb.PrefillEvent(hello=hello_to_pb(event))
        case m.WorkerLoad():
            return wpb.PrefillEvent(load=load_to_pb(event))
        case m.PrefillAccepted():
            return wpb.PrefillEvent(
                accepted=wpb.PrefillAccepted(
                    key=key_to_pb(event.key), ticket=ticket_to_pb(event.ticket), cached_tokens=event.cached_tokens
                )
            )
        case m.FirstToken():
            return wpb.PrefillEvent(first_token=first_token_to_pb(event))
        case m.Refused():
            return wpb.PrefillEvent(refused=_refused_to_pb(event))
        case m.Failed():
            return wpb.PrefillEvent(failed=failed_to_pb(event))
        case m.CacheChange():
            return wpb.PrefillEvent(
                cache_change=wpb.CacheChange(sealed=event.sealed, evicted=event.evicted, sequence=event.sequence)
            )


def prefill_event_from_pb(pb: wpb.PrefillEvent) -> m.PrefillEvent | m.WorkerHello:
    match pb.WhichOneof("event"):
        case "hello":
            return hello_from_pb(pb.hello)
        case "load":
            return load_from_pb(pb.load)
        case "accepted":
            accepted = pb.accepted
            return m.PrefillAccepted(key_from_pb(accepted.key), ticket_from_pb(accepted.ticket), accepted.cached_tokens)
        case "first_token":
            return first_token_from_pb(pb.first_token)
        case "refused":
            return _refused_from_pb(pb.refused)
        case "failed":
            return failed_from_pb(pb.failed)
        case "cache_change":
            change = pb.cache_change
            return m.CacheChange(tuple(change.sealed), tuple(change.evicted), change.sequence)
        case _:
            raise InvalidMessage("an event without content")


def decode_event_to_pb(event: m.DecodeEvent | m.WorkerHello) -> wpb.DecodeEvent:
    match event:
        case m.StepBatch():
            return wpb.DecodeEvent(step=step_to_pb(event))
        case m.WorkerHello():
            return wpb.DecodeEvent(hello=hello_to_pb(event))
        case m.WorkerLoad():
            return wpb.DecodeEvent(load=load_to_pb(event))
        case m.FirstToken():
            return wpb.DecodeEvent(first_token=first_token_to_pb(event))
        case m.Refused():
            return wpb.DecodeEvent(refused=_refused_to_pb(event))
        case m.Failed():
            return wpb.DecodeEvent(failed=failed_to_pb(event))


def decode_event_from_pb(pb: wpb.DecodeEvent) -> m.DecodeEvent | m.WorkerHello:
    match pb.WhichOneof("event"):
        case "step":
            return step_from_pb(pb.step)
        case "hello":
            return hello_from_pb(pb.hello)
        case "load":
            return load_from_pb(pb.load)
        case "first_token":
            return first_token_from_pb(pb.first_token)
        case "refused":
            return _refused_from_pb(pb.refused)
        case "failed":
            return failed_from_pb(pb.failed)
        case _:
            raise InvalidMessage("an event without content")
