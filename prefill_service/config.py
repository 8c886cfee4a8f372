"""What makes a worker a prefill worker before anything runs: its name, ports and default sizes.

The flags themselves are the same for both kinds of worker (wire.options).
"""

from __future__ import annotations

from wire.options import Role

ROLE = Role(
    name="prefill",
    service="pagewire.v1.PrefillService",
    port=50061,
    http_port=8061,
    max_num_seqs=32,  # prompts computed at a time
    max_num_batched_tokens=512,  # prompt tokens per step: a chunk is what a cancel and an announcement wait for
)
