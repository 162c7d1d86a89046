"""The interface of logits processors, for programs that implement one. It imports torch."""

from pagewire.workers.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

__all__ = ["BatchUpdate", "LogitsProcessor", "MoveDirectionality"]
