"""Inference: logits to tokens (sampling), prompts to text (engine), many at once (scheduler, loop), talk (chat)."""

from gptworks.infer.chat import ChatSession, TurnSession, chat_session
from gptworks.infer.engine import Engine, load
from gptworks.infer.request import Completion
from gptworks.infer.sampling import SamplingSettings
from gptworks.infer.text import Piece

__all__ = ["ChatSession", "Completion", "Engine", "Piece", "SamplingSettings", "TurnSession", "chat_session", "load"]
