"""The one decoder: model facts and a shard's weights become a program of kernels. No family has code of its own here.

A program works on up to `max_rows` rows in place: `hidden` in, `hidden` out. The output head is a program of its own, over the few
rows whose logits are wanted.
"""

import numpy as np

from potluck.core.errors import PotluckError
from potluck.core.model_facts import ModelFacts, Rotary
from potluck.engine.kernels import attention as at
from potluck.engine.kernels.library import KernelLibrary
from potluck.engine.kernels.processor import LARGEST_TILE
from potluck.engine.kernels.processor import ROWS as GROUP_ROWS
from potluck.engine.kernels.schedule import BY_GROUPS, BY_ROWS, BY_TASKS, BY_TILES, MAX_CHUNKS
from potluck.engine.kv_cache import KvShape
from potluck.engine.packed_cache import PackedTensor
from potluck.engine.program import Activations, Floats, Program, Words, aligned_floats, float_bits, padded_to
from potluck.engine.rotary import RotaryTable
from potluck.engine.shard_weights import LayerWeights, ShardWeights

_ROTARY_FORMS = {"interleaved": 0, "halves": 1}
_FUNCTIONS = {"silu": 0, "gelu_tanh": 1}
MOST_PROGRAMS = 128  # kept from run to run; some kilobytes for each of their layers


def _address(vector: Floats | None) -> int:
    return 0 if vector is None else int(vector.ctypes.data)


class _Product:
    """Output rows of one product, in whole tiles: `stride` floats per row, padded to whole groups."""

    def __init__(self, max_rows: int, width: int) -> None:
        self.stride = padded_to(GROUP_ROWS, width)
        self.values = aligned_floats(padded_to(LARGEST_TILE, max_rows), self.stride)

    def address(self, column: int = 0) -> int:
        return int(self.values.ctypes.data) + 4 * column


def add_matmul(
    program: Program, library: KernelLibrary, tensor: PackedTensor, source: Activations, target: _Product,
    *, is_beside_previous: bool = False,
) -> None:  # fmt: skip
    is_float = tensor.layout.name in ("F32", "F16", "BF16")
    values, q, d, s, sums, _, padded, _ = (int(word) for word in source.words)
    arguments = (
        tensor.address, tensor.groups, padded // 32, tensor.group_bytes, values if is_float else q, d, s, sums,
        target.address(), target.stride,
    )  # fmt: skip
    program.add(
        library.matmul(tensor.layout.name),
        arguments,
        policy=BY_GROUPS,
        units=tensor.groups,
        is_beside_previous=is_beside_previous,
    )


def _is_quantised(*tensors: PackedTensor | None) -> bool:
    return any(t is not None and t.layout.name not in ("F32", "F16", "BF16") for t in tensors)


class Decoder:
    """Buffers and program for the layers of a shard."""

    def __init__(self, weights: ShardWeights, library: KernelLibrary, kv: KvShape, max_rows: int) -> None:
        self.facts = weights.facts
        self._library, self._kv, self._weights = library, kv, weights
        facts = self.facts
        self.hidden = aligned_floats(max_rows, facts.hidden_size)
        heads_width, kv_width = facts.head_count * facts.head_size, facts.kv_head_count * facts.head_size
        fused_width = heads_width + 2 * kv_width
        self._query_key_value = [_Product(max_rows, width) for width in (heads_width, kv_width, kv_width)]
        if facts.has_fused_query_key_value:
            self._query_key_value = [_Product(max_rows, fused_width)]
        self._projected = _Product(max_rows, facts.hidden_size)
        self._gate_up = (
            [_Product(max_rows, 2 * facts.feed_forward_size)]
            if facts.has_fused_gate_up
            else [_Product(max_rows, facts.feed_forward_size) for _ in range(2)]
        )
        self._queries = aligned_floats(max_rows, heads_width)
        self._scratch = aligned_floats(max_rows, facts.hidden_size) if facts.has_post_norms else None
        quantised = self._quantised_roles()
        self._normed = Activations(max_rows, facts.hidden_size, is_quantised=quantised["normed"])
        self._attended = Activations(max_rows, heads_width, is_quantised=quantised["attended"])
        self._activated = Activations(max_rows, facts.feed_forward_size, is_quantised=quantised["activated"])
        self._tile_capacity = at.tile_capacity(facts.head_count // facts.kv_head_count)
        scratch = at.scratch_floats(facts.head_size, kv.padded_head, self._tile_capacity)
        self._attention_scratch = aligned_floats(MAX_CHUNKS, scratch)
        self.slot_floats = -(-(2 + kv.padded_head) // 16) * 16
        self._slots = aligned_floats(max_rows * facts.head_count, self.slot_floats)
        self._tables: dict[Rotary, RotaryTable] = {}
        self._attention_arguments: list[tuple[Rotary, list[Words]]] = []
        self._held: list[object] = []
        self._programs: dict[tuple[int, int, int, bool], Program] = {}
        self._positions = 1
        self._unplaced = False  # operations that do not know yet where their tables lie

    def _quantised_roles(self) -> dict[str, bool]:
        layers = self._weights.layers.values()
        roles = {
            "normed": ("query", "key", "value", "query_key_value", "gate", "up", "gate_up"),
            "attended": ("attention_output",),
            "activated": ("down",),
        }
        return {
            name: any(_is_quantised(*(layer.matrix(role) for role in wanted)) for layer in layers)
            for name, wanted in roles.items()
        }

    def program_for(self, first: int, stop: int, base: int, head: "OutputHead | None" = None) -> Program:
        """Layers first ≤ layer < stop, for sessions whose pages begin with layer `base`; then the logits of all rows."""
        key = (first, stop, base, head is not None)
        if key not in self._programs:
            self._programs[key] = self._build(first, stop, base, head)
            self.reserve_positions(self._positions)
        return self._programs[key]

    def make_room(self) -> None:
        """To be called between runs: whoever opens sessions names their layers, and any range of them has a program of its own."""
        if len(self._programs) > MOST_PROGRAMS:
            self._programs.clear()
            self._attention_arguments.clear()
            self._held.clear()

    def _build(self, first: int, stop: int, base: int, head: "OutputHead | None") -> Program:
        program = Program()
        pending: tuple[_Product | None, Floats | None, Floats | None] = (None, None, None)
        for layer in range(first, stop):
            weights = self._weights.layers[layer]
            self._add_residual(program, pending, weights.vector("attention_norm"), self._normed)
            self._add_attention(program, layer, base, weights)
            output = weights.matrix("attention_output")
            assert output is not None
            add_matmul(program, self._library, output, self._attended, self._projected)
            added = (self._projected, weights.vector("post_attention_norm"), weights.vector("attention_output_bias"))
            self._add_residual(program, added, weights.vector("feed_forward_norm"), self._normed)
            self._add_feed_forward(program, weights)
            pending = (self._projected, weights.vector("post_feed_forward_norm"), None)
        if head is None:
            self._add_residual(program, pending, None, None)
        else:
            self._add_residual(program, pending, head.norm, head.normed)
            head.add_logits(program)
        program.seal()
        return program

    def _add_residual(
        self, program: Program, added: tuple[_Product | None, Floats | None, Floats | None], norm: Floats | None,
        target: Activations | None,
    ) -> None:  # fmt: skip
        product, post_norm, bias = added
        self._held += [post_norm, bias, norm]
        arguments = (
            int(self.hidden.ctypes.data), 0 if product is None else product.address(), 0 if product is None else product.stride,
            _address(post_norm), _address(self._scratch), _address(norm), float_bits(self.facts.norm_epsilon),
            self.facts.hidden_size, 0 if target is None else target.address, _address(bias),
        )  # fmt: skip
        program.add(self._library.residual_norm, arguments, policy=BY_ROWS)

    def _add_attention(self, program: Program, layer: int, base: int, weights: LayerWeights) -> None:
        facts = self.facts
        fused = weights.matrix("query_key_value")
        matrices = [fused] if fused is not None else [weights.matrix(role) for role in ("query", "key", "value")]
        for i, (matrix, product) in enumerate(zip(matrices, self._query_key_value, strict=True)):
            assert matrix is not None
            add_matmul(program, self._library, matrix, self._normed, product, is_beside_previous=i > 0)
        arguments = self._attention_words(layer, base, weights)
        is_half = self._kv.is_half
        rotary = facts.rotary_of(layer)
        added = [
            program.add(self._library.place(is_half), arguments, policy=BY_TILES),
            program.add(self._library.attend(is_half), arguments, policy=BY_TASKS),
            program.add(self._library.finish, arguments, policy=BY_TILES),
        ]
        self._tables.setdefault(rotary, RotaryTable(rotary))
        self._attention_arguments.append((rotary, added))
        self._unplaced = True

    def _incoming(self) -> tuple[list[int], Words]:
        """Addresses and row strides of queries, keys and values as the products leave them."""
        facts = self.facts
        heads_width, kv_width = facts.head_count * facts.head_size, facts.kv_head_count * facts.head_size
        products = self._query_key_value
        if len(products) == 1:
            addresses = [products[0].address(column) for column in (0, heads_width, heads_width + kv_width)]
            return addresses, np.array([products[0].stride] * 3, np.int64)
        return [product.address() for product in products], np.array([product.stride for product in products], np.int64)

    def _attention_words(self, layer: int, base: int, weights: LayerWeights) -> list[int]:
        facts, kv = self.facts, self._kv
        incoming, strides = self._incoming()
        vectors = [weights.vector(f"{role}_bias") for role in ("query", "key", "value")]
        vectors += [weights.vector("query_norm"), weights.vector("key_norm")]
        self._held += [strides, *vectors]
        rotary = facts.rotary_of(layer)
        words = [0] * at.ATTENTION_WORDS
        words[at.QUERIES_IN : at.VALUES_IN + 1] = incoming
        words[at.IN_STRIDES] = int(strides.ctypes.data)
        words[at.QUERY_BIAS : at.KEY_NORM + 1] = [_address(vector) for vector in vectors]
        words[at.EPSILON] = float_bits(facts.norm_epsilon)
        words[at.ROTARY_FORM] = _ROTARY_FORMS[rotary.form]
        words[at.ROTARY_DIMENSIONS] = rotary.dimensions
        words[at.SCALE] = float_bits(facts.attention_scale)
        words[at.QUERIES] = int(self._queries.ctypes.data)
        words[at.HEADS], words[at.KV_HEADS] = facts.head_count, facts.kv_head_count
        words[at.HEAD_SIZE], words[at.PADDED_HEAD] = facts.head_size, kv.padded_head
        words[at.LAYER_OFFSET] = (layer - base) * kv.layer_bytes
        words[at.HEAD_BYTES], words[at.VALUES_OFFSET] = kv.head_bytes, kv.values_offset
        words[at.WINDOW] = facts.window_of(layer) or 0
        words[at.SOFT_CAP] = float_bits(facts.attention_soft_cap) if facts.attention_soft_cap else 0
        words[at.SCRATCH] = int(self._attention_scratch.ctypes.data)
        words[at.SCRATCH_BYTES] = self._attention_scratch.shape[1] * 4
        words[at.SLOTS], words[at.SLOT_FLOATS] = int(self._slots.ctypes.data), self.slot_floats
        words[at.TARGET] = self._attended.address
        words[at.TILE_CAPACITY] = self._tile_capacity
        return words

    def _add_feed_forward(self, program: Program, weights: LayerWeights) -> None:
        facts = self.facts
        fused = weights.matrix("gate_up")
        matrices = [fused] if fused is not None else [weights.matrix("gate"), weights.matrix("up")]
        for i, (matrix, product) in enumerate(zip(matrices, self._gate_up, strict=True)):
            assert matrix is not None
            add_matmul(program, self._library, matrix, self._normed, product, is_beside_previous=i > 0)
        gate, up = self._gate_up[0], self._gate_up[-1]
        up_address = up.address(facts.feed_forward_size) if fused is not None else up.address()
        arguments = (
            gate.address(), up_address, gate.stride, facts.feed_forward_size, _FUNCTIONS[facts.activation], self._activated.address
        )  # fmt: skip
        program.add(self._library.activate, arguments, policy=BY_ROWS)
        down = weights.matrix("down")
        assert down is not None
        add_matmul(program, self._library, down, self._activated, self._projected)

    def reserve_positions(self, length: int) -> None:
        """Rotary tables reach to `length`; operations learn where they lie."""
        self._positions = max(self._positions, length)
        moved = [table.grow(self._positions) for table in self._tables.values()]
        if not any(moved) and not self._unplaced:
            return
        self._unplaced = False
        for rotary, operations in self._attention_arguments:
            table = self._tables[rotary]
            for words in operations:
                words[at.ROTARY_COS], words[at.ROTARY_SIN] = table.cos.ctypes.data, table.sin.ctypes.data

    def reserve_slots(self, count: int) -> None:
        """Room for `count` partial sums of attention."""
        if count <= len(self._slots):
            return
        self._slots = aligned_floats(count, self.slot_floats)
        for _, operations in self._attention_arguments:
            for words in operations:
                words[at.SLOTS] = self._slots.ctypes.data


class OutputHead:
    """Final norm and logits for up to `max_rows` chosen rows."""

    def __init__(self, weights: ShardWeights, library: KernelLibrary, max_rows: int) -> None:
        if weights.output is None or weights.output_norm is None:
            raise PotluckError("this shard does not own the output head")
        facts: ModelFacts = weights.facts
        self.max_rows = max_rows
        self.vocabulary_size = facts.vocabulary_size
        self.hidden = aligned_floats(max_rows, facts.hidden_size)
        self.norm = weights.output_norm
        self.normed = Activations(max_rows, facts.hidden_size, is_quantised=_is_quantised(weights.output))
        self._library, self._output, self._soft_cap = library, weights.output, facts.output_soft_cap
        self._logits = _Product(max_rows, weights.output.rows)
        self.logits = self._logits.values[:, : self.vocabulary_size]  # what the last run left
        self.program = Program()
        arguments = (
            int(self.hidden.ctypes.data), 0, 0, 0, 0, _address(self.norm), float_bits(facts.norm_epsilon),
            facts.hidden_size, self.normed.address, 0,
        )  # fmt: skip
        self.program.add(library.residual_norm, arguments, policy=BY_ROWS)
        self.add_logits(self.program)
        self.program.seal()

    def add_logits(self, program: Program) -> None:
        """From `normed`, which the program has filled, to `logits`."""
        add_matmul(program, self._library, self._output, self.normed, self._logits)
        if self._soft_cap:
            cap = (self._logits.address(), self._output.rows, self._logits.stride, float_bits(self._soft_cap))
            program.add(self._library.soft_cap, cap, policy=BY_ROWS)
