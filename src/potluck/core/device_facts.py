"""What is known of the device that a node computes on, when it is not the CPU: measured by a process of its own. Pure data."""

import msgspec

RESERVE_BYTES = 1 << 30  # of a device's memory: the driver's own, workspaces, graphs, buffers of a chunk


class DeviceFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`device` as in EngineSettings. `bytes_per_s`: what it copies, about what decoding is bound by."""

    device: str
    name: str
    total_bytes: int
    free_bytes: int
    bytes_per_s: float

    def budget_bytes(self, limit_bytes: int, held_bytes: int = 0) -> int:
        """For weights and KV: what is free beside a reserve, with what this node's own shards hold, within the owner's limit."""
        return max(0, min(self.free_bytes + held_bytes - RESERVE_BYTES, limit_bytes))
