"""Messages that no version of this program sends: bytes mutated from valid ones, and fields set to odd values.

Also the valid ones: what a router, a puller, a worker and a client say. Pure functions of an injected random.Random.
`mutate` works on bytes, as a broken or hostile peer does; `odd` walks a message's descriptor and sets fields to values
at their borders, so that what parses reaches deeper than what does not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from router_front import HELLO

from engine import messages as m
from engine.types import FinishReason, SamplingParams, Token
from protos import generation_pb2 as gpb
from wire import codec, pulling

FD = FieldDescriptor
PARAMS = SamplingParams(temperature=0, seed=1, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.7, seed=2, max_tokens=9, logit_bias={5: 2.0}, logprobs=2, stop_token_ids=(7,))
WHOLE = (0, 1, 2, 3, 15, 16, 17, 63, 64, 255, 256, 4095, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
LONG = (*WHOLE, 2**32, 2**53, 2**63 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 1e30, 3.4e38, float("inf"), float("-inf"), float("nan"), 2.0, 10.0)
TEXTS = (
    "",
    "x",
    "\x00",
    "é✓🎉",
    "{}",
    "[]",
    "[" * 3000,
    "1" * 5000,
    '"\\ud800"',
    "local",
    "grpc",
    "a" * 3000,
    "🎉" * 500,
)
BYTES = (b"", b"\x00", b"\xff" * 32, b"x" * 5000)


def mutate(data: bytes, rng: random.Random, others: Sequence[bytes] = (b"",)) -> bytes:
    """One to four small accidents."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(7):
            case 0 if place < len(changed):
                changed[place] ^= 1 << rng.randrange(8)
            case 1 if place < len(changed):
                changed[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                changed[place:place] = rng.randbytes(rng.randint(1, 8))
            case 3:
                del changed[place : place + rng.randint(1, 8)]
            case 4:
                del changed[place:]
            case 5:
                changed[place:place] = changed[: rng.randint(0, 64)]
            case _:
                other = rng.choice(others)
                changed[place:] = other[rng.randrange(len(other) + 1) :]
    return bytes(changed)


def odd(message: Message, rng: random.Random, chance: float = 0.25) -> Message:
    """A copy with some fields set to odd values and some cleared."""
    changed: Any = type(message)()
    changed.CopyFrom(message)
    for field in message.DESCRIPTOR.fields:
        if rng.random() < chance * 0.4:
            changed.ClearField(field.name)
        elif field.type == FD.TYPE_MESSAGE and not field.is_repeated:
            if changed.HasField(field.name) or rng.random() < chance * 0.3:
                getattr(changed, field.name).CopyFrom(odd(getattr(changed, field.name), rng, chance))
        elif rng.random() < chance:
            _set(changed, field, rng)
    return changed


def _set(message: Any, field: FieldDescriptor, rng: random.Random) -> None:
    if not field.is_repeated:
        setattr(message, field.name, _scalar(field, rng))
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        getattr(message, field.name)[_scalar(key, rng)] = _scalar(value, rng)
    elif field.type == FD.TYPE_MESSAGE:
        for _ in range(rng.randint(0, 2)):
            added = getattr(message, field.name).add()
            added.CopyFrom(odd(added, rng))
    else:
        values = [_scalar(field, rng) for _ in range(rng.choice((0, 1, 2, 40)))]
        getattr(message, field.name)[:] = values


def _scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    match field.type:
        case FD.TYPE_FLOAT | FD.TYPE_DOUBLE:
            return rng.choice(FLOATS)
        case FD.TYPE_STRING:
            return rng.choice(TEXTS)
        case FD.TYPE_BYTES:
            return rng.choice(BYTES)
        case FD.TYPE_BOOL:
            return rng.random() < 0.5
        case FD.TYPE_ENUM:
            return rng.choice((0, 1, 2, 5, 11, 12, 99, 2**31 - 1))
        case FD.TYPE_UINT64 | FD.TYPE_FIXED64:
            return rng.choice((*LONG, 2**64 - 1))
        case FD.TYPE_INT64:
            return rng.choice((*LONG, -1, -(2**63)))
        case FD.TYPE_INT32:
            return rng.choice((0, 1, 7, 999_999_999, 2**31 - 1, -1, -(2**31)))
    return rng.choice(WHOLE)


# ---- valid messages -----------------------------------------------------------------------------------------------


def tokens_of(request: int, count: int = 10) -> tuple[int, ...]:
    return tuple((request * 37 + place) % 250 for place in range(count))


def prefill_commands(request: int) -> list[Message]:
    key = m.RequestKey(request, 1)
    starts = [m.PrefillStart(key, tokens_of(request, 40), 2, params, 3.0, 0.5, b"salt") for params in (PARAMS, SAMPLED)]
    commands = [*starts, *starts, m.Cancel(key), m.Heartbeat(3), m.Drain(1.0), m.RouterHello("r", 2, 3)]
    return [codec.prefill_command_to_pb(command) for command in commands]


def decode_commands(request: int, ticket: m.Ticket) -> list[Message]:
    key = m.RequestKey(request, 1, 1)
    starts = [
        m.DecodeStart(key, ticket, tokens_of(request), 0, params, 30.0, 0.5, 6, b"salt") for params in (PARAMS, SAMPLED)
    ]
    commands = [*starts, *starts, m.Cancel(key), m.Credit(key, 20), m.Heartbeat(3), m.Drain(1.0)]
    return [codec.decode_command_to_pb(command) for command in [*commands, m.RouterHello("r", 2, 3)]]


def pull_requests(ticket: m.Ticket, key: m.RequestKey, digest: bytes) -> list[Message]:
    handle = m.BlockHandle(1, 0, 0, 99)
    opens = [m.PullOpen(ticket.id, key, ticket.owner.incarnation, kind, digest) for kind in ("grpc", "grpc", "local")]
    others = [m.PullWant((0, 1, 2)), m.PullWant((0,)), m.PullCopied((handle,)), m.PullDone(), m.Heartbeat(1)]
    return [pulling.pull_request_to_pb(request) for request in [*opens, *others]]


def worker_events(key: m.RequestKey, index: int = 0) -> list[m.PrefillEvent | m.DecodeEvent]:
    """What both kinds of worker may say of one request."""
    ticket = m.Ticket(9, HELLO.node, 10, 3, 60.0, (b"h" * 32,))
    token = Token(index, 42)
    return [
        m.PrefillAccepted(key, ticket, 4),
        m.FirstToken(key, token),
        m.FirstToken(key, token, FinishReason.LENGTH),
        m.StepBatch(1, (m.Row(key, token), m.Row(key, Token(index + 1, 43)))),
        m.StepBatch(2, (m.Row(key, token),), (m.Finish(key, FinishReason.STOP, 42, m.NO_TIMES),)),
        m.Refused(key, m.Reason.QUEUE_FULL, 0.1, {"waiting": "3"}),
        m.Failed(key, m.Reason.OUT_OF_BLOCKS, True),
        m.Failed(key, m.Reason.INTERNAL, False, {"error_id": "x"}),
        m.WorkerLoad(1, 2, 3, 4, 5, 0.1),
        m.CacheChange((b"a" * 32,), (b"b" * 32,), 2),
    ]


def generate_requests() -> list[Message]:
    sampling = gpb.SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.1, seed=7, n=2, logit_bias={3: 1.0})
    stopping = gpb.StoppingParams(max_tokens=4, min_tokens=1, stop=["xyz"], stop_token_ids=[3])
    output = gpb.OutputOptions(return_text=True, return_token_ids=True, logprobs=2, prompt_logprobs=1)
    chat = gpb.ChatPrompt(messages_json='[{"role": "user", "content": "hello"}]', template_kwargs_json='{"a": 1}')
    few = gpb.StoppingParams(max_tokens=3)
    return [
        gpb.GenerateRequest(request_id="mine", text="hello world", sampling=sampling, stopping=stopping, output=output),
        gpb.GenerateRequest(token_ids=gpb.TokenIds(ids=[1, 2, 3]), stopping=few, cache_salt="s"),
        gpb.GenerateRequest(chat=chat, stopping=few),
        gpb.GenerateRequest(text="go on", stopping=few, resume=gpb.TokenIds(ids=[4]), sampling={"temperature": 0}),
    ]


def public_corpus() -> dict[str, list[Message]]:
    """Valid requests of every method of GenerationService."""
    whole = generate_requests()
    streams = [gpb.GenerateStreamRequest(request=one, min_tokens_per_chunk=2) for one in whole]
    chat = gpb.ChatPrompt(messages_json='[{"role": "user", "content": [{"type": "text", "text": "hé"}]}]')
    return {
        "Generate": whole,
        "GenerateStream": list(streams),
        "Tokenize": [gpb.TokenizeRequest(text="hello ✓", add_special_tokens=True), gpb.TokenizeRequest(chat=chat)],
        "Detokenize": [gpb.DetokenizeRequest(token_ids=[1, 2, 200])],
        "ListModels": [gpb.ListModelsRequest()],
        "GetServerInfo": [gpb.GetServerInfoRequest()],
    }


def nonsense(rng: random.Random, corpus: Sequence[Message]) -> bytes:
    """A valid message, one with odd fields, or one with broken bytes; often the last two at once."""
    message = rng.choice(corpus)
    choice = rng.random()
    if choice < 0.5:
        message = odd(message, rng, rng.choice((0.05, 0.25)))
    data = message.SerializeToString()
    return data if 0.4 < choice < 0.55 else mutate(data, rng, [other.SerializeToString() for other in corpus[:3]])
