"""Inference: from logits to tokens (sampling), from a prompt to text (engine), and a conversation (chat)."""

from gptworks.infer.chat import ChatSession
from gptworks.infer.engine import Completion, Engine, Piece, load
from gptworks.infer.sampling import SamplingSettings

__all__ = ["ChatSession", "Completion", "Engine", "Piece", "SamplingSettings", "load"]
