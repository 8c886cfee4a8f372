"""What makes a worker a decode worker before anything runs: its name, ports and default sizes.

The flags themselves are the same for both kinds of worker (wire.options).
"""

from __future__ import annotations

from wire.options import Role

ROLE = Role(
    name="decode",
    service="pagewire.v1.DecodeService",
    port=50071,
    http_port=8071,
    max_num_seqs=64,  # sequences that run at a time, one token each per step
    max_num_batched_tokens=64,
)
