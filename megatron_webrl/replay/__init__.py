"""The coordinator, its rules and ledger, and the staleness-bounded replay queue."""

from megatron_webrl.replay.book import Book
from megatron_webrl.replay.coordinator import AccountError, Coordinator
from megatron_webrl.replay.ledger import Ledger

__all__ = ["AccountError", "Book", "Coordinator", "Ledger"]
