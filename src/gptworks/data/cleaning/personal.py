"""The filter that masks personal data such as e-mail addresses, which it recognizes by their form."""

import ipaddress
import re

from gptworks.config.cleaning import MaskPersonalData
from gptworks.data.cleaning.base import Filter

# Matching takes linear time: each repetition is bounded, or begins only after a character that it cannot contain.
_EMAIL = re.compile(
    r"(?<![\w.%+-])[A-Za-z0-9_%+-][A-Za-z0-9._%+-]{0,63}@(?:[A-Za-z0-9][A-Za-z0-9-]{0,62}\.){1,8}[A-Za-z]{2,24}\b"
)
_IPV4 = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w]|\.[0-9])")
_IPV6 = re.compile(r"(?<![\w:.])[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{0,4}(?![\w:])")
_PHONE = re.compile(
    r"(?<![\w.+-])(?:\+[0-9]{1,3}(?:[ .-]?\(?[0-9]{1,4}\)?){2,5}|\(?[0-9]{3}\)?[ .-][0-9]{3}[.-][0-9]{4})(?![\w-])"
)
_KEY = re.compile(
    r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{40,255}"
    r"|glpat-[A-Za-z0-9_-]{20,64}|xox[abeoprs]-[A-Za-z0-9-]{10,250}|AIza[A-Za-z0-9_-]{35}"
    r"|sk-[A-Za-z0-9_-]{20,250}|[rs]k_live_[A-Za-z0-9]{16,250}|hf_[A-Za-z0-9]{30,64}"
    r"|eyJ[A-Za-z0-9_-]{10,2000}\.eyJ[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{10,2000})(?![A-Za-z0-9_-])"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]*+-----END [A-Z ]{0,40}PRIVATE KEY-----"
)
# Every match of a pattern above contains one of these parts, which are faster to find than the pattern.
_EMAIL_PART = re.compile(r"@[A-Za-z0-9-]{1,63}\.")
_IPV4_PART = re.compile(r"\.[0-9]{1,3}\.[0-9]")
_IPV6_PART = re.compile(r":[0-9A-Fa-f]{0,4}:")
_PHONE_PARTS = tuple(map(re.compile, (r"\+[0-9]", r"-[0-9]{4}", r"\.[0-9]{4}")))
_KEY_PARTS = (
    "AKIA", "ASIA", "gh", "github_pat_", "glpat-", "xox", "AIza", "sk-", "k_live_", "hf_", "eyJ", "PRIVATE KEY-----",
)  # fmt: skip


class PersonalDataFilter(Filter):
    """Replaces e-mail addresses, public IP addresses, phone numbers and secret keys with `<email>`, `<ip>` and so on.
    The settings list the kinds of data to replace.

    Only the form is checked, so a version number of four parts is taken for an IP address. Private addresses are kept.
    Phone numbers begin with `+` and a country code, or are written as in North America. Keys are keys of well-known
    services, JSON web tokens and private keys.
    """

    settings: MaskPersonalData
    version = 2  # version 1 kept most of GitHub's fine-grained tokens

    def apply(self, text: str) -> str:
        kinds = self.settings.kinds
        if "key" in kinds and any(begin in text for begin in _KEY_PARTS):
            text = _KEY.sub("<key>", text)
        if "email" in kinds and _EMAIL_PART.search(text):
            text = _EMAIL.sub("<email>", text)
        if "ip" in kinds and _IPV4_PART.search(text):
            text = _IPV4.sub(_address, text)
        if "ip" in kinds and _IPV6_PART.search(text):
            text = _IPV6.sub(_address, text)
        if "phone" in kinds and any(part.search(text) for part in _PHONE_PARTS):
            text = _PHONE.sub(_phone, text)
        return text


def _address(match: re.Match[str]) -> str:
    try:
        public = ipaddress.ip_address(match[0]).is_global
    except ValueError:
        public = False
    return "<ip>" if public else match[0]


def _phone(match: re.Match[str]) -> str:
    return "<phone>" if 8 <= sum(map(str.isdigit, match[0])) <= 15 else match[0]
