"""Facts of an imported folder, kept in the run so that exports of the run can be compared with them.

`tokenizer/original.json` of an imported run has these fields:

texts      text → token ids, including the post-processor's, for texts on which tokenizers often differ
ends       the ids that end generation
names      bos_token, eos_token, … as in the folder
template   sha256 of the chat template; null: the folder has no template
templates  the folder's other chat templates by name, which exports write again
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from gptworks.chat_template import FolderTemplates
from gptworks.errors import UserError
from gptworks.files import write_whole
from gptworks.json_files import read_json
from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import encodings, pack_tokenizer, unpack_tokenizer

ORIGINAL_FILE = "original.json"

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    " leading,  double and trailing spaces  ",
    "def f(x):\n\treturn x ** 2  # m²\r\n\n\n",
    "Zoe\u0308 naïvely paid 1,234.50 € for 東京 🗼👩‍👩‍👧!",
    "I'll we've 'tis\u00a0\u3000x\u200b0123456789",
)
"""Samples: words, leading and trailing spaces, indentation, decomposed characters, contractions, runs of digits."""


@dataclass(frozen=True)
class Original:
    """Facts of an imported folder; the module's docstring describes each field."""

    texts: Mapping[str, list[int]]
    ends: list[int]
    names: Mapping[str, str]
    template: str | None
    templates: Mapping[str, str]

    def write(self, tokenizer_folder: Path) -> None:
        write_whole(tokenizer_folder / ORIGINAL_FILE, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")


def original_of(tokenizer: Tokenizer, templates: FolderTemplates) -> Original:
    """Return facts of an imported folder. As in transformers, a special token's name in a text becomes the token."""
    special = special_tokens(tokenizer)
    names = [f"a{name} b" for name in dict.fromkeys(special.names.values())]
    reader = unpack_tokenizer(pack_tokenizer(tokenizer))
    reader.encode_special_tokens = False
    texts = [*TEXTS, *names]
    read = encodings(reader, texts, add_special_tokens=True)
    return Original(
        {text: encoding.ids for text, encoding in zip(texts, read, strict=True)},
        list(special.ends), dict(special.names), sha256(templates.default), templates.others,
    )  # fmt: skip


def read_original(tokenizer_folder: Path) -> Original | None:
    """Return the facts in a run's tokenizer folder; None if the run was not imported. Raises a UserError if the file is
    damaged."""
    path = tokenizer_folder / ORIGINAL_FILE
    if not path.exists():
        return None
    tree = read_json(path)
    try:
        return Original(**tree)
    except TypeError:
        raise UserError(
            f"{path} is not what an import writes: delete it, and exports are compared only with the run."
        ) from None


def sha256(template: str | None) -> str | None:
    return None if template is None else hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest()
