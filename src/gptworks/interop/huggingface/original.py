"""What an imported folder makes of texts and where it ends them, kept in the run to compare its exports with.

`tokenizer/original.json` of an imported run:

texts      text → token ids, of texts on which tokenizers differ, with what the post-processor adds
ends       the ids that end generation
names      bos_token, eos_token, … as the folder states them
template   sha256 of the chat template; null: it has none
templates  the folder's other chat templates, by name; an export gives them back
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
"""Words, spaces at both ends, indentation, composed and decomposed characters, contractions and runs of digits."""


@dataclass(frozen=True)
class Original:
    """The facts; see above."""

    texts: Mapping[str, list[int]]
    ends: list[int]
    names: Mapping[str, str]
    template: str | None
    templates: Mapping[str, str]

    def write(self, tokenizer_folder: Path) -> None:
        write_whole(tokenizer_folder / ORIGINAL_FILE, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")


def original_of(tokenizer: Tokenizer, templates: FolderTemplates) -> Original:
    """The facts of a folder. A text may hold the name of a special token, which is one for transformers."""
    special = special_tokens(tokenizer)
    names = [f"a{name} b" for name in dict.fromkeys(special.names.values())]
    reader = unpack_tokenizer(pack_tokenizer(tokenizer))
    reader.encode_special_tokens = False
    texts = [*TEXTS, *names]
    read = encodings(reader, texts, add_special_tokens=True)
    others = {name: source for name, source in templates.named.items() if name != "default"}
    return Original(
        {text: encoding.ids for text, encoding in zip(texts, read, strict=True)},
        list(special.ends), dict(special.names), sha256(templates.default), others,
    )  # fmt: skip


def read_original(tokenizer_folder: Path) -> Original | None:
    """The facts that a run has kept; None: it was not imported, or by an earlier version.

    Raises:
        UserError: the file is damaged.
    """
    path = tokenizer_folder / ORIGINAL_FILE
    if not path.exists():
        return None
    tree = read_json(path)
    try:
        return Original(**tree)
    except TypeError:
        raise UserError(
            f"{path} is not what an import writes: delete it, and exports are compared with the run only."
        ) from None


def sha256(template: str | None) -> str | None:
    return None if template is None else hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest()
