"""One decode step: which rows it has, where they stand, and where their keys are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one pass of the target model: B requests of Q rows each, T = B x Q.

    tokens:        [T] int64, input token of each row.
    positions:     [T] int64, absolute position of each row.
    slots:         [T] int64, cache slot the row writes, page x block_size + offset; -1 writes nothing.
    visible:       [T] int32, keys the row sees, itself included (its position + 1); 0 in a padding row.
    block_tables:  [B, M] int32, page of each logical KV block of a request. Entries past a
                   request's last block are never read.
    q_len:         Q, rows per request: 1 for plain decode, 1 + draft_len for verify, any for prefill.

    Row j of request r is row r x Q + j. Padding rows come in whole requests at the end, or fill a
    prefill chunk; a row is padding exactly when its slot is negative.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    visible: Tensor
    block_tables: Tensor
    q_len: int

    @property
    def rows(self) -> int:
        """T, padding rows counted."""
        return self.tokens.shape[0]

    @property
    def requests(self) -> int:
        """B, padding requests counted."""
        return self.block_tables.shape[0]

    @property
    def live(self) -> Tensor:
        """[T] bool, rows that are not padding."""
        return self.slots >= 0

    def __post_init__(self) -> None:
        rows = self.block_tables.shape[0] * self.q_len
        if rows < 1:
            raise ValueError(
                f"step: expected at least one row, got {self.block_tables.shape[0]} requests of {self.q_len}"
            )
        for name, dtype, shape in (
            ("tokens", torch.int64, (rows,)),
            ("positions", torch.int64, (rows,)),
            ("slots", torch.int64, (rows,)),
            ("visible", torch.int32, (rows,)),
            ("block_tables", torch.int32, tuple(self.block_tables.shape)),
        ):
            field: Tensor = getattr(self, name)
            if field.dtype != dtype or tuple(field.shape) != shape:
                raise ValueError(
                    f"step.{name}: expected {dtype} {list(shape)}, got {field.dtype} {list(field.shape)}"
                )
            if not field.is_contiguous():
                raise ValueError(f"step.{name}: expected it contiguous, got strides {field.stride()}")

    @staticmethod
    def of(tokens: Tensor, seq_lens: Tensor, block_tables: Tensor, block_size: int) -> Step:
        """The step that appends `tokens` to their requests.

        Shapes:  tokens [B, Q] int64; seq_lens [B] int32, keys of each request with this step's Q
                 rows included, 0 for a padding request; block_tables [B, M] int32.
        Row j of a request of length L sees L - (Q - 1 - j) keys and stands at that number minus 1. A request
        shorter than Q is padding, whole.
        Errors:  ValueError naming a request whose block table has no page for one of its KV blocks.
        """
        Q = tokens.shape[1]
        back = torch.arange(Q - 1, -1, -1, device=tokens.device)  # Q-1 .. 0
        lengths = torch.where(seq_lens >= Q, seq_lens.long(), 0)  # [B]
        visible = (lengths[:, None] - back[None, :]).clamp(min=0)  # [B, Q]
        positions = (visible - 1).clamp(min=0)
        blocks = (lengths + block_size - 1) // block_size  # [B]
        used = torch.arange(block_tables.shape[1], device=blocks.device) < blocks[:, None]
        known = (used & (block_tables >= 0)).sum(dim=1)
        for b in (known < blocks).nonzero().flatten().tolist():
            raise ValueError(
                f"step: request {b}: expected a page for each of its {blocks[b]} KV blocks, got {known[b]}"
            )
        pages = block_tables.long().gather(1, positions // block_size)  # [B, Q]
        slots = torch.where(visible > 0, pages * block_size + positions % block_size, -1)
        return Step(
            tokens=tokens.reshape(-1),
            positions=positions.reshape(-1),
            slots=slots.reshape(-1),
            visible=visible.reshape(-1).int(),
            block_tables=block_tables,
            q_len=Q,
        )

    def padded_to(self, rows: int) -> Step:
        """The same step with whole padding requests appended, up to `rows` rows."""
        if rows == self.rows:
            return self
        if rows < self.rows or rows % self.q_len:
            raise ValueError(
                f"step: cannot pad {self.rows} rows of {self.q_len} a request to a width of {rows}"
            )
        more = rows - self.rows

        def extend(x: Tensor, fill: int) -> Tensor:
            return torch.cat([x, x.new_full((more,), fill)])

        tables = self.block_tables
        return replace(
            self,
            tokens=extend(self.tokens, 0),
            positions=extend(self.positions, 0),
            slots=extend(self.slots, -1),
            visible=extend(self.visible, 0),
            block_tables=torch.cat([tables, tables.new_zeros(more // self.q_len, tables.shape[1])]),
        )

    def to(self, device: torch.device | str) -> Step:
        """The same step on another device."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            slots=self.slots.to(device),
            visible=self.visible.to(device),
            block_tables=self.block_tables.to(device),
        )
