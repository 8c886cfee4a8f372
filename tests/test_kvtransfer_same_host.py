"""The door of an owner of blocks, over real sockets: it stays open whatever happens to one of its connections."""

from __future__ import annotations

import os
import random
import resource
import socket

from kvtransfer_pair import until

from kvtransfer.transports.same_host import Door, Lifeline, knock


async def test_a_process_that_runs_out_of_descriptors_opens_its_door_again_when_it_has_some() -> None:
    address = f"\0pagewire-test-{random.getrandbits(64):016x}"
    door = Door(address, b"welcome")
    door.start()
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    used = [int(number) for number in os.listdir("/proc/self/fd")]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1, hard))
    try:
        try:
            while True:
                fillers.append(os.dup(caller.fileno()))
        except OSError:
            pass  # there is none left
        caller.connect(address)
        await until(lambda: bool(door.refused))
        assert [reason for reason in door.refused] == ["not accepted: Too many open files"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
        caller.close()
    answer = await knock(address, 7)
    assert answer.greeting == b"welcome" and answer.descriptors == []
    answer.connection.close()
    await door.close()


async def test_whoever_is_connected_learns_that_the_owner_has_ended() -> None:
    address = f"\0pagewire-test-{random.getrandbits(64):016x}"
    door, ended = Door(address, b"hello"), list[str]()
    door.start()

    async def gone() -> None:
        ended.append("gone")

    kept, closed = [Lifeline((await knock(address, 5)).connection, gone) for _ in range(2)]
    await until(lambda: len(door) == 2)
    closed.close()
    await until(lambda: len(door) == 1)
    assert ended == []
    await door.close()
    await until(lambda: ended == ["gone"])
    kept.close()
