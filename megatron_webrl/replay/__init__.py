"""The coordinator, its rules and ledger, and the staleness-bounded replay queue."""

from megatron_webrl.replay.batches import BatchWriter, RecordedBatch, choose_batches, read_batches
from megatron_webrl.replay.book import Book
from megatron_webrl.replay.coordinator import AccountError, BatchTimeout, Coordinator
from megatron_webrl.replay.ledger import Ledger
from megatron_webrl.replay.rows import batch_row
from megatron_webrl.replay.state import decode_state

__all__ = [
    "AccountError",
    "BatchTimeout",
    "BatchWriter",
    "Book",
    "Coordinator",
    "Ledger",
    "RecordedBatch",
    "batch_row",
    "choose_batches",
    "decode_state",
    "read_batches",
]
