"""Default sampling settings of a model, from its generation_config.json, or else from `SAMPLING`.

The commands, the server, the studio and Python use these values wherever a request gives none. As in transformers,
`do_sample: false` means greedy. Imported models, and runs tuned from them, keep the values of the imported files; the
recipe's `sampling` overrides these values.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptworks.choices import SAMPLING, Sampling
from gptworks.errors import UserError
from gptworks.infer.sampling import SamplingSettings
from gptworks.json_files import read_json
from gptworks.special_tokens import GENERATION_CONFIG, STATED_SAMPLING


def stated_sampling(generation: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the valid sampling settings of a generation_config.json, by name, and notes for the user.

    The notes list settings that differ from `SAMPLING`, and invalid settings, which are left out. `generation`: the
    contents of the file.
    """
    stated: dict[str, Any] = {}
    notes = []
    for name in STATED_SAMPLING:
        value = generation.get(name)
        if value is None:
            continue
        try:
            kind = int if isinstance(getattr(SAMPLING, name), int) else int | float
            if isinstance(value, bool) or not isinstance(value, kind):
                raise UserError(f"{name}={value!r}: it must be a number.")
            SamplingSettings.of(None, **{name: value})
        except UserError as error:
            notes.append(f"{GENERATION_CONFIG} has {str(error)[:200].removesuffix('.')}; it is left out")
        else:
            stated[name] = value
    if generation.get("do_sample") is False:
        stated["temperature"] = 0.0
    if own := [f"{name}={value:g}" for name, value in stated.items() if value != getattr(SAMPLING, name)]:
        notes.append(f"texts are sampled with {', '.join(own)} where a request gives none ({GENERATION_CONFIG})")
    return stated, tuple(notes)


def sampling_of(tokenizer_folder: Path) -> Sampling:
    """Return the default sampling settings of the run with this tokenizer folder.

    Return `SAMPLING` if the folder has no generation_config.json, or the file cannot be read. Loading the run reports
    an unreadable file.
    """
    file = tokenizer_folder / GENERATION_CONFIG
    try:
        stated, _ = stated_sampling(read_json(file) if file.exists() else {})
    except UserError:
        return SAMPLING
    return SAMPLING._replace(**stated)
