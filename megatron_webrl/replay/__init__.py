"""The coordinator, its rules and records, and the staleness-bounded replay queue."""

from megatron_webrl.replay.batches import BatchWriter, RecordedBatch, choose_batches, read_batches
from megatron_webrl.replay.book import Book
from megatron_webrl.replay.coordinator import AccountError, BatchTimeout, Coordinator
from megatron_webrl.replay.ledger import Ledger, read_account
from megatron_webrl.replay.records import Records
from megatron_webrl.replay.rows import batch_row
from megatron_webrl.replay.rules import Lineage

__all__ = [
    "AccountError",
    "BatchTimeout",
    "BatchWriter",
    "Book",
    "Coordinator",
    "Ledger",
    "Lineage",
    "RecordedBatch",
    "Records",
    "batch_row",
    "choose_batches",
    "read_account",
    "read_batches",
]
