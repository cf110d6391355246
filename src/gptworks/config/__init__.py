"""Every setting: typed, validated, frozen. Knows nothing of torch, nor of files (see recipe.py beside this folder)."""

from gptworks.config.base import Fraction, PositiveInt, Role, Section, Setting, role_of, settings
from gptworks.config.data import (
    ConversationsSource,
    DataConfig,
    HuggingFaceSource,
    JSONLSource,
    ParquetSource,
    PreferencesSource,
    PythonStdlibSource,
    SourceConfig,
    TextSource,
    ValidationSplit,
)
from gptworks.config.model import ModelConfig, RopeScaling
from gptworks.config.objective import (
    DataFault,
    DistillationObjective,
    InstructionObjective,
    NextTokenObjective,
    ObjectiveConfig,
    PreferenceObjective,
    RewardObjective,
)
from gptworks.config.recipe import Recipe, known_vocab_size
from gptworks.config.sweep import SweepConfig, SweepRange
from gptworks.config.tokenizer import (
    BPETokenizer,
    CharTokenizer,
    FileTokenizer,
    GPT2Tokenizer,
    TokenizerConfig,
    WordTokenizer,
)
from gptworks.config.train import IGNORED, ParallelConfig, TrainConfig, computes_again
from gptworks.config.trained import ADAPTED_MODULES, FreezeConfig, LoRAConfig

__all__ = [
    "ADAPTED_MODULES",
    "IGNORED",
    "BPETokenizer",
    "CharTokenizer",
    "ConversationsSource",
    "DataConfig",
    "DataFault",
    "DistillationObjective",
    "FileTokenizer",
    "Fraction",
    "FreezeConfig",
    "GPT2Tokenizer",
    "HuggingFaceSource",
    "InstructionObjective",
    "JSONLSource",
    "LoRAConfig",
    "ModelConfig",
    "NextTokenObjective",
    "ObjectiveConfig",
    "ParallelConfig",
    "ParquetSource",
    "PositiveInt",
    "PreferenceObjective",
    "PreferencesSource",
    "PythonStdlibSource",
    "Recipe",
    "RewardObjective",
    "Role",
    "RopeScaling",
    "Section",
    "Setting",
    "SourceConfig",
    "SweepConfig",
    "SweepRange",
    "TextSource",
    "TokenizerConfig",
    "TrainConfig",
    "ValidationSplit",
    "WordTokenizer",
    "computes_again",
    "known_vocab_size",
    "role_of",
    "settings",
]
