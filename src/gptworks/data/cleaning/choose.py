"""The class of each filter that looks at one document."""

from typing import Any

from gptworks.config.cleaning import (
    C4Rules,
    CodeTables,
    Decontaminate,
    FilterConfig,
    FineWebRules,
    GeneratedCode,
    GlobalFilter,
    GopherQuality,
    GopherRepetition,
    LanguageFilter,
    LengthRules,
    LicenceHeaders,
    MaskPersonalData,
    MinifiedCode,
    NormalizeUnicode,
    RepairEncoding,
)
from gptworks.data.cleaning.base import Filter
from gptworks.data.cleaning.c4 import C4Filter
from gptworks.data.cleaning.code import GeneratedFilter, LicenceFilter, MinifiedFilter, TableFilter
from gptworks.data.cleaning.decontamination import DecontaminationFilter
from gptworks.data.cleaning.encoding import EncodingFilter
from gptworks.data.cleaning.fineweb import FineWebFilter
from gptworks.data.cleaning.gopher_quality import GopherQualityFilter
from gptworks.data.cleaning.gopher_repetition import GopherRepetitionFilter
from gptworks.data.cleaning.language import LanguageOf
from gptworks.data.cleaning.length import LengthFilter
from gptworks.data.cleaning.normalize import UnicodeFilter
from gptworks.data.cleaning.personal import PersonalDataFilter

FILTERS: dict[type[Any], type[Filter]] = {
    RepairEncoding: EncodingFilter,
    NormalizeUnicode: UnicodeFilter,
    LengthRules: LengthFilter,
    GopherQuality: GopherQualityFilter,
    GopherRepetition: GopherRepetitionFilter,
    C4Rules: C4Filter,
    FineWebRules: FineWebFilter,
    LanguageFilter: LanguageOf,
    GeneratedCode: GeneratedFilter,
    CodeTables: TableFilter,
    LicenceHeaders: LicenceFilter,
    MinifiedCode: MinifiedFilter,
    Decontaminate: DecontaminationFilter,
    MaskPersonalData: PersonalDataFilter,
}


def files_signature(settings: tuple[FilterConfig, ...]) -> list[str]:
    """What the filters' results depend on beside their settings: sha256 of what the files hold that they name.

    Raises:
        UserError: such a file is missing or broken.
    """
    return [DecontaminationFilter(one).signature() for one in settings if isinstance(one, Decontaminate)]


def choose_filters(settings: tuple[FilterConfig, ...]) -> list[Filter]:
    """The filters that look at one document, in order; those that compare documents are left out.

    Raises:
        UserError: a library or a file that one needs is missing or broken.
    """
    return [FILTERS[type(one)](one) for one in settings if not isinstance(one, GlobalFilter)]
