"""Protobuf and values of one pull, between the two workers of it. The counterpart of wire.codec for these messages."""

from __future__ import annotations

from engine import messages as m
from protos import worker_pb2 as wpb
from wire.codec import (
    MAX_LABEL,
    InvalidMessage,
    failed_from_pb,
    failed_to_pb,
    first_token_from_pb,
    first_token_to_pb,
    key_from_pb,
    key_to_pb,
)


def _handle_to_pb(handle: m.BlockHandle) -> wpb.BlockHandle:
    block, generation, position, digest = handle
    return wpb.BlockHandle(id=block, generation=generation, position=position, digest=digest)


def _handle_from_pb(pb: wpb.BlockHandle) -> m.BlockHandle:
    return m.BlockHandle(pb.id, pb.generation, pb.position, pb.digest)


def pull_request_to_pb(request: m.PullRequest) -> wpb.PullRequest:
    match request:
        case m.PullOpen():
            return wpb.PullRequest(
                open=wpb.PullOpen(
                    ticket=request.ticket,
                    key=key_to_pb(request.key),
                    owner_incarnation=request.owner_incarnation,
                    transport=request.transport,
                    layout_digest=request.layout_digest,
                    window_bytes=request.window_bytes,
                    request_id=request.request_id,
                )
            )
        case m.PullWant():
            return wpb.PullRequest(want=wpb.PullWant(positions=request.positions))
        case m.PullCopied():
            return wpb.PullRequest(copied=wpb.PullCopied(blocks=map(_handle_to_pb, request.blocks)))
        case m.PullDone():
            return wpb.PullRequest(done=wpb.PullDone())
        case m.Heartbeat():
            return wpb.PullRequest(heartbeat=wpb.Heartbeat(sequence=request.sequence))


def pull_request_from_pb(pb: wpb.PullRequest) -> m.PullRequest:
    match pb.WhichOneof("request"):
        case "open":
            return m.PullOpen(
                ticket=pb.open.ticket,
                key=key_from_pb(pb.open.key),
                owner_incarnation=pb.open.owner_incarnation,
                transport=pb.open.transport,
                layout_digest=pb.open.layout_digest,
                window_bytes=pb.open.window_bytes,
                request_id=pb.open.request_id[:MAX_LABEL],
            )
        case "want":
            return m.PullWant(tuple(pb.want.positions))
        case "copied":
            return m.PullCopied(tuple(map(_handle_from_pb, pb.copied.blocks)))
        case "done":
            return m.PullDone()
        case "heartbeat":
            return m.Heartbeat(pb.heartbeat.sequence)
        case _:
            raise InvalidMessage("a pull request without content")


def pull_event_to_pb(event: m.PullEvent) -> wpb.PullEvent:
    match event:
        case m.PullOpened():
            return wpb.PullEvent(opened=wpb.PullOpened(layout_digest=event.layout_digest))
        case m.BlocksSealed():
            return wpb.PullEvent(sealed=wpb.BlocksSealed(blocks=map(_handle_to_pb, event.blocks)))
        case m.BlocksValid():
            return wpb.PullEvent(
                valid=wpb.BlocksValid(positions=event.positions, stale_positions=event.stale_positions)
            )
        case m.FirstToken():
            return wpb.PullEvent(first_token=first_token_to_pb(event))
        case m.Failed():
            return wpb.PullEvent(failed=failed_to_pb(event))
        case m.Heartbeat():
            return wpb.PullEvent(heartbeat=wpb.Heartbeat(sequence=event.sequence))


def pull_event_from_pb(pb: wpb.PullEvent) -> m.PullEvent:
    """BlockData is not read here: its bytes go straight from the message into a block (kvtransfer.transports)."""
    match pb.WhichOneof("event"):
        case "opened":
            return m.PullOpened(pb.opened.layout_digest)
        case "sealed":
            return m.BlocksSealed(tuple(map(_handle_from_pb, pb.sealed.blocks)))
        case "valid":
            return m.BlocksValid(tuple(pb.valid.positions), tuple(pb.valid.stale_positions))
        case "first_token":
            return first_token_from_pb(pb.first_token)
        case "failed":
            return failed_from_pb(pb.failed)
        case "heartbeat":
            return m.Heartbeat(pb.heartbeat.sequence)
        case _:
            raise InvalidMessage("a pull event without content")
