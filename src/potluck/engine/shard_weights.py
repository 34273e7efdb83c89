"""The tensors of one shard, ready for kernels: matrices packed, norms and biases as float32, embedding rows from the file."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from potluck.core.layers import LayerRange
from potluck.engine.formats import dequantise_rows, to_float32
from potluck.engine.kv_format import MATRICES
from potluck.engine.packed_cache import PackedCache, PackedTensor
from potluck.weights.checkpoint import Checkpoint, TensorEntry

Floats = npt.NDArray[np.float32]
_Q8_BLOCK = np.dtype([("scale", "<f2"), ("integers", "i1", 32)])


class LayerWeights:
    """One layer: `matrix(role)` is packed, `vector(role)` float32; a role that the model does not have is None."""

    def __init__(self, matrices: dict[str, PackedTensor], vectors: dict[str, Floats]) -> None:
        self._matrices = matrices
        self._vectors = vectors

    def matrix(self, role: str) -> PackedTensor | None:
        return self._matrices.get(role)

    def vector(self, role: str) -> Floats | None:
        return self._vectors.get(role)


class Embedding:
    """Rows of the embedding, read from the file as they are asked for: only pages of tokens that occur become resident."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        entry = checkpoint.tensors["embedding"]
        self._format = entry.format
        self._rows = np.frombuffer(checkpoint.read("embedding"), np.uint8).reshape(entry.shape[0], -1)
        scale = checkpoint.facts.embedding_scale
        self._scale = None if scale is None else np.float32(scale)
        self._blocks = self._rows.view(_Q8_BLOCK) if self._format == "Q8_0" else None

    def look_up(self, tokens: Sequence[int]) -> Floats:
        if self._blocks is not None:
            # What nearly every step of the first shard begins with, in a few numpy calls instead of fifteen.
            blocks = self._blocks[tokens[0]] if len(tokens) == 1 else self._blocks[list(tokens)]
            scaled = np.multiply(blocks["scale"][..., None], blocks["integers"], dtype=np.float32)
            rows: Floats = scaled.reshape(len(tokens), -1)
        else:
            rows = dequantise_rows(self._rows[np.asarray(tokens, np.int64)], self._format, len(tokens))
        return rows if self._scale is None else rows * self._scale


class ShardWeights:
    """Loads layers `layers`, the embedding and the output head as asked, and touches no other tensor."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layers: LayerRange | None,
        *,
        has_embedding: bool,
        has_output: bool,
        cache: PackedCache,
    ) -> None:
        self._checkpoint = checkpoint
        self._cache = cache
        self.facts = checkpoint.facts
        self.layers = {layer: self._load_layer(layer) for layer in layers or ()}
        self.embedding = Embedding(checkpoint) if has_embedding else None
        self.output: PackedTensor | None = None
        self.output_norm: Floats | None = None
        if has_output:
            name = "embedding" if self.facts.is_output_tied else "output"
            self.output = cache.load(checkpoint, "output", [name])[name]
            self.output_norm = self._vector(checkpoint.tensors["output_norm"])

    def settle(self) -> None:
        """Of the files only rows of the embedding are read from now on; the rest is packed or copied."""
        self._checkpoint.forget_all()

    def _load_layer(self, layer: int) -> LayerWeights:
        prefix = f"layers.{layer}."
        mine = {name: entry for name, entry in self._checkpoint.tensors.items() if name.startswith(prefix)}
        names = [prefix + role for role in MATRICES if prefix + role in mine]
        packed = self._cache.load(self._checkpoint, f"layer-{layer:04d}", names)
        vectors = {name.removeprefix(prefix): self._vector(entry) for name, entry in mine.items() if name not in packed}
        return LayerWeights({name.removeprefix(prefix): tensor for name, tensor in packed.items()}, vectors)

    def _vector(self, entry: TensorEntry) -> Floats:
        values = to_float32(self._checkpoint.read(entry.name), entry.format).copy()
        is_norm = entry.name.endswith("norm")
        return values + np.float32(1.0) if is_norm and self.facts.norm_weight_plus_one else values
