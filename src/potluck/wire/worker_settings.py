"""What a daemon tells its worker process when it starts it: a model, and how much of the machine to use. Pure data."""

import msgspec

OUT_OF_MEMORY_STATUS = 71  # a worker's exit status: it could not get the memory that it needed


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paths and numbers only; a worker is never given keys or addresses."""

    model_path: str  # a GGUF file, a Hugging Face folder, or random:… for a model without a file
    source: str  # identifies the content (weights_sha256): names the packed files
    packed_folder: str | None = None  # None: packed weights stay in memory
    threads: int = 1
    kv_budget_bytes: int = 1 << 30  # for all stages and sessions of this worker
    row_norm_limit: float = (
        1e7  # activations that arrive with more are rubbish; the largest of real models have about 1e5
    )
    processor: str | None = None  # forces a kind of kernel (tests)
    spin_s: float = 0.0  # how long it looks for the next message before it goes to sleep
    awake_s: float = 0.0  # the same after a rehearsal, whose step is about a millisecond behind it
    device: str = "cpu"  # or "cuda", "cuda:1"
    device_budget_bytes: int | None = None  # what all stages may take of a GPU; None: what is free
    is_batch_invariant: bool = False  # on a GPU: a session's numbers do not depend on who shares its batches

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> "WorkerSettings":
        return msgspec.json.decode(text, type=cls)
