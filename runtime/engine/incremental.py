"""Running the model token by token: prefill of new tokens behind a cached prefix, and decode of one token a row.

The same weights as `model`, laid out for inference: one product for queries, keys and values, no autograd. All
sums run in the same order whatever else is in the batch, so log-probs do not depend on the company a sequence keeps:
matrix products of fewer than four rows are padded (BLAS switches kernels below that), attention masks with exact
zeros. Where a BLAS differs, results agree to rounding (about 1e-6).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from turngate.runtime.engine.cache import KVRows
from turngate.runtime.engine.model import Layer, PolicyModel, norm
from turngate.runtime.engine.packing import block_rows

__all__ = ["Incremental", "Span"]

_MIN_ROWS = 4
"""Matrix products of fewer rows take another BLAS kernel with another order of summation."""
_LANES = 16
"""Attention looks at a multiple of this many positions: shorter rows would sum their softmax in another order."""
_CHUNK = 192
"""Positions summed in one product. BLAS cuts longer sums into equal parts, at places that depend on the longest row."""
_MAX_SCORES = 4_000_000
"""Attention scores held at once, of new tokens or of ways to go on: 16 MB."""


class Span(NamedTuple):
    """New tokens of one sequence. Positions before `written_from` are already in the cache and stay as they are."""

    row: int
    start: int
    """Position of the first id. Either 0, or one before `written_from`: see `Incremental.prefill`."""
    written_from: int
    ids: Sequence[int]


class _LayerWeights(NamedTuple):
    qkv: Tensor
    smear: Tensor
    out: Tensor
    up: Tensor
    down: Tensor


class _Layout(NamedTuple):
    """Where the tokens of a prefill lie; see `_lay_out`."""

    ids_N: Tensor
    positions_N: Tensor
    slots_N: Tensor
    """Flat cache slot each token's key and value go to; the trash row for padding and cached positions."""
    last_B: Tensor
    """Flat index of each span's last token."""
    rows_B: Tensor
    blocks: tuple[tuple[int, int], ...]


class Incremental:
    """Inference with a key-value cache over fixed rows.

    Mutable state: the cache rows (written by `prefill` and `decode`) and the fused weights (`refresh`).
    """

    def __init__(self, model: PolicyModel, rows: int) -> None:
        self.model = model
        config = model.config
        device = model.embed.weight.device
        length = -(-config.max_context // _LANES) * _LANES
        self.cache = KVRows(config.layers, rows, length, config.head_dim, device)
        self._heads, self._head_dim = config.heads, config.head_dim
        self._steps = torch.arange(length, device=device)
        # Rotations for [q heads | k | v] in one product: values turn by nothing.
        rope = model.rope[:, None].expand(-1, config.heads + 2, -1).clone()
        rope[:, -1] = 1
        self._rope = rope
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's present weights; the cache keeps what the old ones computed."""
        self._layers = [_fuse(layer) for layer in self.model.typed_layers]
        self._embed = self.model.embed.weight.detach()
        self._unembed = self._embed * self.model.logit_scale
        head = self.model.value_head
        self._value = head.weight.detach() if head is not None else None

    def logits(self, hidden_M: Tensor) -> Tensor:
        """Return the logits read off final states, shape (M, V)."""
        return _linear(hidden_M, self._unembed)

    def value_outputs(self, hidden_M: Tensor) -> Tensor:
        """Return what the value head puts out for final states, shape (M,). The model must have one."""
        assert self._value is not None, "values are read off models with a value head alone"
        return _linear(hidden_M, self._value)[:, 0]

    def decode(self, tokens_B: Tensor, positions_B: Tensor) -> Tensor:
        """Feed one token to each of the first B rows and return the logits that follow, shape (B, V)."""
        return self.logits(self.decode_hidden(tokens_B, positions_B))

    def decode_hidden(self, tokens_B: Tensor, positions_B: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """Feed one token to each of the first B rows, or of `rows_B`; return the final states, shape (B, width).

        `positions_B` is each token's own position, the number of tokens already in its row.
        """
        count = len(tokens_B)
        rows = slice(count) if rows_B is None else rows_B
        length = _reach(positions_B)
        rope_B = self._rope[positions_B]
        bias_B1T = self._bias(positions_B, length)[:, None]
        row_B = self._steps.new_tensor(range(count)) if rows_B is None else rows_B
        slots_B = row_B * self.cache.length + positions_B
        x = self._embed[tokens_B]
        for index, weights in enumerate(self._layers):
            qkv = _linear(norm(x), weights.qkv)
            key = self._key(qkv)
            smear = self.cache.previous[index, rows] * weights.smear
            self.cache.previous[index, rows] = key
            key += smear
            turned = self._turn(qkv, rope_B)
            self._write(index, slots_B, turned)
            q = turned[:, : -2 * self._head_dim].view(count, self._heads, self._head_dim)
            x = self._after_attention(x, self._attend(index, q, rows, length, bias_B1T), weights)
        return norm(x)

    def peek_hidden(self, rows_B: Tensor, tokens_BK: Tensor, positions_B: Tensor) -> Tensor:
        """Return the final states that feeding each of K tokens to a row would give, shape (B, K, width).

        Writes nothing: K ways to go on from B rows for one pass over what the rows hold. `positions_B` is where the
        token would stand, the number of tokens already in its row.
        """
        ways = max(1, _MAX_SCORES // (self._heads * _reach(positions_B)))
        return torch.cat([self._peek_ways(rows_B, part, positions_B) for part in tokens_BK.split(ways, dim=1)], dim=1)

    def _peek_ways(self, rows_B: Tensor, tokens_BK: Tensor, positions_B: Tensor) -> Tensor:
        """Peek at no more ways than one row can take at once, for as many rows as can."""
        rows = max(1, _MAX_SCORES // (self._heads * _reach(positions_B) * tokens_BK.shape[1]))
        parts = zip(rows_B.split(rows), tokens_BK.split(rows), positions_B.split(rows), strict=True)
        return torch.cat([self._peek(*part) for part in parts])

    def _peek(self, rows_B: Tensor, tokens_BK: Tensor, positions_B: Tensor) -> Tensor:
        rows, ways = tokens_BK.shape
        dim, length = self._head_dim, _reach(positions_B)
        rope_N = self._rope[positions_B].repeat_interleave(ways, dim=0)
        # The token's own position holds nothing yet, or what somebody else has left there.
        bias_B1T = self._bias(positions_B - 1, length)[:, None]
        x = self._embed[tokens_BK.reshape(-1)]
        for index, weights in enumerate(self._layers):
            qkv = _linear(norm(x), weights.qkv)
            key = self._key(qkv)
            key += (self.cache.previous[index, rows_B] * weights.smear).repeat_interleave(ways, dim=0)
            turned = self._turn(qkv, rope_N)
            q = turned[:, : -2 * dim].reshape(rows, ways * self._heads, dim)
            kv = self.cache.kv[index, rows_B, :length]
            cached = torch.bmm(q, kv[..., :dim].transpose(1, 2)).add_(bias_B1T)
            own_k, own_v = turned[:, -2 * dim : -dim, None], turned[:, None, -dim:]
            own = torch.bmm(q.view(rows * ways, self._heads, dim), own_k).view(rows, ways * self._heads, 1)
            weight = torch.softmax(torch.cat([cached, own], dim=-1), dim=-1)
            mixed = _mix(weight[..., :-1], kv[..., dim:]).view(rows * ways, self._heads, dim)
            mixed = mixed + weight[..., -1:].view(rows * ways, self._heads, 1) * own_v
            x = self._after_attention(x, mixed, weights)
        return norm(x).view(rows, ways, -1)

    def prefill(self, spans: Sequence[Span], *, needs: Literal["last", "all", "none"] = "last") -> Tensor:
        """Run the new tokens of several sequences and return logits; see `prefill_hidden`."""
        return self.logits(self.prefill_hidden(spans, needs=needs))

    def prefill_hidden(self, spans: Sequence[Span], *, needs: Literal["last", "all", "none"] = "last") -> Tensor:
        """Run the new tokens of several sequences and return final states.

        A sequence with p tokens in its row starts at p - 1, its last cached token: running that one again yields
        its unsmeared key, which the next key needs and the cache does not hold; what is cached is left as it is.

        Args: needs: `last`: after each span, shape (spans, width); `all`: after each token, the spans one after
        another, shape (tokens, width); `none`: only fill the cache, shape (0, width).
        """
        order = sorted(range(len(spans)), key=lambda i: -len(spans[i].ids))
        layout = self._lay_out([spans[i] for i in order])
        x = self._embed[layout.ids_N]
        last = len(self._layers) - 1
        for index, weights in enumerate(self._layers):
            turned = self._prefill_keys(index, _linear(norm(x), weights.qkv), layout, weights)
            if index == last and needs != "all":
                x = x[:0] if needs == "none" else self._last_layer_at_end(x, turned, layout)
                break
            q = turned[:, : -2 * self._head_dim].view(-1, self._heads, self._head_dim)
            x = self._after_attention(x, self._attend_blocks(index, q, layout), weights)
        if needs == "none":
            return norm(x)
        if needs == "all":
            keep = _natural_order(spans, order, layout.blocks)
        else:
            keep = sorted(range(len(spans)), key=order.__getitem__)
        return norm(x[self._steps.new_tensor(keep)])

    def _prefill_keys(self, index: int, qkv_N: Tensor, layout: _Layout, weights: _LayerWeights) -> Tensor:
        """Smear and rotate, write keys and values to the cache, and return the rotated queries, keys and values."""
        key_N = self._key(qkv_N)
        self.cache.previous[index, layout.rows_B] = key_N[layout.last_B]
        smear = key_N * weights.smear
        offset = 0
        for rows, length in layout.blocks:
            size = rows * length
            block = key_N[offset : offset + size].unflatten(0, (rows, length))
            block[:, 1:] += smear[offset : offset + size].unflatten(0, (rows, length))[:, :-1]
            offset += size
        turned = self._turn(qkv_N, self._rope[layout.positions_N])
        self._write(index, layout.slots_N, turned)
        return turned

    def _last_layer_at_end(self, x_N: Tensor, turned_N: Tensor, layout: _Layout) -> Tensor:
        """Return the last layer's output after each span only: nothing else is read."""
        positions_B = layout.positions_N[layout.last_B]
        length = _reach(positions_B)
        q = turned_N[layout.last_B, : -2 * self._head_dim].view(-1, self._heads, self._head_dim)
        bias_B1T = self._bias(positions_B, length)[:, None]
        mixed = self._attend(len(self._layers) - 1, q, layout.rows_B, length, bias_B1T)
        return self._after_attention(x_N[layout.last_B], mixed, self._layers[-1])

    def _attend_blocks(self, index: int, q_NHD: Tensor, layout: _Layout) -> Tensor:
        """Attention of all new tokens, block by block; returns shape (N, H * D)."""
        out = q_NHD.new_empty(len(q_NHD), self._heads * self._head_dim)
        offset, row = 0, 0
        for rows, count in layout.blocks:
            size = rows * count
            positions_BQ = layout.positions_N[offset : offset + size].view(rows, count)
            length = _reach(positions_BQ)
            bias = self._bias(positions_BQ, length).repeat_interleave(self._heads, dim=1)
            q = q_NHD[offset : offset + size].reshape(rows, count * self._heads, self._head_dim)
            mixed = self._attend(index, q, layout.rows_B[row : row + rows], length, bias)
            out[offset : offset + size] = mixed.view(size, -1)
            offset, row = offset + size, row + rows
        return out

    def _attend(self, index: int, q: Tensor, rows: slice | Tensor, length: int, bias: Tensor) -> Tensor:
        """Attention over cached keys and values, shape (B, queries * heads, D) in and (B, queries, ...) out."""
        kv = self.cache.kv[index, rows, :length]
        scores = torch.bmm(q, kv[..., : self._head_dim].transpose(1, 2)).add_(bias)
        return _mix(torch.softmax(scores, dim=-1), kv[..., self._head_dim :])

    def _after_attention(self, x: Tensor, mixed: Tensor, weights: _LayerWeights) -> Tensor:
        x = x + _linear(mixed.reshape(len(x), -1), weights.out)
        hidden = _linear(norm(x), weights.up).relu_()
        return x + _linear(hidden.mul_(hidden), weights.down)

    def _key(self, qkv: Tensor) -> Tensor:
        return qkv[:, -2 * self._head_dim : -self._head_dim]

    def _turn(self, qkv_N: Tensor, rope_N: Tensor) -> Tensor:
        pairs = torch.view_as_complex(qkv_N.view(len(qkv_N), self._heads + 2, -1, 2))
        return torch.view_as_real(pairs * rope_N).view(len(qkv_N), -1)

    def _write(self, index: int, slots_N: Tensor, turned_N: Tensor) -> None:
        self.cache.flat[index].index_copy_(0, slots_N, turned_N[:, -2 * self._head_dim :])

    def _bias(self, positions: Tensor, length: int) -> Tensor:
        """Return 0 where a query may look and -inf where not, shape (*positions.shape, length)."""
        hidden = self._steps[:length] > positions[..., None]
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)

    def _lay_out(self, spans: Sequence[Span]) -> _Layout:
        """Put spans, sorted from long to short, side by side in padded blocks."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        blocks = self._blocks(spans)
        lengths = [length for rows, length in blocks for _ in range(rows)]
        trash, top = self.cache.trash_slot, self.model.config.max_context - 1
        for span, length in zip(spans, lengths, strict=True):
            count, padding = len(span.ids), length - len(span.ids)
            last.append(len(ids) + count - 1)
            ids += span.ids
            ids += [0] * padding
            stop, base = span.start + count, span.row * self.cache.length
            positions += range(span.start, stop)
            positions += [min(stop, top)] * padding
            cached = span.written_from - span.start
            slots += [trash] * cached
            slots += range(base + span.written_from, base + stop)
            slots += [trash] * padding
        to = self._steps.new_tensor
        return _Layout(to(ids), to(positions), to(slots), to(last), to([span.row for span in spans]), blocks)

    def _blocks(self, spans: Sequence[Span]) -> tuple[tuple[int, int], ...]:
        """Cut spans into blocks of similar lengths whose attention scores stay small enough."""
        blocks: list[tuple[int, int]] = []
        first = 0
        for rows, length in block_rows([len(span.ids) for span in spans]):
            furthest = max(span.start + len(span.ids) for span in spans[first : first + rows])
            most = max(1, _MAX_SCORES // (length * self._heads * furthest))
            blocks += [(min(most, rows - done), length) for done in range(0, rows, most)]
            first += rows
        return tuple(blocks)


def _fuse(layer: Layer) -> _LayerWeights:
    """Lay one layer's weights out for inference; the 1 / sqrt(head_dim) of attention goes into the queries."""
    qkv = torch.cat([layer.q.weight * layer.head_dim**-0.5, layer.k.weight, layer.v.weight])
    return _LayerWeights(qkv, layer.smear.detach(), layer.out.weight, layer.up.weight, layer.down.weight)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, by the same kernel for any number of rows."""
    missing = _MIN_ROWS - len(x)
    if missing <= 0:
        return functional.linear(x, weight)
    return functional.linear(functional.pad(x, (0, 0, 0, missing)), weight)[: len(x)]


def _reach(positions: Tensor) -> int:
    """Return how many cached positions attention must look at."""
    return -(-(int(positions.max()) + 1) // _LANES) * _LANES


def _mix(weights_BQT: Tensor, values_BTD: Tensor) -> Tensor:
    """Return the weighted sum of values, shape (B, Q, D), in chunks of positions that do not depend on T."""
    chunks = zip(weights_BQT.split(_CHUNK, dim=2), values_BTD.split(_CHUNK, dim=1), strict=True)
    out_BQD = torch.bmm(*next(chunks))
    for weights, values in chunks:
        out_BQD.baddbmm_(weights, values)
    return out_BQD


def _natural_order(spans: Sequence[Span], order: Sequence[int], blocks: Sequence[tuple[int, int]]) -> list[int]:
    """Return the flat index of every token of every span, spans in the caller's order."""
    lengths = [length for rows, length in blocks for _ in range(rows)]
    offsets = [0] * len(spans)
    offset = 0
    for index, length in zip(order, lengths, strict=True):
        offsets[index] = offset
        offset += length
    return [offsets[i] + token for i, span in enumerate(spans) for token in range(len(span.ids))]
