"""All settings as typed, validated, frozen classes. The package imports no torch; gptworks/recipe.py reads recipes."""

from gptworks.config.architecture import EARLIER_DEFAULTS, RopeScaling
from gptworks.config.base import Bounded, PositiveInt, PositiveTime, Role, Section, ShortPath, role_of, settings
from gptworks.config.batches import IGNORED, ParallelConfig, computes_again
from gptworks.config.data import DataConfig, MixtureMember, ValidationSplit
from gptworks.config.defaults import ENDS, train_defaults
from gptworks.config.model import LABORATORY, ModelConfig
from gptworks.config.objective import DataFault, ObjectiveConfig
from gptworks.config.optimizers import RateFactors
from gptworks.config.recipe import AnyRecipe, DatasetRecipe, Recipe
from gptworks.config.sampling import SamplingConfig
from gptworks.config.sources import (
    ArchiveSource,
    CodeSource,
    ConversationsSource,
    CSVSource,
    FilesSource,
    HTMLSource,
    HuggingFaceSource,
    JSONLSource,
    JSONSource,
    LinesSource,
    ParquetSource,
    PDFSource,
    PreferencesSource,
    PythonStdlibSource,
    SourceConfig,
    TextSource,
    WARCSource,
)
from gptworks.config.sweep import SweepConfig, SweepRange
from gptworks.config.tokenizer import (
    BPETokenizer,
    CharTokenizer,
    DatasetTokenizer,
    FileTokenizer,
    GPT2Tokenizer,
    TokenizerConfig,
    TrainedTokenizer,
    WordTokenizer,
)
from gptworks.config.train import TrainConfig
from gptworks.config.trained import ADAPTED_MODULES, FreezeConfig, LoRAConfig
