"""What makes a worker both a prefill and a decode worker before anything runs: its name, ports and default sizes.

The flags themselves are the same for every kind of worker (wire.options).
"""

from __future__ import annotations

from wire.options import Role

ROLE = Role(
    name="shared",
    service="pagewire.v1.DecodeService",
    port=50061,
    http_port=8061,
    max_num_seqs=64,  # sequences that run at a time, and prompts beside them
    max_num_batched_tokens=2048,  # prompt tokens per step: more would take longer to let a decode step in
    also=("pagewire.v1.PrefillService",),
)
