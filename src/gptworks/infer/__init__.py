"""Inference: sampling tokens, generating many texts together (engine, scheduler, loop), and chat sessions."""

from gptworks.infer.chat import ChatSession, TurnSession, chat_session
from gptworks.infer.engine import Engine, load
from gptworks.infer.request import Completion
from gptworks.infer.sampling import SamplingSettings
from gptworks.infer.text import Piece

__all__ = ["ChatSession", "Completion", "Engine", "Piece", "SamplingSettings", "TurnSession", "chat_session", "load"]
