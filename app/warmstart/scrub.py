"""Secrets out of what a hook sends, before any of it is embedded, stored or logged.

The rules are Betterleaks' (the successor of gitleaks' set, some 460 of them),
which find the keys and tokens of services by their form. They are made for
files; prompts hold secrets in other ways too, and those are added here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

REDACTED: Final = "[REDACTED]"
#: Letters alone are taken for a secret from this length on.
LONG: Final = 16
MIN_SECRET: Final = 8

_NAME = (
    r"(?:pass(?:word|wd|phrase|wort)|pwd|(?:secret|api|access|private|signing|account)[_-]?key|secret|token|credential)"
)
_PEM = "[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_SCHEMES = "(?:bearer|basic|token)"
#: Each has one group: the secret.
_OWN_RULES: Final = (
    # an API key of this service
    re.compile(r"\b(ws_sk_[A-Za-z0-9_-]{20,})"),
    # an AWS key id: Betterleaks asks for its secret beside it
    re.compile(r"\b((?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16})\b"),
    # scheme://user:secret@host
    re.compile(r"\b[a-z][a-z0-9+.-]{1,30}://[^\s/:@'\"]*:([^\s@/'\"]+)@", re.IGNORECASE),
    # also one whose end was cut off
    re.compile(rf"(-----BEGIN {_PEM}.*?(?:-----END {_PEM}|\Z))", re.DOTALL),
    # Authorization: Bearer secret
    re.compile(rf"\bauthorization['\"]?\s{{0,3}}[:=]\s{{0,3}}['\"]?{_SCHEMES}\s+([\w.~+/=-]{{8,}})", re.IGNORECASE),
)  # fmt: skip
#: name = secret, "name": "secret", --name secret, the name is secret; a secret has letters and digits.
_ASSIGNED = re.compile(
    _NAME + r"s?['\"]?(?:\s{0,3}(?:=>|:=|=|:)\s{0,3}|\s(?:is|was|ist|lautet)\s)(['\"`]?)([^\s'\"`<>{}()\[\],;]{8,})",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(rf"(?:^|[_.-]|(?<=[a-z])){_NAME}$", re.IGNORECASE)
#: What reads a secret from elsewhere, or stands for one.
_NO_SECRET = re.compile(
    r"^(?:\$|%|os\.|process\.|env\.|self\.|request\.|config\.|settings\.|https?:|x{4}|\*{3})", re.IGNORECASE
)
#: Comments by which a repository's owner tells the scanner to look away; a prompt has no such owner.
_LOOK_AWAY = re.compile(r"leaks:allow", re.IGNORECASE)


def scrub(text: str) -> str:
    """`text` with REDACTED for each secret. Raises where the rules can't be run: then nothing may be used."""
    found = dict.fromkeys([*_found(text), *_own(text)])
    for whole, secret in sorted(found, key=lambda pair: len(pair[1]), reverse=True):
        # a secret that is a plain word stands elsewhere as that word
        plain = secret.isalpha() and len(secret) < LONG
        text = text.replace(whole, whole.replace(secret, REDACTED)) if plain else text.replace(secret, REDACTED)
    return text


def scrub_names(value: Any) -> Any:
    """JSON without the values that their names call secret; what is left is for `scrub`."""
    if isinstance(value, list):
        return [scrub_names(item) for item in value]
    if isinstance(value, dict):
        return {
            name: REDACTED if _SECRET_NAME.search(name) and item and isinstance(item, str) else scrub_names(item)
            for name, item in value.items()
        }
    return value


def _found(text: str) -> Iterator[tuple[str, str]]:
    """(what a rule matched, the secret in it)."""
    # loaded with the first event: the rules take some 30 MB
    import betterleaks

    # the scanner's text ends at a NUL
    for finding in betterleaks.scan_string(_LOOK_AWAY.sub("leaks_allow", text.replace("\0", " "))):
        if finding.match and finding.match.value:
            yield finding.match.full, finding.match.value


def _own(text: str) -> Iterator[tuple[str, str]]:
    for rule in _OWN_RULES:
        yield from ((match[0], match[1]) for match in rule.finditer(text))
    for match in _ASSIGNED.finditer(text):
        secret = match[2].rstrip(".!?")
        if len(secret) >= MIN_SECRET and not _NO_SECRET.match(secret) and _is_no_word(secret, quoted=bool(match[1])):
            yield match[0], secret


def _is_no_word(secret: str, *, quoted: bool) -> bool:
    """Letters and digits; or, in quotes, many letters of both cases, which otherwise are the name of something."""
    letters = "".join(c for c in secret if c.isalpha())
    if any(c.isdigit() for c in secret):
        return bool(letters)
    return quoted and len(letters) >= LONG and letters not in (letters.lower(), letters.upper(), letters.capitalize())
