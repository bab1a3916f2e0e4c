"""Fine-tuning through the Hugging Face Trainer: what HdetCallback finds, against a sweep."""

from __future__ import annotations

__all__: list[str] = []
