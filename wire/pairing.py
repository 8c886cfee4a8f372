"""Protobuf and values of what workers say about each other before and beside pulls: peers, pairs, measured paths.

The counterpart of wire.codec for these messages, and like it without any judgement: what the values mean is
kvtransfer's and the router's business. A list that is longer than any honest one is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from engine import messages as m
from protos import generation_pb2 as gpb
from protos import worker_pb2 as wpb

MAX_PEERS = 4096  # that one message may name
MAX_TRANSPORTS = 32


def node_to_pb(node: m.Node) -> wpb.Node:
    return wpb.Node(name=node.name, incarnation=node.incarnation, address=node.address)


def node_from_pb(pb: wpb.Node) -> m.Node:
    return m.Node(pb.name, pb.incarnation, pb.address)


def peers_to_pb(peers: m.Peers) -> wpb.Peers:
    return wpb.Peers(owners=[node_to_pb(node) for node in peers.owners])


def peers_from_pb(pb: wpb.Peers) -> m.Peers:
    return m.Peers(tuple(node_from_pb(node) for node in pb.owners[:MAX_PEERS]))


def layout_to_pb(layout: m.KvLayout) -> wpb.KvLayout:
    return wpb.KvLayout(**layout._asdict())


def layout_from_pb(pb: wpb.KvLayout) -> m.KvLayout:
    return m.KvLayout(**{name: getattr(pb, name) for name in m.KvLayout._fields})


def pair_request_to_pb(request: m.PairRequest) -> wpb.PairRequest:
    return wpb.PairRequest(
        owner_incarnation=request.owner_incarnation,
        puller=node_to_pb(request.puller),
        layout=layout_to_pb(request.layout),
        transports=_offers_to_pb(request.transports),
    )


def pair_request_from_pb(pb: wpb.PairRequest) -> m.PairRequest:
    return m.PairRequest(
        pb.owner_incarnation, node_from_pb(pb.puller), layout_from_pb(pb.layout), _offers_from_pb(pb.transports)
    )


def pair_reply_to_pb(reply: m.PairReply) -> wpb.PairReply:
    return wpb.PairReply(
        owner=node_to_pb(reply.owner),
        layout=layout_to_pb(reply.layout),
        transports=_offers_to_pb(reply.transports),
        probe_blocks=reply.probe_blocks,
        start_seconds=reply.start_seconds,
    )


def pair_reply_from_pb(pb: wpb.PairReply) -> m.PairReply:
    return m.PairReply(
        node_from_pb(pb.owner),
        layout_from_pb(pb.layout),
        _offers_from_pb(pb.transports),
        pb.probe_blocks,
        _number(pb.start_seconds),
    )


def _offers_to_pb(offers: Sequence[m.TransportOffer]) -> list[wpb.TransportOffer]:
    return [wpb.TransportOffer(kind=offer.kind, metadata=offer.metadata) for offer in offers]


def _offers_from_pb(pb: Any) -> tuple[m.TransportOffer, ...]:
    return tuple(m.TransportOffer(offer.kind, offer.metadata) for offer in pb[:MAX_TRANSPORTS])


def paths_to_pb(paths: Iterable[m.KvPath]) -> list[gpb.KvPath]:
    return [gpb.KvPath(**path._asdict()) for path in paths]


def paths_from_pb(pb: Any) -> tuple[m.KvPath, ...]:
    return tuple(
        m.KvPath(
            each.owner,
            each.transport,
            _number(each.bytes_per_second),
            _number(each.warm_seconds),
            each.fallback,
            each.bytes,
            each.transfers,
            dict(each.failures),
            _number(each.start_seconds),
        )
        for each in pb[:MAX_PEERS]
    )


def _number(value: float) -> float:
    return value if math.isfinite(value) else 0.0
